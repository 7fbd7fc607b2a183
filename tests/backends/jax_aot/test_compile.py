"""Compiling for a target that is not there: memory by space, host arguments, crashes, refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from memopt.errors import MemoptError
from memopt.targets import load_target
from memopt_jax import aot, estimate, topology
from memopt_jax.aot_worker import figures

RESIDUAL_BYTES = 12 * 2048 * 1024 * 2  # layers x rows of one device x width x bfloat16
STATE_BYTES = 12 * 1024 * 1024 * 2  # over all devices

Compile = Callable[..., tuple[aot.CompiledStep, ...]]


def test_offloaded_residuals_are_host_temporaries_and_the_device_keeps_less(compiled: Compile) -> None:
    (offloaded,) = compiled("gpu:h100:2", {"offload": ["input"]})
    (kept,) = compiled("gpu:h100:2", {"offload": [], "keep": ["input"]})
    assert offloaded.host.temp == RESIDUAL_BYTES == offloaded.residuals["pinned_host"]
    assert kept.host.total == 0
    assert kept.residuals["device"] == RESIDUAL_BYTES
    assert offloaded.device.total < kept.device.total


def test_host_arguments_keep_their_memory_kind_without_a_device(compiled: Compile) -> None:
    (step,) = compiled("gpu:h100:2", {"offload": [], "host_state": True})
    assert step.host.argument == STATE_BYTES // 2
    assert step.host.alias == step.host.output == STATE_BYTES // 2, "the state is donated within the host"
    assert step.argument_roles["optimizer_state", "pinned_host"] == STATE_BYTES // 2
    assert step.argument_roles["param", "device"] == STATE_BYTES // 2


def test_a_tpu_compiles_the_same_step_with_the_same_host_bytes(compiled: Compile) -> None:
    (step,) = compiled("tpu:v5e:1x1", {"offload": ["input"]})
    assert step.host.temp == RESIDUAL_BYTES == step.residuals["pinned_host"]
    assert step.audit.verdict == "not_applicable"
    assert not step.link_is_known, "no rate is published, so no seconds may be shown"
    assert step.overlap.to_host_bytes == step.overlap.to_device_bytes == RESIDUAL_BYTES
    assert step.overlap.synchronous == ()


def test_the_processor_has_one_memory_and_no_schedule(compiled: Compile) -> None:
    (step,) = compiled("cpu:2", {"offload": ["input"]})
    assert step.host.total == 0
    assert step.overlap is None
    assert step.planned_host_bytes == RESIDUAL_BYTES


def test_the_compilers_peak_is_never_used() -> None:
    class Analysis:
        argument_size_in_bytes, output_size_in_bytes, alias_size_in_bytes, temp_size_in_bytes = 100, 60, 50, 30
        host_argument_size_in_bytes, host_output_size_in_bytes = 7, 7
        host_alias_size_in_bytes, host_temp_size_in_bytes = 7, 5
        peak_memory_in_bytes = 999

    device, host = figures(Analysis())
    assert device.total == 100 + 60 - 50 + 30
    assert host.total == 7 + 5


def test_a_program_too_large_for_a_tpu_says_how_much_it_needs(compiled: Compile) -> None:
    (step,) = compiled("tpu:v5e:1x1", {"offload": [], "layers": 30_000})
    assert step.over_capacity
    assert step.device.total > 2**30 * 200
    assert step.device.argument == 2 * 30_000 * 1024 * 1024 * 2 + 2048 * 1024 * 2


def test_an_offload_without_effect_is_refused(compiled: Compile) -> None:
    with pytest.raises(MemoptError, match="offload-without-effect") as raised:
        compiled("gpu:h100", {"offload": ["output"]})
    assert "layers.*.input" in (raised.value.problems[0].hint or "")


def test_an_offload_that_the_compiled_program_leaves_out_in_part_is_the_plans_first_warning(compiled: Compile) -> None:
    (step,) = compiled("gpu:h100", {"offload": ["input", "output"]})
    measured = estimate.to_measured(step, load_target("gpu:h100"))
    assert step.sent_host_bytes == 2 * RESIDUAL_BYTES
    (said,) = measured.warnings
    assert f"of {2 * RESIDUAL_BYTES} bytes" in said
    assert f"keeps {RESIDUAL_BYTES} there" in said
    (whole,) = compiled("gpu:h100", {"offload": ["input"]})
    assert estimate.to_measured(whole, load_target("gpu:h100")).warnings == ()


@pytest.mark.parametrize(
    "payload, code, said",
    [
        ({"fails": "abort"}, "compiler-crashed", "has had enough"),
        ({"fails": "memopt"}, "toy-problem", "the builder found a problem"),
        ({"fails": "user"}, "step-failed", "the user's model is broken"),
    ],
)
def test_a_dying_compile_is_an_error_with_its_last_words(
    compiled: Compile, payload: dict[str, Any], code: str, said: str
) -> None:
    with pytest.raises(MemoptError) as raised:
        compiled("gpu:h100", payload)
    (problem,) = raised.value.problems
    assert problem.code == code
    assert said in problem.message


def test_a_compile_that_takes_too_long_is_stopped() -> None:
    request = aot.Request(builder="toy_step:build", payload={}, target=load_target("cpu"), mesh=(("fsdp", 1),))
    with pytest.raises(MemoptError, match="compiler-timeout"):
        aot.compile_step(request, timeout_s=0.01)


def test_progress_is_told_while_it_compiles() -> None:
    said: list[str] = []
    request = aot.Request(builder="toy_step:build", payload={}, target=load_target("cpu"), mesh=(("fsdp", 1),))
    aot.compile_step(request, progress=said.append)
    assert said[0] == "asking for cpu"
    assert "compiling 1 of 1" in said


def test_a_mesh_of_another_size_than_the_target_is_refused() -> None:
    request = aot.Request(builder="toy_step:build", payload={}, target=load_target("cpu:2"), mesh=(("fsdp", 4),))
    with pytest.raises(MemoptError, match="the mesh fsdp 4 has 4 devices and the target has 2"):
        aot.compile_step(request)


def test_an_unknown_compiler_option_names_the_nearest(compiled: Compile) -> None:
    variants = ({"xla_gpu_enable_latency_hiding_schedular": True},)
    with pytest.raises(MemoptError, match="unknown-compiler-option") as raised:
        compiled("gpu:h100", {}, variants=variants)
    assert "xla_gpu_enable_latency_hiding_scheduler" in (raised.value.problems[0].hint or "")


def test_a_compiler_option_of_the_wrong_type_is_explained(compiled: Compile) -> None:
    with pytest.raises(MemoptError, match="bad-compiler-option"):
        compiled("gpu:h100", {}, variants=({"xla_gpu_enable_latency_hiding_scheduler": "true"},))


def test_a_missing_plugin_names_the_command_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    here = topology.versions()
    monkeypatch.setattr(topology, "versions", lambda: {k: v for k, v in here.items() if "cuda13" not in k})
    (problem,) = topology.missing(load_target("gpu:h100"))
    assert problem.code == "target-plugin-missing"
    assert "memopt[targets-gpu]" in (problem.hint or "")
    monkeypatch.setattr(topology, "versions", lambda: {k: v for k, v in here.items() if k != "libtpu"})
    assert topology.missing(load_target("tpu:v5e:2x2"))[0].code == "target-plugin-missing"
    assert topology.missing(load_target("cpu")) == ()


def test_a_plugin_of_another_version_than_jaxlib_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    here = topology.versions()
    monkeypatch.setattr(topology, "versions", lambda: {**here, "jax-cuda13-pjrt": "0.9.9"})
    (problem,) = topology.missing(load_target("gpu:h100"))
    assert problem.code == "plugin-version-mismatch"
    assert "0.9.9" in problem.message


def test_more_devices_than_a_node_must_be_whole_nodes() -> None:
    assert topology.gpu_topology(load_target("gpu:gb200:2")) == "1x1x2"
    assert topology.gpu_topology(load_target("gpu:gb200:64")) == "1x16x4"
    with pytest.raises(MemoptError, match="no whole number of nodes of 8"):
        topology.gpu_topology(load_target("gpu:h100:12"))


def test_the_users_xla_flags_do_not_reach_the_compiler() -> None:
    base = {"XLA_FLAGS": "--xla_no_such_flag=1", "PATH": "/bin"}
    assert topology.environment(load_target("gpu:h100"), base)["XLA_FLAGS"] == "--xla_gpu_autotune_level=0"
    assert topology.environment(load_target("tpu:v5e:1x1"), base)["XLA_FLAGS"] == ""
    assert base["XLA_FLAGS"] == "--xla_no_such_flag=1"


def test_zero_bytes_are_never_a_result() -> None:
    class Empty:
        argument_size_in_bytes = output_size_in_bytes = alias_size_in_bytes = temp_size_in_bytes = 0
        host_argument_size_in_bytes = host_output_size_in_bytes = 0
        host_alias_size_in_bytes = host_temp_size_in_bytes = 0

    for analysis in (None, Empty()):
        with pytest.raises(MemoptError, match="no-memory-figures"):
            figures(analysis)


@pytest.mark.parametrize(
    "target",
    ["gpu:a100", "gpu:h200:8", "gpu:b200", "gpu:gb200:512", "tpu:v5p:2x2x1", "tpu:v6e:2x2"],
)
def test_every_kind_of_target_compiles_and_keeps_what_is_offloaded_on_the_host(compiled: Compile, target: str) -> None:
    (step,) = compiled(target, {"offload": ["input"], "layers": 3})
    assert step.host.temp == RESIDUAL_BYTES // 4
    assert step.device.total > 0
    assert step.overlap.to_host_bytes == RESIDUAL_BYTES // 4
    assert step.overlap.synchronous == ()


def test_a_program_that_this_jaxlib_cannot_read_still_has_its_memory(compiled: Compile) -> None:
    (step,) = compiled("tpu:v7x:2x2x1", {"offload": ["input"], "layers": 3})
    assert step.host.temp == RESIDUAL_BYTES // 4
    assert (step.overlap is None) is any("cannot read" in note for note in step.notes)
    assert (step.compiled_flops is None) is (step.overlap is None)

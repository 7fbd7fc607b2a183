"""Memory figures of JAX programs on targets that are not there, as users of neighbouring tools reported them wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from memopt.backend import load_backend
from memopt.errors import MemoptError
from memopt.loading import load_policy
from memopt.lowering import make_plan
from memopt.plan import Plan
from memopt.targets import load_target
from memopt.workloads import WorkloadConfig, load_workload
from memopt_jax import aot, estimate
from memopt_jax.aot_worker import figures

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def workload() -> WorkloadConfig:
    loaded = load_workload(str(ROOT / "configs" / "workloads" / "llama-tiny.yaml"))
    assert isinstance(loaded, WorkloadConfig)
    return loaded


def compiled(workload: WorkloadConfig, policy: object, target: str) -> tuple[Plan, aot.CompiledStep]:
    """The workload's step under a policy, compiled for a target."""
    backend, where = load_backend("jax"), load_target(target)
    spec = backend.inspect_workload(workload)
    plan = make_plan(load_policy(policy), spec, backend=backend, world_size=where.num_devices)  # type: ignore[arg-type]
    return plan, estimate.compile_plan(workload, plan, spec, target=where)


def test_the_figure_counts_temporaries_and_an_empty_answer_is_refused() -> None:
    """Family: a field of the compiler's memory analysis is zero or leaves a part out (jax#18954, jax#31292)."""

    class Peakless:
        argument_size_in_bytes, output_size_in_bytes, alias_size_in_bytes = 10, 10, 10
        temp_size_in_bytes, peak_memory_in_bytes = 500, 0
        host_argument_size_in_bytes = host_output_size_in_bytes = 0
        host_alias_size_in_bytes = host_temp_size_in_bytes = 0

    device, _ = figures(Peakless())
    assert device.total == 510
    with pytest.raises(MemoptError, match="no-memory-figures"):
        figures(None)


def test_recompute_over_a_scan_saves_temporaries_and_shows_what_it_costs(workload: WorkloadConfig) -> None:
    """Family: recompute that saved memory on one release and not on another, unnoticed (jax#27748, jax#13999)."""
    _, kept = compiled(workload, ROOT / "configs/policies/none.yaml", "gpu:h100:1")
    _, recomputed = compiled(workload, ROOT / "configs/policies/recompute.yaml", "gpu:h100:1")
    assert recomputed.device.temp < kept.device.temp
    assert recomputed.plain_flops is not None
    assert recomputed.jaxpr_flops is not None
    assert recomputed.jaxpr_flops > recomputed.plain_flops
    assert kept.jaxpr_flops == recomputed.plain_flops


def test_offloading_a_layers_input_moves_bytes_to_the_host_to_the_byte(workload: WorkloadConfig) -> None:
    """Family: naming a block's value for offload changed nothing and nobody said so (jax#23869)."""
    policy = {
        "version": 1,
        "units": ["layers.*"],
        "rules": [
            {"name": "inputs", "action": "offload", "match": {"path": "layers.*.input"}},
            {"name": "rest", "action": "recompute", "match": {"unit": "layers.*"}},
        ],
    }
    plan, step = compiled(workload, policy, "gpu:h100:2")
    layer_bytes = workload.batch // 2 * workload.sequence * workload.hidden * 4
    assert step.planned_host_bytes == workload.layers * layer_bytes
    assert step.host.temp == step.planned_host_bytes
    assert step.overlap.to_host_bytes == step.overlap.to_device_bytes == step.planned_host_bytes
    assert step.overlap.synchronous == ()
    assert {row.rule for row in plan.rows if row.residual == "offload"} == {"inputs"}


def test_a_plan_names_the_compiler_what_it_leaves_out_and_that_the_split_is_attributed(
    workload: WorkloadConfig,
) -> None:
    """Family: one bare number that leaves activations, host memory or the runtime out (DeepSpeed#4527)."""
    backend, where = load_backend("jax"), load_target("gpu:h100:2")
    spec = backend.inspect_workload(workload)
    policy = load_policy(ROOT / "configs/policies/offload.yaml")
    plan = make_plan(policy, spec, backend=backend, world_size=2)
    measured = backend.estimate(workload, plan, spec, target=where)
    assert measured.method == "xla-aot"
    assert measured.attributed
    assert measured.left_out
    assert measured.versions["jaxlib"]
    assert sum(measured.by_role.values()) == measured.peak_bytes
    assert measured.by_role["optimizer_state"] == pytest.approx(2 * measured.by_role["param"], rel=1e-3)
    assert measured.host_bytes > 0
    assert measured.overlap is not None
    assert measured.overlap["offset_audit"] in ("right", "worked_around")

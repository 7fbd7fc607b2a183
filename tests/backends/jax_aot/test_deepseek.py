"""DeepSeek-V3's shape, few and narrow layers, compiled for GPUs: the shipped policies do what their comments say."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from memopt.backend import load_backend
from memopt.loading import load_policy
from memopt.lowering import make_plan
from memopt.plan import Plan
from memopt.targets import load_target
from memopt.workloads import WorkloadConfig, load_workload
from memopt_jax import aot, estimate

ROOT = Path(__file__).parents[3]
DEVICES = 16  # eight for the experts, times two


@cache
def small() -> WorkloadConfig:
    """Two dense layers and two with experts: with a single one XLA unrolls the scan and drops its transfers."""
    config = load_workload(str(ROOT / "configs" / "workloads" / "deepseek-tiny.yaml"))
    assert isinstance(config, WorkloadConfig)
    assert config.moe is not None
    moe = config.moe.model_copy(update={"dense_layers": 2})
    sizes = {"layers": 4, "hidden": 512, "intermediate": 1024, "vocab": 512}
    return config.model_copy(update={**sizes, "moe": moe, "batch": DEVICES, "sequence": 1024})


@cache
def compiled(name: str) -> tuple[Plan, aot.CompiledStep]:
    """The plan of a shipped policy, and the step compiled for 16 GB200."""
    backend, where = load_backend("jax"), load_target(f"gpu:gb200:{DEVICES}")
    spec = backend.inspect_workload(small())
    policy = load_policy(ROOT / "configs" / "policies" / "deepseek" / f"{name}.yaml")
    plan = make_plan(policy, spec, backend=backend, world_size=DEVICES)
    return plan, estimate.compile_plan(small(), plan, spec, target=where)


@pytest.mark.parametrize("name", ["full-recompute", "offload"])
def test_the_step_compiles_with_tokens_that_travel_to_their_experts(name: str) -> None:
    plan, step = compiled(name)
    experts = [row for row in plan.rows_of("param") if ".experts." in row.path]
    assert experts
    assert all(row.layout["expert"] == 0 and "fsdp" in row.layout for row in experts)
    assert {"all_gather", "reduce_scatter"} <= set(step.collectives)
    assert not step.overlap.synchronous
    assert step.audit.verdict in ("right", "worked_around", "not_applicable")


def test_offload_needs_no_more_device_memory_than_full_recompute_but_for_copies_on_their_way() -> None:
    """At full depth it needs less (evidence-jax.md); four layers hardly outweigh the copies of two."""
    _, recomputed = compiled("full-recompute")
    plan, offloaded = compiled("offload")
    on_their_way = 2 * offloaded.host.temp // small().layers
    assert offloaded.device.total <= recomputed.device.total + on_their_way
    assert offloaded.host.temp == sum(row.nbytes or 0 for row in plan.rows if row.residual == "offload") > 0
    assert recomputed.host.total == 0
    assert offloaded.compiled_flops is not None
    assert recomputed.compiled_flops is not None
    assert offloaded.compiled_flops < recomputed.compiled_flops

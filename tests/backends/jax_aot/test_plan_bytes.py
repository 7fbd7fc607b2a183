"""Host bytes of a compiled step against the plan's, on TPUs and GPUs that are not there."""

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
IN_VAIN = "mlp_down"  # no backward pass reads it: the next layer's input is a value of its own
POLICY = {
    "version": 1,
    "units": ["layers.*"],
    "precision": {"compute": "bfloat16", "master": "float32", "reduce": "bfloat16", "optimizer_state": "float32"},
    "rules": [
        {"name": "weights", "action": "shard", "match": {"role": "param"}, "axis": "fsdp"},
        {"name": "inputs", "action": "offload", "match": {"path": "layers.*.input"}},
        {"name": "values", "action": "offload", "match": {"tensor": ["q", "k", "v", "o", "mlp_gate", IN_VAIN]}},
        {"name": "rest", "action": "recompute", "match": {"unit": "layers.*"}},
    ],
}


@cache
def aligned() -> WorkloadConfig:
    """A Llama whose every offloaded value is whole tiles (8 x 128) of a TPU's memory on each of four devices."""
    config = load_workload(str(ROOT / "configs" / "workloads" / "llama-tiny.yaml"))
    assert isinstance(config, WorkloadConfig)
    sizes = {"layers": 3, "hidden": 512, "intermediate": 1024, "heads": 4, "kv_heads": 4, "vocab": 512}
    return config.model_copy(update={**sizes, "batch": 4, "sequence": 256})


@cache
def compiled(target: str) -> tuple[Plan, aot.CompiledStep]:
    """The plan, and the step compiled for the target."""
    backend, where = load_backend("jax"), load_target(target)
    spec = backend.inspect_workload(aligned())
    plan = make_plan(load_policy(POLICY), spec, backend=backend, world_size=where.num_devices)
    return plan, estimate.compile_plan(aligned(), plan, spec, target=where)


def planned(plan: Plan, *, in_vain: bool) -> int:
    """Bytes of one device that the plan's rows send to the host: of what is read again, or of what is not."""
    rows = [row for row in plan.rows_of("activation") if row.residual == "offload"]
    return sum(row.nbytes or 0 for row in rows if (row.tensor == IN_VAIN) is in_vain)


@pytest.mark.parametrize("target", ["tpu:v5e:2x2", "tpu:v6e:2x2", "gpu:gb200:4"])
def test_host_bytes_are_the_plans_to_the_byte(target: str) -> None:
    plan, step = compiled(target)
    assert planned(plan, in_vain=False) > 0
    assert step.host.temp == step.sent_host_bytes == planned(plan, in_vain=False)
    assert step.host.argument == step.host.output == 0


@pytest.mark.parametrize("target", ["cpu:4", "gpu:gb200:4"])
def test_a_value_that_the_backward_pass_does_not_read_is_not_counted_and_is_named(target: str) -> None:
    plan, step = compiled(target)
    assert step.named_in_vain == {IN_VAIN: planned(plan, in_vain=True)}
    assert step.planned_host_bytes == step.sent_host_bytes + planned(plan, in_vain=True)
    measured = estimate.to_measured(step, load_target(target))
    assert measured.host_bytes == planned(plan, in_vain=False)
    assert measured.to_host_bytes == planned(plan, in_vain=False)
    assert any(IN_VAIN in note and "not sent" in note for note in measured.notes)

"""Optimizer state on the host, in part of the layers: bytes of the compiled step against the plan's, on GPUs that are
not there."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from memopt.backend import load_backend
from memopt.loading import load_policy
from memopt.lowering import make_plan
from memopt.plan import Plan
from memopt.targets import load_target
from memopt.workloads import WorkloadConfig, load_workload
from memopt_jax import aot, estimate

ROOT = Path(__file__).parents[3]
TARGET = "gpu:gb200:4"
RULES: dict[str, list[dict[str, Any]]] = {
    "none": [],
    "all": [{"name": "adam", "action": "offload", "match": {"role": "optimizer_state"}}],
    "half": [{"name": "adam", "action": "offload", "match": {"role": "optimizer_state"}, "fraction": 0.5}],
    "last layer": [
        {"name": "adam", "action": "offload", "match": {"role": "optimizer_state", "layers": {"last": 1}}},
    ],
}


@cache
def compiled(name: str) -> tuple[Plan, aot.CompiledStep]:
    """The plan, and the step compiled for four GPUs: a Llama in which state outweighs activations."""
    config = load_workload(str(ROOT / "configs" / "workloads" / "llama-tiny.yaml"))
    assert isinstance(config, WorkloadConfig)
    sizes = {"layers": 8, "hidden": 512, "intermediate": 2048, "heads": 4, "kv_heads": 4, "vocab": 512}
    config = config.model_copy(update={**sizes, "batch": 4, "sequence": 128})
    policy = {
        "version": 1,
        "units": ["layers.*"],
        "precision": {"compute": "bfloat16", "master": "float32", "reduce": "bfloat16", "optimizer_state": "float32"},
        "rules": [
            {"name": "weights", "action": "shard", "match": {"role": "param"}, "axis": "fsdp"},
            *RULES[name],
            {"name": "rest", "action": "recompute", "match": {"unit": "layers.*"}},
        ],
    }
    backend, target = load_backend("jax"), load_target(TARGET)
    spec = backend.inspect_workload(config)
    plan = make_plan(load_policy(policy), spec, backend=backend, world_size=target.num_devices)
    return plan, estimate.compile_plan(config, plan, spec, target=target)


@cache
def compiled_list(name: str) -> tuple[Plan, aot.CompiledStep]:
    """The same for layers in a Python list."""
    workload = load_workload(f"{Path(__file__).parent / 'listed_layers.py'}:make")
    sharded = {"name": "weights", "action": "shard", "match": {"role": "param"}, "axis": "fsdp"}
    policy = {
        "version": 1,
        "units": ["layers.*"],
        "rules": [sharded, *RULES[name], {"name": "rest", "action": "recompute", "match": {"unit": "layers.*"}}],
    }
    backend, target = load_backend("jax"), load_target(TARGET)
    spec = backend.inspect_workload(workload)
    plan = make_plan(load_policy(policy), spec, backend=backend, world_size=target.num_devices)
    return plan, estimate.compile_plan(workload, plan, spec, target=target)


def planned(plan: Plan) -> int:
    """Bytes of one device's state that the plan's rows hold on the host."""
    return sum(row.nbytes or 0 for row in plan.rows_of("optimizer_state") if row.memory_kind == "pinned_host")


@pytest.mark.parametrize("name", ["half", "last layer"])
def test_host_arguments_are_the_plans_state_to_the_byte_and_the_device_holds_less(name: str) -> None:
    plan, step = compiled(name)
    _, plain = compiled("none")
    assert planned(plan) > 0
    assert step.host.argument == planned(plan)
    assert step.host.total == planned(plan)
    assert plain.device.argument - step.device.argument == planned(plan)
    assert step.device.total < plain.device.total


def test_the_state_of_layers_in_a_list_passes_through_the_device_layer_by_layer() -> None:
    plan, step = compiled_list("all")
    _, plain = compiled_list("none")
    assert step.host.total == planned(plan) > 0
    # Saved: the state but for two layers of six, one of them on its way.
    assert step.device.total < plain.device.total - planned(plan) * 4 // 6

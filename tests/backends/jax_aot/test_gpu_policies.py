"""The policies shipped for GPUs: each means what its comment says, on the shapes it was written for."""

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
from memopt_jax.compiler_options import PIPELINED
from memopt_jax.estimate import offloads_anything

ROOT = Path(__file__).parents[3]
POLICIES = sorted((ROOT / "configs" / "policies" / "gpu").glob("*.yaml"))
GIB = 2**30


@cache
def lowered(name: str, workload: str, num_devices: int) -> Plan:
    """A shipped policy on a shipped workload, one sequence for each device."""
    config = load_workload(str(ROOT / "configs" / "workloads" / f"{workload}.yaml"))
    assert isinstance(config, WorkloadConfig)
    config = config.model_copy(update={"batch": num_devices})
    backend = load_backend("jax")
    policy = load_policy(ROOT / "configs" / "policies" / "gpu" / f"{name}.yaml")
    return make_plan(policy, backend.inspect_workload(config), backend=backend, world_size=num_devices)


def host_residual_bytes(plan: Plan) -> int:
    """Bytes of activations that one device sends to its host."""
    return sum(row.nbytes or 0 for row in plan.rows_of("activation") if row.residual == "offload")


@pytest.mark.parametrize("file", POLICIES, ids=lambda file: file.stem)
def test_every_policy_shards_and_those_that_offload_say_how_they_are_checked(file: Path) -> None:
    plan = lowered(file.stem, "llama-tiny", 4)
    weights = [row for row in plan.rows_of("param") if row.path.endswith("q_proj.weight")]
    assert weights
    assert all(row.layout for row in weights)
    sends_activations = host_residual_bytes(plan) > 0
    assert offloads_anything(plan) is (file.stem != "full-recompute")
    assert bool(plan.options.get("compiler_options", {}).get(PIPELINED)) is sends_activations
    assert (plan.options.get("check") == "first_step") is sends_activations


def test_the_405b_policy_fits_the_hosts_of_64_gb200() -> None:
    plan = lowered("offload-405b", "llama-3.1-405b", 64)
    target = load_target("gpu:gb200:64")
    assert target.host_bytes_per_node is not None
    on_host = host_residual_bytes(plan)
    assert on_host < 200 * GIB
    assert on_host * target.devices_per_node < target.host_bytes_per_node
    gates = [row for row in plan.rows_of("activation") if row.tensor == "mlp_gate"]
    assert sum(row.residual == "offload" for row in gates) == round(0.55 * 126)

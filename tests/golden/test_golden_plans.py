"""What each shipped policy does to a tiny model on each backend, line by line: a change of meaning shows in review.

Renew with `pytest tests/golden --snapshot-update`.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from memopt import MemoptError, Plan, make_plan
from memopt.backend import backend_names, load_backend
from memopt.checking import plan_for
from memopt.explain import compress, compress_units
from memopt.spec import ModelSpec
from memopt.workloads import load_workload

CONFIGS = Path(__file__).parents[2] / "configs"
POLICIES = sorted((CONFIGS / "policies").rglob("*.yaml"))
TINY_LLAMA = CONFIGS / "workloads" / "llama-tiny.yaml"
WORKLOADS = {"deepseek": (CONFIGS / "workloads" / "deepseek-tiny.yaml", 16)}
"""Folder of the policies that are for one family -> a workload of it and the number of devices; else Llama on 4."""


def _lines(plan: Plan) -> list[str]:
    mesh = " x ".join(f"{axis} {size}" for axis, size in plan.mesh)
    lines = [f"mesh {mesh}"]
    for name, count, unit in compress_units(plan.units):
        region = f", region, unnamed {unit.unnamed_residual}" if unit.region else ""
        lines.append(f"unit {name} x {count}: reshard {unit.reshard_after_forward}{region}")
    for line in compress(plan, plan.rows):
        row = line.row
        layout = " ".join(f"{axis}:{dimension}" for axis, dimension in row.layout.items()) or "whole"
        what = row.residual or layout
        lines.append(f"{row.path} {row.role} | {what} | {row.memory_kind} | {row.rule} | {line.nbytes}")
    return [*lines, *(f"note: {warning}" for warning in plan.warnings)]


@pytest.mark.parametrize("backend", backend_names())
@pytest.mark.parametrize("policy", POLICIES, ids=[str(file.relative_to(CONFIGS / "policies")) for file in POLICIES])
def test_the_plan_of_a_shipped_policy(policy: Path, backend: str, snapshot) -> None:
    assert _said(policy, backend) == snapshot


@cache
def _inspected(backend: str, workload: Path) -> ModelSpec:
    return load_backend(backend).inspect_workload(load_workload(workload))


def _said(policy: Path, backend: str) -> str:
    """The plan, or the refusal of what the backend cannot do; any other problem fails the test."""
    try:
        workload, world_size = WORKLOADS.get(policy.parent.name, (TINY_LLAMA, 4))
        plan = make_plan(policy, _inspected(backend, workload), backend=backend, world_size=world_size)
    except MemoptError as error:
        if any(problem.code != "unsupported-by-backend" for problem in error.problems):
            raise
        return str(error).replace(str(policy), policy.name)
    return "\n".join(_lines(plan))


@pytest.mark.parametrize("backend", backend_names())
def test_the_plan_of_a_shipped_policy_reads_back(backend: str) -> None:
    plan = plan_for(CONFIGS / "policies" / "shard.yaml", str(TINY_LLAMA), backend)
    assert not plan.diff(Plan.from_json(plan.to_json()))

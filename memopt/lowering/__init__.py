"""Lowering: (policy, model inventory, backend's capabilities) -> plan. Pure; every problem is reported at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..backend import Backend
from ..errors import MemoptError, Problem, did_you_mean
from ..plan import Plan
from ..policy import Policy
from ..spec import ModelSpec
from .entries import make_entries
from .mesh import Mesh, existing_axes, lower_mesh
from .refusals import refuse
from .rows import make_rows
from .rules import cover
from .selectors import needs_units
from .slots import decide, shadowed
from .units import lower_units

__all__ = ["make_plan"]


def make_plan(
    policy: Policy,
    spec: ModelSpec,
    *,
    backend: Backend,
    world_size: int = 1,
    options: Mapping[str, Any] | None = None,
) -> Plan:
    """The plan: one row per tensor and the rule that decided it; allocates nothing.

    Args:
        policy: The policy.
        spec: The model's inventory.
        backend: Its capabilities decide what is refused.
        world_size: Devices in all.
        options: This backend's options, validated; left out: as the policy writes them.

    Raises:
        MemoptError: With every problem found.
    """
    options = dict(policy.backend_options.get(backend.name, {}) if options is None else options)
    capabilities = backend.capabilities(options)
    problems: list[Problem] = []
    mesh = lower_mesh(policy, spec, world_size, problems)
    num_before = len(problems)
    units = lower_units(policy, spec, problems)
    has_units = len(problems) == num_before
    entries = make_entries(policy, spec, units)
    coverage = [cover(policy, i, entries, spec, units) for i in range(len(policy.rules))]
    for rule, one in zip(policy.rules, coverage, strict=True):
        # Over units that are not there, rules about units cannot be judged.
        problems += one.problems if has_units or not needs_units(rule) else []
    problems += _unknown_axes(policy, mesh, spec)
    if not has_units:
        _raise(problems)
    decisions = decide(policy, entries, coverage)
    problems += shadowed(policy, coverage, decisions)
    problems += refuse(
        policy, spec, entries, decisions, dict(mesh), units.units, backend=backend.name, capabilities=capabilities
    )
    _raise(problems)
    table = make_rows(policy, spec, entries, decisions, dict(mesh), units, sharding=capabilities.sharding)
    _raise(table.problems)
    return Plan(
        backend=backend.name,
        world_size=world_size,
        mesh=mesh,
        units=table.units,
        rows=table.rows,
        precision=policy.precision.model_dump() if policy.precision is not None else {},
        accumulate_steps=policy.accumulate.steps,
        accumulate_reduce=policy.accumulate.reduce,
        options=options,
        budget={} if policy.budget is None else {k: int(v) for k, v in policy.budget if v is not None},
        warnings=(*(note for one in coverage for note in one.notes), *table.warnings),
        family=spec.family,
        rule_order=tuple(rule.name for rule in policy.rules),
    )


def _raise(problems: list[Problem] | tuple[Problem, ...]) -> None:
    if problems:
        raise MemoptError(sorted(problems, key=lambda problem: (problem.line or 0, problem.column or 0)))


def _unknown_axes(policy: Policy, mesh: Mesh, spec: ModelSpec) -> list[Problem]:
    known = [axis for axis, _ in mesh]
    existing = existing_axes(spec)
    return [
        Problem(
            "unknown-axis",
            f"rule `{rule.name}` shards over `{axis}`, which the mesh does not have; its axes are {', '.join(known)}",
            hint=did_you_mean(axis, known) or f"add it: `mesh: {{{axis}: -1}}`",
            **policy.source.at(("rules", i, "axis")),
        )
        for i, rule in enumerate(policy.rules)
        if rule.action == "shard"
        for axis in rule.axes
        if axis not in known and axis not in existing
    ]

"""Lowering: (policy, model inventory, backend's capabilities) -> plan. Pure; every problem is reported at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..backend import Backend
from ..errors import MemoptError, Problem
from ..plan import Plan
from ..policy import Policy
from ..policy_checks import unknown_axes
from ..spec import ModelSpec
from .entries import Entry, make_entries
from .mesh import Mesh, existing_axes, lower_mesh
from .refusals import refuse, refuse_by_policy
from .rows import make_rows
from .rules import Coverage, cover
from .selectors import needs_units
from .slots import decide, shadowed
from .units import UnitTable, lower_units

__all__ = ["make_plan", "rule_problems"]

_OF_THE_MESH = frozenset({"mesh-conflict", "mesh-world", "unknown-axis"})
"""With one of these no tensor can be laid out."""


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
    matched = _match(policy, spec, world_size)
    mesh, units, entries, problems = dict(matched.mesh), matched.units, matched.entries, list(matched.problems)
    if not matched.has_units:
        _raise([*problems, *refuse_by_policy(policy, mesh, backend=backend.name, capabilities=capabilities)])
    decisions = decide(policy, entries, matched.coverage)
    problems += shadowed(policy, matched.coverage, decisions)
    problems += refuse(
        policy, spec, entries, decisions, mesh, units.units, backend=backend.name, capabilities=capabilities
    )
    if any(problem.code in _OF_THE_MESH for problem in problems):
        _raise(problems)
    table = make_rows(policy, spec, entries, decisions, mesh, units, sharding=capabilities.sharding)
    _raise([*problems, *table.problems])
    return Plan(
        backend=backend.name,
        world_size=world_size,
        mesh=matched.mesh,
        units=table.units,
        rows=table.rows,
        precision=policy.precision.model_dump() if policy.precision is not None else {},
        accumulate_steps=policy.accumulate.steps,
        accumulate_reduce=policy.accumulate.reduce,
        options=options,
        budget={} if policy.budget is None else {k: int(v) for k, v in policy.budget if v is not None},
        warnings=(*(note for one in matched.coverage for note in one.notes), *table.warnings),
        family=spec.family,
        rule_order=tuple(rule.name for rule in policy.rules),
    )


def rule_problems(policy: Policy, spec: ModelSpec, *, world_size: int) -> list[Problem]:
    """What is wrong with each rule, unit and the mesh by itself: of a policy parts of which are known to be broken.

    How rules act on each other, and what the backend refuses of what they decide, is left out: it would change with
    the broken ones mended.
    """
    return list(_match(policy, spec, world_size).problems)


@dataclass(frozen=True)
class _Matched:
    """The rules over the model, each by itself."""

    mesh: Mesh
    units: UnitTable
    has_units: bool
    entries: tuple[Entry, ...]
    coverage: tuple[Coverage, ...]
    problems: tuple[Problem, ...]


def _match(policy: Policy, spec: ModelSpec, world_size: int) -> _Matched:
    problems: list[Problem] = []
    mesh = lower_mesh(policy, spec, world_size, problems)
    num_before = len(problems)
    units = lower_units(policy, spec, problems)
    has_units = len(problems) == num_before
    entries = tuple(make_entries(policy, spec, units))
    coverage = tuple(cover(policy, i, entries, spec, units) for i in range(len(policy.rules)))
    for rule, one in zip(policy.rules, coverage, strict=True):
        # Over units that are not there, rules about units cannot be judged.
        problems += one.problems if has_units or not needs_units(rule) else []
    problems += unknown_axes(policy, [axis for axis, _ in mesh], existing=existing_axes(spec))
    return _Matched(mesh, units, has_units, entries, coverage, tuple(problems))


def _raise(problems: list[Problem] | tuple[Problem, ...]) -> None:
    if problems:
        raise MemoptError(sorted(problems, key=lambda problem: (problem.line or 0, problem.column or 0)))

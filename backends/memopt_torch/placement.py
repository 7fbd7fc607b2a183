"""From the plan to the engine's requests: which modules form a unit, how each parameter is laid out, and what becomes
of parameters that no unit of the policy holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from memopt.errors import MemoptError, Problem
from memopt.plan import Plan, PlanRow, PlanUnit

from .inventory import Names
from .requests import Dtypes, Layout, ParameterRequest, Site, UnitRequest

ROOT = "<root>"
"""The unit of parameters used in several places of the model; gathered for the whole step."""


def dtypes_of(plan: Plan) -> Dtypes:
    """The dtypes of the plan's `precision`."""
    named = {key: getattr(torch, name) for key, name in plan.precision.items()}
    return Dtypes(named.get("compute"), named.get("master"), named.get("reduce"))


def layouts_of(plan: Plan) -> dict[str, Layout]:
    """Parameter path -> how far it is sharded over `fsdp`.

    Raises:
        MemoptError: `layout-unsupported` for splits along a dimension, which flat units do not have.
    """
    rows: dict[str, dict[str, PlanRow]] = {}
    odd: dict[tuple[str | None, str], list[str]] = {}
    for row in plan.rows:
        if row.role in ("param", "grad", "optimizer_state"):
            rows.setdefault(row.path, {})[row.role] = row
            elsewhere = {axis: d for axis, d in row.layout.items() if axis != "fsdp" or d != -1}
            if elsewhere:
                odd.setdefault((row.rules.get("layout"), str(elsewhere)), []).append(row.path)
    if odd:
        raise MemoptError([_unlike_flat(rule, layout, paths) for (rule, layout), paths in odd.items()])
    return {path: _layout(by_role) for path, by_role in rows.items()}


def _unlike_flat(rule: str | None, layout: str, paths: list[str]) -> Problem:
    num_others = len(set(paths)) - 1
    others = f" and {num_others} more" if num_others else ""
    return Problem(
        "layout-unsupported",
        f"rule `{rule}` splits `{paths[0]}`{others} over {layout}; the layer engine splits units over `fsdp` alone",
        path=paths[0],
        hint="write `axis: fsdp`, or set backend_options.torch.engine: fsdp2",
    )


def _layout(by_role: Mapping[str, PlanRow]) -> Layout:
    sharded = {role for role, row in by_role.items() if row.layout}
    if "param" in sharded:
        return "shard"
    if "grad" in sharded:
        return "zero2"
    return "zero1" if "optimizer_state" in sharded else "whole"


def requests_of(plan: Plan, names: Names) -> tuple[UnitRequest, ...]:
    """Units in the order the model runs them (as far as its module order tells)."""
    layouts = layouts_of(plan)
    unit_of = {row.path: row.unit for row in plan.rows if row.role == "param"}
    members = {names.aliases.get(member, member): unit.name for unit in plan.units for member in unit.members}
    drafts = [_draft(unit, names) for unit in plan.units]
    by_unit: dict[str, list[ParameterRequest]] = {unit.name: [] for unit in plan.units}
    left_over: list[ParameterRequest] = []
    for path, places in names.parameters.items():
        sites = tuple(Site(module, name) for module, name in places)
        request = ParameterRequest(path, names.parameter(path), sites, layouts.get(path, "whole"))
        unit = unit_of.get(path)
        if unit is not None and not _all_within(places, plan.unit_of(unit), names):
            unit = None  # tied to a module outside: it must be there when that one runs
        (by_unit[unit] if unit is not None else left_over).append(request)
    requests = [replace(draft, parameters=tuple(by_unit[draft.name])) for draft in drafts]
    requests += _root_requests(left_over, names, members, plan)
    order = {id(module): i for i, module in enumerate(names.modules.values())}
    requests = [request for request in requests if request.parameters]
    requests.sort(key=lambda request: (not request.resident, min(order[id(module)] for module in request.modules)))
    return tuple(requests)


def _all_within(places: Sequence[tuple[nn.Module, str]], unit: PlanUnit, names: Names) -> bool:
    inside = {id(module) for member in unit.members for module in names.module(member).modules()}
    return all(id(module) in inside for module, _ in places)


def shared_outside(unit: PlanUnit, names: Names) -> bool:
    """Whether a parameter of the unit is tied to a module outside of it."""
    inside = {id(module) for member in unit.members for module in names.module(member).modules()}
    return any({id(module) in inside for module, _ in places} == {True, False} for places in names.parameters.values())


def _draft(unit: PlanUnit, names: Names) -> UnitRequest:
    modules = tuple(dict.fromkeys(names.module(member) for member in unit.members))
    return UnitRequest(
        name=unit.name,
        modules=modules,
        parameters=(),
        reshard_after_forward=unit.reshard_after_forward,
        is_layer=unit.stack is not None,
        prefetch_forward=unit.prefetch_forward,
        prefetch_backward=unit.prefetch_backward,
    )


@dataclass(frozen=True, slots=True)
class _Owner:
    """A module outside all units that owns parameters itself."""

    path: str
    module: nn.Module
    position: int
    parameters: tuple[ParameterRequest, ...]


def _root_requests(
    left_over: Sequence[ParameterRequest], names: Names, members: Mapping[str, str], plan: Plan
) -> list[UnitRequest]:
    """Units for what the policy's units leave out.

    A module that alone holds its parameters is gathered just around its own call: each by itself before the first unit
    (embeddings), one group for each run between units and after them (final norm and head). Parameters that several
    modules share, or that a container holds, stay gathered for the whole step.
    """
    paths = {id(module): path for path, module in names.modules.items()}
    resident: list[ParameterRequest] = []
    owned: dict[str, list[ParameterRequest]] = {}
    for request in left_over:
        owners = {paths[id(site.module)] for site in request.sites}
        path = next(iter(owners))
        own = names.modules[path]
        inside = any(_within(path, member) for member in members)
        if len(owners) > 1 or inside or any(own.children()):
            resident.append(request)
        else:
            owned.setdefault(path, []).append(request)
    position = {path: i for i, path in enumerate(names.modules)}
    owners = [_Owner(path, names.modules[path], position[path], tuple(found)) for path, found in owned.items()]
    owners.sort(key=lambda owner: owner.position)
    ahead = next(iter(plan.units), None)  # units of our own gather as far ahead as the policy's first
    requests = [
        request
        if ahead is None
        else replace(request, prefetch_forward=ahead.prefetch_forward, prefetch_backward=ahead.prefetch_backward)
        for request in _runs(owners, sorted(position[member] for member in members))
    ]
    if resident:
        root = names.modules[""]
        requests.insert(0, UnitRequest(ROOT, (root,), tuple(resident), resident=True, is_layer=False))
    return requests


def _within(path: str, member: str) -> bool:
    return path == member or path.startswith(f"{member}.")


def _runs(owners: Iterable[_Owner], unit_positions: Sequence[int]) -> Iterable[UnitRequest]:
    runs: dict[int, list[_Owner]] = {}
    for owner in owners:
        before = sum(position < owner.position for position in unit_positions)
        runs.setdefault(before, []).append(owner)
    for before, run in runs.items():
        groups = [[owner] for owner in run] if before == 0 else [run]
        for group in groups:
            yield UnitRequest(
                name="+".join(owner.path for owner in group),
                modules=tuple(owner.module for owner in group),
                parameters=tuple(request for owner in group for request in owner.parameters),
                is_layer=False,
            )

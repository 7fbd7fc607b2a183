"""Notes: what works but costs more than its author is likely to expect, in sentences for the user."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ..plan import PlanRow
from ..policy import Policy
from ..spec import ModelSpec
from .units import UnitTable


def make_notes(
    policy: Policy,
    spec: ModelSpec,
    rows: Sequence[PlanRow],
    units: UnitTable,
    mesh: Mapping[str, int],
    *,
    whole: Mapping[str, Sequence[str]],
) -> list[str]:
    """The plan's warnings about layouts and accumulation."""
    params = [row for row in rows if row.role == "param"]
    notes = [
        f"{listing(starred(path, spec) for path in paths)}: fewer elements than `{axis}` has devices ({mesh[axis]}), "
        "kept whole"
        for axis, paths in whole.items()
    ]
    return [
        *notes,
        *_shared_by_units(params, units),
        *_replicated_in_sharded(params, spec),
        *_deferred(policy, rows),
        *_one_unit(params),
    ]


def _shared_by_units(params: Sequence[PlanRow], units: UnitTable) -> list[str]:
    """A tied parameter must outlive every unit that uses it."""
    notes = []
    for row in params:
        owners = [owner for owner in (units.of(name) for name in (row.path, *row.aliases)) if owner is not None]
        if row.unit is None and owners:
            users = listing(owners)
            notes.append(f"`{row.path}` is shared ({users} use it): it belongs to no unit and stays whole in use")
    return notes


def _replicated_in_sharded(params: Sequence[PlanRow], spec: ModelSpec) -> list[str]:
    """One all-reduce a step for the parameters a rule keeps whole inside a sharded unit, by kind of unit."""
    sharded = {row.unit for row in params if row.layout and row.unit is not None}
    whole = [row for row in params if row.unit in sharded and not row.layout and row.trainable]
    by_kind: dict[str, list[PlanRow]] = {}
    for row in whole:
        by_kind.setdefault(starred(row.unit or "", spec), []).append(row)
    return [
        f"unit `{kind}`: {listing(starred(row.path, spec) for row in rows)} stay whole inside a sharded unit: one "
        f"all-reduce of {sum(row.nbytes or 0 for row in rows) // len({row.unit for row in rows})} bytes a unit and step"
        for kind, rows in by_kind.items()
    ]


def _deferred(policy: Policy, rows: Sequence[PlanRow]) -> list[str]:
    if policy.accumulate.steps == 1 or policy.accumulate.reduce == "each":
        return []
    split = {row.path for row in rows if row.role == "param" and row.layout}
    nbytes = sum(row.nbytes or 0 for row in rows if row.role == "grad" and row.path in split)
    if not nbytes:
        return []
    return [f"`accumulate: {{reduce: last}}` keeps whole gradients between micro-batches: {nbytes} bytes a device"]


def _one_unit(params: Sequence[PlanRow]) -> list[str]:
    sharded = [row for row in params if row.layout]
    owners = {row.unit for row in sharded}
    if len(sharded) < 2 or len(owners) > 1:
        return []
    where = "in no unit (the root)" if owners == {None} else f"in one unit, `{next(iter(owners))}`"
    return [f"all sharded parameters are {where}: they are gathered at once, so sharding saves nothing at the peak"]


def starred(path: str, spec: ModelSpec) -> str:
    """The path with `*` in place of layer indices."""
    for stack in spec.stacks:
        head = f"{stack.path}." if stack.path else ""
        if path.startswith(head):
            index, dot, rest = path[len(head) :].partition(".")
            if index.isdigit():
                path = f"{head}*{dot}{rest}"
    return path


def listing(paths: Iterable[str], *, limit: int = 4) -> str:
    """The first few, quoted, and how many more."""
    names = list(dict.fromkeys(paths))
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(f"`{name}`" for name in names[:limit]) + more

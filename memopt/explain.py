"""What a plan says about each tensor, as rows for JSON and as a table where equal layers are one line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .errors import MemoptError, did_you_mean
from .matching import matches
from .plan import Plan, PlanRow, PlanUnit

_JSON_KEYS = (
    "path", "aliases", "role", "unit", "shape", "dtype", "nbytes", "global_nbytes", "layout", "memory_kind", "residual",
    "rule", "rules", "losers", "update_on", "tensor", "op",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Line:
    """Rows that are equal but for the layer they are in.

    Attributes:
        row: The first of them, with `*` (or `{0..3}`) for the layer in its path and unit.
        num_rows: How many.
        nbytes: Their bytes per device together; None where unknown.
    """

    row: PlanRow
    num_rows: int
    nbytes: int | None


def select_rows(plan: Plan, pattern: str | None) -> tuple[PlanRow, ...]:
    """The rows whose path or alias a glob selects, in model order; all of them without one.

    Raises:
        MemoptError: `tensor-matches-nothing`.
    """
    if pattern is None:
        return plan.rows
    rows = tuple(row for row in plan.rows if any(matches(pattern, name) for name in (row.path, *row.aliases)))
    if not rows:
        names = list(dict.fromkeys(line.row.path for line in compress(plan, plan.rows)))
        raise MemoptError.of(
            "tensor-matches-nothing",
            f"`{pattern}` matches no tensor of the plan",
            hint=did_you_mean(pattern, [*names, *(row.path for row in plan.rows)]) or "`*` stays within one part",
        )
    return rows


def row_to_json(row: PlanRow) -> dict[str, Any]:
    """The contract's keys of one row of `explain`."""
    data = {key: getattr(row, key) for key in _JSON_KEYS}
    return {key: list(value) if isinstance(value, tuple) else value for key, value in data.items()}


def unit_to_json(unit: PlanUnit) -> dict[str, Any]:
    """One unit of `explain`."""
    keys = ("name", "members", "stack", "index", "region", "unnamed_residual", "inferred", "reshard_after_forward")
    data = {key: getattr(unit, key) for key in keys}
    prefetch = {"forward": unit.prefetch_forward, "backward": unit.prefetch_backward}
    return {**data, "members": list(unit.members), "prefetch": prefetch}


def compress(plan: Plan, rows: Iterable[PlanRow]) -> list[Line]:
    """Equal rows of the layers of a stack as one line, in the order of their first."""
    stacks = {unit.stack: 0 for unit in plan.units if unit.stack is not None}
    for unit in plan.units:
        if unit.stack is not None and unit.index is not None:
            stacks[unit.stack] = max(stacks[unit.stack], unit.index + 1)
    groups: dict[Any, list[tuple[PlanRow, int | None]]] = {}
    for row in rows:
        starred, stack, index = _starred(row.path, stacks)
        key = (starred, stack, row.role, _without_layer(row, stacks))
        groups.setdefault(key, []).append((row, index))
    return [_line(starred, stack, members, stacks) for (starred, stack, _, _), members in groups.items()]


def _starred(path: str, stacks: Mapping[str, int]) -> tuple[str, str | None, int | None]:
    for stack in sorted(stacks, key=len):
        head = f"{stack}." if stack else ""
        if path.startswith(head):
            index, dot, rest = path[len(head) :].partition(".")
            if index.isdigit():
                return f"{head}*{dot}{rest}", stack, int(index)
    return path, None, None


def _without_layer(row: PlanRow, stacks: Mapping[str, int]) -> tuple[Any, ...]:
    """Everything that must be equal for two rows to be shown as one."""
    unit = None if row.unit is None else _starred(row.unit, stacks)[0]
    layout, rules = tuple(sorted(row.layout.items())), tuple(sorted(row.rules.items()))
    shown = (row.shape, row.dtype, row.nbytes, layout, row.memory_kind, row.residual, row.rule, row.losers)
    return (unit, rules, row.update_on, row.trainable, *shown)


def _line(
    starred: str, stack: str | None, members: Sequence[tuple[PlanRow, int | None]], stacks: Mapping[str, int]
) -> Line:
    row = members[0][0]
    sizes = [member.nbytes for member, _ in members]
    known = [size for size in sizes if size is not None]
    nbytes = sum(known) if len(known) == len(sizes) else None
    if stack is None:
        return Line(row, len(members), nbytes)
    indices = sorted({index for _, index in members if index is not None})
    label = "*" if len(indices) == stacks[stack] else _ranges(indices)
    head = f"{stack}." if stack else ""
    path = starred.replace(f"{head}*", f"{head}{label}", 1)
    unit = None if row.unit is None else _starred(row.unit, stacks)[0].replace(f"{head}*", f"{head}{label}", 1)
    return Line(replace(row, path=path, unit=unit), len(members), nbytes)


def _ranges(indices: Sequence[int]) -> str:
    """`3`, `{0..3}`, `{0,2,4}`.

    >>> _ranges([3]), _ranges([0, 1, 2, 3]), _ranges([0, 2, 4, 5])
    ('3', '{0..3}', '{0,2,4..5}')
    """
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    parts = [str(run[0]) if len(run) == 1 else f"{run[0]}..{run[-1]}" for run in runs]
    return parts[0] if len(indices) == 1 else "{" + ",".join(parts) + "}"


def compress_units(units: Iterable[PlanUnit]) -> list[tuple[str, int, PlanUnit]]:
    """Units of a stack that are alike as one: (name with `*`, how many, the first of them)."""
    groups: dict[Any, list[PlanUnit]] = {}
    for unit in units:
        name = unit.name if unit.stack is None else f"{unit.stack}.*"
        alike = (unit.reshard_after_forward, unit.prefetch_forward, unit.prefetch_backward, unit.region)
        groups.setdefault((name, *alike, unit.unnamed_residual), []).append(unit)
    return [
        (key[0] if len(members) > 1 else members[0].name, len(members), members[0]) for key, members in groups.items()
    ]

"""What differs between two plans: settings, units and rows, each with both values."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from .plan import Plan, PlanRow, PlanUnit

_ROW_KEYS = tuple(field.name for field in fields(PlanRow) if field.name not in ("path", "role", "aliases", "losers"))
_UNIT_KEYS = tuple(field.name for field in fields(PlanUnit) if field.name != "name")
_SETTINGS = (
    "backend", "family", "world_size", "mesh", "precision", "accumulate_steps", "accumulate_reduce", "options",
    "budget",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Change:
    """One difference.

    Attributes:
        where: `setting`, `unit` or `row`.
        name: The setting's key, the unit's name, or the row's path.
        role: Of a row.
        field: What differs; None where the whole unit or row was added or removed.
        before, after: The two values; None on the side that lacks the unit or row.
    """

    where: Literal["setting", "unit", "row"]
    name: str
    role: str | None
    field: str | None
    before: Any
    after: Any

    def render(self) -> str:
        """`row layers.3.input (activation): residual keep -> offload`."""
        role = f" ({self.role})" if self.role else ""
        head = f"{self.where} {self.name}{role}"
        if self.field is None:
            return f"{head}: {'added' if self.before is None else 'removed'}"
        field = "" if self.where == "setting" else f"{self.field} "
        return f"{head}: {field}{self.before} -> {self.after}"


@dataclass(frozen=True, slots=True)
class PlanDiff:
    """Every difference from one plan to another; empty where the plans do the same.

    Rules' names count: a tensor that another rule decides in the same way differs in `rule` and `rules`.
    """

    changes: tuple[Change, ...]

    def __bool__(self) -> bool:
        return bool(self.changes)

    def __iter__(self) -> Iterator[Change]:
        return iter(self.changes)

    def __len__(self) -> int:
        return len(self.changes)

    def __str__(self) -> str:
        return "\n".join(change.render() for change in self.changes) or "no difference"

    def to_json(self, *, indent: int | None = None) -> str:
        """A JSON list of the changes."""
        return json.dumps([asdict(change) for change in self.changes], indent=indent, sort_keys=True)


def diff_plans(before: Plan, after: Plan) -> PlanDiff:
    """What changes from `before` to `after`; settings first, then units and rows sorted by name."""
    settings = [
        Change("setting", key, None, key, _plain(getattr(before, key)), _plain(getattr(after, key)))
        for key in _SETTINGS
        if _plain(getattr(before, key)) != _plain(getattr(after, key))
    ]
    units = _compare(
        "unit", {(unit.name, None): unit for unit in before.units}, {(unit.name, None): unit for unit in after.units}
    )
    rows = _compare(
        "row", {(row.path, row.role): row for row in before.rows}, {(row.path, row.role): row for row in after.rows}
    )
    return PlanDiff((*settings, *units, *rows))


def _compare(
    where: Literal["unit", "row"],
    before: Mapping[tuple[str, str | None], PlanRow | PlanUnit],
    after: Mapping[tuple[str, str | None], PlanRow | PlanUnit],
) -> Sequence[Change]:
    changes: list[Change] = []
    for key in sorted({*before, *after}, key=lambda key: (key[0], key[1] or "")):
        name, role = key
        if key not in before or key not in after:
            is_new = key in after
            changes.append(Change(where, name, role, None, None if is_new else "there", "there" if is_new else None))
            continue
        for field in _ROW_KEYS if where == "row" else _UNIT_KEYS:
            old, new = _plain(getattr(before[key], field)), _plain(getattr(after[key], field))
            if old != new:
                changes.append(Change(where, name, role, field, old, new))
    return changes


def _plain(value: Any) -> Any:
    """Tuples as lists and mappings as dicts, so that a plan read back from JSON equals its origin."""
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, list | tuple) else value

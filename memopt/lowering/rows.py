"""Rows: the decided entries as the plan's rows, with layouts, bytes and what the user should know."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from ..errors import Problem
from ..plan import PlanRow, PlanUnit, Residual
from ..policy import Policy
from ..rules import OffloadRule, Rule, ShardRule
from ..spec import ModelSpec
from .entries import Entry
from .layout import Sharding, Split, describe, device_nbytes, is_within, split
from .notes import make_notes
from .selectors import acting_roles
from .slots import LAYOUT, MEMORY, RESIDUAL, Decisions, residual_of
from .units import UnitTable


@dataclass(frozen=True)
class RowTable:
    """Rows and units as decided, with warnings, or what is wrong."""

    rows: tuple[PlanRow, ...]
    units: tuple[PlanUnit, ...]
    warnings: tuple[str, ...]
    problems: tuple[Problem, ...]


def make_rows(
    policy: Policy,
    spec: ModelSpec,
    entries: Sequence[Entry],
    decisions: Decisions,
    mesh: Mapping[str, int],
    units: UnitTable,
    *,
    sharding: Sharding,
) -> RowTable:
    """One row per entry, in order; rows of unnamed values only where their unit became a region."""
    builder = _Builder(policy, spec, entries, decisions, mesh, sharding)
    rows = [builder.row(n) for n in range(len(entries))]
    regions = {row.unit for row in rows if row.residual in ("recompute", "offload")}
    unnamed = {entry.unit: rows[n] for n, entry in enumerate(entries) if entry.unnamed}
    decided = tuple(
        replace(unit, region=True, unnamed_residual=unnamed[unit.name].residual) if unit.name in regions else unit
        for unit in units.units
    )
    kept = tuple(row for n, row in enumerate(rows) if not entries[n].unnamed or row.unit in regions)
    warnings = make_notes(policy, spec, kept, units, mesh, whole=builder.whole)
    return RowTable(kept, decided, tuple(warnings), tuple(builder.problems()))


class _Builder:
    """Builds rows one by one; a parameter's layout is needed by the gradient and state that follow it."""

    def __init__(
        self,
        policy: Policy,
        spec: ModelSpec,
        entries: Sequence[Entry],
        decisions: Decisions,
        mesh: Mapping[str, int],
        sharding: Sharding,
    ) -> None:
        self._policy = policy
        self._entries = entries
        self._decisions = decisions
        self._mesh = mesh
        self._sharding: Sharding = sharding
        self._data_devices = _data_devices(mesh, spec) if spec.batch == "global" else 1
        self._layout_of: dict[tuple[str, str], Mapping[str, int]] = {}
        self._layout_rule: dict[str, str] = {}
        self._gradient_rule: dict[str, int] = {}
        self._faults: dict[int, list[str]] = {}
        self._conflicts: dict[int, list[Problem]] = {}
        self.whole: dict[str, list[str]] = {}

    def row(self, n: int) -> PlanRow:
        entry = self._entries[n]
        won = self._decisions.winners.get(n, {})
        rules = {slot: self._policy.rules[i].name for slot, i in won.items()}
        if entry.role == "activation":
            return self._activation(entry, self._rule(won.get(RESIDUAL)), rules, n)
        layout = self._layout(n, entry, won, rules)
        memory = self._rule(won.get(MEMORY))
        offloads = isinstance(memory, OffloadRule)
        is_state = entry.role == "optimizer_state"
        update_on = (memory.update_on or "device") if isinstance(memory, OffloadRule) else "device"
        return replace(
            self._common(n, entry, rules),
            nbytes=device_nbytes(entry, layout, self._mesh),
            layout=layout,
            memory_kind="pinned_host" if offloads else "device",
            update_on=update_on if is_state else None,
        )

    def _rule(self, i: int | None) -> Rule | None:
        return None if i is None else self._policy.rules[i]

    def _common(self, n: int, entry: Entry, rules: Mapping[str, str]) -> PlanRow:
        tensor = entry.tensor
        return PlanRow(
            path=entry.path,
            role=entry.role,
            unit=entry.unit,
            shape=tensor.shape,
            dtype=entry.dtype,
            nbytes=None,
            global_nbytes=entry.global_nbytes,
            rule=self._deciding_rule(n, rules),
            rules=dict(rules),
            losers=tuple(self._policy.rules[i].name for i in self._decisions.losers.get(n, ())),
            aliases=tensor.aliases,
            trainable=tensor.trainable,
            tensor=tensor.tensor,
            op=tensor.op,
            checkpoint_name=tensor.checkpoint_name,
        )

    def _deciding_rule(self, n: int, rules: Mapping[str, str]) -> str | None:
        """The rule that matched the row itself, layout's before memory's; else the one whose layout it inherits."""
        own = self._decisions.winners.get(n, {})
        slots = [slot for slot in (LAYOUT, MEMORY, RESIDUAL) if slot in own] or list(rules)
        return rules[slots[0]] if slots else None

    def _activation(self, entry: Entry, rule: Rule | None, rules: Mapping[str, str], n: int) -> PlanRow:
        residual = cast(Residual, residual_of(rule))
        layout = self._existing(entry)
        nbytes = device_nbytes(entry, layout, self._mesh)
        if nbytes is not None:
            nbytes = math.ceil(nbytes / self._data_devices)
        kind = "pinned_host" if residual == "offload" else "device"
        common = self._common(n, entry, rules)
        return replace(common, nbytes=nbytes, layout=layout, memory_kind=kind, residual=residual)

    def _existing(self, entry: Entry) -> dict[str, int]:
        return {axis: dimension for axis, dimension in entry.tensor.sharding.items() if axis in self._mesh}

    def _layout(self, n: int, entry: Entry, won: Mapping[str, int], rules: dict[str, str]) -> Mapping[str, int]:
        existing = self._existing(entry)
        rule = self._rule(won.get(LAYOUT))
        derived = entry.role in ("grad", "optimizer_state")
        if isinstance(rule, ShardRule):
            parted = split(entry.tensor.shape, rule.axes, self._mesh, existing, sharding=self._sharding)
            layout = self._noted(won[LAYOUT], entry, parted)
            if derived:
                self._check_contains(won[LAYOUT], entry, layout)
        elif derived:
            layout = self._layout_of[entry.path, "param"]
            if rule is None and entry.path in self._layout_rule:
                rules[LAYOUT] = self._layout_rule[entry.path]
            if entry.role == "optimizer_state":
                self._check_gradient(entry, layout)
        else:
            layout = existing
        self._layout_of[entry.path, entry.role] = layout
        if entry.role == "param" and LAYOUT in rules:
            self._layout_rule[entry.path] = rules[LAYOUT]
        if entry.role == "grad" and isinstance(rule, ShardRule):
            self._gradient_rule[entry.path] = won[LAYOUT]
        if entry.role == "grad" and _is_deferred(self._policy):
            if isinstance(rule, ShardRule) and "param" not in acting_roles(rule):
                self._conflicts.setdefault(won[LAYOUT], []).append(self._deferred_conflict(won[LAYOUT]))
            layout = existing
        return layout

    def _noted(self, i: int, entry: Entry, parted: Split) -> Mapping[str, int]:
        if parted.fault:
            self._faults.setdefault(i, []).append(f"`{entry.path}`: {parted.fault}")
        for axis in parted.whole:
            self.whole.setdefault(axis, []).append(entry.path)
        return parted.layout

    def _check_contains(self, i: int, entry: Entry, layout: Mapping[str, int]) -> None:
        """Gradients are split at least as their parameter is, state at least as its gradient."""
        inner_role = "param" if entry.role == "grad" else "grad"
        inner = self._layout_of.get((entry.path, inner_role), {})
        if is_within(inner, layout):
            return
        problem = Problem(
            "layout-conflict",
            f"rule `{self._policy.rules[i].name}` splits the {entry.role} of `{entry.path}` as {describe(layout)}, "
            f"its {inner_role} is split as {describe(inner)}",
            hint=f"shard it over the axes of its {inner_role} and any others, or leave it to follow",
            **self._policy.source.at(("rules", i, "axis")),
        )
        self._conflicts.setdefault(i, []).append(problem)

    def _check_gradient(self, entry: Entry, layout: Mapping[str, int]) -> None:
        """A gradient that a rule splits needs state that is split so too: no device has the rest of it."""
        i = self._gradient_rule.get(entry.path)
        gradient = self._layout_of.get((entry.path, "grad"), {})
        if i is None or is_within(gradient, layout):
            return
        name = self._policy.rules[i].name
        problem = Problem(
            "layout-conflict",
            f"rule `{name}` splits the gradient of `{entry.path}` as {describe(gradient)}, and its optimizer state is "
            f"{describe(layout)}: no device could update the rest",
            hint="shard both: `match: {role: [grad, optimizer_state]}`",
            **self._policy.source.at(("rules", i)),
        )
        self._conflicts.setdefault(i, []).append(problem)

    def _deferred_conflict(self, i: int) -> Problem:
        name = self._policy.rules[i].name
        return Problem(
            "layout-conflict",
            f"rule `{name}` splits gradients, and `accumulate: {{reduce: last}}` keeps them whole "
            "between micro-batches",
            hint="write `reduce: each`, or take the rule out",
            **self._policy.source.at(("rules", i)),
        )

    def problems(self) -> list[Problem]:
        """Uneven dimensions by rule, all tensors named in one problem, and layouts that contradict each other."""
        uneven = [
            Problem(
                "uneven-dimension",
                f"rule `{self._policy.rules[i].name}` cannot split {len(dict.fromkeys(faults))} tensors: "
                + "; ".join(list(dict.fromkeys(faults))[:3]),
                hint="name another dimension, pad the model's size, or keep those whole with a rule above: "
                "`{name: whole, action: keep, match: {path: ...}}`",
                **self._policy.source.at(("rules", i, "axis")),
            )
            for i, faults in self._faults.items()
        ]
        return uneven + [conflicts[0] for conflicts in self._conflicts.values()]


def _is_deferred(policy: Policy) -> bool:
    return policy.accumulate.steps > 1 and policy.accumulate.reduce == "last"


def _data_devices(mesh: Mapping[str, int], spec: ModelSpec) -> int:
    """Devices that each take a share of the batch: every axis the model is not sharded on already."""
    taken = {axis for tensor in spec.tensors for axis in tensor.sharding}
    return math.prod(size for axis, size in mesh.items() if axis not in taken)

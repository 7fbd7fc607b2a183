"""What must be held of a unit's values so that the rest can be recomputed.

From what the plan says of each name, and from one recorded forward, `decide` works out the fewest storages to hold.
Values autograd does not need, and no recomputation starts from, are never held, whatever the policy says of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from memopt.plan import Plan, PlanUnit, Residual

from .recording import OpRecord, Recording


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the plan says of one unit's values.

    Attributes:
        unit: The unit's name.
        residuals: Name of a value (canonical path, alias or pseudo path) -> residual, with the order of its rule.
        ops: `op:` kind -> the same, for results that no path reaches.
        unnamed: Residual of everything else.
        pseudo: Names that are neither a module's output nor its input (`layers.3.self_attn.q`), and their rule.
    """

    unit: str
    residuals: Mapping[str, tuple[int, Residual]]
    ops: Mapping[str, tuple[int, Residual]]
    unnamed: Residual
    pseudo: Mapping[str, str] = field(default_factory=dict)

    @property
    def can_recompute(self) -> bool:
        """Whether anything at all is to be recomputed here."""
        rows = (*self.residuals.values(), *self.ops.values())
        return self.unnamed == "recompute" or any(residual == "recompute" for _, residual in rows)

    @property
    def is_whole(self) -> bool:
        """Whether everything is to be recomputed, whatever its name."""
        return self.unnamed == "recompute" and not self.can_hold

    @property
    def can_hold(self) -> bool:
        """Whether a rule keeps or offloads something of the unit."""
        rows = (*self.residuals.values(), *self.ops.values())
        return any(residual != "recompute" for _, residual in rows)


def wanted_of(plan: Plan, unit: PlanUnit) -> Wanted:
    """Read a unit's activation rows off the plan; rows no rule decided count for nothing."""
    order = {name: index for index, name in enumerate(plan.rule_order)}
    residuals: dict[str, tuple[int, Residual]] = {}
    ops: dict[str, tuple[int, Residual]] = {}
    pseudo: dict[str, str] = {}
    for row in plan.rows_of("activation"):
        if row.unit != unit.name or row.rule is None or row.residual is None or row.path.endswith(".<unnamed>"):
            continue
        said = (order.get(row.rule, len(order)), row.residual)
        if row.path.endswith(">") and row.op is not None:
            ops[row.op] = min(ops.get(row.op, said), said)
            continue
        for name in (row.path, *row.aliases):
            residuals[name] = min(residuals.get(name, said), said)
        if row.tensor is not None and row.residual != "recompute":
            pseudo[row.path] = row.rule
    return Wanted(unit.name, residuals, ops, unit.unnamed_residual, pseudo)


@dataclass(frozen=True, slots=True)
class Decision:
    """What to hold of a unit's forward, by operator number.

    Attributes:
        funcs: The operators in order: a later call that deviates holds what it has held so far, and nothing is skipped.
        held: Operator number -> {leaf of its result: `keep` or `offload`}.
        rerun: Operators of `held` that run again all the same, for another of their results.
        late: Operators of `held` whose result is overwritten later in the forward: only then is it final.
        skipped: Operators whose results nobody needs when the rest is recomputed.
        reseeded: Operators not run again that must draw all the same, so that later random ones draw what they drew.
        views: Operators that only reinterpret an input.
        rules: Numbers (in `Plan.rule_order`) of the rules by which something is held.
        warnings: Sentences for the user.
    """

    funcs: tuple[Any, ...]
    held: Mapping[int, Mapping[int, Residual]]
    rerun: frozenset[int]
    late: frozenset[int]
    skipped: frozenset[int]
    reseeded: frozenset[int]
    views: frozenset[int] = frozenset()
    rules: frozenset[int] = frozenset()
    warnings: tuple[str, ...] = ()

    @property
    def is_plain(self) -> bool:
        """Nothing to hold and nothing to skip: ordinary recomputation does."""
        return not self.held and not self.skipped


def said_of(number: int, recording: Recording, wanted: Wanted, *, is_own: bool = True) -> tuple[int, Residual]:
    """What the plan says of one storage, and the number of the rule that says it (-1: none).

    The earliest rule of its names and its operator, else the unit's. Storages made outside the unit (`is_own` False)
    are touched by name only.
    """
    names = recording.names.get(number, ())
    kind = recording.kinds.get(number)
    if any(name.endswith((".attn_out", ".attn_stats")) for name in names):
        kind = "attention"
    by_op = wanted.ops.get(kind) if kind is not None else None
    if kind == "topk":
        return by_op or (-1, "keep")
    said = [wanted.residuals[name] for name in names if name in wanted.residuals]
    if by_op is not None:
        said.append(by_op)
    return min(said) if said else (-1, wanted.unnamed if is_own else "keep")


def decide(recording: Recording, wanted: Wanted) -> Decision:
    """The fewest storages to hold so that everything autograd saved can be had again.

    Walks the operators backwards: a value that is needed is held where the plan keeps or offloads it; otherwise its
    operator is run again, and its inputs are needed in turn.
    """
    ops = recording.ops
    said = {number: said_of(number, recording, wanted) for number in recording.maker}
    label = {number: residual for number, (_, residual) in said.items()}
    last_write = _last_writes(recording)
    needed = set(recording.saved)
    live: set[int] = set()
    held: dict[int, Mapping[int, Residual]] = {}
    refused = _overwritten_too_late(recording, last_write)
    for index in range(len(ops) - 1, -1, -1):
        op = ops[index]
        if op.is_view or op.is_fixed:
            live.add(index)
            if op.is_fixed:
                needed.update(op.reads)
            continue
        outs = {leaf: number for leaf, number in enumerate(op.makes) if number is not None and number in needed}
        stored = {leaf: label[n] for leaf, n in outs.items() if label[n] != "recompute" and n not in refused}
        if stored:
            held[index] = cast("dict[int, Residual]", stored)
        can_hold = {number for number in op.writes if label.get(number, "recompute") != "recompute"} - refused
        if len(stored) < len(outs) or needed & set(op.writes) - can_hold:
            live.add(index)
            needed.update(op.reads)
    skipped = frozenset(
        index for index, op in enumerate(ops) if index not in live and index not in held and _can_skip(op)
    )
    idle = (set(held) | skipped | {index for index, op in enumerate(ops) if op.writes}) - live
    return Decision(
        funcs=tuple(op.func for op in ops),
        held=held,
        rerun=frozenset(set(held) & live),
        late=frozenset(i for i in held if any(number in last_write for number in ops[i].makes)),
        skipped=skipped,
        reseeded=_reseeded(ops, live, idle),
        views=frozenset(index for index, op in enumerate(ops) if op.is_view),
        rules=frozenset(
            said[n][0] for i, leaves in held.items() for leaf in leaves if (n := ops[i].makes[leaf]) is not None
        ),
        warnings=_warnings(recording, held, live),
    )


def _can_skip(op: OpRecord) -> bool:
    return not op.writes and all(number is not None for number in op.makes) and bool(op.makes)


def _last_writes(recording: Recording) -> dict[int, int]:
    last: dict[int, int] = {}
    for index, op in enumerate(recording.ops):
        for number in op.writes:
            last[number] = index
    return last


def _overwritten_too_late(recording: Recording, last_write: Mapping[int, int]) -> set[int]:
    """Storages read between their making and their last overwriting: only their last content could be held."""
    refused = set()
    for index, op in enumerate(recording.ops):
        if op.is_view:
            continue
        if op.writes and any(returned.alias_info is None for returned in op.func._schema.returns):
            refused.update(op.writes)  # leaving the operator out would leave its other results without content
        for number in op.reads:
            if number in op.writes:
                continue
            if number in last_write and recording.maker.get(number, index) < index < last_write[number]:
                refused.add(number)
    return refused


def _reseeded(ops: list[OpRecord], live: set[int], idle: Iterable[int]) -> frozenset[int]:
    last_draw = max((index for index in live if ops[index].is_random), default=-1)
    return frozenset(index for index in idle if ops[index].is_random and index < last_draw)


def _warnings(recording: Recording, held: Mapping[int, Any], live: set[int]) -> tuple[str, ...]:
    return tuple(
        f"`{recording.ops[index].func}` runs again although one of its results is held, because another of them is "
        "recomputed; give them one rule (`op:` names them all)"
        for index in held
        if index in live
    )

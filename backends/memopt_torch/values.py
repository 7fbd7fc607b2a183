"""Which tensor of a running unit is which named value, and what must be held so that the rest can be recomputed.

The first call of a unit is recorded: every operator, the storages it reads, makes and overwrites, the storages
autograd saves, and the names modules give to them. From that `decide` works out the fewest storages to hold. Values
autograd does not need, and no recomputation starts from, are never held, whatever the policy says of them.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
import torch.utils.checkpoint
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from memopt.plan import Plan, PlanUnit, Residual

from .measure import plain_tensors

aten = torch.ops.aten
_HERE = Path(__file__).parent
_PACKAGE_REGIONS = (str(_HERE / "recompute.py"), str(_HERE / "offload.py"))
# Checkpointing inserts its own detaches, a different number in the forward and in the recomputation.
IGNORED = frozenset({aten.detach.default, torch.ops.prim.device.default})
_MATMULS = frozenset({"mm", "addmm", "bmm", "baddbmm", "addbmm", "_scaled_mm", "_grouped_mm", "_int_mm"})
# These overwrite their running statistics when training, and their schemas do not say so.
_BATCH_NORMS = frozenset({"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"})
# What these projections take has a name of its own (Transformers' module names, all families).
_TAKES = {"down_proj": "act", "o_proj": "attn_out"}
_COLLECTIVE_NAMESPACES = frozenset({"c10d", "_c10d_functional", "c10d_functional", "fsdp"})


def detached(value: Any) -> Any:
    """The same tensor outside autograd, sharing its version counter, so that a later overwriting shows."""
    if not isinstance(value, torch.Tensor):
        return value
    # Inside a dispatch mode the key that shares version counters is off (torch.utils.checkpoint switches it on too).
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return value.detach()


def storage_keys(value: Any) -> list[int]:
    """Identity of each storage in `value`; valid only while the storage lives."""
    return [tensor.untyped_storage()._cdata for tensor in plain_tensors(value)]


def op_kind(func: Any) -> str | None:
    """The policy's `op:` name of an operator, or None."""
    name = func._overloadpacket.__name__
    if name in _MATMULS:
        return "matmul"
    if "scaled_dot_product" in name or name in ("_flash_attention_forward", "_efficient_attention_forward"):
        return "attention"
    if name == "topk":
        return "topk"
    return "random" if torch.Tag.nondeterministic_seeded in func.tags else None


def draws_random(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether this call advances the random generator (attention does only with a dropout probability)."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            given = kwargs.get("dropout_p", args[position] if position < len(args) else argument.default_value)
            return bool(given)
    return True


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


@dataclass(slots=True)
class OpRecord:
    """One operator call of a recorded forward; storages are small numbers in order of appearance.

    Attributes:
        func: The operator.
        reads, writes: Storages of its inputs, and of those it overwrites.
        makes: For each leaf of its result the storage it made, or None (a view, an input returned, not a tensor).
        is_view: Only reinterprets an input.
        is_random: Advances the random generator.
        is_fixed: Must run in every recomputation (collectives, values read by Python).
    """

    func: Any
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    makes: tuple[int | None, ...]
    is_view: bool
    is_random: bool
    is_fixed: bool


@dataclass
class Recording:
    """One recorded forward of a unit.

    Everything made is held until the recording is decided, so that no storage's identity is used twice.
    """

    ops: list[OpRecord] = field(default_factory=list)
    names: dict[int, set[str]] = field(default_factory=dict)
    kinds: dict[int, str] = field(default_factory=dict)
    saved: set[int] = field(default_factory=set)
    maker: dict[int, int] = field(default_factory=dict)
    results: list[Any] = field(default_factory=list)
    _numbers: dict[int, int] = field(default_factory=dict)
    _held: list[torch.Tensor] = field(default_factory=list)

    def numbers(self, value: Any) -> tuple[int, ...]:
        """The numbers of the storages in `value`, new ones given where needed."""
        found = []
        for tensor in plain_tensors(value):
            key = tensor.untyped_storage()._cdata
            if key not in self._numbers:
                self._numbers[key] = len(self._numbers)
                self._held.append(tensor.detach())
            found.append(self._numbers[key])
        return tuple(found)

    def number_of(self, tensor: torch.Tensor) -> int | None:
        """The number of a tensor's storage, or None if no operator met it."""
        return self._numbers.get(tensor.untyped_storage()._cdata)

    def add(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
        """Record one call, after it has run."""
        reads = self.numbers((args, kwargs))
        writes = self.numbers(written(func, args, kwargs))
        makes: list[int | None] = []
        has_values = False
        for leaf in tree_leaves(out):
            if not isinstance(leaf, torch.Tensor):
                has_values = has_values or leaf is not None
                makes.append(None)
                continue
            (number,) = self.numbers(leaf)[:1] or (None,)
            is_new = number is not None and number not in reads and number not in self.maker
            makes.append(number if is_new else None)
            if is_new and number is not None:
                self.maker[number] = len(self.ops)
        is_fixed = has_values or func.namespace in _COLLECTIVE_NAMESPACES
        is_view = not any(number is not None for number in makes) and not writes and not is_fixed
        record = OpRecord(func, reads, writes, tuple(makes), is_view, draws_random(func, args, kwargs), is_fixed)
        kind = op_kind(func)
        if kind is not None:
            for number in (*makes, *writes):
                if number is not None:
                    self.kinds[number] = kind
        self.ops.append(record)
        self.results.append(tree_map(detached, out))

    def external_writes(self) -> dict[int, Any]:
        """Storages made outside the unit that its forward overwrites, and the operator that does."""
        return {n: op.func for op in self.ops for n in op.writes if n not in self.maker}

    def name(self, name: str, value: Any) -> None:
        """Give the storage of `value` a name (a view names the storage it looks into)."""
        for number in self.numbers(value)[:1]:
            self.names.setdefault(number, set()).add(name)

    def save(self, tensor: torch.Tensor) -> None:
        """Autograd keeps this tensor for the backward pass."""
        self.saved.update(self.numbers(tensor))

    def release(self) -> None:
        """Let go of everything that was held to keep identities apart."""
        self._held.clear()
        self.results.clear()


def written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments an operator overwrites."""
    if func._overloadpacket.__name__ in _BATCH_NORMS:
        return [statistic for statistic in args[3:5] if statistic is not None] if args[5] else []
    if not func._schema.is_mutable:
        return []
    found = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            if position < len(args):
                found.append(args[position])
            elif argument.name in kwargs:
                found.append(kwargs[argument.name])
    return found


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

    Its names' earliest rule, else its operator's, else the unit's. Storages made outside the unit (`is_own` False) are
    touched by name only.
    """
    names = recording.names.get(number, ())
    kind = recording.kinds.get(number)
    if any(name.endswith((".attn_out", ".attn_stats")) for name in names):
        kind = "attention"
    by_op = wanted.ops.get(kind) if kind is not None else None
    if kind == "topk":
        return by_op or (-1, "keep")
    named = [wanted.residuals[name] for name in names if name in wanted.residuals]
    if named:
        return min(named)
    return by_op or (-1, wanted.unnamed if is_own else "keep")


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


class Naming:
    """Names storages while a recorded forward runs: hooks on the unit's modules, there for that one call."""

    def __init__(self, module: nn.Module, paths: Mapping[int, str], recording: Recording) -> None:
        self._module = module
        self._paths = paths
        self._recording = recording
        self._stack: list[str] = []
        self._num_products: dict[str, int] = {}
        self.called: set[str] = set()
        self.checkpointed: set[str] = set()
        self._handles: list[Any] = []

    def __enter__(self) -> Naming:
        for module in self._module.modules():
            path = self._paths.get(id(module))
            if path is None or module is self._module:
                continue
            self._handles.append(module.register_forward_pre_hook(self._before(path), with_kwargs=True, prepend=True))
            self._handles.append(module.register_forward_hook(self._after(path), with_kwargs=True))
        self._stack.append(self._paths.get(id(self._module), ""))
        return self

    def __exit__(self, *_: Any) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._stack.clear()

    def _before(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._stack.append(path)
            self.called.add(path)
            if _is_in_checkpoint():
                self.checkpointed.add(path)
            name_inputs(self._recording, path, module, args, kwargs)

        return hook

    def _after(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self._stack.pop()
            name_output(self._recording, path, output)

        return hook

    def operator(self, func: Any, args: tuple[Any, ...], out: Any) -> None:
        """Name what an attention operator, or the two products of one written out, take and give."""
        if not self._stack:
            return
        path, kind = self._stack[-1], op_kind(func)
        if kind == "attention":
            self._attention(path, args, out)
        elif kind == "matmul" and func._overloadpacket.__name__ in ("bmm", "baddbmm"):
            turn = self._num_products.get(path, 0)
            self._num_products[path] = turn + 1
            if turn == 0:
                self._recording.name(f"{path}.q", args[0])
                self._recording.name(f"{path}.k", args[1])
            elif turn == 1:
                self._recording.name(f"{path}.attn_out", out)
        elif kind == "topk":
            self._recording.name(f"{path}.topk", out)

    def _attention(self, path: str, args: tuple[Any, ...], out: Any) -> None:
        for name, value in zip(("q", "k", "v"), args):
            self._recording.name(f"{path}.{name}", value)
        leaves = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        self._recording.name(f"{path}.attn_out", leaves[0])
        for leaf in leaves[1:]:
            if leaf.numel():
                self._recording.name(f"{path}.attn_stats", leaf)


def _is_in_checkpoint() -> bool:
    """Whether a checkpoint of the model's own lies between a module and the unit it is part of."""
    frame = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.startswith(_PACKAGE_REGIONS):
        if frame.f_code.co_filename == torch.utils.checkpoint.__file__:
            return True
        frame = frame.f_back
    return False


def tensor_inputs(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """A module's tensor arguments in the order of its signature, keywords included."""
    bound = inspect.signature(module.forward).bind(*args, **kwargs)
    for value in bound.arguments.values():
        for leaf in tree_leaves(value):
            if isinstance(leaf, torch.Tensor):
                yield leaf


def name_inputs(
    recording: Recording, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """`PATH.input` is the first tensor argument, `PATH.input[i]` each of them; some have a name of their own too."""
    for index, tensor in enumerate(tensor_inputs(module, args, kwargs)):
        recording.name(f"{path}.input[{index}]", tensor)
        if index == 0:
            recording.name(f"{path}.input", tensor)
            parent, _, last = path.rpartition(".")
            if last in _TAKES:
                recording.name(f"{parent}.{_TAKES[last]}", tensor)


def name_output(recording: Recording, path: str, output: Any) -> None:
    """`PATH` is a module's output, or its first leaf; `PATH[i]` the leaves."""
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    for index, leaf in enumerate(leaves):
        recording.name(f"{path}[{index}]", leaf)
        if index == 0:
            recording.name(path, leaf)

"""Writes down one forward of a unit: every operator, the storages it reads, makes and overwrites,
and what autograd saves.

Storages are known by small numbers in order of appearance, however many views look into them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from .measure import plain_tensors

aten = torch.ops.aten
# Checkpointing inserts its own detaches, a different number in the forward and in the recomputation.
_IGNORED = frozenset({aten.detach.default, torch.ops.prim.device.default})
_MATMULS = frozenset({"mm", "addmm", "bmm", "baddbmm", "addbmm", "_scaled_mm", "_grouped_mm", "_int_mm"})
# These overwrite their running statistics when training, and their schemas do not say so.
_BATCH_NORMS = frozenset({"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"})
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


def is_ignored(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether a call is no part of the unit's sequence: casts of weights are not, as autocast makes them once or twice,
    whatever else has used the weight. They are cheap, and what they give is weights."""
    return func in _IGNORED or (func is aten._to_copy.default and isinstance(args[0], nn.Parameter))


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
    generators: dict[torch.Generator, torch.Tensor] = field(default_factory=dict)
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
        return next((self._numbers.get(key) for key in storage_keys(tensor)), None)

    def before(self, kwargs: Mapping[str, Any]) -> None:
        """An operator is about to run: a generator that is passed to it has its first state now."""
        generator = kwargs.get("generator")
        if generator is not None and generator not in self.generators:
            self.generators[generator] = generator.get_state()

    def add(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
        """Record one call, after it has run."""
        reads = self.numbers((args, kwargs))
        writes = self.numbers(written(func, args, kwargs))
        makes: list[int | None] = []
        leaves = tree_leaves(out)
        # Sizes beside tensors (CUDA's attention gives some) are given back with them; a lone value is read by Python.
        has_values = any(leaf is not None for leaf in leaves) and not any(isinstance(x, torch.Tensor) for x in leaves)
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor):
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

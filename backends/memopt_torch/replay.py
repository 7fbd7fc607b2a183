"""Run a unit's forward holding chosen values, and run it again giving them back instead of computing them.

A pair of dispatch modes for `torch.utils.checkpoint`: operators are known by their number in the forward, so a value is
given back only to the very operator that made it. A call that does not follow what was learnt is never wrong: from the
first deviation on nothing more is held, nothing is skipped, and the next call learns anew.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from memopt.errors import MemoptError
from memopt.plan import Residual

from .forward_state import QuietBuffers
from .measure import plain_tensors
from .naming import Naming
from .recording import Recording, detached, is_ignored, storage_keys, written
from .values import Decision


class HostCopy(Protocol):
    """A tensor on its way to host memory and back."""

    def fetch(self) -> None:
        """Start bringing it back."""

    def take(self) -> torch.Tensor:
        """The tensor, ready on the compute stream; once only."""
        ...


Send = Callable[[torch.Tensor], HostCopy]


@dataclass(slots=True)
class _Kept:
    """A value held on the device."""

    tensor: torch.Tensor
    version: int = 0

    def take(self, unit: str) -> torch.Tensor:
        if self.tensor._version != self.version:
            raise MemoptError.of(
                "held-value-overwritten",
                "a value held for the backward pass was overwritten in place after the unit had run",
                path=unit,
                hint="keep another value, or replace the in-place operator (`x += y` by `x = x + y`)",
            )
        return self.tensor


@dataclass(slots=True)
class _Blank:
    """A result nobody needs: only its form is given back."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def like(cls, tensor: torch.Tensor) -> _Blank:
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)

    def make(self) -> torch.Tensor:
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)


@dataclass(slots=True)
class _Entry:
    """What one operator gives back: leaves of its result (held, host copies, blanks, plain values) and their tree."""

    leaves: list[Any]
    tree: Any
    inputs: tuple[Any, ...]


@dataclass(eq=False)
class Call:
    """One forward of a unit and what it holds.

    Attributes:
        unit: The unit's name, for messages.
        decision: What was learnt, or None while this call is the one that is recorded.
        send: Starts a copy to host memory.
    """

    unit: str
    decision: Decision | None
    send: Send
    entries: dict[int, _Entry] = field(default_factory=dict)
    num_ops: int = 0
    is_followed: bool = True
    is_replayed: bool = False

    def hold(self, index: int, residuals: Mapping[int, Residual], inputs: tuple[Any, ...], out: Any) -> None:
        """Hold the wanted leaves of an operator's result."""
        flat, tree = tree_flatten(out)
        leaves: list[Any] = []
        for leaf, value in enumerate(flat):
            if not isinstance(value, torch.Tensor):
                leaves.append(value)
            elif residuals.get(leaf) == "offload":
                leaves.append(self.send(value))
            elif residuals.get(leaf) == "keep":
                leaves.append(_Kept(detached(value)))
            elif value.layout is torch.strided:
                leaves.append(_Blank.like(value))
            else:
                leaves.append(_Kept(detached(value)))
        self.entries[index] = _Entry(leaves, tree, inputs)

    def skip(self, index: int, inputs: tuple[Any, ...], out: Any) -> None:
        """Note only the form of a result nobody will need."""
        self.hold(index, {}, inputs, out)

    def seal(self) -> None:
        """The forward is over: from now on held values must not change."""
        for entry in self.entries.values():
            for leaf in entry.leaves:
                if isinstance(leaf, _Kept):
                    leaf.version = leaf.tensor._version

    def copies(self) -> list[HostCopy]:
        """The host copies it holds, in order."""
        return [
            leaf
            for _, entry in sorted(self.entries.items())
            for leaf in entry.leaves
            if leaf is not None and hasattr(leaf, "fetch")
        ]


def _form(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Shapes and dtypes of an operator's tensor arguments: what must be the same when it is run again."""
    return tuple((tuple(arg.shape), arg.dtype) for arg in args if isinstance(arg, torch.Tensor))


class Holding(TorchDispatchMode):
    """The forward of a learnt unit: holds what the decision says, as long as the operators are the ones learnt."""

    def __init__(self, call: Call, quiet: QuietBuffers) -> None:
        super().__init__()
        self._call = call
        self._quiet = quiet
        assert call.decision is not None
        self._decision = call.decision
        self._finals: list[tuple[int, Mapping[int, Residual], tuple[Any, ...], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._quiet.about_to_run(func, args, kwargs or {})
        out = func(*args, **(kwargs or {}))
        if is_ignored(func, args):
            return out
        call, decision, index = self._call, self._decision, self._call.num_ops
        call.num_ops += 1
        if call.is_followed and (index >= len(decision.funcs) or decision.funcs[index] is not func):
            call.is_followed = False
        if not call.is_followed:
            self._drop_overwritten(func, args, kwargs or {})
            return out
        residuals = decision.held.get(index)
        if residuals is not None:
            if index in decision.late:
                self._finals.append((index, residuals, _form(args), tree_map(detached, out)))
            else:
                call.hold(index, residuals, _form(args), out)
        elif index in decision.skipped:
            call.skip(index, _form(args), out)
        return out

    def __exit__(self, *exc_info: Any) -> None:
        super().__exit__(*exc_info)
        if self._call.num_ops != len(self._decision.funcs):
            self._call.is_followed = False
        for index, residuals, inputs, out in self._finals:
            self._call.hold(index, residuals, inputs, out)
        self._finals.clear()
        self._call.seal()

    def _drop_overwritten(self, func: Any, args: Any, kwargs: Any) -> None:
        """An operator nobody foresaw writes into something held: then it has to be computed again."""
        keys = set(storage_keys(written(func, args, kwargs)))
        if not keys:
            return
        self._finals = [final for final in self._finals if not keys & set(storage_keys(final[3]))]
        for index, entry in list(self._call.entries.items()):
            kept = [leaf.tensor for leaf in entry.leaves if isinstance(leaf, _Kept)]
            if keys & set(storage_keys(kept)) or any(hasattr(leaf, "fetch") for leaf in entry.leaves):
                del self._call.entries[index]


class Learning(TorchDispatchMode):
    """The first forward of a unit: everything is held until it is over, then all that need not be is let go."""

    def __init__(self, call: Call, naming: Naming, recording: Recording, decide: Callable[[], Decision]) -> None:
        super().__init__()
        self._call = call
        self._naming = naming
        self._recording = recording
        self._decide = decide
        self._forms: list[tuple[Any, ...]] = []
        self._stack = ExitStack()

    def __enter__(self) -> Learning:
        self._stack.enter_context(self._naming)
        self._stack.enter_context(watch_saved(self._recording.save))
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._recording.before(kwargs or {})
        out = func(*args, **(kwargs or {}))
        if not is_ignored(func, args):
            self._recording.add(func, args, kwargs or {}, out)
            self._forms.append(_form(args))
            self._naming.operator(func, args, out)
        return out

    def __exit__(self, *exc_info: Any) -> None:
        super().__exit__(*exc_info)
        self._stack.close()
        if exc_info[0] is None:
            decision = self._call.decision = self._decide()
            self._call.num_ops = len(decision.funcs)
            for index in (*decision.held, *decision.skipped):
                residuals = decision.held.get(index, {})
                self._call.hold(index, residuals, self._forms[index], self._recording.results[index])
            self._call.seal()
        self._recording.release()


def watch_saved(see: Callable[[torch.Tensor], None]) -> AbstractContextManager[Any]:
    """Show `see` every tensor autograd saves; saving itself goes on as it would without."""
    outer = torch._C._autograd._top_saved_tensors_default_hooks(True)  # pyright: ignore[reportAttributeAccessIssue]
    pack, unpack = outer if outer is not None else (lambda tensor: tensor, lambda tensor: tensor)

    def seen(tensor: torch.Tensor) -> Any:
        see(tensor)
        return pack(tensor)

    return torch.autograd.graph.saved_tensors_hooks(seen, unpack)


class _LiveStorages:
    """Storages by identity, forgotten when they die: an identity may be used again."""

    def __init__(self) -> None:
        self._guards: dict[int, list[weakref.ref[torch.UntypedStorage]]] = {}

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        for plain in plain_tensors(tensor):
            storage = plain.untyped_storage()
            key = storage._cdata
            self._guards[key] = [weakref.ref(storage, lambda _, key=key: self._guards.pop(key, None))]
        return tensor

    def __contains__(self, key: int) -> bool:
        return key in self._guards

    def is_any(self) -> bool:
        return bool(self._guards)

    def clear(self) -> None:
        self._guards.clear()


class Replaying(TorchDispatchMode):
    """The forward run again in the backward pass: held values are given back, the rest is computed."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self._call = call
        self._index = 0
        self._given = _LiveStorages()
        self._blanks = _LiveStorages()
        self._is_full = False

    def __enter__(self) -> Replaying:
        self._index = 0
        # What was held is handed out once; a second backward pass through the same graph computes everything.
        self._is_full = self._call.is_replayed
        self._call.is_replayed = True
        return super().__enter__()

    def __exit__(self, *exc_info: Any) -> None:
        super().__exit__(*exc_info)
        self._call.entries.clear()
        self._given.clear()
        self._blanks.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._is_full or is_ignored(func, args):
            return func(*args, **kwargs)
        index = self._index
        self._index += 1
        decision = self._call.decision
        assert decision is not None
        self._check_same(decision, func, index)
        entry = self._call.entries.pop(index, None)
        if entry is not None and (index in decision.held or self._call.is_followed):
            return self._give(decision, entry, index, func, args, kwargs)
        overwritten = storage_keys(written(func, args, kwargs))
        if overwritten and all(key in self._given or key in self._blanks for key in overwritten):
            return self._leave_out(decision, index, func, args, kwargs)
        if self._blanks.is_any() and index not in decision.views and self._reads_blank(args, kwargs):
            raise self._mismatch(f"`{func}` (number {index}) reads a value nothing needed when the unit was learnt")
        return func(*args, **kwargs)

    def _reads_blank(self, args: Any, kwargs: Any) -> bool:
        return any(key in self._blanks for key in storage_keys((args, kwargs)))

    def _check_same(self, decision: Decision, func: Any, index: int) -> None:
        if self._call.is_followed and decision.funcs[index : index + 1] != (func,):
            before = decision.funcs[index] if index < len(decision.funcs) else "nothing"
            raise self._mismatch(f"operator number {index} was `{before}` in the forward pass and is `{func}` now")

    def _give(self, decision: Decision, entry: _Entry, index: int, func: Any, args: Any, kwargs: Any) -> Any:
        if entry.inputs != _form(args):
            raise self._mismatch(
                f"`{func}` (number {index}) got {entry.inputs} in the forward pass and {_form(args)} now"
            )
        if index in decision.reseeded:
            func(*args, **kwargs)
        computed = tree_leaves(func(*args, **kwargs)) if index in decision.rerun else None
        leaves = []
        for leaf, value in enumerate(entry.leaves):
            if isinstance(value, _Blank) and computed is not None:
                leaves.append(computed[leaf])
            elif isinstance(value, _Blank):
                leaves.append(self._blanks.add(value.make()))
            else:
                leaves.append(self._note_given(value))
        return tree_unflatten(leaves, entry.tree)

    def _note_given(self, value: Any) -> Any:
        if isinstance(value, _Kept):
            tensor = value.take(self._call.unit)
        elif value is not None and hasattr(value, "take"):
            tensor = value.take()
        else:
            return value
        self._given.add(tensor)
        # As a fresh tensor: autograd will make it this operator's result.
        return detached(tensor)

    def _leave_out(self, decision: Decision, index: int, func: Any, args: Any, kwargs: Any) -> Any:
        """The value given back is the final one: overwriting it again would apply the operator twice."""
        if index in decision.reseeded:
            targets = {id(target) for target in written(func, args, kwargs)}
            scratch = [torch.empty_like(arg) if id(arg) in targets else arg for arg in args]
            func(*scratch, **kwargs)
        by_set = {}
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None:
                value = args[position] if position < len(args) else kwargs.get(argument.name)
                by_set[frozenset(argument.alias_info.before_set)] = value
        results = [by_set[frozenset(returned.alias_info.before_set)] for returned in func._schema.returns]
        return results[0] if len(results) == 1 else tuple(results) if results else None

    def _mismatch(self, what: str) -> MemoptError:
        return MemoptError.of(
            "recompute-mismatch",
            f"the forward pass of this unit ran differently in the backward pass: {what}",
            path=self._call.unit,
            hint="a unit that is recomputed must depend on its inputs, weights and torch's random generator alone; "
            "leave this unit out of the rule, or take the changing state out of its forward",
        )

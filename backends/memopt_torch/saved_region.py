"""A unit that is not recomputed: of the tensors autograd saves in it, those the plan offloads go to the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memopt.errors import MemoptError

from .naming import Naming, name_inputs, refuse_missing
from .offload import Transfers
from .recording import Recording, is_ignored, storage_keys
from .values import Wanted, said_of


@dataclass(frozen=True, slots=True)
class _Pattern:
    """What autograd saves in one forward of a unit, in order, and which of it goes to the host."""

    forms: tuple[tuple[int, torch.dtype], ...]
    sent: frozenset[int]


class _Call:
    """One forward of a unit whose saved tensors are offloaded."""


class SavedRegion:
    """A unit that is not recomputed: of the tensors autograd saves, those the plan offloads go to the host.

    The first call is recorded to learn which saved tensor is which value; later calls go by the order of saving.
    """

    def __init__(
        self, module: nn.Module, path: str, wanted: Wanted, paths: Mapping[int, str], transfers: Transfers
    ) -> None:
        self._module, self._path, self._wanted, self._paths, self._transfers = module, path, wanted, paths, transfers
        self._patterns: dict[Any, _Pattern] = {}
        self.used: set[int] = set()

    def forward(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the module's own forward with its saved tensors watched."""
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        weights = tuple(weight.requires_grad for weight in self._module.parameters())
        key = (self._module.training, tuple(leaf.requires_grad for leaf in leaves), weights)
        call = _Call()
        with self._transfers.trip(call):
            pattern = self._patterns.get(key)
            if pattern is not None:
                return self._follow(original, args, kwargs, key=key, pattern=pattern, call=call)
            return self._learn(original, args, kwargs, key=key, call=call)

    def _follow(self, original: Any, args: Any, kwargs: Any, *, key: Any, pattern: _Pattern, call: _Call) -> Any:
        num_saved = 0
        is_followed = True

        def pack(tensor: torch.Tensor) -> Any:
            nonlocal num_saved, is_followed
            index, num_saved = num_saved, num_saved + 1
            is_followed = is_followed and _form(tensor) == pattern.forms[index : index + 1]
            return (
                self._transfers.send(tensor)
                if is_followed and index in pattern.sent
                else _Slot(tensor, tensor._version)
            )

        with torch.autograd.graph.saved_tensors_hooks(pack, self._unpack(call)):
            out = original(*args, **kwargs)
        if not is_followed or num_saved != len(pattern.forms):
            del self._patterns[key]  # another path through the forward: learn it next time
        return out

    def _learn(self, original: Any, args: Any, kwargs: Any, *, key: Any, call: _Call) -> Any:
        recording, saved = Recording(), list[_Slot]()
        name_inputs(recording, self._path, self._module, args, kwargs)
        naming = Naming(self._module, self._paths, recording)

        def pack(tensor: torch.Tensor) -> _Slot:
            recording.save(tensor)
            slot = _Slot(tensor, tensor._version)
            saved.append(slot)
            return slot

        unpack = self._unpack(call)
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, unpack)
        with naming, hooks, _Recorder(recording, naming):
            out = original(*args, **kwargs)
        refuse_missing(self._wanted, recording, naming, self._path)
        weights = set(storage_keys(list(self._module.parameters())))
        forms = tuple(form for slot in saved for form in _form(slot.held))
        sent = frozenset(
            index
            for index, slot in enumerate(saved)
            if self._is_sent(slot.held, recording) and not weights & set(storage_keys(slot.held))
        )
        for index in sent:
            saved[index].send(self._transfers)
        self._patterns[key] = _Pattern(forms, sent)
        recording.release()
        return out

    def _is_sent(self, tensor: torch.Tensor, recording: Recording) -> bool:
        number = recording.number_of(tensor)
        if number is None:
            return False
        if number not in recording.maker and not recording.names.get(number):
            return False  # made elsewhere and without a name here: weights, tables, masks
        rule, residual = said_of(number, recording, self._wanted, is_own=number in recording.maker)
        self.used.add(rule)
        return residual == "offload"

    def _unpack(self, call: _Call) -> Callable[[Any], torch.Tensor]:
        def unpack(packed: Any) -> torch.Tensor:
            held = packed.checked() if isinstance(packed, _Slot) else packed
            if isinstance(held, torch.Tensor):
                return held
            self._transfers.arrive(call)
            return held.take()

        return unpack


def _form(tensor: Any) -> tuple[tuple[int, torch.dtype], ...]:
    """What tells saved tensors apart; sizes may change from batch to batch."""
    return ((tensor.dim(), tensor.dtype),)


@dataclass(eq=False)
class _Slot:
    """A saved tensor that stays, or (of a recorded call) may be sent when the call is over.

    Under hooks autograd does not look whether a saved tensor was overwritten; this does.
    """

    held: Any
    version: int

    def checked(self) -> Any:
        """What is held.

        Raises:
            MemoptError: `held-value-overwritten`.
        """
        if isinstance(self.held, torch.Tensor) and self.held._version != self.version:
            raise MemoptError.of(
                "held-value-overwritten",
                f"a value of shape {list(self.held.shape)} that autograd keeps for the backward pass of an offloaded "
                "unit was overwritten in place after it had been saved",
                hint="replace the in-place operator (`x += y` by `x = x + y`)",
            )
        return self.held

    def send(self, transfers: Transfers) -> None:
        """Put it on its way, unless it has been overwritten since: then it stays, and the backward pass says so."""
        if self.held._version == self.version:
            self.held = transfers.send(self.held)


class _Recorder(TorchDispatchMode):
    """Writes a forward's operators into a recording."""

    def __init__(self, recording: Recording, naming: Naming) -> None:
        super().__init__()
        self._recording, self._naming = recording, naming

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not is_ignored(func, args):
            self._recording.add(func, args, kwargs or {}, out)
            self._naming.operator(func, args, out)
        return out

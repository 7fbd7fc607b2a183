"""Containers handed to a unit: it is given copies, in which tensors are marked, and what it does to those reaches the
caller's own.

A unit may add to a list it is given (auxiliary losses), or fill a cache. Left in the copy, that would be gone without a
word.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from .traversal import tensors_in


@dataclass(frozen=True, slots=True)
class _Pair:
    """The caller's container, the copy, and what was in the copy when it was handed over."""

    own: Any
    copy: Any
    before: list[tuple[Any, Any]]


@dataclass(slots=True)
class Handed:
    """Mutable containers among the arguments of one call."""

    pairs: list[_Pair] = field(default_factory=list)
    originals: dict[int, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, given: tuple[tuple, dict], passed: tuple[tuple, dict]) -> Handed | None:
        """Compares what the caller gave with what the module is passed; None where no container can be changed."""
        handed = cls()
        for own, copy in zip((*given[0], *given[1].values()), (*passed[0], *passed[1].values()), strict=True):
            handed._match(own, copy)
        return handed if handed.pairs else None

    def _match(self, own: Any, copy: Any) -> None:
        if own is copy:
            return
        if not isinstance(own, torch.Tensor):
            inside = _items(copy)
            if not isinstance(own, tuple):
                self.pairs.append(_Pair(own, copy, inside))
            for (_, value), (_, other) in zip(_items(own), inside, strict=True):
                self._match(value, other)
        self.originals[id(copy)] = own

    def give_back(self) -> Iterator[torch.Tensor]:
        """Does to the caller's containers what was done to the copies; gives the tensors that came in."""
        for pair in self.pairs:
            after = _items(pair.copy)
            if len(after) == len(pair.before) and all(
                a == c and b is d for (a, b), (c, d) in zip(after, pair.before, strict=True)
            ):
                continue
            old = {id(value) for _, value in pair.before}
            yield from tensors_in([value for _, value in after if id(value) not in old])
            _refill(pair.own, [(key, self.originals.get(id(value), value)) for key, value in after])


def _items(container: Any) -> list[tuple[Any, Any]]:
    """What is in it, in order, by key, place or attribute."""
    if isinstance(container, dict):
        return list(container.items())
    if isinstance(container, list | tuple | deque):
        return list(enumerate(container))
    return list(vars(container).items()) if hasattr(container, "__dict__") else []


def _refill(container: Any, items: list[tuple[Any, Any]]) -> None:
    if isinstance(container, dict):
        container.clear()
        container.update(items)
    elif isinstance(container, list | deque):
        container.clear()
        container.extend(value for _, value in items)
    else:
        vars(container).clear()
        vars(container).update(items)

"""Streams for tests: the latest and most careless ones that the interface allows.

Whatever is read, overwritten or given away too soon shows: in poisoned values, or as a fault in words.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from .streams import Ticket


@dataclass(frozen=True)
class _Stretch:
    """The memory of one side of a copy. Like a GPU's copy, it does not keep that memory alive."""

    storage: weakref.ref[torch.UntypedStorage]
    key: int
    first: int
    stop: int
    view: Callable[[torch.UntypedStorage], torch.Tensor]

    @classmethod
    def of(cls, tensor: torch.Tensor, when_freed: Callable[[Any], None]) -> _Stretch:
        """The bytes of a tensor without gaps; `when_freed` is called when its storage dies."""
        storage = tensor.untyped_storage()
        size, stride, offset, dtype = tensor.size(), tensor.stride(), int(tensor.storage_offset()), tensor.dtype

        def view(storage: torch.UntypedStorage) -> torch.Tensor:
            return torch.empty(0, dtype=dtype).set_(storage, offset, size, stride)

        first = offset * dtype.itemsize
        stop = first + tensor.numel() * dtype.itemsize
        return cls(weakref.ref(storage, when_freed), storage._cdata, first, stop, view)

    def overlaps(self, other: _Stretch) -> bool:
        """Whether both hold some byte of the same memory."""
        is_alive = self.storage() is not None and other.storage() is not None
        return is_alive and self.key == other.key and self.first < other.stop and other.first < self.stop


@dataclass(eq=False)
class _Late:
    """A copy not done yet, the `number`th that was started; `before` it those that it is ordered after."""

    number: int
    before: tuple[_Late, ...]
    is_done: bool = False
    source: _Stretch = field(init=False)
    target: _Stretch = field(init=False)

    def pending(self) -> dict[_Late, None]:
        """What must be done for this one to be done, itself included."""
        found: dict[_Late, None] = {}
        open_: list[_Late] = [self]
        while open_:
            late = open_.pop()
            if not late.is_done and late not in found:
                found[late] = None
                open_ += late.before
        return found

    def races_with(self, other: _Late) -> bool:
        """Whether one of both writes what the other reads or writes."""
        return (
            self.target.overlaps(other.source)
            or self.target.overlaps(other.target)
            or self.source.overlaps(other.target)
        )


@dataclass
class DelayedStreams:
    """For tests: two streams whose copies are done at the last moment that is allowed, their targets poison until then.

    What is overwritten or used too early shows in values; what could go wrong by chance alone is written down.

    Attributes:
        faults: What was done wrong, in words: memory of a copy freed before it was done, and copies that touch the
            same memory without one being ordered after the other.
    """

    faults: list[str] = field(default_factory=list)
    _started: list[_Late] = field(default_factory=list)
    _last: dict[str, _Late] = field(default_factory=dict)
    _num_started: int = 0

    def to_host(self, source: torch.Tensor, target: torch.Tensor, *, after: Ticket | None = None) -> Ticket:
        """See `Streams.to_host`."""
        return self._start("to_host", source, target, after)

    def to_device(self, source: torch.Tensor, target: torch.Tensor, *, after: Ticket | None = None) -> Ticket:
        """See `Streams.to_device`."""
        return self._start("to_device", source, target, after)

    def _start(self, stream: str, source: torch.Tensor, target: torch.Tensor, after: _Late | None) -> _Late:
        late = _Late(self._num_started, tuple(p for p in (self._last.get(stream), after) if p is not None))
        late.source = _Stretch.of(source, lambda _: self._freed(late, "source"))
        late.target = _Stretch.of(target, lambda _: self._freed(late, "target"))
        self._num_started += 1
        self._started = [other for other in self._started if not other.is_done]
        ordered = late.pending()
        self.faults += [
            f"copy {late.number} ({stream}) uses memory of copy {other.number}, which it does not wait for"
            for other in self._started
            if other not in ordered and late.races_with(other)
        ]
        self._started.append(late)
        self._last[stream] = late
        self._poison(late)
        return late

    def _poison(self, late: _Late) -> None:
        """Let nobody read the target; not while an earlier copy still has to."""
        target = late.target.storage()
        earlier = [other for other in self._started if other.number < late.number and not other.is_done]
        if target is not None and not any(late.target.overlaps(other.source) for other in earlier):
            late.target.view(target).view(-1).view(torch.uint8).fill_(0xFF)  # NaN in every floating dtype

    def _freed(self, late: _Late, side: str) -> None:
        if not late.is_done:
            self.faults.append(f"the {side} of copy {late.number} was freed before it was done")

    def wait(self, ticket: Ticket) -> None:
        """Do this copy now, and those it is ordered after."""
        for late in sorted(ticket.pending(), key=lambda late: late.number):
            source, target = late.source.storage(), late.target.storage()
            if source is not None and target is not None:
                late.target.view(target).copy_(late.source.view(source))
            late.is_done, late.before = True, ()
            for other in self._started:
                if not other.is_done and other.target.overlaps(late.source):
                    self._poison(other)

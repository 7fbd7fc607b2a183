"""Copies between device and host memory beside the computation, and who has to wait for whom.

Three implementations of one interface: CUDA side streams ordered by events, a CPU one that copies on the spot (exact),
and one for tests that copies as late as is allowed, so that a use before the copy is done reads poison.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

Ticket = Any
"""A copy under way; what it is depends on the implementation."""


class Streams(Protocol):
    """Starts copies and makes the computation wait for them.

    The caller keeps the source alive, and leaves source and target alone, until it has waited for the copy's ticket.
    """

    def to_host(self, source: torch.Tensor, target: torch.Tensor, *, after: Ticket | None = None) -> Ticket:
        """Copy what `source` holds once everything computed so far is done, and `after` too."""
        ...

    def to_device(self, source: torch.Tensor, target: torch.Tensor, *, after: Ticket | None = None) -> Ticket:
        """Copy back into `target`, once `after` is done and the memory of `target` is free of earlier uses."""
        ...

    def wait(self, ticket: Ticket) -> None:
        """Nothing computed from now on starts before that copy is done."""
        ...


class CpuStreams:
    """Copies on the spot: exact, no overlap."""

    def to_host(self, source: torch.Tensor, target: torch.Tensor, *, after: Ticket | None = None) -> Ticket:
        """See `Streams.to_host`."""
        target.copy_(source)
        return None

    to_device = to_host

    def wait(self, ticket: Ticket) -> None:
        """Every copy is done when it is started."""


class CudaStreams:
    """One side stream a direction, ordered by events; the allocator is told nothing (no `record_stream`).

    Args:
        device: The device the computation runs on.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._to_host = torch.cuda.Stream(device)
        self._to_device = torch.cuda.Stream(device)

    def _copy(self, stream: Any, source: torch.Tensor, target: torch.Tensor, after: Ticket | None) -> Ticket:
        # The computation's own stream wrote the source, or last used the memory of the target.
        stream.wait_event(torch.cuda.current_stream(self._device).record_event())
        if after is not None:
            stream.wait_event(after)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            return stream.record_event()

    def to_host(self, source: torch.Tensor, target: torch.Tensor, *, after: Ticket | None = None) -> Ticket:
        """See `Streams.to_host`."""
        return self._copy(self._to_host, source, target, after)

    def to_device(self, source: torch.Tensor, target: torch.Tensor, *, after: Ticket | None = None) -> Ticket:
        """See `Streams.to_device`."""
        return self._copy(self._to_device, source, target, after)

    def wait(self, ticket: Ticket) -> None:
        """See `Streams.wait`."""
        torch.cuda.current_stream(self._device).wait_event(ticket)


@dataclass(eq=False)
class _Late:
    """A copy not done yet. Like a GPU's, it does not keep its source alive."""

    source: weakref.ref[torch.UntypedStorage]
    read: Callable[[torch.UntypedStorage], torch.Tensor]
    target: torch.Tensor
    is_done: bool = False


@dataclass
class DelayedStreams:
    """For tests: every copy is done at the last moment that is allowed, and its target holds poison until then.

    Attributes:
        faults: What was done wrong, in words: sources freed before their copy was waited for.
    """

    faults: list[str] = field(default_factory=list)
    _queue: list[_Late] = field(default_factory=list)

    def to_host(self, source: torch.Tensor, target: torch.Tensor, *, after: Ticket | None = None) -> Ticket:
        """See `Streams.to_host`."""
        storage = source.untyped_storage()
        size, stride, offset, dtype = source.size(), source.stride(), source.storage_offset(), source.dtype

        def read(storage: torch.UntypedStorage) -> torch.Tensor:
            return torch.empty(0, dtype=dtype).set_(storage, offset, size, stride)

        target.view(-1).view(torch.uint8).fill_(0xFF)  # NaN in every floating dtype
        late = _Late(weakref.ref(storage), read, target)
        self._queue.append(late)
        return late

    to_device = to_host

    def wait(self, ticket: Ticket) -> None:
        """Do the copies up to this one, in the order they were started."""
        if ticket.is_done:
            return
        while self._queue:
            late = self._queue.pop(0)
            storage = late.source()
            if storage is None:
                self.faults.append(f"the source of a copy of {late.target.numel()} values was freed before it was done")
            else:
                late.target.copy_(late.read(storage))
            late.is_done = True
            if late is ticket:
                return


def streams_for(device: torch.device, *, synchronous: bool = False) -> Streams:
    """The streams of a device; `synchronous` copies on the spot everywhere."""
    if device.type == "cuda" and not synchronous:
        return CudaStreams(device)
    return CpuStreams()

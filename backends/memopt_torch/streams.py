"""Copies between device and host memory beside the computation, and who has to wait for whom.

Three implementations of one interface: CUDA side streams ordered by events, a CPU one that copies on the spot (exact),
and `delayed_streams`, for tests, that copies as late as is allowed.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from .journal import Direction, note_wait, noted_copy

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
    """Copies on the spot: exact, no overlap. A plan's journal is told where they would run and be waited for.

    Args:
        synchronous: A GPU would copy on the spot too.
    """

    def __init__(self, *, synchronous: bool = False) -> None:
        self._synchronous = synchronous

    def _copy(self, direction: Direction, source: torch.Tensor, target: torch.Tensor, after: Ticket | None) -> Ticket:
        with noted_copy(direction, source, after=after) as ticket:
            target.copy_(source)
        if self._synchronous:
            note_wait(ticket)
        return ticket

    def to_host(self, source: torch.Tensor, target: torch.Tensor, *, after: Ticket | None = None) -> Ticket:
        """See `Streams.to_host`."""
        return self._copy("to_host", source, target, after)

    def to_device(self, source: torch.Tensor, target: torch.Tensor, *, after: Ticket | None = None) -> Ticket:
        """See `Streams.to_device`."""
        return self._copy("to_device", source, target, after)

    def wait(self, ticket: Ticket) -> None:
        """Every copy is done when it is started."""
        note_wait(ticket)


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


def streams_for(device: torch.device, *, synchronous: bool = False) -> Streams:
    """The streams of a device; `synchronous` copies on the spot everywhere."""
    if device.type == "cuda" and not synchronous:
        return CudaStreams(device)
    return CpuStreams(synchronous=synchronous)

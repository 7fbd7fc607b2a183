"""A stretch of a storage on its way to host memory and back, and the views of it that were saved.

Bytes travel once however many views of them are saved; each view comes back with its own shape and strides.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from memopt.errors import MemoptError

from .host_pool import Chunk, HostPool
from .measure import note_role
from .streams import Streams, Ticket

if TYPE_CHECKING:
    from .offload import Transfers


def extent_of(tensor: torch.Tensor) -> int:
    """Elements from a tensor's first to its last in memory, gaps included (1 for a fully expanded one)."""
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))


@dataclass(eq=False)
class Parcel:
    """The bytes of one stretch of a storage, on their way to the host and back.

    `source` is there until the copy out has been waited for, `chunk` from the copy's start on.
    """

    transfers: Transfers
    source: torch.Tensor | None
    version: int
    chunk: Chunk | None = None
    ticket: Ticket | None = None
    _form: tuple[int, torch.dtype, torch.device] | None = None
    num_views: int = 0
    num_taken: int = 0
    _base: torch.Tensor | None = None
    _is_ready: bool = False

    def depart(self) -> None:
        """Start the copy to the host."""
        if self.chunk is not None or self.source is None:
            return
        self._check_unchanged()
        self.chunk = self.transfers.pool.take(self.source.numel() * self.source.element_size())
        retire = weakref.finalize(self, _retire, self.chunk, self.transfers.pool, self.transfers.streams)
        retire.atexit = False  # the process's end frees all memory, and may have ended CUDA before
        target = self._host_view(self.source)
        self.ticket = self.transfers.streams.to_host(self.source, target, after=self.chunk.last)
        self.chunk.last = self.ticket
        self.transfers.to_host_bytes += self.source.numel() * self.source.element_size()

    def settle(self) -> None:
        """Let go of the device memory; the computation waits for the copy if need be."""
        if self.chunk is None or self.source is None:
            return
        self.transfers.streams.wait(self.ticket)
        self._check_unchanged()
        self._form = (self.source.numel(), self.source.dtype, self.source.device)
        self.source = None

    def fetch(self) -> None:
        """Start the copy back, unless the tensor never left or is back already."""
        if self.source is not None or self._base is not None:
            return
        assert self._form is not None
        assert self.chunk is not None
        numel, dtype, device = self._form
        self._base = torch.empty(numel, dtype=dtype, device=device)
        self.ticket = self.transfers.streams.to_device(self._host_view(self._base), self._base, after=self.chunk.last)
        self.chunk.last = self.ticket
        self._is_ready = False
        note_role(self._base, "activation")
        self.transfers.to_device_bytes += self._base.numel() * self._base.element_size()

    def base(self) -> torch.Tensor:
        """The stretch as a one-dimensional tensor, ready to use; let go when every view of it has been taken."""
        if self.source is not None:
            self._check_unchanged()
            return self.source
        self.fetch()
        base = self._base
        assert base is not None
        if not self._is_ready:
            self.transfers.streams.wait(self.ticket)
            self._is_ready = True
        self.num_taken += 1
        if self.num_taken >= self.num_views:  # a later backward pass through the same graph fetches it again
            self._base = None
        return base

    def _host_view(self, like: torch.Tensor) -> torch.Tensor:
        assert self.chunk is not None
        return self.chunk.data[: like.numel() * like.element_size()].view(like.dtype)

    def _check_unchanged(self) -> None:
        if self.source is not None and self.source._version != self.version:
            raise MemoptError.of(
                "held-value-overwritten",
                "a value offloaded for the backward pass was overwritten in place after the unit had run",
                hint="offload another value, or replace the in-place operator (`x += y` by `x = x + y`)",
            )


def _retire(chunk: Chunk, pool: HostPool, streams: Streams) -> None:
    """A parcel dies, perhaps under way: its memory may be used again only after its last copy."""
    streams.wait(chunk.last)
    pool.give(chunk)


@dataclass(eq=False)
class Handle:
    """One view of a parcel."""

    parcel: Parcel
    size: torch.Size
    stride: tuple[int, ...]

    def fetch(self) -> None:
        """Start bringing it back."""
        self.parcel.fetch()

    def take(self) -> torch.Tensor:
        """The tensor as it was saved: same values, shape and strides."""
        return self.parcel.base().as_strided(self.size, self.stride)

"""Host buffers for offloaded tensors: taken once, used again, under a cap.

The pool never holds more than was in use at once: before a buffer of a new size is made, idle ones of other sizes are
given up.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import torch

from memopt.errors import MemoptError

from .measure import register_host_storage
from .streams import Ticket

_ALIGNMENT = 512


@dataclass(eq=False)
class Chunk:
    """One host buffer.

    Attributes:
        data: Bytes, pinned where there is a GPU.
        last: The copy that reads or writes it last; the next writer comes after it.
    """

    data: torch.Tensor
    last: Ticket | None = None

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.data.numel()


@dataclass
class HostPool:
    """Host buffers by size.

    Attributes:
        cap_bytes: The most the pool may hold, or None.
        pinned: Whether the memory is page-locked (needed for copies beside the computation of a GPU).
        used_bytes, total_bytes: In use, and held in all, now.
        peak_bytes: The most in use at once so far.
    """

    cap_bytes: int | None = None
    pinned: bool = False
    used_bytes: int = 0
    total_bytes: int = 0
    peak_bytes: int = 0
    _idle: dict[int, list[Chunk]] = field(default_factory=lambda: defaultdict(list))

    def take(self, nbytes: int) -> Chunk:
        """A buffer of at least `nbytes`.

        Raises:
            MemoptError: `host-pool-full`.
        """
        size = -(-max(nbytes, 1) // _ALIGNMENT) * _ALIGNMENT
        self.used_bytes += size
        if self.cap_bytes is not None and self.used_bytes > self.cap_bytes:
            self.used_bytes -= size
            raise MemoptError.of(
                "host-pool-full",
                f"offloading needs {self.used_bytes + size:,} bytes of host memory at once; "
                f"the cap is {self.cap_bytes:,}",
                path="backend_options.torch.offload.pinned_pool",
                hint="raise the cap, offload fewer values (`fraction:`, `layers:`), or recompute some of them",
            )
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        if self._idle[size]:
            return self._idle[size].pop()
        self._give_up(self.total_bytes + size - self.peak_bytes)
        self.total_bytes += size
        data = torch.empty(size, dtype=torch.uint8, pin_memory=self.pinned)
        register_host_storage(data)
        return Chunk(data)

    def give(self, chunk: Chunk) -> None:
        """Take a buffer back; it is used again for one of its size."""
        self.used_bytes -= chunk.nbytes
        self._idle[chunk.nbytes].append(chunk)

    def _give_up(self, nbytes: int) -> None:
        for size, idle in self._idle.items():
            while idle and nbytes > 0:
                idle.pop()
                nbytes -= size
                self.total_bytes -= size

"""What torch's CUDA allocator would hold for a traced step: its blocks, pools and segments, replayed without a device.

The allocator keeps what is freed, for the stream it was freed on: memory of one stream serves no other, a hole serves
only what fits in it, and nothing goes back to the device before it runs out. So a process *reserves* more than its
tensors ever occupy at once. Rules as in c10/cuda/CUDACachingAllocator.cpp (torch 2.13): sizes rounded to 512 bytes,
requests up to 1 MiB in a pool of their own, best fit among the free blocks of a stream, the rest of a block split off,
neighbours merged. Not modelled: what happens once the device is full (the cache is then given back), private pools.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

Event: TypeAlias = tuple[int, int, Hashable]
"""(storage, change in bytes, stream it is allocated on): a change to nothing frees, any other allocates anew."""

_MIB = 2**20
_ROUND_BYTES = 512
_SMALL_BYTES = _MIB
_SMALL_SEGMENT_BYTES = 2 * _MIB
_LARGE_SEGMENT_BYTES = 20 * _MIB
_MIN_LARGE_BYTES = 10 * _MIB
_ROUND_LARGE_BYTES = 2 * _MIB


@dataclass(eq=False, slots=True)
class _Block:
    """A stretch of a segment, in use or free, between its neighbours."""

    address: int
    nbytes: int
    is_free: bool = False
    before: _Block | None = None
    after: _Block | None = None


@dataclass(slots=True)
class _Pool:
    """The blocks of one stream and one class of sizes."""

    is_small: bool
    is_expandable: bool
    reserved_bytes: int = 0
    free: list[tuple[int, int, _Block]] = field(default_factory=list)
    tail: _Block | None = None

    def take(self, nbytes: int) -> _Block:
        block = self._fitting(nbytes) or (self._expanded(nbytes) if self.is_expandable else self._segment(nbytes))
        self._split(block, nbytes)
        block.is_free = False
        return block

    def _fitting(self, nbytes: int) -> _Block | None:
        """The smallest free block that is large enough; the end of an expandable segment counts as endless."""
        for at in range(bisect_left(self.free, (nbytes, -1)), len(self.free)):
            block = self.free[at][2]
            if not (self.is_expandable and block is self.tail):
                del self.free[at]
                return block
        return None

    def _expanded(self, nbytes: int) -> _Block:
        """The end of the segment, grown by whole pages as far as it takes."""
        page = _SMALL_SEGMENT_BYTES if self.is_small else _LARGE_SEGMENT_BYTES
        block = self.tail
        if block is None or not block.is_free:
            block = _Block(self.reserved_bytes, 0, before=self.tail)
            if self.tail is not None:
                self.tail.after = block
            self.tail = block
        else:
            self._forget(block)
        missing = nbytes - block.nbytes
        if missing > 0:
            grown = -(-missing // page) * page
            block.nbytes += grown
            self.reserved_bytes += grown
        return block

    def _segment(self, nbytes: int) -> _Block:
        if self.is_small:
            size = _SMALL_SEGMENT_BYTES
        elif nbytes < _MIN_LARGE_BYTES:
            size = _LARGE_SEGMENT_BYTES
        else:
            size = -(-nbytes // _ROUND_LARGE_BYTES) * _ROUND_LARGE_BYTES
        block = _Block(self.reserved_bytes, size)
        self.reserved_bytes += size
        return block

    def _split(self, block: _Block, nbytes: int) -> None:
        left = block.nbytes - nbytes
        least = _ROUND_BYTES if self.is_small or self.is_expandable else _SMALL_BYTES + 1
        if left < least:
            return
        rest = _Block(block.address + nbytes, left, before=block, after=block.after)
        if block.after is not None:
            block.after.before = rest
        block.after, block.nbytes = rest, nbytes
        if self.tail is block:
            self.tail = rest
        self._offer(rest)

    def give(self, block: _Block) -> None:
        before, after = block.before, block.after
        if before is not None and before.is_free:
            self._forget(before)
            before.nbytes += block.nbytes
            before.after = after
            if after is not None:
                after.before = before
            self.tail = before if self.tail is block else self.tail
            block = before
        if after is not None and after.is_free:
            self._forget(after)
            block.nbytes += after.nbytes
            block.after = after.after
            if after.after is not None:
                after.after.before = block
            self.tail = block if self.tail is after else self.tail
        self._offer(block)

    def _offer(self, block: _Block) -> None:
        block.is_free = True
        insort(self.free, (block.nbytes, block.address, block), key=lambda entry: entry[:2])

    def _forget(self, block: _Block) -> None:
        at = bisect_left(self.free, (block.nbytes, block.address), key=lambda entry: entry[:2])
        del self.free[at]
        block.is_free = False


@dataclass(slots=True)
class CachingAllocator:
    """Hands out blocks as torch's allocator on CUDA does, and says what it has taken from the device.

    Attributes:
        is_expandable: Whether segments grow (`expandable_segments:True`); torch's default is that they do not.

    >>> allocator = CachingAllocator(is_expandable=False)
    >>> allocator.play([(0, 30 * 2**20, None), (0, -30 * 2**20, None), (1, 40 * 2**20, None)])
    >>> allocator.reserved_bytes // 2**20  # the first block is too small for the second tensor
    70
    """

    is_expandable: bool
    _pools: dict[tuple[Hashable, bool], _Pool] = field(default_factory=dict)
    _held: dict[int, tuple[_Pool, _Block, int]] = field(default_factory=dict)

    @property
    def reserved_bytes(self) -> int:
        """Bytes taken from the device so far; they only grow."""
        return sum(pool.reserved_bytes for pool in self._pools.values())

    def play(self, events: Iterable[Event]) -> None:
        """Allocate and free as the events say."""
        for storage, change, stream in events:
            pool, block, nbytes = self._held.pop(storage, (None, None, 0))
            if pool is not None and block is not None:
                pool.give(block)
            if nbytes + change > 0:
                self._held[storage] = self._take(nbytes + change, stream)

    def _take(self, nbytes: int, stream: Hashable) -> tuple[_Pool, _Block, int]:
        rounded = max(_ROUND_BYTES, -(-nbytes // _ROUND_BYTES) * _ROUND_BYTES)
        is_small = rounded <= _SMALL_BYTES
        pool = self._pools.setdefault((stream, is_small), _Pool(is_small, self.is_expandable))
        return pool, pool.take(rounded), nbytes

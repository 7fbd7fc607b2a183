"""Where the arena's blocks lie: one allocation for every gathered weight and every gradient on its way to a reduction.

Two layers are never whole at once for longer than the schedule needs, so their buffers may share memory. Lifetimes of
the blocks over one step are known before it runs (the order of the units and how far ahead they are gathered); the
planner turns them into offsets. Nothing is allocated during training, and the bytes are known, and printed, before it.

Reduced gradients live from a unit's reduction to the optimizer step, when ever fewer weights are needed: they lie where
the arena has room for them at no further byte, and have memory of their own where it has none.

Where memory comes before time (nothing is gathered ahead), the arena falls into regions by what lies in them, each
given back while it is empty: between forward and backward, when the loss needs most, nothing of it is there. Reduced
gradients then come with the reduction and go with the next forward pass.

Everything here is a pure function of sizes, so a plan can be made where nothing is allocated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .lifetimes import Block, BlockKind, UnitSizes, kept_units, lifetimes, reduced_lifetimes

ALIGNMENT_BYTES = 256  # the widest vector access of common devices; NCCL wants 16

Placed = tuple[tuple[Block, int], ...]
"""Blocks with their byte offsets."""


@dataclass(frozen=True, slots=True)
class ArenaPlan:
    """Offsets of every block.

    Attributes:
        placed: Every block that lies in the arena, with its offset.
        region_nbytes: Sizes of the allocations it is made of, one behind the other: offsets run through all of them.
        floor_nbytes: Bytes in use at the busiest moment: no plan can be smaller.
        kept: Names of the units that stay gathered between forward and backward.
        outside: Reduced gradients with memory of their own.
        is_freed: Each region's memory is given back while nothing lies in it.
    """

    placed: Placed
    region_nbytes: tuple[int, ...]
    floor_nbytes: int
    kept: frozenset[str] = field(default_factory=frozenset)
    outside: tuple[Block, ...] = ()
    is_freed: bool = False

    @property
    def nbytes(self) -> int:
        """Size of the arena."""
        return sum(self.region_nbytes)

    def offsets(self, unit: str) -> dict[BlockKind, int]:
        """Where the blocks of a unit lie; kinds that take no arena memory are left out."""
        return {block.kind: offset for block, offset in self.placed if block.unit == unit}

    def table(self) -> str:
        """The plan as text, largest blocks first."""
        rows = sorted(self.placed, key=lambda row: (-row[0].nbytes, row[0].name))
        lines = [f"{block.name:40s} {block.nbytes:>14,d} bytes at {offset:>14,d}" for block, offset in rows]
        how = "given back while empty" if self.is_freed else "in one allocation"
        lines.append(f"arena: {self.nbytes:,d} bytes {how} (busiest moment {self.floor_nbytes:,d})")
        if self.outside_nbytes and self.is_freed:
            lines.append(f"reduced gradients: {self.outside_nbytes:,d} bytes, from reduction to the next forward pass")
        elif self.outside_nbytes:
            lines.append(f"reduced gradients that find no room in it: {self.outside_nbytes:,d} bytes of their own")
        return "\n".join(lines)

    @property
    def outside_nbytes(self) -> int:
        """Reduced gradients with memory of their own."""
        return sum(block.nbytes for block in self.outside)


def plan_arena(units: Sequence[UnitSizes], *, grad_slots: int = 1, is_freed: bool = False) -> ArenaPlan:
    """Offsets for the units' buffers: the best of three first-fit orders.

    Args:
        units: In the order the forward pass runs them.
        grad_slots: Gradient buffers in flight; 2 lets a reduction run beside the next unit's whole backward.
        is_freed: Memory is given back while nothing lies in it.
    """
    blocks = lifetimes(units, grad_slots=grad_slots, is_freed=is_freed)
    kept = kept_units(units, is_freed=is_freed)
    moments = range(2 * len(units))
    floor = max((sum(_round_up(b.nbytes) for b in blocks if b.is_live(moment)) for moment in moments), default=0)
    if is_freed:
        placed, regions = _in_regions(blocks, kept)
        return ArenaPlan(placed, regions, floor, kept, reduced_lifetimes(units), is_freed=True)
    placed, total = _best_of_three(blocks)
    inside, outside = _where_room_is(reduced_lifetimes(units), placed, total)
    return ArenaPlan((*placed, *inside), (total,), floor, kept, outside)


def _in_regions(blocks: Sequence[Block], kept: frozenset[str]) -> tuple[Placed, tuple[int, ...]]:
    """One region for each kind of block, and one for weights that stay when all others are away."""
    kinds: dict[tuple[str, bool], list[Block]] = {}
    for block in blocks:
        kinds.setdefault((block.kind, block.kind == "weights" and block.unit in kept), []).append(block)
    placed: list[tuple[Block, int]] = []
    regions: list[int] = []
    for alike in kinds.values():
        inside, total = _best_of_three(alike)
        placed += [(block, sum(regions) + offset) for block, offset in inside]
        regions.append(total)
    return tuple(placed), tuple(regions) or (0,)


def _round_up(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _first_fit(block: Block, placed: Sequence[tuple[Block, int]]) -> int:
    """The lowest offset where nothing that the block meets lies."""
    taken = sorted((at, at + _round_up(other.nbytes)) for other, at in placed if block.meets(other))
    size, offset = _round_up(block.nbytes), 0
    for start, stop in taken:
        if offset + size <= start:
            break
        offset = max(offset, stop)
    return offset


def _best_of_three(blocks: Sequence[Block]) -> tuple[Placed, int]:
    """The largest first, the longest-lived first, the product first: whichever needs least; and its bytes."""
    lengths = {block: sum(b - a + 1 for a, b in block.lifetimes) for block in blocks}
    orders = [
        sorted(blocks, key=lambda block: -block.nbytes),
        sorted(blocks, key=lambda block: (-lengths[block], -block.nbytes)),
        sorted(blocks, key=lambda block: -block.nbytes * lengths[block]),
    ]
    return min((_place(order) for order in orders), key=lambda result: result[1])


def _place(blocks: Sequence[Block]) -> tuple[Placed, int]:
    placed: list[tuple[Block, int]] = []
    for block in blocks:
        placed.append((block, _first_fit(block, placed)))
    return tuple(placed), max((at + _round_up(block.nbytes) for block, at in placed), default=0)


def _where_room_is(blocks: Sequence[Block], taken: Placed, total: int) -> tuple[Placed, tuple[Block, ...]]:
    """Reduced gradients that fit beside what is there without a byte more, and the others.

    The best of three orders: the latest first (they meet least), the earliest, the largest.
    """
    orders = (blocks, blocks[::-1], sorted(blocks, key=lambda block: -block.nbytes))
    inside = max(
        (_place_within(order, taken, total) for order in orders),
        key=lambda found: sum(block.nbytes for block, _ in found),
    )
    found = {block for block, _ in inside}
    return inside, tuple(block for block in blocks if block not in found)


def _place_within(blocks: Sequence[Block], taken: Placed, ceiling: int) -> Placed:
    placed = list(taken)
    for block in blocks:
        offset = _first_fit(block, placed)
        if offset + _round_up(block.nbytes) <= ceiling:
            placed.append((block, offset))
    return tuple(placed[len(taken) :])

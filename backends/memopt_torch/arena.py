"""The arena: one allocation for every gathered weight and every gradient on its way to a reduction.

Two layers are never whole at once for longer than the schedule needs, so their buffers may share memory. Lifetimes of
the blocks over one step are known before it runs (the order of the units and how far ahead they are gathered); the
planner turns them into offsets. Nothing is allocated during training, and the bytes are known, and printed, before it.

Reduced gradients live from a unit's reduction to the optimizer step, when ever fewer weights are needed: they lie where
the arena has room for them at no further byte, and have memory of their own where it has none.

Everything here except `Arena` is a pure function of sizes, so a plan can be made where nothing is allocated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

ALIGNMENT_BYTES = 256  # the widest vector access of common devices; NCCL wants 16


@dataclass(frozen=True, slots=True)
class Block:
    """A stretch of memory with the times it is in use.

    Attributes:
        name: `weights layers.3` or `gradients layers.3`.
        nbytes: Size in bytes.
        lifetimes: Closed intervals `(first, last)` over the step's events.
    """

    name: str
    nbytes: int
    lifetimes: tuple[tuple[int, int], ...]

    def meets(self, other: Block) -> bool:
        """Whether both are in use at some moment."""
        return any(a <= d and c <= b for a, b in self.lifetimes for c, d in other.lifetimes)


@dataclass(frozen=True, slots=True)
class UnitSizes:
    """What one unit asks of the arena.

    Attributes:
        name: The unit's name.
        weight_nbytes: Gathered weights in the compute dtype, padding included; 0 where nothing is gathered.
        grad_nbytes: Whole gradients in the reduce dtype; 0 for a frozen unit or one reduced in place.
        needs_weights_in_backward: False for an embedding, whose gradient does not read its weight.
        is_layer: One of the repeated layers.
        keep: The policy keeps it gathered between forward and backward.
        resident: Gathered from the first forward event to the last backward one (weights used across the model).
        prefetch_forward: Units gathered ahead of it in the forward pass.
        prefetch_backward: The same in the backward pass.
        reduced_nbytes: This rank's part of the reduced gradient; 0 where it must have memory of its own, because it
            stays through the next forward pass or is reduced in place.
    """

    name: str
    weight_nbytes: int
    grad_nbytes: int
    needs_weights_in_backward: bool = True
    is_layer: bool = True
    keep: bool = False
    resident: bool = False
    prefetch_forward: int = 1
    prefetch_backward: int = 1
    reduced_nbytes: int = 0


@dataclass(frozen=True, slots=True)
class ArenaPlan:
    """Offsets of every block.

    Attributes:
        blocks: Weights and gradient slot of each unit in turn.
        offsets: Byte offset of each block.
        nbytes: Size of the one allocation.
        floor_nbytes: Bytes in use at the busiest moment: no plan can be smaller.
        kept: Names of the units that stay gathered between forward and backward.
        reduced: The reduced gradient of each unit.
        reduced_offsets: Where those lie; None for the ones with memory of their own.
    """

    blocks: tuple[Block, ...]
    offsets: tuple[int, ...]
    nbytes: int
    floor_nbytes: int
    kept: frozenset[str] = field(default_factory=frozenset)
    reduced: tuple[Block, ...] = ()
    reduced_offsets: tuple[int | None, ...] = ()

    def placed(self) -> list[tuple[Block, int]]:
        """Every block that lies in the arena, with its offset."""
        both = zip((*self.blocks, *self.reduced), (*self.offsets, *self.reduced_offsets), strict=True)
        return [(block, offset) for block, offset in both if offset is not None and block.nbytes]

    def table(self) -> str:
        """The plan as text, largest blocks first."""
        rows = sorted(self.placed(), key=lambda row: (-row[0].nbytes, row[0].name))
        lines = [f"{block.name:40s} {block.nbytes:>14,d} bytes at {offset:>14,d}" for block, offset in rows]
        lines.append(f"arena: {self.nbytes:,d} bytes in one allocation (busiest moment {self.floor_nbytes:,d})")
        if self.outside_nbytes:
            lines.append(f"reduced gradients that find no room in it: {self.outside_nbytes:,d} bytes of their own")
        return "\n".join(lines)

    @property
    def outside_nbytes(self) -> int:
        """Reduced gradients with memory of their own."""
        both = zip(self.reduced, self.reduced_offsets, strict=True)
        return sum(block.nbytes for block, offset in both if offset is None)


def _round_up(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def kept_units(units: Sequence[UnitSizes]) -> frozenset[str]:
    """Units that stay gathered because they are the first the backward pass needs.

    The last unit always; before it as many layers as the backward pass gathers ahead. Freeing them would only buy the
    same collective again.
    """
    if not units:
        return frozenset()
    more = units[-1].prefetch_backward + (0 if units[-1].is_layer else 1)
    last = units[-(1 + more) :]
    return frozenset(unit.name for unit in units if unit.keep or unit.resident) | {unit.name for unit in last}


def lifetimes(units: Sequence[UnitSizes], *, grad_slots: int = 1) -> tuple[Block, ...]:
    """Two blocks a unit, weights then gradients, over events `0..n-1` (forward) and `n..2n-1` (backward)."""
    n = len(units)
    kept = kept_units(units)
    blocks = []
    for i, unit in enumerate(units):
        forward, backward = i, 2 * n - 1 - i
        # Who comes before decides how early this one is gathered.
        ahead_f = units[max(i - 1, 0)].prefetch_forward
        ahead_b = units[min(i + 1, n - 1)].prefetch_backward
        first, again = max(0, forward - ahead_f), max(n, backward - ahead_b)
        if unit.resident:
            spans: tuple[tuple[int, int], ...] = ((0, 2 * n - 1),)
        elif unit.name in kept:
            spans = ((first, backward if unit.needs_weights_in_backward else forward),)
        elif unit.needs_weights_in_backward:
            spans = ((first, forward), (again, backward))
        else:
            spans = ((first, forward),)
        blocks.append(Block(f"weights {unit.name}", unit.weight_nbytes, spans))
        # A resident unit's gradients come from both ends of the model, so its slot is taken for the whole backward.
        start = n if unit.resident else backward
        stop = 2 * n - 1 if unit.resident else min(backward + grad_slots - 1, 2 * n - 1)
        blocks.append(Block(f"gradients {unit.name}", unit.grad_nbytes, ((start, stop),)))
    return tuple(blocks)


def reduced_lifetimes(units: Sequence[UnitSizes]) -> tuple[Block, ...]:
    """A block a unit for its reduced gradient: from its backward event to the end of the step."""
    end = 2 * len(units) - 1
    # What a resident unit's slot brings may be wanted at any time of the backward pass.
    starts = (len(units) if unit.resident else end - i for i, unit in enumerate(units))
    return tuple(
        Block(f"reduced {unit.name}", unit.reduced_nbytes, ((start, end),))
        for unit, start in zip(units, starts, strict=True)
    )


def _first_fit(block: Block, placed: Sequence[tuple[Block, int]]) -> int:
    """The lowest offset where nothing that the block meets lies."""
    taken = sorted((at, at + _round_up(other.nbytes)) for other, at in placed if block.meets(other))
    size, offset = _round_up(block.nbytes), 0
    for start, stop in taken:
        if offset + size <= start:
            break
        offset = max(offset, stop)
    return offset


def _place(blocks: Sequence[Block], order: Sequence[int]) -> tuple[tuple[int, ...], int]:
    offsets = [0] * len(blocks)
    placed: list[tuple[Block, int]] = []
    for i in order:
        offsets[i] = _first_fit(blocks[i], placed)
        placed.append((blocks[i], offsets[i]))
    return tuple(offsets), max((at + _round_up(block.nbytes) for block, at in placed), default=0)


def _place_within(
    blocks: Sequence[Block], order: Sequence[int], taken: Sequence[tuple[Block, int]], ceiling: int
) -> tuple[int | None, ...]:
    """As many of the blocks as fit beside what is there without a byte more."""
    offsets: list[int | None] = [None] * len(blocks)
    placed = list(taken)
    for i in order:
        offset = _first_fit(blocks[i], placed)
        if offset + _round_up(blocks[i].nbytes) <= ceiling:
            offsets[i] = offset
            placed.append((blocks[i], offset))
    return tuple(offsets)


def plan_arena(units: Sequence[UnitSizes], *, grad_slots: int = 1) -> ArenaPlan:
    """Offsets for the units' buffers: the best of three first-fit orders.

    Args:
        units: In the order the forward pass runs them.
        grad_slots: Gradient buffers in flight; 2 lets a reduction run beside the next unit's whole backward.
    """
    blocks = lifetimes(units, grad_slots=grad_slots)
    indices = [i for i, block in enumerate(blocks) if block.nbytes]
    length = {i: sum(b - a + 1 for a, b in blocks[i].lifetimes) for i in indices}
    orders: list[list[int]] = [
        sorted(indices, key=lambda i: (-blocks[i].nbytes, i)),
        sorted(indices, key=lambda i: (-length[i], -blocks[i].nbytes, i)),
        sorted(indices, key=lambda i: (-blocks[i].nbytes * length[i], i)),
    ]
    offsets, total = min((_place(blocks, order) for order in orders), key=lambda result: result[1])
    moments = range(2 * len(units))
    floor = max(
        (
            sum(_round_up(b.nbytes) for b in blocks if any(s <= moment <= e for s, e in b.lifetimes))
            for moment in moments
        ),
        default=0,
    )
    reduced = reduced_lifetimes(units)
    taken = [(blocks[i], offsets[i]) for i in indices]
    reduced_offsets = _reduced_offsets(reduced, taken, total)
    return ArenaPlan(blocks, offsets, total, floor, kept_units(units), reduced, reduced_offsets)


def _reduced_offsets(
    reduced: Sequence[Block], taken: Sequence[tuple[Block, int]], total: int
) -> tuple[int | None, ...]:
    """The best of three orders: the latest first (they meet least), the earliest, the largest."""
    indices = [i for i, block in enumerate(reduced) if block.nbytes]
    orders = (indices, indices[::-1], sorted(indices, key=lambda i: (-reduced[i].nbytes, i)))
    tries = [_place_within(reduced, order, taken, total) for order in orders]
    return max(tries, key=lambda at: sum(b.nbytes for b, offset in zip(reduced, at, strict=True) if offset is not None))


TenantKind = Literal["weights", "gradients", "reduced"]


class Tenant:
    """A block at run time: where it lies, which blocks share its memory, and whether it is in use.

    Attributes:
        kind: `weights`, `gradients` (on their way to the reduction) or `reduced` (what it brought).
        owner: The section whose data it holds.
        neighbours: Blocks that share memory with this one.
        occupied: Holds live data now.
    """

    __slots__ = ("kind", "nbytes", "neighbours", "occupied", "offset", "owner")

    def __init__(self, kind: TenantKind, owner: object, offset: int, nbytes: int) -> None:
        self.kind = kind
        self.owner = owner
        self.offset = offset
        self.nbytes = nbytes
        self.neighbours: tuple[Tenant, ...] = ()
        self.occupied = False


class Arena:
    """The one allocation, and typed views of it."""

    def __init__(self, plan: ArenaPlan, *, device: torch.device) -> None:
        self.plan = plan
        self.storage = torch.zeros(plan.nbytes, dtype=torch.uint8, device=device)
        self._tenants: list[Tenant] = []

    def view(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A 1-D view of `numel` values at a byte offset."""
        return self.storage[offset : offset + numel * dtype.itemsize].view(dtype)

    def tenant(self, kind: TenantKind, owner: object, *, offset: int, nbytes: int) -> Tenant:
        """Registers a block and finds the ones it shares memory with."""
        new = Tenant(kind, owner, offset, nbytes)
        shares = [t for t in self._tenants if t.offset < offset + nbytes and offset < t.offset + t.nbytes]
        new.neighbours = tuple(shares)
        for other in shares:
            other.neighbours = (*other.neighbours, new)
        self._tenants.append(new)
        return new

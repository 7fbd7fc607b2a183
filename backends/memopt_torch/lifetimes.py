"""Which memory a unit needs when: blocks over the events of a step, from sizes alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

BlockKind = Literal["weights", "gradients", "resharded", "reduced"]
"""Gathered weights; whole gradients on their way to the reduction; this rank's part of the weights of a unit that is
resharded over a small group; this rank's part of the reduced gradients."""


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
        resharded_nbytes: This rank's part of the weights where they are resharded over groups, else 0.
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
    resharded_nbytes: int = 0
    reduced_nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Block:
    """A stretch of memory with the times it is in use.

    Attributes:
        kind: What lies in it.
        unit: Name of the unit it belongs to.
        nbytes: Size in bytes.
        lifetimes: Closed intervals `(first, last)` over the step's events.
    """

    kind: BlockKind
    unit: str
    nbytes: int
    lifetimes: tuple[tuple[int, int], ...]

    @property
    def name(self) -> str:
        """`weights layers.3`, say."""
        return f"{self.kind} {self.unit}"

    def meets(self, other: Block) -> bool:
        """Whether both are in use at some moment."""
        return any(a <= d and c <= b for a, b in self.lifetimes for c, d in other.lifetimes)

    def is_live(self, moment: int) -> bool:
        """Whether it is in use at that event."""
        return any(first <= moment <= last for first, last in self.lifetimes)


def kept_units(units: Sequence[UnitSizes], *, is_freed: bool = False) -> frozenset[str]:
    """Units that stay gathered because they are the first the backward pass needs.

    The last unit always; before it as many layers as the backward pass gathers ahead. Freeing them would only buy the
    same collective again. Where the arena `is_freed` between the passes, only those that have to stay.
    """
    if not units or is_freed:
        return frozenset(unit.name for unit in units if unit.keep or unit.resident)
    more = units[-1].prefetch_backward + (0 if units[-1].is_layer else 1)
    last = units[-(1 + more) :]
    return frozenset(unit.name for unit in units if unit.keep or unit.resident) | {unit.name for unit in last}


def lifetimes(units: Sequence[UnitSizes], *, grad_slots: int = 1, is_freed: bool = False) -> tuple[Block, ...]:
    """Blocks of weights and gradients over events `0..n-1` (forward) and `n..2n-1` (backward); empty ones left out."""
    kept = kept_units(units, is_freed=is_freed)
    blocks = []
    for i, unit in enumerate(units):
        forward, backward = i, 2 * len(units) - 1 - i
        blocks.append(Block("weights", unit.name, unit.weight_nbytes, _gathered(units, i, kept)))
        if unit.needs_weights_in_backward and unit.name not in kept:
            blocks.append(Block("resharded", unit.name, unit.resharded_nbytes, ((forward, backward),)))
        # A resident unit's gradients come from both ends of the model, so its slot is taken for the whole backward.
        start = len(units) if unit.resident else backward
        stop = 2 * len(units) - 1 if unit.resident else min(backward + grad_slots - 1, 2 * len(units) - 1)
        blocks.append(Block("gradients", unit.name, unit.grad_nbytes, ((start, stop),)))
    return tuple(block for block in blocks if block.nbytes)


def _gathered(units: Sequence[UnitSizes], i: int, kept: frozenset[str]) -> tuple[tuple[int, int], ...]:
    """When the weights of unit `i` are gathered: who runs before decides how early."""
    n, unit = len(units), units[i]
    forward, backward = i, 2 * n - 1 - i
    first = max(0, forward - units[max(i - 1, 0)].prefetch_forward)
    again = max(n, backward - units[min(i + 1, n - 1)].prefetch_backward)
    if unit.resident:
        return ((0, 2 * n - 1),)
    if not unit.needs_weights_in_backward:
        return ((first, forward),)
    return ((first, backward),) if unit.name in kept else ((first, forward), (again, backward))


def reduced_lifetimes(units: Sequence[UnitSizes]) -> tuple[Block, ...]:
    """Blocks of reduced gradients: from a unit's backward event to the end of the step; empty ones left out."""
    end = 2 * len(units) - 1
    # What a resident unit's slot brings may be wanted at any time of the backward pass.
    starts = (len(units) if unit.resident else end - i for i, unit in enumerate(units))
    return tuple(
        Block("reduced", unit.name, unit.reduced_nbytes, ((start, end),))
        for unit, start in zip(units, starts, strict=True)
        if unit.reduced_nbytes
    )

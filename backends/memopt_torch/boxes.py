"""A stretch of a flattened tensor as axis-aligned boxes: what checkpoint formats of whole tensors understand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Box:
    """An axis-aligned part of a tensor whose values are consecutive in row-major order.

    Attributes:
        offsets: First index in each dimension.
        sizes: Extent in each dimension.
        start: Flat index of its first value.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        """Values in it."""
        return math.prod(self.sizes)


def boxes_of(shape: Sequence[int], start: int, stop: int) -> tuple[Box, ...]:
    """The flat stretch `[start, stop)` of a row-major tensor as boxes, at most `2 * ndim - 1` of them.

    >>> [box.sizes for box in boxes_of((4, 5), 3, 17)]
    [(1, 2), (2, 5), (1, 2)]
    """
    if stop <= start:
        return ()
    if not shape:
        return (Box((), (), 0),)
    row = math.prod(shape[1:])
    if len(shape) == 1:
        return (Box((start,), (stop - start,), start),)
    first, last = start // row, (stop - 1) // row
    if first == last and (start % row or stop % row):
        return _within_row(shape, first, start, stop)
    found: list[Box] = []
    if start % row:
        found += _within_row(shape, first, start, (first + 1) * row)
        first += 1
    full = stop // row
    if full > first:
        rest = tuple(shape[1:])
        found.append(Box((first, *(0 for _ in rest)), (full - first, *rest), first * row))
    if stop % row:
        found += _within_row(shape, full, full * row, stop)
    return tuple(found)


def _within_row(shape: Sequence[int], index: int, start: int, stop: int) -> tuple[Box, ...]:
    """Boxes of a stretch inside one slice along the first dimension."""
    row = math.prod(shape[1:])
    inner = boxes_of(shape[1:], start - index * row, stop - index * row)
    return tuple(Box((index, *box.offsets), (1, *box.sizes), index * row + box.start) for box in inner)

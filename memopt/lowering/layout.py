"""Layouts: which mesh axis splits which dimension, and the bytes that leaves on a device."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from .entries import Entry

FLAT = -1
"""In a layout: the axis splits the backend's flat unit, not a dimension of the tensor."""

Sharding = Literal["flat", "divisible", "first"]


@dataclass(frozen=True, slots=True)
class Split:
    """A layout, or why there is none.

    Attributes:
        layout: Axis -> dimension.
        fault: Why the tensor cannot be split so; empty when it can.
        whole: Axes that leave it whole, as it has fewer elements than they have devices.
    """

    layout: Mapping[str, int]
    fault: str = ""
    whole: tuple[str, ...] = ()


def split(
    shape: tuple[int, ...] | None,
    axes: Mapping[str, int | str],
    sizes: Mapping[str, int],
    existing: Mapping[str, int],
    *,
    sharding: Sharding,
) -> Split:
    """The layout of a tensor that a rule shards over `axes`, beside the axes it is sharded on already."""
    layout = {axis: dimension for axis, dimension in existing.items() if axis not in axes}
    whole: list[str] = []
    explicit = {axis: dimension for axis, dimension in axes.items() if isinstance(dimension, int)}
    for axis, dimension in explicit.items():
        fault = _explicit_fault(shape, axis, dimension, layout, sizes, sharding)
        if fault:
            return Split(layout, fault)
        layout[axis] = dimension
    for axis in axes:
        if axis in explicit:
            continue
        dimension = _auto(shape, axis, layout, sizes, sharding)
        if dimension is not None:
            layout[axis] = dimension
        elif shape is not None and (not shape or math.prod(shape) < sizes[axis]):
            whole.append(axis)
        else:
            return Split(layout, f"no dimension of {shape} is divisible by `{axis}` = {sizes[axis]}")
    order = [axis for axis in sizes if axis in layout]
    return Split({axis: layout[axis] for axis in order}, whole=tuple(whole))


def _explicit_fault(
    shape: tuple[int, ...] | None,
    axis: str,
    dimension: int,
    layout: Mapping[str, int],
    sizes: Mapping[str, int],
    sharding: Sharding,
) -> str:
    if shape is None:
        return ""
    if dimension >= len(shape):
        return f"dimension {dimension} of {shape} does not exist"
    parts = sizes[axis] * _taken(layout, dimension, sizes)
    if sharding == "divisible" and shape[dimension] % parts:
        return f"dimension {dimension} of {shape} is not divisible by {parts} (`{axis}` = {sizes[axis]})"
    return ""


def _auto(
    shape: tuple[int, ...] | None,
    axis: str,
    layout: Mapping[str, int],
    sizes: Mapping[str, int],
    sharding: Sharding,
) -> int | None:
    """The dimension: the largest that divides evenly, those no other axis splits before the others."""
    if sharding == "flat":
        return FLAT
    if shape is None or not shape:
        return None
    if sharding == "first":
        return 0 if math.prod(shape) >= sizes[axis] else None
    candidates = [
        (d in layout.values(), -shape[d], d)
        for d in range(len(shape))
        if shape[d] and shape[d] % (sizes[axis] * _taken(layout, d, sizes)) == 0
    ]
    return min(candidates)[2] if candidates else None


def _taken(layout: Mapping[str, int], dimension: int, sizes: Mapping[str, int]) -> int:
    return math.prod(sizes[axis] for axis, split_dimension in layout.items() if split_dimension == dimension)


def device_nbytes(entry: Entry, layout: Mapping[str, int], sizes: Mapping[str, int]) -> int | None:
    """Bytes on the fullest device: each split dimension rounded up, the flat unit's share rounded up to an element."""
    shape = entry.tensor.shape
    if shape is None:
        return None
    local = [math.ceil(size / _taken(layout, d, sizes)) for d, size in enumerate(shape)]
    return entry.nbytes_of(math.ceil(math.prod(local) / _taken(layout, FLAT, sizes)))


def is_within(inner: Mapping[str, int], outer: Mapping[str, int]) -> bool:
    """Whether every axis that splits `inner` splits `outer` in the same dimension."""
    return all(outer.get(axis) == dimension for axis, dimension in inner.items())


def describe(layout: Mapping[str, int], names: Sequence[str] = ()) -> str:
    """`fsdp:flat, expert:0`, or `whole`."""
    parts = [f"{axis}:{'flat' if d == FLAT else d}" for axis, d in layout.items() if not names or axis in names]
    return ", ".join(parts) or "whole"

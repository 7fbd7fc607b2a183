"""Shardings an array has already: they are read, reported, and left as they are on axes the policy does not name."""

from __future__ import annotations

from typing import Any

from jax.sharding import NamedSharding


def existing_sharding(value: Any) -> tuple[dict[str, int], dict[str, int]]:
    """Mesh axis -> dimension, and the axes' sizes, of an array's named sharding; empty for any other placement."""
    sharding = getattr(value, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return {}, {}
    sizes = dict(sharding.mesh.shape)
    dimensions: dict[str, int] = {}
    for dimension, entry in enumerate(sharding.spec):
        for axis in entry if isinstance(entry, tuple) else (entry,):
            if isinstance(axis, str) and sizes[axis] > 1:
                dimensions[axis] = dimension
    return dimensions, {axis: sizes[axis] for axis in dimensions}

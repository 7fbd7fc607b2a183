"""Shardings an array has already: they are read, reported, and left as they are on axes the policy does not name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.sharding import NamedSharding

from memopt.spec import ModelSpec

EXPERT_AXIS = "expert"
"""The mesh axis over which modules with an `expert_parallel` attribute keep their experts split while they compute."""


def leaf_path(path: Sequence[Any]) -> tuple[str, ...]:
    """The keys of a leaf's path in a tree, without the `.value` that a variable puts around its array.

    A parameter or module that is called `value` keeps its name: that is a key, not an attribute.
    """
    keys = list(path)
    if keys and getattr(keys[-1], "name", None) == "value":
        keys.pop()
    return tuple(str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in keys)


def kept_in_use(spec: ModelSpec) -> dict[str, dict[str, int]]:
    """Parameter path -> axes that stay while it is used, with their dimensions: those it had, and experts' own."""
    return {
        tensor.path: {**tensor.sharding, **tensor.split_in_use}
        for tensor in spec.tensors
        if tensor.sharding or tensor.split_in_use
    }


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

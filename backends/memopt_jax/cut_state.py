"""Optimizer state of a scanned stack of which some layers rest on the host: one array in two parts.

A scanned stack's state is one array for all layers, and an array lies in one memory. Where the rules offload the state
of some layers only, it is kept as two arrays, cut along the stacking axis. To a checkpoint it is whole: `whole_on_host`
and `in_parts` go through the host's memory shard by shard, so nothing is gathered and the device holds no copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from memopt.errors import MemoptError, Problem
from memopt.plan import PlanRow

from .naming import is_traced
from .treatments import Template

Part = Literal["host", "device"]
PARTS: tuple[Part, Part] = ("host", "device")
MEMORY_OF = {"host": "pinned_host", "device": "device"}


@dataclass(frozen=True)
class Cut:
    """Which layers of a stack rest where; both are not empty."""

    host: tuple[int, ...]
    device: tuple[int, ...]

    def layers(self, part: Part) -> tuple[int, ...]:
        """The layers of one part, in order."""
        return self.host if part == "host" else self.device

    @cached_property
    def order(self) -> tuple[int, ...]:
        """Where each layer lies in host part and device part put one after the other."""
        place = {layer: index for index, layer in enumerate((*self.host, *self.device))}
        return tuple(place[layer] for layer in range(len(place)))


@jax.tree_util.register_pytree_with_keys_class
class CutArray:
    """A stacked array as the part that rests on the host and the part that rests on the device."""

    def __init__(self, host: Any, device: Any, cut: Cut) -> None:
        """Args:
        host, device: The layers `cut.host` and `cut.device`; arrays, shapes or shardings.
        cut: Which layers they are.
        """
        self.host = host
        self.device = device
        self.cut = cut

    def part(self, part: Part) -> Any:
        """One of the two."""
        return self.host if part == "host" else self.device

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole."""
        return (len(self.cut.host) + len(self.cut.device), *self.host.shape[1:])

    @property
    def ndim(self) -> int:
        """Of the whole."""
        return len(self.shape)

    @property
    def dtype(self) -> Any:
        """Of both parts."""
        return self.host.dtype

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, Any], ...], Cut]:
        """The two parts; which layers they are is static."""
        return tuple((jax.tree_util.GetAttrKey(part), self.part(part)) for part in PARTS), self.cut

    @classmethod
    def tree_unflatten(cls, cut: Cut, parts: Sequence[Any]) -> CutArray:
        """The inverse."""
        return cls(parts[0], parts[1], cut)


def is_cut(leaf: Any) -> bool:
    """Whether a leaf is kept in two parts; for `is_leaf` of tree functions."""
    return isinstance(leaf, CutArray)


def cut_array(whole: Any, cut: Cut) -> CutArray:
    """The two parts of a whole array, or of its shape."""
    if isinstance(whole, jax.ShapeDtypeStruct):
        host, device = ((len(layers), *whole.shape[1:]) for layers in (cut.host, cut.device))
        return CutArray(jax.ShapeDtypeStruct(host, whole.dtype), jax.ShapeDtypeStruct(device, whole.dtype), cut)
    if jax.typeof(whole).memory_space == jax.memory.Space.Host:  # made like parameters that rest there
        if not is_traced(whole):
            return in_parts(whole, cut)
        whole = jax.device_put(whole, jax.memory.Space.Device)
    return CutArray(_taken(whole, cut.host), _taken(whole, cut.device), cut)


def joined(host: Any, device: Any, cut: Cut) -> Any:
    """The whole of two parts that are both on the device."""
    if _is_run(cut.host) and _is_run(cut.device):
        return jnp.concatenate([host, device] if cut.host[0] == 0 else [device, host])
    return jnp.concatenate([host, device])[np.asarray(cut.order)]


def _taken(array: Any, layers: tuple[int, ...]) -> Any:
    return array[layers[0] : layers[-1] + 1] if _is_run(layers) else array[np.asarray(layers)]


def _is_run(layers: tuple[int, ...]) -> bool:
    return layers[-1] - layers[0] == len(layers) - 1


def whole_on_host(leaf: CutArray) -> Any:
    """The whole array in pinned host memory, each device's shard put together on its own host."""

    def shard(host: Any, device: Any) -> np.ndarray:
        return np.concatenate([np.asarray(host), np.asarray(device)])[np.asarray(leaf.cut.order)]

    return _by_shards(shard, (leaf.host, leaf.device), leaf.shape, kind="pinned_host")


def in_parts(whole: Any, cut: Cut) -> CutArray:
    """The parts of a whole array, each where it rests; the inverse of `whole_on_host`."""

    def part(which: Part) -> Any:
        layers = cut.layers(which)
        shape = (len(layers), *whole.shape[1:])
        return _by_shards(lambda x: np.asarray(x)[np.asarray(layers)], (whole,), shape, kind=MEMORY_OF[which])

    return CutArray(part("host"), part("device"), cut)


def _by_shards(make: Callable[..., np.ndarray], arrays: Sequence[Any], shape: tuple[int, ...], *, kind: str) -> Any:
    """An array made shard by shard of arrays that are split alike; the stacking axis is never split."""
    sharding = arrays[0].sharding.with_memory_kind(kind)
    shards = [
        jax.device_put(
            make(*(shard.data for shard in at_device)),
            jax.sharding.SingleDeviceSharding(at_device[0].device, memory_kind=kind),
        )
        for at_device in zip(*(array.addressable_shards for array in arrays), strict=True)
    ]
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


def cuts_of(rows: Sequence[PlanRow], template: Template) -> dict[str, Cut]:
    """Parameter label -> where the layers of its state rest, of the stacks whose layers differ.

    Raises:
        MemoptError: `stack-state-differs` where the layers of one array are laid out differently over the mesh.
    """
    by_label: dict[str, dict[int, PlanRow]] = {}
    for row in rows:
        label, index = template.split(row.path)
        if index is not None:
            by_label.setdefault(label, {})[index] = row
    problems = [_differ(label, layers) for label, layers in by_label.items() if _other_layout(layers) is not None]
    if problems:
        raise MemoptError(problems)
    cuts = {}
    for label, layers in by_label.items():
        host = tuple(sorted(index for index, row in layers.items() if row.memory_kind == "pinned_host"))
        device = tuple(sorted(index for index, row in layers.items() if row.memory_kind != "pinned_host"))
        if host and device:
            cuts[label] = Cut(host, device)
    return cuts


def _other_layout(layers: dict[int, PlanRow]) -> PlanRow | None:
    """The first row whose layout is not the first layer's."""
    first = layers[min(layers)]
    return next((row for row in layers.values() if row.layout != first.layout), None)


def _differ(label: str, layers: dict[int, PlanRow]) -> Problem:
    first, other = layers[min(layers)], _other_layout(layers) or layers[min(layers)]
    return Problem(
        "stack-state-differs",
        f"`{label}` has one array of {first.role.replace('_', ' ')} for all layers of a scanned stack, and the rules "
        f"split it differently over the mesh: `{first.path}` {dict(first.layout)}, `{other.path}` {dict(other.layout)}",
        hint="give all layers of the stack the same shard rules, or build the layers in a Python list",
        path=other.path,
    )

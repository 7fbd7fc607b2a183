"""Layouts of the plan as JAX shardings: at rest, in use, and in which memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from memopt.errors import MemoptError
from memopt.plan import Plan, PlanRow

from .naming import is_traced

DATA_AXES = ("replicate", "fsdp", "expert", "data")
"""Mesh axes that split the batch; the others (tensor, sequence) are the user's own business."""

AnyMesh = Mesh | AbstractMesh


def make_mesh(plan: Plan, mesh: AnyMesh | None) -> AnyMesh:
    """The mesh of a plan: the user's own where one is given, else all devices in the plan's order.

    Raises:
        MemoptError: `mesh-differs` when the user's mesh lacks an axis of the policy or has another size.
    """
    if mesh is None:
        names = tuple(name for name, _ in plan.mesh) or ("fsdp",)
        sizes = tuple(size for _, size in plan.mesh) or (1,)
        count = int(np.prod(sizes))
        if count > jax.device_count():
            raise MemoptError.of(
                "mesh-too-large",
                f"the policy's mesh has {count} devices and JAX sees {jax.device_count()} here",
                hint="use fsdp: -1 to take what there is, or run where there are more devices",
                path="mesh",
            )
        devices = np.array(jax.devices()[:count]).reshape(sizes)
        return Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))
    wrong = [f"{name}: {size}" for name, size in plan.mesh if dict(mesh.shape).get(name) != size]
    if wrong:
        raise MemoptError.of(
            "mesh-differs",
            f"the policy wants {', '.join(wrong)}; the mesh passed has "
            f"{', '.join(f'{name}: {size}' for name, size in mesh.shape.items())}",
            hint="name the mesh's axes in the policy's `mesh`, with the same sizes",
            path="mesh",
        )
    return mesh


@dataclass(frozen=True)
class LayerLayout:
    """One layer's parameter: sharding in use (the policy's axes gathered) and at rest."""

    used: NamedSharding
    rests: NamedSharding


class Layouts:
    """Shardings of a plan's rows over one mesh."""

    def __init__(self, plan: Plan, mesh: AnyMesh, kept: Mapping[str, Mapping[str, int]]) -> None:
        """Args:
        plan: The plan.
        mesh: Over which devices.
        kept: Parameter path -> axes that stay while it is in use, with their dimensions (`placement.kept_in_use`).
        """
        self.mesh = mesh
        self._kept = kept
        self._order = tuple(mesh.axis_names)

    def spec(self, layout: Mapping[str, int], ndim: int, *, leading: int = 0) -> PartitionSpec:
        """The partition of an array with `leading` stacking axes before the tensor's own dimensions."""
        entries: list[list[str]] = [[] for _ in range(ndim)]
        for axis in sorted(layout, key=self._order.index):
            entries[layout[axis] + leading].append(axis)
        parts = [tuple(axes) if len(axes) > 1 else (axes[0] if axes else None) for axes in entries]
        while parts and parts[-1] is None:
            parts.pop()
        return PartitionSpec(*parts)

    def sharding(
        self, layout: Mapping[str, int], ndim: int, *, leading: int = 0, kind: str | None = None
    ) -> NamedSharding:
        """As `spec`, on the mesh, in a memory."""
        return NamedSharding(self.mesh, self.spec(layout, ndim, leading=leading), memory_kind=kind)

    def of_layer(self, row: PlanRow) -> LayerLayout:
        """In use and at rest, of one layer of the parameter."""
        ndim = len(row.shape or ())
        kept = self._kept.get(row.path, {})
        used = {axis: dimension for axis, dimension in row.layout.items() if kept.get(axis) == dimension}
        return LayerLayout(self.sharding(used, ndim), self.sharding(row.layout, ndim))

    def replicated(self, kind: str | None = None) -> NamedSharding:
        """The same on every device."""
        return NamedSharding(self.mesh, PartitionSpec(), memory_kind=kind)

    @property
    def device(self) -> Any:
        """The first device: its platform is the mesh's.

        Raises:
            ValueError: The mesh has no devices.
        """
        if not isinstance(self.mesh, Mesh) or self.mesh.devices is None:
            raise ValueError("a mesh without devices cannot run anything")
        return self.mesh.devices.flat[0]

    @property
    def data_axes(self) -> tuple[str, ...]:
        """Axes that split the batch."""
        return tuple(name for name in self._order if name in DATA_AXES)

    @property
    def num_data(self) -> int:
        """Parts the batch is split in."""
        return int(np.prod([dict(self.mesh.shape)[name] for name in self.data_axes], dtype=int))

    def batch(self, tree: Any) -> Any:
        """Shardings for a batch: dimension 0 of every array over the data axes.

        Raises:
            MemoptError: `batch-not-divisible`.
        """
        return jax.tree.map(self._batch_leaf, tree)

    def _batch_leaf(self, leaf: Any) -> NamedSharding:
        shape = np.shape(leaf)
        if not shape or self.num_data == 1:
            return self.replicated()
        if shape[0] % self.num_data:
            raise MemoptError.of(
                "batch-not-divisible",
                f"a batch of {shape[0]} does not divide over {self.num_data} devices",
                hint=f"use a batch that is a multiple of {self.num_data}",
                path="batch",
            )
        return NamedSharding(self.mesh, PartitionSpec(self.data_axes))

    def constrain_batch(self, tree: Any) -> Any:
        """Keep the batch split over the data axes in what a module returns; other dimensions are left to the
        compiler."""
        return jax.tree.map(self._constrain_leaf, tree)

    def _constrain_leaf(self, leaf: Any) -> Any:
        shape = getattr(leaf, "shape", ())
        if self.num_data == 1 or len(shape) < 2 or shape[0] % self.num_data or not is_traced(leaf):
            return leaf
        free = (PartitionSpec.UNCONSTRAINED,) * (len(shape) - 1)
        return jax.lax.with_sharding_constraint(leaf, NamedSharding(self.mesh, PartitionSpec(self.data_axes, *free)))


def place(tree: Any, shardings: Any) -> Any:
    """Move the arrays that are not where they belong; those that are, and what is no array, stay the same objects.

    Args:
        tree: Arrays and other leaves.
        shardings: Of the same structure; None leaves a leaf alone.
    """
    leaves, structure = jax.tree.flatten(tree)
    wanted: Sequence[Any] = structure.flatten_up_to(shardings)
    return structure.unflatten([_placed(leaf, sharding) for leaf, sharding in zip(leaves, wanted, strict=True)])


def _placed(leaf: Any, sharding: NamedSharding | None) -> Any:
    if sharding is None or not hasattr(leaf, "shape"):
        return leaf
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    if isinstance(leaf, jax.Array) and is_placed(leaf, sharding):
        return leaf
    return jax.device_put(leaf, sharding)


def is_placed(leaf: jax.Array, sharding: NamedSharding) -> bool:
    """Whether an array is laid out so already, memory included."""
    kind = sharding.memory_kind or "device"
    own = leaf.sharding.memory_kind or "device"
    return own == kind and leaf.committed and leaf.sharding.is_equivalent_to(sharding, leaf.ndim)

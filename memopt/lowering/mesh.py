"""The mesh: sizes of its axes, checked against the world."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ..errors import Problem
from ..policy import Policy
from ..spec import ModelSpec

Mesh = tuple[tuple[str, int], ...]


def lower_mesh(policy: Policy, spec: ModelSpec, world_size: int, problems: list[Problem]) -> Mesh:
    """Axis name -> size, outer to inner; the product is `world_size`.

    Axes on which the model is sharded already and which the policy does not name stay as they are, innermost.
    """
    existing = existing_axes(spec)
    asked = dict(policy.mesh) if policy.mesh is not None else {"fsdp": -1}
    taken = {axis: size for axis, size in existing.items() if axis not in asked}
    sizes = {**asked, **taken}
    known = math.prod(size for size in sizes.values() if size != -1)
    rest, remainder = divmod(world_size, known)
    filled = {axis: rest if size == -1 else size for axis, size in sizes.items()}
    if -1 in sizes.values() and remainder:
        problems.append(_does_not_divide(policy, sizes, known, world_size))
        return tuple({axis: size or 1 for axis, size in filled.items()}.items())
    problems.extend(_conflicts(policy, filled, existing))
    if -1 not in sizes.values() and known != world_size:
        problems.append(_does_not_fill(policy, asked, taken, known, world_size))
    problems.extend(_uneven_groups(policy, filled.get("fsdp", 1)))
    return tuple(filled.items())


def existing_axes(spec: ModelSpec) -> dict[str, int]:
    """Axes the model is sharded on already, with their sizes, in the order met."""
    axes: dict[str, int] = {}
    for tensor in spec.tensors:
        axes.update({axis: size for axis, size in tensor.axis_sizes.items() if axis in tensor.sharding})
    return axes


def _conflicts(policy: Policy, sizes: Mapping[str, int], existing: Mapping[str, int]) -> list[Problem]:
    """Axes of another size than the model's own, one that takes what is left included."""
    return [
        Problem(
            "mesh-conflict",
            f"axis `{axis}` has {size} devices here, but the model is sharded over {existing[axis]} on it",
            hint=f"write `{axis}: {existing[axis]}`, and name the axes that take the other devices",
            **policy.source.at(("mesh", axis)),
        )
        for axis, size in sizes.items()
        if axis in existing and size != existing[axis]
    ]


def _uneven_groups(policy: Policy, size: int) -> list[Problem]:
    """Group sizes of `reshard_after_forward` that do not divide `fsdp`. On one device nothing is split or gathered."""
    written = [(("unit_defaults", "reshard_after_forward"), policy.unit_defaults.reshard_after_forward)]
    written += [
        (("units", i, "reshard_after_forward"), unit.reshard_after_forward) for i, unit in enumerate(policy.units or ())
    ]
    allowed = ", ".join(str(number) for number in range(2, size) if size % number == 0)
    return [
        Problem(
            "reshard-group-size",
            f"groups of {group} ranks do not divide the {size} of `fsdp`",
            hint=f"write {allowed} or true (all {size})" if allowed else "write true or false",
            **policy.source.at(path),
        )
        for path, group in written
        if group is not None and not isinstance(group, bool) and size > 1 and size % group
    ]


def _does_not_divide(policy: Policy, sizes: Mapping[str, int], known: int, world_size: int) -> Problem:
    free = next(axis for axis, size in sizes.items() if size == -1)
    others = [f"{axis} {size}" for axis, size in sizes.items() if size != -1]
    fixed = " × ".join(others) + (f" = {known}" if len(others) > 1 else "")
    return Problem(
        "mesh-world",
        f"the world has {world_size} devices, which the other axes ({fixed}) do not divide: "
        f"nothing whole is left for `{free}`",
        hint=f"start a multiple of {known} devices, or change an axis so that the product divides {world_size}",
        **policy.source.at(("mesh",)),
    )


def _does_not_fill(
    policy: Policy, asked: Mapping[str, int], taken: Mapping[str, int], known: int, world_size: int
) -> Problem:
    product = " × ".join(f"{axis} {size}" for axis, size in {**asked, **taken}.items())
    inner = list(asked)[-1]
    others = known // asked[inner]
    if world_size % others == 0:
        fix = f"write `{inner}: {world_size // others}` (or -1, which takes what is left)"
    else:
        fix = "change the axes so that their product is the world"
    return Problem(
        "mesh-world",
        f"the mesh {product} has {known} devices, the world has {world_size}",
        hint=f"{fix}, or start {known} devices",
        **policy.source.at(("mesh",)),
    )

"""Whose bytes they are: arguments by role and memory kind, and values that a loop saves for a later loop.

A compiled program without a device tells totals only. Parameters and optimizer state are the step's arguments; saved
values show as stacked buffers that one loop writes slice by slice and a later one reads; what is left is `temp`.
"""

from __future__ import annotations

import math
from typing import Any

from .hlo import Computation, Instruction, Module
from .scalars import trip_counts

ARGUMENT_ROLES = ("param", "optimizer_state", "batch")


def argument_bytes(args: tuple[Any, ...]) -> dict[tuple[str, str], int]:
    """(role, memory kind) -> bytes of one device's part of the step's `(params, opt_state, batch)`."""
    import jax

    found: dict[tuple[str, str], int] = {}
    for role, tree in zip(ARGUMENT_ROLES, args, strict=True):
        for leaf in jax.tree.leaves(tree):
            kind = getattr(leaf.sharding, "memory_kind", None) or "device"
            part = leaf.sharding.shard_shape(leaf.shape) if leaf.sharding is not None else leaf.shape
            found[role, kind] = found.get((role, kind), 0) + math.prod(part) * leaf.dtype.itemsize
    return found


def residual_bytes(module: Module) -> dict[str, int]:
    """Memory kind -> bytes of one device's values that a loop stacks up and a later loop reads."""
    counts = trip_counts(module)
    kinds = {"device": 0, "pinned_host": 0}
    for computation in module.computations.values():
        loops = [item for item in computation.instructions if item.opcode == "while"]
        if len(loops) < 2:
            continue
        read = _read_by_loops(computation, loops)
        for loop in loops:
            body = module[loop.callee("body") or module.entry]
            trips = counts.get(body.name) or 1
            for position in _written(body) & {place for name, place in read if name == loop.name}:
                array = loop.arrays[position] if position < len(loop.arrays) else None
                if array is not None and trips > 1 and array.dims and array.dims[0] >= trips:
                    kinds["pinned_host" if array.is_host else "device"] += array.nbytes
    return kinds


def _written(body: Computation) -> set[int]:
    """Positions of the loop's state that an iteration changes."""
    root = body.root
    if root.opcode != "tuple":
        return set()
    changed = set()
    for position, name in enumerate(root.operands):
        item = body.by_name.get(name)
        unchanged = (
            item is not None
            and item.opcode == "get-tuple-element"
            and int(item.attribute(r"index=(\d+)") or -1) == position
            and (source := body.operand(item, 0)) is not None
            and source.opcode == "parameter"
        )
        if not unchanged:
            changed.add(position)
    return changed


def _origin(computation: Computation, item: Instruction | None) -> Instruction | None:
    """The instruction a buffer comes from, through what renames it and through peeled writes into it."""
    while item is not None:
        first = computation.operand(item, 0)
        passes_on = item.opcode in _RENAMES or item.opcode.endswith("-done")
        if not passes_on and item.opcode.removesuffix("-start") in _WRITES and first is not None:
            passes_on = bool(set(first.arrays) & set(item.arrays))
        if not passes_on:
            return item
        item = first
    return None


_WRITES = frozenset(("dynamic-update-slice", "fusion", "async"))
_RENAMES = frozenset(("bitcast", "copy", "reshape", "optimization-barrier", "copy-start"))


def _read_by_loops(computation: Computation, loops: list[Instruction]) -> set[tuple[str, int]]:
    """(loop, position) of results that a later loop is given."""
    read: set[tuple[str, int]] = set()
    for loop in loops:
        start = computation.operand(loop, 0)
        for name in start.operands if start is not None else ():
            item = _origin(computation, computation.by_name.get(name))
            if item is not None and item.opcode == "get-tuple-element":
                source = computation.operand(item, 0)
                if source is not None and source.opcode == "while" and source.index < loop.index:
                    read.add((source.name, int(item.attribute(r"index=(\d+)") or 0)))
    return read

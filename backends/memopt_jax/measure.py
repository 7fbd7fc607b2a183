"""What a compiled step holds and does, read from the executable: no estimate, no profiler.

`peak = argument + output - alias + temp` of one device (`peak_memory_in_bytes` leaves temporaries out on the CPU and
counts host bytes on accelerators, so it is not used). The compiler gives a total; its split by role is attributed:
parameters and optimizer state are the arguments that hold them, residuals are read off the jaxpr, the rest is `temp`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

from . import flops
from .jaxprs import scan_counts

_COLLECTIVES = {
    "all-gather": "all_gather",
    "all-reduce": "all_reduce",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "collective-permute": "collective_permute",
}
_COLLECTIVE = re.compile(r"= \S+.*? (" + "|".join(_COLLECTIVES) + r")(?:-start)?\(")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFigures:
    """One compiled step; bytes of one device, FLOPs of all devices together.

    Attributes:
        peak_bytes: Device bytes.
        by_role: Their split, attributed; sums to the peak.
        host_bytes: On the host; counted on the program where the device has one memory.
        counted: Whether `host_bytes` was counted on the program.
        step_flops: Matrix products of the step, recomputed ones included.
        collectives: Kind -> instructions in the compiled program (a loop's body counts once).
        notes: How figures were got.
    """

    peak_bytes: int
    by_role: Mapping[str, int]
    host_bytes: int = 0
    counted: bool = False
    step_flops: float | None = None
    collectives: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def step_figures(
    compiled: Any,
    jaxpr: Any,
    *,
    params: Any,
    optimizer_state: Any,
    counted_host_bytes: int | None = None,
) -> StepFigures:
    """The figures of one compiled step.

    Args:
        compiled: `jit(...).lower(...).compile()`.
        jaxpr: Of the same step, for FLOPs and residuals.
        params, optimizer_state: Trees of arrays or `ShapeDtypeStruct`s with shardings: the step's arguments.
        counted_host_bytes: Bytes of offloaded residuals on one device, for a device with one memory, which compiles
            offload to nothing; None where the executable tells.
    """
    memory = compiled.memory_analysis()
    peak = (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
    )
    host = (
        memory.host_argument_size_in_bytes
        + memory.host_output_size_in_bytes
        - memory.host_alias_size_in_bytes
        + memory.host_temp_size_in_bytes
    )
    residuals = min(residual_nbytes(jaxpr) // num_devices(params), memory.temp_size_in_bytes)
    if counted_host_bytes is not None:  # one memory: what the policy holds on the host is in the total, and taken out
        host = counted_host_bytes + host_nbytes((params, optimizer_state))
        peak, residuals = peak - host, max(0, residuals - counted_host_bytes)
    by_role = {"param": device_nbytes(params), "optimizer_state": device_nbytes(optimizer_state)}
    by_role["activation"] = residuals
    by_role["temp"] = max(0, peak - sum(by_role.values()))
    return StepFigures(
        peak_bytes=peak,
        by_role=by_role,
        host_bytes=host,
        counted=counted_host_bytes is not None,
        step_flops=flops.count(jaxpr).total,
        collectives=count_collectives(compiled.as_text()),
        notes=(
            "peak: argument + output - alias + temp of the executable, less what is counted as on the host; its split "
            "by role is attributed",
            "collectives: instructions of the compiled program; those in a loop's body count once",
        ),
    )


def device_nbytes(tree: Any) -> int:
    """Bytes one device holds of a tree's arrays that live in device memory."""
    return _held_nbytes(tree, on_host=False)


def host_nbytes(tree: Any) -> int:
    """Bytes held for one device of a tree's arrays that live in pinned host memory."""
    return _held_nbytes(tree, on_host=True)


def _held_nbytes(tree: Any, *, on_host: bool) -> int:
    total = 0
    for leaf in jax.tree.leaves(tree):
        sharding = getattr(leaf, "sharding", None)
        if (sharding is not None and sharding.memory_kind == "pinned_host") != on_host:
            continue
        shape = leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)
        total += _nbytes(shape, leaf.dtype)
    return total


def num_devices(tree: Any) -> int:
    """Devices the tree's arrays are laid over."""
    return max(
        (len(leaf.sharding.device_set) for leaf in jax.tree.leaves(tree) if hasattr(leaf, "sharding")), default=1
    )


def residual_nbytes(jaxpr: Any) -> int:
    """Bytes that forward loops stack up for backward loops, over all devices.

    A residual of a scanned layer is an output stacked by one scan (`ys`) that a later, reversed scan takes apart
    (`xs`). Residuals outside scans are not told from temporaries and stay in `temp`.
    """
    total = 0
    for level in _levels(getattr(jaxpr, "jaxpr", jaxpr)):
        stacked = {}
        for equation in level.eqns:
            if equation.primitive.name != "scan":
                continue
            if equation.params["reverse"]:
                first = sum(scan_counts(equation))
                taken = {id(var) for var in equation.invars[first:]}
                total += sum(size for key, size in stacked.items() if key in taken)
            else:
                outputs = equation.outvars[scan_counts(equation)[1] :]
                stacked.update({id(var): _nbytes(var.aval.shape, var.aval.dtype) for var in outputs})
    return total


def count_collectives(hlo_text: str) -> dict[str, int]:
    """Collective instructions of a compiled program by kind; an asynchronous pair counts once."""
    found = Counter(_COLLECTIVES[match.group(1)] for match in _COLLECTIVE.finditer(hlo_text))
    return dict(sorted(found.items()))


def _levels(jaxpr: Any) -> Any:
    yield jaxpr
    for equation in jaxpr.eqns:
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from _levels(inner)


def _nbytes(shape: tuple[int, ...], dtype: Any) -> int:
    count = 1
    for size in shape:
        count *= size
    return count * jax.numpy.dtype(dtype).itemsize

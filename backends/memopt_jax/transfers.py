"""Finds host transfers and collectives in a scheduled module, in the forms GPUs and TPUs print them.

An asynchronous transfer is a `*-start` whose result or operand lies in host memory (`S(5)`): `copy-start`,
`dynamic-slice-start`, `dynamic-update-slice-start`, and on GPUs a `fusion-start` or `async-start` around one of these.
An operation that is no start and still reads or makes host memory is synchronous: compute stands still for it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .hlo import Array, Computation, Instruction, Module
from .playback import Direction

COLLECTIVES = (
    "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute",
    "collective-broadcast",
)  # fmt: skip

# Instructions that pass a host buffer on without touching its bytes.
_PASSES = frozenset(
    ("tuple", "get-tuple-element", "parameter", "bitcast", "while", "conditional", "call", "optimization-barrier",
     "custom-call", "constant", "after-all", "add-dependency", "domain", "broadcast")
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class HostOp:
    """A host transfer in a schedule.

    Attributes:
        name: Of the instruction that starts (or is) it.
        direction: `to_host` or `to_device`.
        nbytes: Bytes moved once.
        is_synchronous: Whether compute stands still for it.
    """

    name: str
    direction: Direction
    nbytes: int
    is_synchronous: bool


def host_op(module: Module, computation: Computation, item: Instruction) -> HostOp | None:
    """The host transfer an instruction starts or is, or None."""
    if item.opcode in _PASSES or item.opcode.endswith(("-done", "-update")):
        return None
    is_start = item.opcode.endswith("-start")
    result, reads = _ends(computation, item, is_start)
    makes_host = any(array.is_host for array in result)
    reads_host = [array for array in reads if array.is_host]
    if makes_host and reads_host and not _moves_device_bytes(computation, item, reads):
        return None  # host to host
    if not makes_host and not reads_host:
        return None
    direction: Direction = "to_host" if makes_host else "to_device"
    return HostOp(item.name, direction, _moved_bytes(module, computation, item, direction, result), not is_start)


def is_collective(item: Instruction) -> bool:
    """Whether the instruction starts or is a collective (a TPU's fused ones are custom calls and not seen here)."""
    return item.opcode.removesuffix("-start") in COLLECTIVES


def collective_bytes(computation: Computation, item: Instruction) -> float:
    """Bytes that cross one device's link in one direction, by the ring algorithm."""
    kind = item.opcode.removesuffix("-start")
    sent = sum(array.nbytes for name in item.operands for array in _arrays_of(computation, name))
    group = group_size(item)
    if group is not None and group <= 1:
        return 0.0
    share = 1.0 if group is None else (group - 1) / group
    if kind == "all-gather":
        return sent * (group - 1) if group is not None else float(sent)
    if kind == "all-reduce":
        return 2.0 * sent * share
    if kind in ("collective-permute", "collective-broadcast"):
        return float(sent)
    return sent * share


def group_size(item: Instruction) -> int | None:
    """Devices that take part in a collective together; None when the text does not say."""
    mesh = item.attribute(r"replica_groups=mesh\[([^\]]*)\]")
    if mesh is not None:
        used = item.attribute(r"replica_groups=mesh\[[^\]]*\] \{([^}]*)\}") or ""
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", mesh))
        product = 1
        for axis in re.findall(r"'([^']+)'", used):
            product *= int(sizes.get(axis, 1))
        return product
    iota = item.attribute(r"replica_groups=\[\d+,(\d+)\]<=")
    if iota is not None:
        return int(iota)
    listed = item.attribute(r"replica_groups=\{\{([\d,]*)\}")
    return len(listed.split(",")) if listed else None


def _ends(computation: Computation, item: Instruction, is_start: bool) -> tuple[tuple[Array, ...], list[Array]]:
    """The arrays an instruction makes and those it reads."""
    reads = [array for name in item.operands for array in _arrays_of(computation, name)]
    if not is_start:
        return item.arrays, reads
    if item.opcode == "copy-start":  # (destination, source, context)
        return item.arrays[:1], list(item.arrays[1:2])
    return item.arrays[len(reads) :], reads  # ((operands), results, context)


def _moves_device_bytes(computation: Computation, item: Instruction, reads: list[Array]) -> bool:
    """Whether something of a size (no index) comes from the device: an update of a host buffer."""
    return any(not array.is_host and array.num_elements > 1 for array in reads)


def _moved_bytes(
    module: Module, computation: Computation, item: Instruction, direction: Direction, result: tuple[Array, ...]
) -> int:
    wanted = "dynamic-update-slice" if direction == "to_host" else "dynamic-slice"
    if item.opcode.removesuffix("-start") == wanted:
        return _slice_bytes(computation, item, direction, result)
    inside = module.computations.get(item.called or "")
    if inside is not None:
        slices = [inner for inner in inside.instructions if inner.opcode == wanted]
        if slices:
            return sum(_slice_bytes(inside, inner, direction, inner.arrays) for inner in slices)
    if direction == "to_host":
        return sum(array.nbytes for array in result if array.is_host)
    if item.opcode == "copy-start":
        return sum(array.nbytes for array in result)
    return sum(array.nbytes for array in result if array.num_elements > 1)


def _slice_bytes(computation: Computation, item: Instruction, direction: Direction, result: tuple[Array, ...]) -> int:
    if direction == "to_host":
        update = computation.operand(item, 1)
        return update.arrays[0].nbytes if update is not None else 0
    return next((array.nbytes for array in result if not array.is_host), 0)


def _arrays_of(computation: Computation, name: str) -> tuple[Array, ...]:
    item = computation.by_name.get(name)
    return item.arrays if item is not None else ()

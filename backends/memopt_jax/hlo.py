"""Reads the text of a compiled XLA module: computations, instructions, shapes and loops. No framework is imported.

Only what the schedule reader, the offset audit and the FLOP count need is kept. In a scheduled module
(`is_scheduled=true`) the order of instructions in a computation is the order in which they run.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from memopt.errors import MemoptError

from .jaxprs import EXPECTED_TRIPS

HOST_SPACE = 5  # XLA's memory space of pinned host buffers, printed as S(5)

ITEM_BYTES = {
    "pred": 1, "s4": 0.5, "u4": 0.5, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "s32": 4, "u32": 4, "s64": 8, "u64": 8,
    "f16": 2, "bf16": 2, "f32": 4, "f64": 8, "c64": 8, "c128": 16, "token": 0, "opaque": 0,
}  # fmt: skip

_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\](?:\{([^}]*)\})?")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+)(?: \(.*)? -> .*\{\s*$|^(ENTRY )?%?([\w.\-]+) \{\s*$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r"([\w\-]+)\(")
_COMMENT = re.compile(r"/\*.*?\*/")
_REFERENCE = re.compile(r"%([\w.\-]+)")


@dataclass(frozen=True, slots=True)
class Array:
    """One array of a shape: element type, dimensions, layout (minor to major) and memory space."""

    dtype: str
    dims: tuple[int, ...]
    minor_to_major: tuple[int, ...]
    memory_space: int = 0

    @property
    def num_elements(self) -> int:
        """Product of the dimensions."""
        return math.prod(self.dims)

    @property
    def nbytes(self) -> int:
        """Bytes without the padding of tiled layouts."""
        return math.ceil(self.num_elements * item_bytes(self.dtype))

    @property
    def is_host(self) -> bool:
        """Whether it lives in pinned host memory."""
        return self.memory_space == HOST_SPACE

    def strides_bytes(self) -> tuple[float, ...]:
        """Bytes between neighbours along each dimension, by the layout."""
        strides, step = [0.0] * len(self.dims), item_bytes(self.dtype)
        for dim in self.minor_to_major:
            strides[dim] = step
            step *= self.dims[dim]
        return tuple(strides)


@dataclass(slots=True)
class Instruction:
    """One line of a computation.

    Attributes:
        operands: Names of the instructions it reads; for a constant or parameter the literal or number.
        attributes: The text after the operands.
        index: Position in its computation.
    """

    name: str
    opcode: str
    shape_text: str
    operands: tuple[str, ...]
    attributes: str
    is_root: bool
    index: int
    _arrays: tuple[Array, ...] | None = None
    _config: Mapping[str, Any] | None = None

    @property
    def arrays(self) -> tuple[Array, ...]:
        """The arrays of its result, tuples flattened."""
        if self._arrays is None:
            self._arrays = parse_arrays(self.shape_text)
        return self._arrays

    @property
    def config(self) -> Mapping[str, Any]:
        """Its `backend_config`, or an empty mapping."""
        if self._config is None:
            self._config = _backend_config(self.attributes)
        return self._config

    def callee(self, attribute: str) -> str | None:
        """Name of the computation in `attribute` (`calls`, `body`, `condition`, `to_apply`), if it has one."""
        found = re.search(rf"\b{attribute}=%?([\w.\-]+)", self.attributes)
        return found.group(1) if found else None

    def attribute(self, pattern: str) -> str | None:
        """First group of `pattern` in its attributes."""
        found = re.search(pattern, self.attributes)
        return found.group(1) if found else None

    @property
    def called(self) -> str | None:
        """The computation a fusion, call or asynchronous wrapper runs."""
        return self.callee("calls") or (self.callee("to_apply") if self.opcode == "call" else None)

    @property
    def branches(self) -> tuple[str, ...]:
        """The computations of a conditional."""
        listed = self.attribute(r"branch_computations=\{([^}]*)\}")
        if listed is not None:
            return tuple(_REFERENCE.findall(listed))
        pair = (self.callee("true_computation"), self.callee("false_computation"))
        return tuple(name for name in pair if name is not None)


@dataclass(slots=True)
class Computation:
    """A list of instructions in order, found by name too."""

    name: str
    instructions: list[Instruction] = field(default_factory=list)
    by_name: dict[str, Instruction] = field(default_factory=dict)

    @property
    def root(self) -> Instruction:
        """The instruction whose value it returns."""
        return next((item for item in self.instructions if item.is_root), self.instructions[-1])

    def operand(self, instruction: Instruction, position: int) -> Instruction | None:
        """The instruction that makes an operand."""
        if position >= len(instruction.operands):
            return None
        return self.by_name.get(instruction.operands[position])

    def users(self) -> dict[str, list[Instruction]]:
        """Name -> the instructions that read it."""
        users: dict[str, list[Instruction]] = {}
        for item in self.instructions:
            for name in item.operands:
                users.setdefault(name, []).append(item)
        return users


@dataclass
class Module:
    """A compiled module.

    Attributes:
        entry: Name of the entry computation.
        computations: By name.
        is_scheduled: Whether the order of instructions is the order they run in.
    """

    entry: str
    computations: dict[str, Computation]
    is_scheduled: bool

    def __getitem__(self, name: str) -> Computation:
        return self.computations[name]

    @cached_property
    def loops(self) -> dict[str, Instruction]:
        """Body computation -> the `while` that runs it."""
        return {
            body: item
            for computation in self.computations.values()
            for item in computation.instructions
            if item.opcode == "while" and (body := item.callee("body")) is not None
        }

    def trip_count(self, loop: Instruction) -> int | None:
        """Iterations of a `while`, where the compiler knows them, or as many as the program's author expects."""
        known = loop.config.get("known_trip_count", {}).get("n")
        if known is None:
            known = loop.attribute(r'known_trip_count"?[:=]\{"?n"?:"?(\d+)')
        if known is None:
            known = loop.attribute(rf'op_name="[^"]*{EXPECTED_TRIPS}(\d+)\)*/while"')
        return int(known) if known is not None else None

    def callees(self, item: Instruction) -> Iterator[str]:
        """Every computation an instruction runs (a loop's body, not its condition)."""
        names = (item.callee("body"), item.called, *item.branches)
        yield from (name for name in names if name is not None and name in self.computations)


def parse(text: str) -> Module:
    """The module in `text` (what `compiled.as_text()` returns).

    Raises:
        MemoptError: `not-hlo` when there is no entry computation in it.
    """
    computations: dict[str, Computation] = {}
    entry, current = None, None
    for line in text.splitlines():
        if current is None:
            opened = _COMPUTATION.match(line)
            if opened and not line.startswith("HloModule"):
                current = Computation(opened.group(2) or opened.group(4))
                computations[current.name] = current
                entry = current.name if opened.group(1) or opened.group(3) else entry
        elif line.startswith("}"):
            current = None
        else:
            _add_instruction(current, line)
    if entry is None:
        raise MemoptError.of("not-hlo", "the text holds no entry computation; pass what `compiled.as_text()` returns")
    head = text[: text.find("\n") + 1]
    return Module(entry, computations, "is_scheduled=true" in head)


def parse_arrays(shape: str) -> tuple[Array, ...]:
    """The arrays of a shape's text, tuples flattened.

    >>> parse_arrays("bf16[12,2048]{1,0:S(5)}")[0].is_host
    True
    """
    return tuple(_array(*found.groups()) for found in _ARRAY.finditer(shape))


def item_bytes(dtype: str) -> float:
    """Bytes of one element; float8 and float4 formats by the digits in their names."""
    if dtype in ITEM_BYTES:
        return ITEM_BYTES[dtype]
    narrow = re.match(r"f(\d)", dtype)
    if narrow is None:
        raise MemoptError.of("unknown-dtype", f"XLA's element type `{dtype}` is not known to the schedule reader")
    return int(narrow.group(1)) / 8


def _array(dtype: str, dims_text: str, layout: str | None) -> Array:
    dims = tuple(int(size.strip("<=")) for size in dims_text.split(",") if size)
    order, _, rest = (layout or "").partition(":")
    minor_to_major = tuple(int(dim) for dim in order.split(",") if dim) or tuple(reversed(range(len(dims))))
    space = re.search(r"S\((\d+)\)", rest)
    return Array(dtype, dims, minor_to_major, int(space.group(1)) if space else 0)


def _add_instruction(computation: Computation, line: str) -> None:
    found = _INSTRUCTION.match(line)
    if found is None:
        return
    right = found.group(3)
    end = _balanced(right, 0) if right.startswith("(") else right.find(" ")
    shape, rest = right[:end], right[end:].lstrip()
    opcode = _OPCODE.match(rest)
    if opcode is None:
        return
    close = _balanced(rest, opcode.end() - 1)
    inside = rest[opcode.end() : close - 1]
    if opcode.group(1) in ("constant", "parameter"):
        operands: tuple[str, ...] = (inside,)
    else:
        operands = tuple(_REFERENCE.findall(_COMMENT.sub("", inside)))
    item = Instruction(
        name=found.group(2),
        opcode=opcode.group(1),
        shape_text=shape,
        operands=operands,
        attributes=rest[close:],
        is_root=found.group(1) is not None,
        index=len(computation.instructions),
    )
    computation.instructions.append(item)
    computation.by_name[item.name] = item


def _balanced(text: str, start: int) -> int:
    """Index after the bracket that closes the one at `start`."""
    depth = 0
    for position in range(start, len(text)):
        if text[position] == "(":
            depth += 1
        elif text[position] == ")":
            depth -= 1
            if depth == 0:
                return position + 1
    return len(text)


def _backend_config(attributes: str) -> Mapping[str, Any]:
    start = attributes.find("backend_config={")
    if start < 0:
        return {}
    try:
        config, _ = json.JSONDecoder().raw_decode(attributes, start + len("backend_config="))
    except json.JSONDecodeError:
        return {}  # some TPU custom calls carry text that is no JSON; nothing here reads those
    return config

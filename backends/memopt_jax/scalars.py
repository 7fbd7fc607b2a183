"""Evaluates the integer scalars of a compiled module: loop counters, slice offsets, loop conditions.

This follows the data flow of the program itself, iteration by iteration, and trusts no annotation of the compiler. A
value that depends on data is `None`; whoever needs it must treat it as unknown.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from .hlo import Computation, Instruction, Module

Value = Any  # int, a tuple of Values for a tuple-shaped result, or None for unknown

MAX_ITERATIONS = 100_000  # a loop that runs longer is left unknown rather than followed

_COMPARE: dict[str, Callable[[int, int], bool]] = {
    "LT": operator.lt, "LE": operator.le, "GT": operator.gt, "GE": operator.ge, "EQ": operator.eq, "NE": operator.ne,
}  # fmt: skip
_BINARY: dict[str, Callable[[int, int], int]] = {
    "add": operator.add, "subtract": operator.sub, "multiply": operator.mul, "minimum": min, "maximum": max,
    "and": operator.and_, "or": operator.or_, "xor": operator.xor,
}  # fmt: skip
_SAME_VALUE = frozenset(
    (
        "copy",
        "bitcast",
        "convert",
        "reshape",
        "broadcast",
        "optimization-barrier",
        "copy-start",
        "copy-done",
        "transpose",
    )
)
_CALLS = frozenset(("fusion", "call", "fusion-start", "async-start", "call-start"))


@dataclass(slots=True)
class Frame:
    """One run of a computation with known parameters; values are computed when asked for."""

    module: Module
    computation: Computation
    parameters: tuple[Value, ...]
    _known: dict[str, Value] = field(default_factory=dict)

    def value(self, name: str) -> Value:
        """The value of an instruction in this run."""
        if name not in self._known:
            item = self.computation.by_name.get(name)
            self._known[name] = None if item is None else self._evaluate(item)
        return self._known[name]

    def operand(self, item: Instruction, position: int) -> Value:
        """The value of an instruction's operand."""
        return self.value(item.operands[position]) if position < len(item.operands) else None

    def call(self, callee: str, arguments: tuple[Value, ...]) -> Frame:
        """A run of another computation."""
        return Frame(self.module, self.module[callee], arguments)

    def result(self) -> Value:
        """The value the computation returns."""
        return self.value(self.computation.root.name)

    def arguments_of(self, item: Instruction) -> tuple[Value, ...]:
        """The values of all operands."""
        return tuple(self.value(name) for name in item.operands)

    def _evaluate(self, item: Instruction) -> Value:
        if item.opcode == "tuple":
            return self.arguments_of(item)
        if item.opcode == "get-tuple-element":
            return self._element(item)
        if item.opcode == "parameter":
            number = int(item.operands[0])
            return self.parameters[number] if number < len(self.parameters) else None
        if item.opcode == "while":
            return self._after_loop(item)
        callee = item.called
        if item.opcode in _CALLS and callee is not None:
            return self.call(callee, self.arguments_of(item)).result()
        if item.opcode == "optimization-barrier":
            return self.operand(item, 0)
        if any(array.num_elements != 1 for array in item.arrays):
            return None
        return self._scalar(item)

    def _scalar(self, item: Instruction) -> Value:
        if item.opcode == "constant":
            return _literal(item.operands[0])
        if item.opcode in _SAME_VALUE:
            return self.operand(item, 0)
        values = self.arguments_of(item)
        if item.opcode == "select" and values[0] is not None:
            return values[1] if values[0] else values[2]
        numbers = [value for value in values if isinstance(value, int)]
        if not numbers or len(numbers) != len(values):
            return None
        return _arithmetic(item, numbers)

    def _element(self, item: Instruction) -> Value:
        whole = self.operand(item, 0)
        index = int(item.attribute(r"index=(\d+)") or 0)
        return whole[index] if isinstance(whole, tuple) and index < len(whole) else None

    def _after_loop(self, item: Instruction) -> Value:
        *_, state = self.iterations(item, and_after=True)
        return state

    def iterations(self, loop: Instruction, *, and_after: bool = False) -> Iterator[Value]:
        """The loop's state before each iteration; with `and_after`, the state when it ends as well.

        The number of iterations follows from the condition, else from the compiler's annotation. Where neither is
        known a single unknown state is given.
        """
        body, condition = loop.callee("body"), loop.callee("condition")
        annotated = self.module.trip_count(loop)
        state = self.operand(loop, 0)
        for number in range(MAX_ITERATIONS):
            goes_on = self.call(condition, (state,)).result() if condition in self.module.computations else None
            if goes_on is None and annotated is not None:
                goes_on = number < annotated
            if goes_on is None:
                yield None
                return
            if not goes_on:
                if and_after:
                    yield state
                return
            yield state
            state = self.call(body, (state,)).result() if body is not None else None
        yield None


def entry_frame(module: Module) -> Frame:
    """A run of the whole module on unknown data."""
    return Frame(module, module[module.entry], ())


def _arithmetic(item: Instruction, numbers: list[int]) -> int | None:
    if item.opcode in _BINARY:
        return _BINARY[item.opcode](numbers[0], numbers[1])
    if item.opcode == "compare":
        return int(_COMPARE[item.attribute(r"direction=(\w\w)") or "EQ"](numbers[0], numbers[1]))
    if item.opcode == "clamp":
        return min(max(numbers[0], numbers[1]), numbers[2])
    if item.opcode == "negate":
        return -numbers[0]
    if item.opcode in ("divide", "remainder") and numbers[1] != 0:
        quotient = abs(numbers[0]) // abs(numbers[1]) * (1 if numbers[0] * numbers[1] >= 0 else -1)
        return quotient if item.opcode == "divide" else numbers[0] - quotient * numbers[1]
    return None


def _literal(text: str) -> int | None:
    if text in ("true", "false"):
        return int(text == "true")
    try:
        return int(text.strip("{} "))
    except ValueError:
        return None


def trip_counts(module: Module) -> dict[str, int | None]:
    """Body computation -> iterations of its loop on the first time it is reached; None where it cannot be known."""
    counts: dict[str, int | None] = {}

    def visit(frame: Frame) -> None:
        for item in frame.computation.instructions:
            body = item.callee("body") if item.opcode == "while" else None
            if body is not None and body not in counts:
                states = list(frame.iterations(item))
                counts[body] = None if states == [None] and module.trip_count(item) != 1 else len(states)
                visit(frame.call(body, (states[0] if states else None,)))
            elif body is None and item.opcode != "fusion":
                for callee in module.callees(item):
                    visit(frame.call(callee, () if item.branches else frame.arguments_of(item)))

    visit(entry_frame(module))
    return counts

"""Counts matrix-product FLOPs of a step, on its jaxpr and in its compiled program.

XLA's own cost analysis counts a loop's body once and gives nothing without a device, so both counts are made here: each
product is 2·m·k·n, times the length of every loop around it. Near the memory limit XLA recomputes on its own; the
difference between the two counts shows it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from . import hlo
from .hlo import Computation, Instruction, Module
from .jaxprs import expected_trips
from .scalars import trip_counts


@dataclass(frozen=True, slots=True)
class FlopCount:
    """FLOPs of the matrix products.

    Attributes:
        total: FLOPs; over all devices for a jaxpr, of one device for a compiled program.
        num_unknown_loops: Loops whose length is not in the program; their bodies are counted once.
    """

    total: float
    num_unknown_loops: int = 0


def count(jaxpr: Any) -> FlopCount:
    """FLOPs of a (closed) jaxpr over all devices.

    Scans count their length, and a loop whose length the data decides the one its scope says it expects; of a
    conditional's branches the costliest counts; a `shard_map` counts once per device.
    """
    total, unknown = _count_jaxpr(getattr(jaxpr, "jaxpr", jaxpr))
    return FlopCount(total, unknown)


def count_compiled(module: Module) -> FlopCount:
    """FLOPs of one device's compiled program."""
    costs = CompiledCosts(module)
    unknown = sum(trips is None for trips in costs.trips.values())
    return FlopCount(costs.computation(module.entry), unknown)


class CompiledCosts:
    """FLOPs of any instruction of a compiled module, loops and fusions included."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self.trips = trip_counts(module)
        self._known: dict[str, float] = {}

    def computation(self, name: str) -> float:
        """FLOPs of one run of a computation."""
        if name not in self._known:
            self._known[name] = 0.0
            computation = self.module[name]
            self._known[name] = sum(self.instruction(computation, item) for item in computation.instructions)
        return self._known[name]

    def instruction(self, computation: Computation, item: Instruction) -> float:
        """FLOPs of one instruction; of a conditional the costliest branch."""
        if item.opcode in _PRODUCTS:
            return _PRODUCTS[item.opcode](computation, item)
        body = item.callee("body") if item.opcode == "while" else None
        if body is not None:
            return (self.trips.get(body) or 1) * self.computation(body)
        if item.branches:
            return max((self.computation(name) for name in item.branches), default=0.0)
        called = item.called
        return self.computation(called) if called in self.module.computations else 0.0


def _dims(text: str | None) -> tuple[int, ...]:
    return tuple(int(dim) for dim in re.findall(r"\d+", text or ""))


def _dot(computation: Computation, item: Instruction) -> float:
    left = computation.operand(item, 0)
    if left is None:
        return 0.0
    contracted = _dims(item.attribute(r"lhs_contracting_dims=\{([\d,]*)\}"))
    return 2.0 * item.arrays[0].num_elements * math.prod(left.arrays[0].dims[dim] for dim in contracted)


def _library_product(computation: Computation, item: Instruction) -> float:
    """A matrix product handed to cuBLAS; other custom calls count nothing."""
    left = computation.operand(item, 0)
    if left is None or not (item.attribute(r'custom_call_target="([^"]*)"') or "").startswith("__cublas$"):
        return 0.0
    listed = item.attribute(r'"lhs_contracting_dimensions":\[([^\]]*)\]')
    return 2.0 * item.arrays[0].num_elements * math.prod(left.arrays[0].dims[dim] for dim in _dims(listed))


def _convolution(computation: Computation, item: Instruction) -> float:
    """A TPU's matrix product, or a real convolution; only kernel positions that meet the input count."""
    left, kernel = computation.operand(item, 0), computation.operand(item, 1)
    labels = item.attribute(r"dim_labels=([\w?]+_[\w?]+->[\w?]+)")
    if left is None or kernel is None or labels is None:
        return 0.0
    left_labels, kernel_labels, out_labels = re.split(r"_|->", labels)
    output, products = item.arrays[0], 2.0
    products *= output.dims[out_labels.index("b")] * output.dims[out_labels.index("f")]
    products *= kernel.arrays[0].dims[kernel_labels.index("i")]
    groups = int(item.attribute(r"batch_group_count=(\d+)") or 1)
    window = _window(item.attribute(r"window=\{([^}]*)\}") or "", len(out_labels) - 2)
    for place in range(len(out_labels) - 2):
        digit = str(place)
        products *= _meeting_positions(
            left.arrays[0].dims[left_labels.index(digit)],
            kernel.arrays[0].dims[kernel_labels.index(digit)],
            output.dims[out_labels.index(digit)],
            window[place],
        )
    return products / groups


def _window(text: str, num_dims: int) -> list[dict[str, tuple[int, ...]]]:
    fields = {key: value.split("x") for key, value in re.findall(r"(\w+)=([\w\-]+)", text)}
    defaults = {"stride": "1", "pad": "0_0", "lhs_dilate": "1", "rhs_dilate": "1", "rhs_reversal": "0"}
    return [
        {
            key: tuple(int(part) for part in (fields[key][dim] if key in fields else default).split("_"))
            for key, default in defaults.items()
        }
        for dim in range(num_dims)
    ]


def _meeting_positions(input_size: int, kernel_size: int, output_size: int, window: dict[str, tuple[int, ...]]) -> int:
    """Pairs of kernel and output positions that fall on a real input element along one dimension."""
    (stride,), (dilate,), (kernel_dilate,) = window["stride"], window["lhs_dilate"], window["rhs_dilate"]
    pad = window["pad"][0]
    meeting = 0
    for kernel_at in range(kernel_size):
        for output_at in range(output_size):
            at = output_at * stride + kernel_at * kernel_dilate - pad
            meeting += at % dilate == 0 and 0 <= at // dilate < input_size
    return meeting


_PRODUCTS = {"dot": _dot, "custom-call": _library_product, "convolution": _convolution}


def _count_jaxpr(jaxpr: Any) -> tuple[float, int]:
    total, unknown = 0.0, 0
    for equation in jaxpr.eqns:
        own, own_unknown = _count_equation(equation)
        total, unknown = total + own, unknown + own_unknown
    return total, unknown


def _count_equation(equation: Any) -> tuple[float, int]:
    name, parameters = equation.primitive.name, equation.params
    if name == "dot_general":
        (contracted, _), _ = parameters["dimension_numbers"]
        shape = equation.invars[0].aval.shape
        return 2.0 * math.prod(equation.outvars[0].aval.shape) * math.prod(shape[dim] for dim in contracted), 0
    if name == "conv_general_dilated":
        kernel = equation.invars[1].aval.shape
        out_feature = parameters["dimension_numbers"].rhs_spec[0]
        return 2.0 * math.prod(equation.outvars[0].aval.shape) * math.prod(kernel) / kernel[out_feature], 0
    if name.startswith("ragged_dot"):
        return 2.0 * math.prod(equation.outvars[0].aval.shape) * equation.invars[0].aval.shape[-1], 0
    if name == "cond":
        branches = [_count_jaxpr(branch.jaxpr) for branch in parameters["branches"]]
        return max((total for total, _ in branches), default=0.0), sum(unknown for _, unknown in branches)
    if name == "while":
        total, unknown = _count_jaxpr(parameters["body_jaxpr"].jaxpr)
        expected = expected_trips(equation)
        return total * (expected or 1), unknown + (expected is None)
    times = parameters["length"] if name == "scan" else 1
    if name == "shard_map":
        times = math.prod(parameters["mesh"].shape.values())
    counted = [_count_jaxpr(inner) for inner in _inner_jaxprs(parameters.values())]
    return times * sum(total for total, _ in counted), sum(unknown for _, unknown in counted)


def _inner_jaxprs(values: Any) -> Iterator[Any]:
    for value in values:
        if hasattr(value, "eqns"):
            yield value
        elif hasattr(value, "jaxpr") and hasattr(value.jaxpr, "eqns"):
            yield value.jaxpr
        elif isinstance(value, Sequence) and not isinstance(value, str):
            yield from _inner_jaxprs(value)


def parse_and_count(text: str) -> FlopCount:
    """FLOPs of what `compiled.as_text()` returns."""
    return count_compiled(hlo.parse(text))

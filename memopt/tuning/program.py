"""The mixed-integer program: counts of kept, offloaded and recomputed layers, and the step's start times.

A *block* is a run of layers of one class. In blocks of one layer the constraints are the schedule itself: an end is at
least every wait plus a duration, so the smallest feasible end is the simulated one. In longer blocks a layer's part of
the block stands for it. Chains: a tensor is recomputed in at most as many layers of a block as have what it is made
from; with counts that is exact too, since layers can be nested (the first `n` layers of a block, tensor by tensor).
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, OptimizeResult, milp
from scipy.sparse import coo_array

from .problem import LayerClass, Problem

Linear = dict[int, float]
"""Variable index -> coefficient; the constant term is under -1."""
CONST = -1


@dataclass(frozen=True, slots=True)
class Block:
    """`size` layers of one class."""

    layer: LayerClass
    size: int


@dataclass(frozen=True, slots=True)
class Counts:
    """Per choice of a block: layers that keep, offload, recompute; the rest drop."""

    keep: tuple[int, ...]
    offload: tuple[int, ...]
    recompute: tuple[int, ...]


class Rows:
    """Variables, bounds and constraints, collected and handed to HiGHS; times and bytes are scaled to about 100."""

    def __init__(self) -> None:
        self.upper: list[float] = []
        self.integral: list[bool] = []
        self.rows: list[tuple[Linear, float, float]] = []

    def variable(self, *, upper: float = math.inf, integral: bool = False) -> int:
        self.upper.append(upper)
        self.integral.append(integral)
        return len(self.upper) - 1

    def at_least(self, left: Linear, right: Linear) -> None:
        """left >= right."""
        row = plus(left, right, factor=-1.0)
        self.rows.append((row, -row.pop(CONST, 0.0), math.inf))

    def solve(self, objective: Linear, *, time_limit_s: float, rel_gap: float) -> OptimizeResult:
        costs = np.zeros(len(self.upper))
        for index, value in objective.items():
            if index != CONST:
                costs[index] = value
        entries = [
            (number, index, value) for number, (row, _, _) in enumerate(self.rows) for index, value in row.items()
        ]
        numbers, indices, values = (np.array(part) for part in zip(*entries, strict=True))
        matrix = coo_array((values, (numbers, indices)), shape=(len(self.rows), len(self.upper))).tocsr()
        low, high = np.array([low for _, low, _ in self.rows]), np.array([high for _, _, high in self.rows])
        with _stdout_to_stderr():
            return self._milp(costs, matrix, low, high, time_limit_s=time_limit_s, rel_gap=rel_gap)

    def _milp(
        self, costs: Any, matrix: Any, low: Any, high: Any, *, time_limit_s: float, rel_gap: float
    ) -> OptimizeResult:
        return milp(
            costs,
            constraints=LinearConstraint(matrix, low, high),  # pyright: ignore[reportArgumentType]
            integrality=np.array(self.integral, dtype=int),
            bounds=Bounds(np.zeros(len(self.upper)), np.array(self.upper)),  # pyright: ignore[reportArgumentType]
            options={"time_limit": time_limit_s, "mip_rel_gap": rel_gap},
        )


@contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """HiGHS now and then prints a line of its own to the process's standard output, which may carry a JSON document."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def plus(*terms: Linear, factor: float = 1.0) -> Linear:
    """The first term plus `factor` times each other."""
    total = dict(terms[0])
    for term in terms[1:]:
        for index, value in term.items():
            total[index] = total.get(index, 0.0) + factor * value
    return total


def times(term: Linear, factor: float) -> Linear:
    """Every coefficient multiplied."""
    return {index: value * factor for index, value in term.items()}


def const(value: float) -> Linear:
    """A constant term."""
    return {CONST: value}


class Program:
    """One problem over given blocks. `max_cuts` bounds the tensors that are treated unlike in layers of one block."""

    def __init__(self, problem: Problem, blocks: tuple[Block, ...], *, max_cuts: int | None = None) -> None:
        self.problem, self.blocks, self.rows = problem, blocks, Rows()
        self.time_unit = max(1e-12, sum((b.layer.forward_s + b.layer.backward_s) * b.size for b in blocks) / 100)
        total_bytes = sum(choice.nbytes * b.size for b in blocks for choice in b.layer.choices)
        self.byte_unit = max(1.0, total_bytes / 100)
        self.counts = [self._count_variables(block) for block in blocks]
        self.stage = self.rows.variable()
        self.peak = self.rows.variable()
        self.end = self.rows.variable()
        self.wholes: list[list[dict[str, int]]] = [[] for _ in blocks]
        if max_cuts is not None:
            self._limit_cuts(max_cuts)
        self._memory()
        self._schedule()

    def _count_variables(self, block: Block) -> list[dict[str, int]]:
        counts = []
        for choice in block.layer.choices:
            offloadable = "offload" in choice.actions and self.problem.link is not None
            allowed = {
                "keep": "keep" in choice.actions,
                "offload": offloadable,
                "recompute": "recompute" in choice.actions,
            }
            counts.append(
                {name: self.rows.variable(upper=block.size if ok else 0, integral=True) for name, ok in allowed.items()}
            )
        by_name = {choice.name: count for choice, count in zip(block.layer.choices, counts, strict=True)}
        for choice, count in zip(block.layer.choices, counts, strict=True):
            available = dict.fromkeys(count.values(), 1.0)
            self.rows.at_least(const(block.size), available)
            if choice.needed:
                self.rows.at_least(available, const(block.size))
            for parent in choice.parents:
                parents = dict.fromkeys(by_name[parent].values(), 1.0)
                self.rows.at_least(parents, {count["recompute"]: 1.0})
        return counts

    def _limit_cuts(self, max_cuts: int) -> None:
        """A choice is treated alike in all layers of a block, or it is one of the few that are cut."""
        cuts: Linear = {}
        for number, block in enumerate(self.blocks):
            for choice, count in zip(block.layer.choices, self.counts[number], strict=True):
                cut = self.rows.variable(upper=1, integral=True)
                whole = {name: self.rows.variable(upper=1, integral=True) for name in count}
                one: Linear = {cut: 1.0, **dict.fromkeys(whole.values(), 1.0)}
                if not choice.needed:
                    one[self.rows.variable(upper=1, integral=True)] = 1.0
                self.rows.at_least(one, const(1))
                self.rows.at_least(const(1), one)
                for name, index in count.items():
                    self.rows.at_least({index: 1.0}, {whole[name]: float(block.size)})
                    self.rows.at_least({whole[name]: float(block.size), cut: float(block.size)}, {index: 1.0})
                cuts[cut] = 1.0
                self.wholes[number].append({**whole, "cut": cut})
        self.rows.at_least(const(max_cuts), cuts)

    def _sum(self, number: int, action: str, weights: list[float]) -> Linear:
        pairs = zip(self.counts[number], weights, strict=True)
        return {count[action]: weight for count, weight in pairs if weight}

    def _bytes(self, number: int, action: str) -> Linear:
        return self._sum(number, action, [c.nbytes / self.byte_unit for c in self.blocks[number].layer.choices])

    def _memory(self) -> None:
        problem, rows = self.problem, self.rows
        kept: Linear = const(problem.static_bytes / self.byte_unit)
        offloaded: Linear = {}
        for number in range(len(self.blocks)):
            kept = plus(kept, self._bytes(number, "keep"))
            offloaded = plus(offloaded, self._bytes(number, "offload"))
            rows.at_least({self.stage: 1.0}, self._one_layer(number, "offload"))
            worst = plus(kept, self._one_layer(number, "own"), {self.stage: float(problem.buffers)})
            rows.at_least({self.peak: 1.0}, worst)
        self.device_row = len(rows.rows)
        rows.at_least(const(problem.device_bytes / self.byte_unit), {self.peak: 1.0})
        rows.at_least(const(min(problem.host_bytes, 1e30) / self.byte_unit), offloaded)

    def _one_layer(self, number: int, what: str) -> Linear:
        """Bytes of the block's worst layer: what it offloads, or what it neither keeps nor offloads."""
        block = self.blocks[number]
        total: Linear = {}
        for place, choice in enumerate(block.layer.choices):
            size, count = choice.nbytes / self.byte_unit, self.counts[number][place]
            if block.size == 1:
                part = {count["offload"]: size}
                rest = plus(const(size), {count["keep"]: size, count["offload"]: size}, factor=-1.0)
            else:
                whole = self.wholes[number][place]
                part = {whole["offload"]: size, whole["cut"]: size}
                rest = plus(const(size), {whole["keep"]: size, whole["offload"]: size}, factor=-1.0)
            total = plus(total, part if what == "offload" else rest)
        return total

    def _copy(self, number: int) -> Linear:
        """Seconds of the block's copies in one direction with nobody beside them, scaled."""
        if self.problem.link is None:
            return {}
        scale = self.byte_unit / self.problem.link.rate(1) / self.time_unit
        return times(self._bytes(number, "offload"), scale)

    def _schedule(self) -> None:
        forwards, copies = self._forwards()
        middle = self.rows.variable()
        self.rows.at_least({middle: 1.0}, plus({forwards[-1]: 1.0}, const(self.problem.middle_s / self.time_unit)))
        backwards = self._backwards(forwards[-1], middle, copies)
        self.rows.at_least({self.end: 1.0}, {backwards[0]: 1.0})

    def _forwards(self) -> tuple[list[int], list[int]]:
        """End variables of the blocks' forward passes and of their copies to the host."""
        rows, depth = self.rows, self.problem.buffers
        ends: list[int] = []
        copies: list[int] = []
        gathered: int | None = None
        for number, block in enumerate(self.blocks):
            one_s, copy = block.layer.forward_s / self.time_unit, self._copy(number)
            start, end, sent = rows.variable(), rows.variable(), rows.variable()
            if ends:
                rows.at_least({start: 1.0}, {ends[-1]: 1.0})
                rows.at_least({sent: 1.0}, plus({copies[-1]: 1.0}, copy))
            if number >= depth and block.size == 1:
                rows.at_least({start: 1.0}, {copies[number - depth]: 1.0})
            rows.at_least({end: 1.0}, plus({start: 1.0}, const(one_s * block.size)))
            rows.at_least({sent: 1.0}, plus({end: 1.0}, times(copy, 1 / block.size)))
            rows.at_least({sent: 1.0}, plus({start: 1.0}, const(one_s), copy))
            if block.size > depth:
                self._staged(block.size, start, end, const(one_s), copy, copies)
            gathered = self._gather_forward(number, gathered, ends, start, end)
            ends.append(end)
            copies.append(sent)
        return ends, copies

    def _staged(self, size: int, start: int, end: int, one: Linear, copy: Linear, copies: list[int]) -> None:
        """A long block's last layer starts only once the copies of all but the last `buffers` layers have left."""
        left = times(copy, (size - self.problem.buffers) / size)
        self.rows.at_least({end: 1.0}, plus({start: 1.0}, one, one, left))
        if copies:
            self.rows.at_least({end: 1.0}, plus({copies[-1]: 1.0}, one, left))
        if self.problem.buffers == 1:  # nothing overlaps: each layer waits for the copy of the one before
            self.rows.at_least({end: 1.0}, plus({start: 1.0}, times(one, size), times(copy, (size - 1) / size)))

    def _gather_forward(self, number: int, before: int | None, ends: list[int], start: int, end: int) -> int | None:
        block, rows = self.blocks[number], self.rows
        gather_s = block.layer.gather_s / self.time_unit
        if not gather_s:
            return before
        done = rows.variable()
        whole = const(gather_s * block.size)
        rows.at_least({done: 1.0}, plus({before: 1.0}, whole) if before is not None else whole)
        if block.size == 1:
            if number > 1:
                rows.at_least({done: 1.0}, plus({ends[number - 2]: 1.0}, whole))
            rows.at_least({start: 1.0}, {done: 1.0})
        else:
            rows.at_least({end: 1.0}, plus({done: 1.0}, const(block.layer.forward_s / self.time_unit)))
            rows.at_least({start: 1.0}, plus({done: 1.0}, const(-gather_s * (block.size - 1))))
        return done

    def _backwards(self, last_forward: int, middle: int, copies: list[int]) -> list[int]:
        rows = self.rows
        ends = [rows.variable() for _ in self.blocks]
        durations = [self._backward_seconds(number) for number in range(len(self.blocks))]
        collective = _Collectives(self, ends, last_forward)
        returned: int | None = None
        for number in reversed(range(len(self.blocks))):
            block, start = self.blocks[number], rows.variable()
            rows.at_least({start: 1.0}, {middle: 1.0})
            if number + 1 < len(self.blocks):
                rows.at_least({start: 1.0}, {ends[number + 1]: 1.0})
            rows.at_least({ends[number]: 1.0}, plus({start: 1.0}, durations[number]))
            if self.problem.link is not None:
                returned = self._return(number, returned, copies, ends)
                copy = self._copy(number)
                rows.at_least({start: 1.0}, plus({returned: 1.0}, times(copy, -(block.size - 1) / block.size)))
                rows.at_least({ends[number]: 1.0}, plus({returned: 1.0}, times(durations[number], 1 / block.size)))
            collective.add(number, start, durations[number])
        collective.finish()
        return ends

    def _backward_seconds(self, number: int) -> Linear:
        block = self.blocks[number]
        again = self._sum(number, "recompute", [c.recompute_s / self.time_unit for c in block.layer.choices])
        fixed_s = (block.layer.backward_s + block.layer.recompute_s) * block.size
        return plus(const(fixed_s / self.time_unit), again)

    def _return(self, number: int, before: int | None, copies: list[int], ends: list[int]) -> int:
        """End variable of the block's copies back; only what was sent has to have left first."""
        rows, depth, block = self.rows, self.problem.buffers, self.blocks[number]
        done, copy, used = rows.variable(), self._copy(number), rows.variable(upper=1, integral=True)
        counts = {count["offload"]: 1.0 for count in self.counts[number]}
        rows.at_least({used: float(block.size * len(block.layer.choices))}, counts)
        horizon = 1e4
        left = plus({copies[number]: 1.0}, copy, {used: horizon}, const(-horizon))
        rows.at_least({done: 1.0}, left)
        if before is not None:
            rows.at_least({done: 1.0}, plus({before: 1.0}, copy))
        if block.size == 1 and number + depth < len(self.blocks):
            rows.at_least({done: 1.0}, plus({ends[number + depth]: 1.0}, copy))
        return done


class _Collectives:
    """The backward's gathers and reductions on their one stream, in the order they are asked for."""

    def __init__(self, program: Program, ends: list[int], last_forward: int) -> None:
        self.program, self.ends, self.last_forward = program, ends, last_forward
        self.before: int | None = None
        self.gathered: dict[int, int] = {}
        count = len(program.blocks)
        self._gather(count - 1)
        self._gather(count - 2)

    def _task(self, seconds: float, after: int) -> int:
        rows, done = self.program.rows, self.program.rows.variable()
        length = const(seconds / self.program.time_unit)
        rows.at_least({done: 1.0}, plus({after: 1.0}, length))
        if self.before is not None:
            rows.at_least({done: 1.0}, plus({self.before: 1.0}, length))
        self.before = done
        return done

    def _gather(self, number: int) -> None:
        if number < 0:
            return
        block = self.program.blocks[number]
        if block.layer.again_s:
            after = self.ends[number + 2] if number + 2 < len(self.ends) else self.last_forward
            self.gathered[number] = self._task(block.layer.again_s * block.size, after)

    def add(self, number: int, start: int, duration: Linear) -> None:
        block, rows = self.program.blocks[number], self.program.rows
        if number in self.gathered:
            done = {self.gathered[number]: 1.0}
            if block.size == 1:
                rows.at_least({start: 1.0}, done)
            else:
                rows.at_least({self.ends[number]: 1.0}, plus(done, times(duration, 1 / block.size)))
        self._gather(number - 2)
        if block.layer.reduce_s:
            self._task(block.layer.reduce_s * block.size, self.ends[number])

    def finish(self) -> None:
        if self.before is not None:
            self.program.rows.at_least({self.program.end: 1.0}, {self.before: 1.0})

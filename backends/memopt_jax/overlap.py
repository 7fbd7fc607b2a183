"""Reads a compiled program's schedule: what moves between device and host, what it hides under, what is exposed.

The schedule is played on a timeline (`playback.py`) at the target's rates. Compute is the matrix products alone unless
asked otherwise, at a stated share of the peak: a model, not a measurement, and it errs towards exposing transfers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from memopt.errors import MemoptError
from memopt.roofline import FABRIC_DEVICES, NETWORK_BYTES_PER_S
from memopt.targets import Target

from . import hlo
from .flops import CompiledCosts
from .hlo import Computation, Instruction, Module
from .playback import Direction, Playback, Rates
from .transfers import HostOp, collective_bytes, group_size, host_op, is_collective

DEFAULT_MFU = 0.5
MAX_PLAYED = 4_000  # iterations of one loop that are played at most where no steady state shows


@dataclass(frozen=True, slots=True)
class Transfer:
    """One host transfer of the schedule.

    Attributes:
        name: The instruction.
        direction: `to_host` or `to_device`.
        nbytes: Bytes moved each time.
        times: How often in a step.
        compute_s: Compute scheduled between its start and its end, each time.
        transfer_s: At the link's rate, each time.
        exposed_s: Compute stalled for it, over the whole step.
        in_loop: False for those before, between and after loops: peeled iterations and single tensors.
    """

    name: str
    direction: Direction
    nbytes: int
    times: int
    compute_s: float
    transfer_s: float
    exposed_s: float
    in_loop: bool

    @property
    def hidden_fraction(self) -> float:
        """The share of it that the compute between start and end could cover, by itself."""
        return min(1.0, self.compute_s / self.transfer_s) if self.transfer_s else 1.0

    def to_json(self) -> dict[str, Any]:
        """Every attribute and the hidden fraction."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return {**values, "hidden_fraction": self.hidden_fraction}


@dataclass(frozen=True, slots=True)
class OverlapReport:
    """A schedule played at a target's rates, per device and step.

    Attributes:
        transfers: Asynchronous transfers, in program order.
        synchronous: Transfers during which compute stands still: each is exposed whole.
        step_s: End of the timeline: matrix products, stalls and (where asked for) collectives.
        compute_s: Matrix products.
        transfer_s: Union of the intervals in which a transfer runs.
        exposed_s: Union of the intervals in which compute stalls for transfers, synchronous ones included.
        exposed_outside_loops_s: The part of it that is due to transfers outside loops (peeled iterations).
        collective_exposed_s: Compute stalled for collectives.
        to_host_bytes, to_device_bytes: Over the link in a step.
        rates: What it was played at.
        num_unknown_loops: Loops whose length the program does not tell; played once.
    """

    transfers: tuple[Transfer, ...]
    synchronous: tuple[Transfer, ...]
    step_s: float
    compute_s: float
    transfer_s: float
    exposed_s: float
    exposed_outside_loops_s: float
    collective_exposed_s: float
    to_host_bytes: int
    to_device_bytes: int
    rates: Rates
    collectives: dict[str, dict[str, int]] = field(default_factory=dict)
    num_unknown_loops: int = 0

    @property
    def hidden_fraction(self) -> float:
        """Share of the transfer time that compute (or another stall) covers; 1 when nothing moves."""
        return max(0.0, 1.0 - self.exposed_s / self.transfer_s) if self.transfer_s else 1.0

    @property
    def exposed_fraction(self) -> float:
        """Exposed seconds over the step's."""
        return self.exposed_s / self.step_s if self.step_s else 0.0

    def to_json(self) -> dict[str, Any]:
        """The contract's `overlap` keys (less the audit) and the totals."""
        return {
            "transfers": [transfer.to_json() for transfer in self.transfers],
            "synchronous": [transfer.to_json() for transfer in self.synchronous],
            "exposed_s": self.exposed_s,
            "hidden_fraction": self.hidden_fraction,
            "exposed_outside_loops_s": self.exposed_outside_loops_s,
            "transfer_s": self.transfer_s,
            "compute_s": self.compute_s,
            "collective_exposed_s": self.collective_exposed_s,
            "step_s": self.step_s,
        }


def rates_of(
    target: Target,
    *,
    mfu: float = DEFAULT_MFU,
    host_link_bytes_per_s: float | None = None,
    shared_dram: bool = True,
    collectives: bool = True,
    memory_bound_ops: bool = False,
) -> Rates:
    """The rates to play a schedule at.

    Args:
        target: Where it would run.
        mfu: Share of the peak that matrix products reach.
        host_link_bytes_per_s: Instead of the target's.
        shared_dram: Bound transfers by the device's share of its host's memory bandwidth too.
        collectives: Put collectives on the timeline.
        memory_bound_ops: Let operations other than matrix products take time as well.

    Raises:
        MemoptError: `no-link-rate`, where the target's host link is not published and none is given.
    """
    link = host_link_bytes_per_s or target.host_link_bytes_per_s
    if link is None or target.bf16_flops is None:
        raise MemoptError.of(
            "no-link-rate",
            f"the rate of the host link of `{target.name}` is not published, so exposed time cannot be modelled",
            hint="pass host_link_bytes_per_s=, measured on that machine",
        )
    dram = target.host_dram_bytes_per_s
    return Rates(
        flops=target.bf16_flops * mfu,
        host_link_bytes_per_s=link,
        host_dram_bytes_per_s=dram / target.devices_per_host_dram if shared_dram and dram is not None else None,
        fabric_bytes_per_s=target.fabric_bytes_per_s if collectives else None,
        network_bytes_per_s=NETWORK_BYTES_PER_S.get(target.model),
        fabric_devices=FABRIC_DEVICES.get(target.model),
        hbm_bytes_per_s=target.hbm_bytes_per_s if memory_bound_ops else None,
    )


def read(text_or_module: str | Module, target: Target, *, rates: Rates | None = None) -> OverlapReport:
    """Plays the schedule in a compiled program's text.

    Args:
        text_or_module: What `compiled.as_text()` returns, or that parsed.
        target: The device it was compiled for.
        rates: See `rates_of`, whose defaults are taken where this is None.

    Raises:
        MemoptError: `not-scheduled`: the text's order is not the order of execution; `no-link-rate`.
    """
    module = hlo.parse(text_or_module) if isinstance(text_or_module, str) else text_or_module
    if not module.is_scheduled:
        raise MemoptError.of(
            "not-scheduled",
            "the program's text is not scheduled, so nothing can be said about what runs beside what",
            hint="pass the text of a compiled program for a GPU or TPU, not of a lowered one",
        )
    player = _Player(module, rates or rates_of(target))
    player.run(module.entry, times=1, in_loop=False)
    return player.report()


class _Player:
    """Walks the schedule and keeps the account of each transfer."""

    def __init__(self, module: Module, rates: Rates) -> None:
        self.module, self.rates = module, rates
        self.costs = CompiledCosts(module)
        self.playback = Playback(rates)
        self.seen: dict[tuple[str, str], tuple[HostOp, int, float, bool]] = {}
        self.collectives: dict[str, dict[str, int]] = {}
        self._moving = _computations_with(module, lambda computation, item: self._is_event(computation, item))
        self._in_loop_names: set[str] = set()

    def run(self, name: str, *, times: int, in_loop: bool) -> None:
        """Plays one run of a computation that stands for `times` runs in the report's counts."""
        computation = self.module[name]
        running: dict[str, object] = {}
        for item in computation.instructions:
            if item.opcode.endswith("-done"):
                job = running.pop(item.operands[0], None) if item.operands else None
                if job is not None:
                    self.playback.wait(job)
            elif (op := host_op(self.module, computation, item)) is not None:
                self._transfer(computation, item, op, times, in_loop, running)
            elif is_collective(item):
                self._collective(computation, item, times, running)
            elif item.opcode == "while" and item.callee("body") in self._moving:
                self._loop(item, times)
            elif item.opcode in ("call", "conditional") and any(
                callee in self._moving for callee in self.module.callees(item)
            ):
                moving = [callee for callee in self.module.callees(item) if callee in self._moving]
                self.run(max(moving, key=self.costs.computation), times=times, in_loop=in_loop)
            else:
                self.playback.compute(self._seconds(computation, item))
        for job in running.values():  # started here, ended elsewhere: nothing may outlive its computation unpaid
            self.playback.wait(job)

    def report(self) -> OverlapReport:
        """What was played."""
        totals = self.playback.totals
        made = [self._made(key, *entry) for key, entry in self.seen.items()]
        asynchronous = tuple(transfer for transfer, waits in made if not waits)
        synchronous = tuple(transfer for transfer, waits in made if waits)
        moved = {
            direction: sum(item.nbytes * item.times for item, _ in made if item.direction == direction)
            for direction in ("to_host", "to_device")
        }
        outside = sum(item.exposed_s for item, _ in made if not item.in_loop)
        return OverlapReport(
            transfers=asynchronous,
            synchronous=synchronous,
            step_s=self.playback.now_s,
            compute_s=totals.compute_s,
            transfer_s=totals.transfer_busy_s,
            exposed_s=totals.exposed_s,
            exposed_outside_loops_s=outside,
            collective_exposed_s=totals.collective_exposed_s,
            to_host_bytes=moved["to_host"],
            to_device_bytes=moved["to_device"],
            rates=self.rates,
            collectives=self.collectives,
            num_unknown_loops=sum(trips is None for trips in self.costs.trips.values()),
        )

    def _made(
        self, key: tuple[str, str], op: HostOp, times: int, compute_s: float, in_loop: bool
    ) -> tuple[Transfer, bool]:
        exposed_s = self.playback.totals.exposed_by.get("/".join(key), 0.0)
        transfer_s = op.nbytes / self.rates.host_link_bytes_per_s
        return (
            Transfer(op.name, op.direction, op.nbytes, times, compute_s, transfer_s, exposed_s, in_loop),
            op.is_synchronous,
        )

    def _transfer(
        self, computation: Computation, item: Instruction, op: HostOp, times: int, in_loop: bool, running: dict
    ) -> None:
        key = (computation.name, item.name)
        _, counted, _, _ = self.seen.get(key, (op, 0, 0.0, in_loop))
        between_s = 0.0 if op.is_synchronous else self._compute_until_done(computation, item)
        self.seen[key] = (op, counted + times, between_s, in_loop)
        job = self.playback.start_transfer("/".join(key), op.direction, op.nbytes)
        if op.is_synchronous:
            self.playback.wait(job)
        else:
            running[item.name] = job

    def _collective(self, computation: Computation, item: Instruction, times: int, running: dict) -> None:
        num_bytes = collective_bytes(computation, item)
        kind = item.opcode.removesuffix("-start").replace("-", "_")
        entry = self.collectives.setdefault(kind, {"count": 0, "bytes": 0})
        if group_size(item) != 1:
            entry["count"] += times
            entry["bytes"] += int(num_bytes) * times
        if self.rates.fabric_bytes_per_s is None:
            return
        job = self.playback.start_collective(item.name, self.rates.collective_s(num_bytes, group_size(item)))
        if item.opcode.endswith("-start"):
            running[item.name] = job
        else:
            self.playback.wait(job)

    def _loop(self, loop: Instruction, times: int) -> None:
        """Plays iterations until one repeats the one before in length and backlog, and counts the rest."""
        body = loop.callee("body") or ""
        trips = self.costs.trips.get(body) or 1
        before: tuple[float, tuple[float, ...]] | None = None
        for number in range(trips):
            began_s, so_far = self.playback.now_s, self.playback.totals.copy()
            counts = {key: entry[1] for key, entry in self.seen.items()}
            kinds = {kind: dict(entry) for kind, entry in self.collectives.items()}
            self.run(body, times=times, in_loop=trips > 1)
            after = (self.playback.now_s - began_s, self.playback.backlog())
            left = trips - number - 1
            if before is not None and (_is_close(before, after) or number >= MAX_PLAYED):
                self.playback.skip(after[0], self.playback.totals.minus(so_far), left)
                self._repeat_counts(counts, kinds, left)
                return
            before = after

    def _repeat_counts(self, counts: dict[tuple[str, str], int], kinds: dict[str, dict[str, int]], left: int) -> None:
        for key, (op, times, between_s, in_loop) in list(self.seen.items()):
            self.seen[key] = (op, times + left * (times - counts.get(key, 0)), between_s, in_loop)
        for kind, entry in self.collectives.items():
            for name in entry:
                entry[name] += left * (entry[name] - kinds.get(kind, {}).get(name, 0))

    def _compute_until_done(self, computation: Computation, item: Instruction) -> float:
        total = 0.0
        for later in computation.instructions[item.index + 1 :]:
            if later.opcode.endswith("-done") and item.name in later.operands:
                return total
            total += self._seconds(computation, later)
        return total

    def _seconds(self, computation: Computation, item: Instruction) -> float:
        seconds = self.costs.instruction(computation, item) / self.rates.flops
        if self.rates.hbm_bytes_per_s is None:
            return seconds
        return max(seconds, _memory_bytes(self.module, self.costs, computation, item) / self.rates.hbm_bytes_per_s)

    def _is_event(self, computation: Computation, item: Instruction) -> bool:
        if is_collective(item):
            return True
        return host_op(self.module, computation, item) is not None


def _is_close(before: tuple[float, tuple[float, ...]], after: tuple[float, tuple[float, ...]]) -> bool:
    pairs = [(before[0], after[0]), *zip(before[1], after[1], strict=True)]
    return all(abs(one - other) <= 1e-9 * max(abs(one), abs(other), 1e-12) for one, other in pairs)


def _computations_with(module: Module, is_event: Any) -> set[str]:
    """Computations that hold an event, and those that run one of them; fused ones do not count, they are one kernel."""
    fused = {
        item.called
        for computation in module.computations.values()
        for item in computation.instructions
        if item.called is not None and item.opcode != "call"
    }
    holding = {
        name
        for name, computation in module.computations.items()
        if name not in fused and any(is_event(computation, item) for item in computation.instructions)
    }
    while True:
        callers = set(_callers(module, holding)) - holding
        if not callers:
            return holding
        holding |= callers


def _callers(module: Module, holding: set[str]) -> Iterator[str]:
    for name, computation in module.computations.items():
        for item in computation.instructions:
            runs = item.opcode in ("while", "call", "conditional")
            if runs and any(callee in holding for callee in module.callees(item)):
                yield name


_FREE = frozenset(("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "optimization-barrier"))


def _memory_bytes(module: Module, costs: CompiledCosts, computation: Computation, item: Instruction) -> float:
    """Rough device-memory traffic of an operation: its result, and no more of each operand than eight times that."""
    if item.opcode in _FREE or item.opcode.endswith(("-start", "-done")):
        return 0.0
    body = item.callee("body") if item.opcode == "while" else None
    if body is not None:
        inner = module[body]
        once = sum(_memory_bytes(module, costs, inner, each) for each in inner.instructions)
        return (costs.trips.get(body) or 1) * once
    made = sum(array.nbytes for array in item.arrays)
    read_bytes = 0
    for name in item.operands:
        operand = computation.by_name.get(name)
        if operand is not None:
            read_bytes += min(sum(array.nbytes for array in operand.arrays), 8 * max(made, 1 << 20))
    return float(made + read_bytes)

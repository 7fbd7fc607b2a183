"""Plays a schedule: one compute stream, one copy queue per direction that share the host's memory, one of collectives.

Copies run while compute runs; waiting for one stalls compute. Both directions of all devices on a host processor share
its memory bandwidth, so a direction gets the lesser of its link and its share. Times are seconds, sizes bytes.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

Direction = Literal["to_host", "to_device"]
QUEUES = ("to_host", "to_device", "collective")


@dataclass(frozen=True, slots=True)
class Rates:
    """What the schedule is played at.

    Attributes:
        flops: Matrix-product FLOPs per second that are reached (not the peak).
        host_link_bytes_per_s: Per direction.
        host_dram_bytes_per_s: This device's share of its host's memory bandwidth, both directions together; None:
            the link alone bounds.
        fabric_bytes_per_s: Per direction, for collectives; None leaves collectives off the timeline.
        network_bytes_per_s: Per device, for collectives of more devices than share the fabric; None: the fabric's.
        fabric_devices: Devices that share the fabric.
        hbm_bytes_per_s: Where given, operations other than matrix products take time as well, by the bytes they move.
    """

    flops: float
    host_link_bytes_per_s: float
    host_dram_bytes_per_s: float | None = None
    fabric_bytes_per_s: float | None = None
    network_bytes_per_s: float | None = None
    fabric_devices: int | None = None
    hbm_bytes_per_s: float | None = None

    def collective_s(self, num_bytes: float, group: int | None) -> float:
        """Seconds of a collective that moves that many bytes over each device's link."""
        rate = self.fabric_bytes_per_s
        beyond = group is None or (self.fabric_devices is not None and group > self.fabric_devices)
        if beyond and self.network_bytes_per_s is not None:
            rate = self.network_bytes_per_s
        return num_bytes / rate if rate else 0.0


@dataclass(slots=True)
class Totals:
    """Sums over the played schedule; `exposed_by` is stall per transfer name, whose sum may exceed the union."""

    compute_s: float = 0.0
    transfer_busy_s: float = 0.0
    exposed_s: float = 0.0
    collective_busy_s: float = 0.0
    collective_exposed_s: float = 0.0
    exposed_by: dict[str, float] = field(default_factory=dict)

    def minus(self, other: Totals) -> Totals:
        """What was added since `other`."""
        by = {name: value - other.exposed_by.get(name, 0.0) for name, value in self.exposed_by.items()}
        return Totals(exposed_by=by, **{key: getattr(self, key) - getattr(other, key) for key in _SUMS})

    def add(self, other: Totals, times: int = 1) -> None:
        """Adds `other`, `times` over."""
        for key in _SUMS:
            setattr(self, key, getattr(self, key) + times * getattr(other, key))
        for name, value in other.exposed_by.items():
            self.exposed_by[name] = self.exposed_by.get(name, 0.0) + times * value

    def copy(self) -> Totals:
        """A copy of its own."""
        return Totals(exposed_by=dict(self.exposed_by), **{key: getattr(self, key) for key in _SUMS})


_SUMS = ("compute_s", "transfer_busy_s", "exposed_s", "collective_busy_s", "collective_exposed_s")


@dataclass(slots=True)
class _Job:
    name: str
    left: float  # bytes of a transfer, seconds of a collective


class Playback:
    """The clock and the queues. Transfers of one direction run in order."""

    def __init__(self, rates: Rates) -> None:
        self.rates = rates
        self.now_s = 0.0
        self.totals = Totals()
        self._queues: dict[str, deque[_Job]] = {name: deque() for name in QUEUES}

    def compute(self, seconds: float) -> None:
        """Compute runs for that long; queues run beside it."""
        self._advance(seconds)
        self.totals.compute_s += seconds

    def start_transfer(self, name: str, direction: Direction, num_bytes: float) -> object:
        """Puts a transfer at the end of its queue; returns what to wait for."""
        return self._start(direction, name, num_bytes)

    def start_collective(self, name: str, seconds: float) -> object:
        """Puts a collective at the end of its queue; returns what to wait for."""
        return self._start("collective", name, seconds)

    def wait(self, job: object) -> float:
        """Stalls compute until `job` has finished; returns the seconds lost."""
        began_s = self.now_s
        queue_name = next((name for name, queue in self._queues.items() if job in queue), None)
        if queue_name is None or not isinstance(job, _Job):
            return 0.0
        while job in self._queues[queue_name]:
            self._advance(self._next_completion_s())
        stall_s = self.now_s - began_s
        if queue_name == "collective":
            self.totals.collective_exposed_s += stall_s
        else:
            self.totals.exposed_s += stall_s
            self.totals.exposed_by[job.name] = self.totals.exposed_by.get(job.name, 0.0) + stall_s
        return stall_s

    def backlog(self) -> tuple[float, ...]:
        """What is left in each queue: the state a loop's iteration leaves behind."""
        return tuple(sum(job.left for job in self._queues[name]) for name in QUEUES)

    def skip(self, seconds: float, totals: Totals, times: int) -> None:
        """Counts `times` more repetitions of a steady iteration without playing them."""
        self.now_s += times * seconds
        self.totals.add(totals, times)

    def _start(self, queue: str, name: str, amount: float) -> _Job:
        job = _Job(name, amount)
        self._queues[queue].append(job)
        return job

    def _rate(self, queue: str) -> float:
        """Bytes (seconds, for collectives) that a busy queue gets through per second, as things stand."""
        if queue == "collective":
            return 1.0
        share = self.rates.host_dram_bytes_per_s
        busy = sum(1 for name in ("to_host", "to_device") if self._queues[name])
        return min(self.rates.host_link_bytes_per_s, share / busy if share is not None else math.inf)

    def _next_completion_s(self) -> float:
        return min(queue[0].left / self._rate(name) for name, queue in self._queues.items() if queue)

    def _advance(self, seconds: float) -> None:
        while seconds > 0 and any(self._queues.values()):
            step_s = min(seconds, self._next_completion_s())
            rates = {name: self._rate(name) for name, queue in self._queues.items() if queue}
            transferring = any(name != "collective" for name in rates)
            self.totals.transfer_busy_s += step_s if transferring else 0.0
            self.totals.collective_busy_s += step_s if "collective" in rates else 0.0
            for name, rate in rates.items():
                job = self._queues[name][0]
                job.left -= rate * step_s
                if job.left <= 1e-9 * rate:  # below a nanosecond's worth: rounding, not work
                    self._queues[name].popleft()
            self.now_s += step_s
            seconds -= step_s
        self.now_s += max(seconds, 0.0)
        if seconds <= 0:
            self._drop_empty()

    def _drop_empty(self) -> None:
        for queue in self._queues.values():
            while queue and queue[0].left <= 0:
                queue.popleft()

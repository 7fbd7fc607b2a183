"""Plays one step's tasks against each other and says when each ran: an event simulator.

It knows streams, waits and rates, and nothing of how a policy was chosen: `tune` is judged by it. Each stream runs its
tasks one at a time in list order. The two copy directions, and work done on the host, draw on the memory bandwidth of
the host processor, which the GPUs of that processor share: an equal part each, since all devices run the same step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .timeline import TRANSFERS, Task

_DRAM_STREAMS = (*TRANSFERS, "host_compute")
_DONE = 1e-15


@dataclass(frozen=True, slots=True)
class HostLink:
    """How fast bytes move between one device and its host.

    Attributes:
        bytes_per_s: Rate of the link in one direction, reached when the host keeps up.
        dram_bytes_per_s: This device's part of its host processor's memory bandwidth, for both directions and host work
            together; None where it is not known to bind.
    """

    bytes_per_s: float
    dram_bytes_per_s: float | None = None

    def rate(self, num_active: int) -> float:
        """Bytes per second of one of `num_active` streams that draw on host memory now."""
        if self.dram_bytes_per_s is None:
            return self.bytes_per_s
        return min(self.bytes_per_s, self.dram_bytes_per_s / max(1, num_active))


@dataclass(frozen=True, slots=True)
class Simulation:
    """When everything ran.

    Attributes:
        makespan_s: From the first task's start to the last one's end.
        starts_s, ends_s: Per task.
        busy_s: Stream -> seconds in which it ran something.
        waits_s: Stream -> seconds the compute stream stood still for it, at the end of the step too.
    """

    makespan_s: float
    starts_s: tuple[float, ...]
    ends_s: tuple[float, ...]
    busy_s: Mapping[str, float]
    waits_s: Mapping[str, float]

    @property
    def exposed_s(self) -> float:
        """Seconds of the step that only host transfers account for."""
        return sum(self.waits_s.get(stream, 0.0) for stream in (*TRANSFERS, "host_compute"))

    @property
    def hidden_fraction(self) -> float | None:
        """The part of the transfers' seconds that compute hid; None without transfers."""
        moved_s = sum(self.busy_s.get(stream, 0.0) for stream in TRANSFERS)
        exposed_s = sum(self.waits_s.get(stream, 0.0) for stream in TRANSFERS)
        return None if moved_s == 0 else min(1.0, max(0.0, 1.0 - exposed_s / moved_s))


def simulate(tasks: Sequence[Task], seconds: Sequence[float], *, link: HostLink | None = None) -> Simulation:
    """Run the tasks.

    Args:
        tasks: Dependencies point backwards (`timeline.check_order`).
        seconds: Duration of each compute and collective task. Of a transfer (and of host compute, whose `hbm_bytes` are
            host memory traffic) it is used only where there is no `link`.
        link: The host link; transfers then share it as it says.

    >>> from .timeline import Task
    >>> tasks = [Task("f", "compute"), Task("d", "to_host", (0,), nbytes=4.0), Task("g", "compute")]
    >>> simulate(tasks, [1.0, 0.0, 1.0], link=HostLink(2.0)).makespan_s
    3.0
    """
    run = _Run(tasks, seconds, link)
    while run.pending:
        run.start_what_can()
        run.advance()
    return run.result()


class _Run:
    """The state of one simulation; a class because every part of the loop touches all of it."""

    def __init__(self, tasks: Sequence[Task], seconds: Sequence[float], link: HostLink | None) -> None:
        self.tasks, self.link = tasks, link
        self.queues: dict[str, list[int]] = {}
        for index, task in enumerate(tasks):
            self.queues.setdefault(task.stream, []).append(index)
        self.heads = dict.fromkeys(self.queues, 0)
        self.left = [self._amount(task, duration) for task, duration in zip(tasks, seconds, strict=True)]
        self.starts, self.ends = [math.nan] * len(tasks), [math.inf] * len(tasks)
        self.running: dict[str, int] = {}
        self.now = 0.0
        self.pending = len(tasks)

    def _amount(self, task: Task, duration: float) -> float:
        """Bytes for what moves at the link's rate, else seconds."""
        if self.link is None or task.stream not in _DRAM_STREAMS or task.seconds is not None:
            return task.seconds if task.seconds is not None else duration
        return task.nbytes if task.stream in TRANSFERS else task.hbm_bytes

    def _is_moved(self, index: int) -> bool:
        task = self.tasks[index]
        return self.link is not None and task.stream in _DRAM_STREAMS and task.seconds is None

    def start_what_can(self) -> None:
        for stream, queue in self.queues.items():
            if stream in self.running or self.heads[stream] == len(queue):
                continue
            index = queue[self.heads[stream]]
            if all(self.ends[dep] <= self.now for dep in self.tasks[index].after):
                self.running[stream] = index
                self.starts[index] = self.now

    def advance(self) -> None:
        """To the next end of a task; all that end then end together."""
        moving = sum(self._is_moved(index) for index in self.running.values())
        rates = {index: self._rate(index, moving) for index in self.running.values()}
        step_s = min(self.left[index] / rate for index, rate in rates.items())
        self.now += step_s
        for stream, index in list(self.running.items()):
            self.left[index] -= step_s * rates[index]
            if self.left[index] <= _DONE * max(1.0, rates[index]):
                self.ends[index] = self.now
                self.heads[stream] += 1
                self.pending -= 1
                del self.running[stream]

    def _rate(self, index: int, moving: int) -> float:
        if self.link is None or not self._is_moved(index):
            return 1.0
        if self.tasks[index].stream == "host_compute":
            return (self.link.dram_bytes_per_s or math.inf) / moving
        return self.link.rate(moving)

    def result(self) -> Simulation:
        busy = {
            stream: math.fsum(self.ends[index] - self.starts[index] for index in queue)
            for stream, queue in self.queues.items()
        }
        makespan_s = max(self.ends, default=0.0)
        return Simulation(makespan_s, tuple(self.starts), tuple(self.ends), busy, self._waits(makespan_s))

    def _waits(self, makespan_s: float) -> dict[str, float]:
        """Idle time of the compute stream, to the account of the stream that ended last among what it waited for."""
        waits: dict[str, float] = {}
        free_s = 0.0
        for index in self.queues.get("compute", []):
            idle_s = self.starts[index] - free_s
            if idle_s > 0:
                blocker = max(self.tasks[index].after, key=lambda dep: self.ends[dep])
                stream = self.tasks[blocker].stream
                waits[stream] = waits.get(stream, 0.0) + idle_s
            free_s = self.ends[index]
        if makespan_s > free_s:
            last = max(range(len(self.tasks)), key=lambda index: self.ends[index])
            waits[self.tasks[last].stream] = waits.get(self.tasks[last].stream, 0.0) + makespan_s - free_s
        return waits

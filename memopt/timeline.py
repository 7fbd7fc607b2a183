"""One training step as tasks on streams: what a backend measured, before anything is said about seconds.

A backend that traces (or a model of the step) gives a list of `Task`s; `roofline` turns each into seconds on a target
and `simulate` plays them against each other. Amounts are per device and per step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from .errors import MemoptError

Stream = Literal["compute", "to_host", "to_device", "collective", "host_compute"]
Phase = Literal["forward", "recompute", "backward", "optimizer"]
STREAMS: tuple[str, ...] = get_args(Stream)
TRANSFERS: tuple[str, ...] = ("to_host", "to_device")


@dataclass(frozen=True, slots=True)
class Task:
    """A piece of work on one stream; tasks of one stream run one at a time, in list order.

    Attributes:
        name: What a person would call it: `layers.3 forward`, `all_gather layers.4`.
        stream: `compute`, `to_host` and `to_device` (the two copy directions), `collective`, `host_compute`.
        after: Indices of earlier tasks in the list that must have ended before this one starts.
        flops: Matrix FLOPs (compute streams).
        hbm_bytes: Bytes read and written in device memory (compute), or in host memory (`host_compute`).
        nbytes: Bytes over the host link, or one device's bytes on the fabric for a collective (a ring all-gather of a
            tensor of B bytes over n devices: `B * (n - 1) / n`).
        group: Devices that take part in a collective.
        stride: Distance between neighbouring ones among all devices (replicas of a sharded model are apart).
        parts: (FLOPs, bytes) of each operator in it, where it is several run one after another; they add up to `flops`
            and `hbm_bytes`. A roofline goes by operator: some are bound by the one, some by the other.
        seconds: A duration known otherwise (measured); the amounts are then only for reports.
        unit: The plan's unit it belongs to.
        phase: Part of the step.
    """

    name: str
    stream: Stream
    after: tuple[int, ...] = ()
    flops: float = 0.0
    hbm_bytes: float = 0.0
    nbytes: float = 0.0
    group: int = 1
    stride: int = 1
    parts: tuple[tuple[float, float], ...] = ()
    seconds: float | None = None
    unit: str | None = None
    phase: Phase | None = None


def check_order(tasks: Sequence[Task]) -> None:
    """Refuse a list whose dependencies do not point backwards or whose streams are unknown.

    Raises:
        MemoptError: `bad-timeline`; every fault is named.
    """
    faults = []
    for index, task in enumerate(tasks):
        faults += [f"task {index} `{task.name}` waits for task {dep}" for dep in task.after if not 0 <= dep < index]
        if task.stream not in STREAMS:
            faults.append(f"task {index} `{task.name}` is on stream `{task.stream}`")
    if faults:
        raise MemoptError.of(
            "bad-timeline",
            "; ".join(faults) + f"; tasks may wait only for earlier ones, streams are {', '.join(STREAMS)}",
            hint="this is a fault of the backend that made the timeline: report it with the command you ran",
        )


class TimelineBuilder:
    """Collects tasks and hands out their indices; keeps nobody from writing a `list[Task]` by hand.

    >>> build = TimelineBuilder()
    >>> forward = build.add("layer 0", "compute", flops=1e12)
    >>> build.add("copy", "to_host", after=(forward,), nbytes=1e9)
    1
    """

    def __init__(self) -> None:
        self._tasks: list[Task] = []

    def add(self, name: str, stream: Stream, *, after: Iterable[int | None] = (), **amounts: object) -> int:
        """Append a task; None among `after` is left out (the first layer waits for nobody)."""
        waits = tuple(sorted({index for index in after if index is not None}))
        self._tasks.append(Task(name, stream, waits, **amounts))  # type: ignore[arg-type]
        return len(self._tasks) - 1

    def done(self) -> tuple[Task, ...]:
        """The checked timeline."""
        check_order(self._tasks)
        return tuple(self._tasks)

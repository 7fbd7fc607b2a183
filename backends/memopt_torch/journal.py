"""What a step does and who waits for whom, noted as it runs: the work the event simulator plays.

A traced step runs on the CPU, where copies, collectives and streams are over as soon as they are issued. What a GPU
would do is noted instead: work on a stream follows the work issued there before; a collective, or a copy over the host
link, follows what its stream had issued by then, and is waited for where the code says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from memopt.timeline import Phase, Stream

from .operators import bytes_moved
from .reserved import Place

Direction = Literal["to_host", "to_device"]
Ticket = int | None
"""An entry of the journal under way; None where no journal is kept."""

_open: list[Journal] = []


@dataclass(slots=True)
class Entry:
    """Work of one kind, one piece after another, between two moments at which something waits.

    Attributes:
        stream: Of the simulator.
        what: The collective or the copy; empty for operators.
        stretch: Number of the stretch of the step it was issued in.
        lap: Number of the micro-batch.
        after: Entries that must be over before it starts.
        parts: (FLOPs, bytes) of each operator.
        nbytes: Over the link or the fabric.
        group, stride: Of a collective.
        phase: Of the step.
    """

    stream: Stream
    what: str
    stretch: int
    lap: int
    after: tuple[int, ...]
    phase: Phase | None
    parts: list[tuple[float, float]] = field(default_factory=list)
    nbytes: float = 0.0
    group: int = 1
    stride: int = 1


class Journal:
    """The entries of a step under way.

    Attributes:
        entries: So far.
        stretches: Where the step has come to: place, and how often it had come there before.
        lap: The micro-batch under way.
    """

    def __init__(self, is_host_storage: Callable[[torch.UntypedStorage], bool]) -> None:
        self.entries: list[Entry] = []
        self.stretches: list[tuple[Place, int]] = []
        self.lap = 0
        self._is_host_storage = is_host_storage
        self._turns: dict[Place, int] = {}
        self._tails: dict[Any, int] = {}  # torch stream -> its last entry
        self._waits: dict[Any, set[int]] = {}  # torch stream -> what all further work on it comes after
        self._latest: dict[str, int] = {}  # simulated stream -> its last entry
        self._closed: set[int] = set()  # something follows them: they grow no more
        self._results: dict[int, int] = {}  # storage -> the functional collective that writes it
        self._last_collective: Ticket = None
        self._is_copying = False

    def enter(self, place: Place) -> None:
        """The step comes to another place."""
        self._turns[place] = self._turns.get(place, -1) + 1
        self.stretches.append((place, self._turns[place]))

    # Work.

    def operator(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, *, flops: int, phase: Phase
    ) -> None:
        """An operator ran on the current stream, or on the host where its tensors lie there."""
        if self._is_copying:
            return
        if func._overloadpacket.__name__ == "wait_tensor":
            self._wait_for_result(args[0])
            return
        operands = [leaf.untyped_storage() for leaf in tree_leaves((args, kwargs, out)) if _has_values(leaf)]
        moved = bytes_moved(func, args, kwargs, out) if operands else 0
        if not moved and not flops:
            return
        current = torch.cpu.current_stream()
        if any(map(self._is_host_storage, operands)):
            waits = self._waits.setdefault(current, set())  # of copies the host itself has waited for
            waits.add(self._work("host_compute", "host", set(waits), phase, (flops, moved)))
            return  # the host issues nothing while it computes
        stream: Stream = "compute" if current is torch.cpu._default_cpu_stream else "collective"
        waits = self._waits.pop(current, set())
        self._tails[current] = self._work(stream, current, waits, phase, (flops, moved))

    def _work(self, stream: Stream, key: Any, waits: set[int], phase: Phase, part: tuple[float, float]) -> int:
        tail = self._tails.get(key)
        if tail is not None and tail not in self._closed and self._latest.get(stream) == tail:
            entry = self.entries[tail]
            alike = entry.phase == phase and entry.stretch == len(self.stretches) - 1 and entry.lap == self.lap
            if alike and waits <= {*entry.after, tail}:
                entry.parts.append(part)
                return tail
        index = self._add(stream, "", waits if tail is None else {*waits, tail}, phase)
        self.entries[index].parts.append(part)
        self._tails[key] = index
        return index

    def collective(self, func: Any, args: Sequence[Any], out: Any, *, kind: str, nbytes: int, phase: Phase) -> None:
        """A collective was issued: it follows all that its stream was given, and holds nothing up until waited for."""
        ranks = _ranks_of(func, args)
        current = torch.cpu.current_stream()
        index = self._add("collective", kind, self._pending(current), phase)
        entry = self.entries[index]
        entry.group, entry.stride = len(ranks), ranks[1] - ranks[0] if len(ranks) > 1 else 1
        entry.nbytes = _on_the_wire(kind, nbytes, len(ranks))
        self._last_collective = index
        if func.namespace == "c10d":
            if not _is_async(func, args):
                self._waits.setdefault(current, set()).add(index)
            return
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._results[leaf.untyped_storage()._cdata] = index

    @contextmanager
    def copying(self, direction: Direction, source: torch.Tensor, after: Ticket) -> Iterator[int]:
        """A copy over the host link is issued; operators run inside are the copy itself."""
        current = torch.cpu.current_stream()
        waits = self._pending(current)
        index = self._add(direction, direction, waits if after is None else {*waits, after}, None)
        self.entries[index].nbytes = source.numel() * source.element_size()
        self._is_copying = True
        try:
            yield index
        finally:
            self._is_copying = False

    def _add(self, stream: Stream, what: str, after: set[int], phase: Phase | None) -> int:
        """A new entry. Simulated streams run in order: of each, the last entry to wait for will do, of its own none."""
        last = {self.entries[index].stream: index for index in sorted(after)}
        others = tuple(sorted(index for other, index in last.items() if other != stream))
        self._closed.update(after)
        self.entries.append(Entry(stream, what, len(self.stretches) - 1, self.lap, others, phase))
        self._latest[stream] = len(self.entries) - 1
        return len(self.entries) - 1

    # Waiting.

    def wait(self, ticket: Ticket) -> None:
        """Nothing issued on the current stream from now on starts before that entry is over."""
        if ticket is not None:
            self._waits.setdefault(torch.cpu.current_stream(), set()).add(ticket)

    def _pending(self, stream: Any) -> set[int]:
        """What work issued on a stream now comes after."""
        tail = self._tails.get(stream)
        return {*self._waits.get(stream, ()), *(() if tail is None else (tail,))}

    def _wait_for_result(self, tensor: torch.Tensor) -> None:
        self.wait(self._results.get(tensor.untyped_storage()._cdata))

    @contextmanager
    def following_streams(self) -> Iterator[None]:
        """Let torch's CPU streams, which do nothing, note who waits for whom: FSDP2 orders its work by them."""
        stream, event = torch.cpu.Stream, torch.cpu.Event
        kept = stream.record_event, stream.wait_event, stream.wait_stream, event.record, event.wait

        def mark(self_: Any) -> _Mark:
            return _Mark(frozenset(self._pending(self_)))

        def wait_event(self_: Any, marked: Any) -> None:
            entries = getattr(marked, "entries", None) or getattr(marked, "_memopt_entries", frozenset())
            self._waits.setdefault(self_, set()).update(entries)

        def record(self_: Any, on: Any = None) -> None:
            self_._memopt_entries = mark(on or torch.cpu.current_stream()).entries

        stream.record_event = mark  # type: ignore[method-assign]
        stream.wait_event = wait_event  # type: ignore[method-assign]
        stream.wait_stream = lambda self_, other: wait_event(self_, mark(other))  # type: ignore[method-assign]
        event.record = record  # type: ignore[method-assign]
        event.wait = lambda self_, on=None: wait_event(on or torch.cpu.current_stream(), self_)  # type: ignore[method-assign]
        try:
            yield
        finally:
            stream.record_event, stream.wait_event, stream.wait_stream, event.record, event.wait = kept

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Collectives and copies issued inside are noted here."""
        _open.append(self)
        try:
            with self.following_streams():
                yield
        finally:
            _open.remove(self)


@dataclass(frozen=True, slots=True)
class _Mark:
    """An event: what a stream had been given when it was recorded."""

    entries: frozenset[int]


@contextmanager
def noted_copy(direction: Direction, source: torch.Tensor, *, after: Ticket = None) -> Iterator[Ticket]:
    """Note the copy run inside, where a journal is kept; gives what to wait for."""
    if not _open:
        yield None
        return
    with _open[-1].copying(direction, source, after) as ticket:
        yield ticket


def noted_collective() -> Ticket:
    """What to wait for of the collective issued last."""
    return _open[-1]._last_collective if _open else None


def note_wait(ticket: Ticket) -> None:
    """The current stream goes on only when that is over."""
    if _open and ticket is not None:
        _open[-1].wait(ticket)


def _has_values(leaf: Any) -> bool:
    """Tensors of more than one number; optimizers keep their counters on the host, where they take no time."""
    return isinstance(leaf, torch.Tensor) and leaf.numel() > 1


def _ranks_of(func: Any, args: Sequence[Any]) -> list[int]:
    """The ranks of an operator's process group, ascending."""
    for argument, value in zip(func._schema.arguments, args):
        if argument.name == "process_group":
            return sorted(dist.get_process_group_ranks(dist.ProcessGroup.unbox(value)))
        if argument.name == "group_name":
            resolve = dist.distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
            return sorted(dist.get_process_group_ranks(resolve(value)))
    return [0]


def _is_async(func: Any, args: Sequence[Any]) -> bool:
    """Whether the caller means to wait for it later; operators without the choice are waited for at once."""
    for at, argument in enumerate(func._schema.arguments):
        if argument.name == "async_op":
            return bool(args[at]) if at < len(args) else True
    return False


def _on_the_wire(kind: str, nbytes: int, size: int) -> float:
    """Bytes one device sends in a ring (`Task.nbytes`).

    Args:
        kind: Of collective.
        nbytes: The larger of its input and output on this rank.
        size: Ranks of the group.
    """
    share = (size - 1) / size
    return nbytes * {"all_reduce": 2 * share, "broadcast": 1.0, "send": 1.0, "recv": 1.0}.get(kind, share)

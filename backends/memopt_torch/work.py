"""A step's work as tasks of the event simulator: read from a trace of some layers, unrolled to all of them.

Layers in the middle of a trace are repeated, as for the allocator's replay (`reserved`): what they do, and what they
wait for in themselves and their neighbours, is what every further layer does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from memopt.timeline import Task

from .journal import Entry, Journal
from .reserved import Block, Place

_NEAR = 4  # layers apart up to which work is taken to wait for that of a neighbour (gathers may be this far ahead)


@dataclass(frozen=True, slots=True)
class _Moment:
    """An entry's place in the step: a stretch by what it is, and the entry's number in it."""

    place: Place
    turn: int
    order: int

    def at(self, layer: int) -> _Moment:
        return replace(self, place=replace(self.place, layer=layer))


@dataclass(frozen=True, slots=True)
class Work:
    """What a step does, in the order it is issued.

    Attributes:
        stretches: Where the step went: place, and how often it had come there before.
        entries: All work; `Entry.stretch` numbers `stretches`, `Entry.after` the entries themselves.
    """

    stretches: tuple[tuple[Place, int], ...]
    entries: tuple[Entry, ...]

    @classmethod
    def of(cls, journal: Journal) -> Work:
        """A journal that is complete."""
        return cls(tuple(journal.stretches), tuple(journal.entries))

    def unrolled(self, block: Block) -> Work:
        """The work of a model that has those layers, whose neighbours are like them, more often."""
        moments = self._moments()
        inside: dict[tuple[Place, int], list[int]] = {}
        for index, entry in enumerate(self.entries):
            inside.setdefault(self.stretches[entry.stretch], []).append(index)
        stretches = tuple(block.repeated(self.stretches))
        entries: list[Entry] = []
        placed: dict[_Moment, int] = {}
        for number, (place, turn) in enumerate(stretches):
            old = replace(place, layer=block.origin(place.layer))
            for order, index in enumerate(inside.get((old, turn), ())):
                entry = self.entries[index]
                waits = (_moved(moments[dep], old.layer, place.layer, block) for dep in entry.after)
                after = tuple(sorted(placed[moment] for moment in waits if moment in placed))
                placed[_Moment(place, turn, order)] = len(entries)
                entries.append(replace(entry, stretch=number, after=after))
        return Work(stretches, tuple(entries))

    def _moments(self) -> list[_Moment]:
        counts: dict[int, int] = {}
        found = []
        for entry in self.entries:
            order = counts.get(entry.stretch, 0)
            counts[entry.stretch] = order + 1
            place, turn = self.stretches[entry.stretch]
            found.append(_Moment(place, turn, order))
        return found

    def with_micro_batches(self, num_traced: int, num_steps: int) -> Work:
        """The work of an optimizer step of more micro-batches: the second, in the middle of three, comes again."""
        if num_steps <= num_traced:
            return self
        first = next(index for index, entry in enumerate(self.entries) if entry.lap == 1)
        end = next(index for index, entry in enumerate(self.entries) if entry.lap == 2)
        return self.repeated(first, end, num_steps - num_traced)

    def repeated(self, first: int, end: int, turns: int, *, scale: float = 1.0) -> Work:
        """With the entries from `first` to before `end` that many times more, their amounts scaled."""
        width, added = end - first, (end - first) * turns
        latest = {entry.stream: index for index, entry in enumerate(self.entries[:end])}
        entries = list(self.entries[:end])
        for turn in range(1, turns + 1):
            for entry in self.entries[first:end]:
                # What came before the repeated stretch is, for a copy, the end of the copy before.
                after = {
                    dep + turn * width if dep >= first else latest[self.entries[dep].stream] + (turn - 1) * width
                    for dep in entry.after
                }
                parts = [(flops * scale, nbytes * scale) for flops, nbytes in entry.parts]
                entries.append(replace(entry, after=tuple(sorted(after)), parts=parts, nbytes=entry.nbytes * scale))
        for entry in self.entries[end:]:
            after = tuple(dep if dep < first else dep + added for dep in entry.after)
            entries.append(replace(entry, after=after))
        return Work(self.stretches, tuple(entries))

    def outside_layers(self) -> dict[tuple[Place, int], range]:
        """The entries of each stretch that belongs to no layer."""
        found: dict[tuple[Place, int], range] = {}
        for index, entry in enumerate(self.entries):
            stretch = self.stretches[entry.stretch]
            if stretch[0].layer < 0:
                found[stretch] = range(found[stretch].start if stretch in found else index, index + 1)
        return found

    def tasks(self, layers: Sequence[str], units: Sequence[str | None]) -> tuple[Task, ...]:
        """For the simulator.

        Args:
            layers: Path of each layer.
            units: The plan's unit of each layer.
        """
        return tuple(self._tasks(layers, units))

    def _tasks(self, layers: Sequence[str], units: Sequence[str | None]) -> Iterator[Task]:
        for entry in self.entries:
            place, _ = self.stretches[entry.stretch]
            where = layers[place.layer] if place.layer >= 0 else ""
            what = entry.what or entry.phase or ""
            yield Task(
                name=" ".join(part for part in (what, "after" if place.kind == "after" else "", where) if part),
                stream=entry.stream,
                after=entry.after,
                flops=sum(flops for flops, _ in entry.parts),
                hbm_bytes=sum(nbytes for _, nbytes in entry.parts),
                nbytes=entry.nbytes,
                group=entry.group,
                stride=entry.stride,
                parts=tuple(sorted(entry.parts)) if len(entry.parts) > 1 else (),  # their order is no matter
                unit=units[place.layer] if place.layer >= 0 else None,
                phase=entry.phase,
            )


def fitted(first: Work, more: Sequence[Work], times: Sequence[int]) -> Work:
    """The deepest trace's work, with what belongs to no layer (the update, clipping) at the whole model's size.

    Args:
        first: Of the shallowest trace.
        more: For each kind of layer, of a trace with some more of them; the last is the deepest.
        times: How often what those add comes on top of `first` in the whole model.
    """
    work = more[-1]
    ranges = [one.outside_layers() for one in (first, *more)]
    for stretch in sorted(work.outside_layers(), key=lambda stretch: -ranges[-1][stretch].start):
        if any(stretch not in known for known in ranges):
            continue
        each = [[one.entries[i] for i in known[stretch]] for one, known in zip((first, *more), ranges)]
        if len({tuple((entry.stream, entry.what, entry.phase) for entry in entries) for entries in each}) == 1:
            own = ranges[-1][stretch]
            grown = [_grown(same[0], same[1:], times) for same in zip(*each)]
            work = Work(work.stretches, (*work.entries[: own.start], *grown, *work.entries[own.stop :]))
        else:
            work = _lengthened(work, ranges[-1][stretch], each, times)
    return work


def _grown(first: Entry, more: Sequence[Entry], times: Sequence[int]) -> Entry:
    """An entry whose amounts grow linearly with the layers: operators on all parameters, or one for each."""

    def at(zero: float, others: Sequence[float]) -> float:
        return zero + sum(n * (other - zero) for other, n in zip(others, times))

    if all(len(one.parts) == len(first.parts) for one in more):
        parts = [
            (at(same[0][0], [part[0] for part in same[1:]]), at(same[0][1], [part[1] for part in same[1:]]))
            for same in zip(first.parts, *(one.parts for one in more))
        ]
    else:
        parts = list(first.parts)
        for one, n in zip(more, times):
            parts += list((Counter(one.parts) - Counter(first.parts)).elements()) * n
    return replace(more[-1], parts=parts, nbytes=at(first.nbytes, [one.nbytes for one in more]))


def _lengthened(work: Work, own: range, each: Sequence[Sequence[Entry]], times: Sequence[int]) -> Work:
    """A stretch whose entries grow in number (state that travels in buckets): its middle is repeated."""
    moved = [sum(entry.nbytes + sum(nbytes for _, nbytes in entry.parts) for entry in entries) for entries in each]
    missing = moved[0] + sum(n * (more - moved[0]) for more, n in zip(moved[1:], times)) - moved[-1]
    ends = [index + 1 for index in own if work.entries[index].stream in ("compute", "host_compute")]
    if missing <= 0 or len(ends) < 2:
        return work
    first, end = ends[len(ends) // 4], ends[-1 - len(ends) // 4]
    inside = sum(entry.nbytes + sum(nbytes for _, nbytes in entry.parts) for entry in work.entries[first:end])
    if not inside:
        return work
    turns = max(1, round(missing / inside))
    return work.repeated(first, end, turns, scale=missing / (turns * inside))


def _moved(dep: _Moment, old: int, new: int, block: Block) -> _Moment:
    """Where what a traced layer (`old`) waited for is for its copy (`new`): as far away if near, else itself."""
    if dep.place.layer < 0:
        return dep
    apart = dep.place.layer - old
    if old >= 0 and abs(apart) <= _NEAR * block.width:
        return dep.at(new + apart)
    return dep.at(block.later(dep.place.layer))

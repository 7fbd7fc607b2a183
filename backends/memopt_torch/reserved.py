"""What the allocator would hold for a whole model's step, from a trace of some of its layers.

Live bytes grow evenly with depth, what an allocator reserves does not: it depends on the order in which memory comes
and goes. So layers in the middle of a trace are unrolled: their allocations are repeated, each freed where the
original's are, and the step that results is replayed through the allocator.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from .caching_allocator import CachingAllocator, Event
from .ledger import Ledger

_NEAR = 2  # layers apart up to which a tensor is taken to pass from layer to layer


@dataclass(frozen=True, slots=True)
class Place:
    """A stretch of a step: what it is (`forward`, `after`, `backward`, ...), of which traced layer (-1: of none)."""

    kind: str
    layer: int = -1


@dataclass(frozen=True, slots=True)
class Block:
    """Layers of a trace that are repeated: `times` more of them come after the `width` layers from `first` on."""

    first: int
    width: int
    times: int

    def __contains__(self, layer: int) -> bool:
        return self.first <= layer < self.first + self.width

    def later(self, layer: int) -> int:
        """The number of a layer of the trace once the copies are there."""
        return layer + self.times * self.width if layer >= self.first + self.width else layer

    def origin(self, layer: int) -> int:
        """The traced layer that a layer of the longer step is, or is a copy of."""
        behind = layer - self.first
        if behind < self.width:
            return layer
        return (
            self.first + behind % self.width
            if behind < self.width * (self.times + 1)
            else layer - self.times * self.width
        )

    def repeated(self, stretches: Sequence[tuple[Place, int]]) -> Iterator[tuple[Place, int]]:
        """The stretches with the copies' between: after the layers' own on the way up, before them on the way down."""
        at = 0
        while at < len(stretches):
            place, turn = stretches[at]
            if place.layer not in self:
                yield replace(place, layer=self.later(place.layer)), turn
                at += 1
                continue
            end = at
            while end < len(stretches) and stretches[end][0].layer in self:
                end += 1
            own = stretches[at:end]
            is_down = at > 0 and stretches[at - 1][0].layer > place.layer
            for copy in range(self.times, -1, -1) if is_down else range(self.times + 1):
                yield from ((replace(one, layer=one.layer + copy * self.width), turned) for one, turned in own)
            at = end


@dataclass(frozen=True, slots=True)
class _Moment:
    """A place in the step's order: `turn` counts the times the step came to it, `order` its events."""

    place: Place
    turn: int
    order: int


@dataclass(frozen=True, slots=True)
class _Life:
    """One allocation: bytes, stream, when it is made (None: before the step) and freed (None: not in the step)."""

    nbytes: int
    stream: int
    born: _Moment | None
    died: _Moment | None


@dataclass(frozen=True, slots=True)
class Allocations:
    """The allocations of a traced step.

    Attributes:
        stretches: Where the step went, in order.
        lives: All allocations on the device.
    """

    stretches: tuple[tuple[Place, int], ...]
    lives: tuple[_Life, ...]

    @property
    def start_bytes(self) -> int:
        """Held before the step."""
        return sum(life.nbytes for life in self.lives if life.born is None)

    def unrolled(self, block: Block, *, more_start_bytes: int = 0) -> Allocations:
        """The step of a model that has those layers more often.

        Args:
            block: Layers whose neighbours are like them.
            more_start_bytes: What the further layers hold before the step, in all.
        """
        lives: list[_Life] = [_Life(more_start_bytes, 0, None, None)] if more_start_bytes else []
        for life in self.lives:
            lives.append(_moved(life, block, 0))
            if life.born is not None and life.born.place.layer in block:
                lives += [_moved(life, block, copy) for copy in range(1, block.times + 1)]
        return Allocations(tuple(block.repeated(self.stretches)), tuple(lives))

    def reserved_bytes(self, *, is_expandable: bool) -> int:
        """What torch's allocator on CUDA reserves for steps like this, once the second has run."""
        allocator = CachingAllocator(is_expandable)
        allocator.play(self._events(0))
        for lap in (1, 2):
            allocator.play(self._events(lap))
        return allocator.reserved_bytes

    def _events(self, lap: int) -> Iterator[Event]:
        """Those before the step (`lap` 0), or of one step; what outlives it is freed as the next begins."""
        at = {stretch: number for number, stretch in enumerate(self.stretches)}
        end = len(self.stretches)
        if lap == 0:
            yield from ((number, life.nbytes, life.stream) for number, life in enumerate(self.lives) if not life.born)
            return
        timed: list[tuple[tuple[int, int, int], Event]] = []
        for number, life in enumerate(self.lives):
            if life.born is None:
                continue  # what was there before stays: weights, state
            key = lap * len(self.lives) + number
            timed.append((_when(life.born, at, end), (key, life.nbytes, life.stream)))
            timed.append((_when(life.died, at, end), (key, -life.nbytes, life.stream)))
        yield from (event for _, event in sorted(timed, key=lambda pair: pair[0]))


def _when(moment: _Moment | None, at: Mapping[tuple[Place, int], int], end: int) -> tuple[int, int, int]:
    if moment is None:
        return end, 0, 0
    return at[moment.place, moment.turn], moment.order, moment.place.layer


def allocations(ledger: Ledger, marks: Sequence[tuple[int, Place]]) -> Allocations:
    """Read a step's allocations from its ledger.

    Args:
        ledger: Closed.
        marks: Where the step came to each place: number of the next event, and the place; ascending, the first at 0.
    """
    stretches, turns = [], {}
    for _, place in marks:
        turns[place] = turns.get(place, -1) + 1
        stretches.append((place, turns[place]))
    lives: list[_Life] = []
    held: dict[int, tuple[int, _Moment | None]] = {}
    stretch = 0
    for number, (index, change) in enumerate(ledger.events):
        while stretch + 1 < len(marks) and marks[stretch + 1][0] <= number:
            stretch += 1
        record = ledger.records[index]
        if record.is_host:
            continue
        place, turn = stretches[stretch]
        now = _Moment(place, turn, number - marks[stretch][0])
        nbytes, born = held.pop(index, (0, None))
        if nbytes:
            lives.append(_Life(nbytes, record.stream, born, now))
        if nbytes + change > 0:
            is_old = record.born == "start" and not nbytes and number < marks[0][0]
            held[index] = nbytes + change, None if is_old else now
    lives += [_Life(nbytes, ledger.records[index].stream, born, None) for index, (nbytes, born) in held.items()]
    return Allocations(tuple(stretches), tuple(lives))


def _moved(life: _Life, block: Block, copy: int) -> _Life:
    """The allocation in the longer step: what lies behind the block moves on, a copy goes with its own layers."""
    if life.born is None:
        return replace(life, died=_shifted(life.died, block))
    old = life.born.place.layer
    born = _at(life.born, old + copy * block.width if old in block else block.later(old))
    died = life.died
    if died is None or died.place.layer < 0:
        return replace(life, born=born, died=died)
    apart = died.place.layer - old
    if old >= 0 and abs(apart) <= _NEAR * block.width:
        return replace(life, born=born, died=_at(died, born.place.layer + apart))
    return replace(life, born=born, died=_shifted(died, block))


def _shifted(moment: _Moment | None, block: Block) -> _Moment | None:
    return None if moment is None else _at(moment, block.later(moment.place.layer))


def _at(moment: _Moment, layer: int) -> _Moment:
    return replace(moment, place=replace(moment.place, layer=layer))

"""The book of live storages: who was born when, how big, until when; the peak and what it is made of.

Roles are settled afterwards: a gradient is only known to be one once it is accumulated, an activation only once it has
outlived the forward pass. So the ledger keeps every birth, resize and death of a step and reads the peak from them.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch

Role = Literal["param", "grad", "optimizer_state", "activation", "gathered", "temp"]
Phase = Literal["start", "forward", "backward", "recompute", "optimizer"]
ROLES: tuple[Role, ...] = ("param", "grad", "optimizer_state", "activation", "gathered", "temp")
_AFTER_FORWARD = ("backward", "recompute", "optimizer", "end")


@dataclass(slots=True)
class Record:
    """One storage over its life.

    Attributes:
        nbytes: Bytes now (0 after death).
        born, died: Phase of birth and of death (`end`: it survived the step).
        role: Settled role, or None for what only its life can tell (activation or temp).
        is_host: Lives in host memory that stands for another device's (offload buffers).
        origin: Operator that made it.
        shape: Shape of the first tensor seen on it.
        module: Path of the innermost module running at its birth, where that is tracked.
        stream: Number of the stream it was allocated on, 0 for the default one (`Ledger.stream`).
    """

    nbytes: int
    born: Phase
    died: str = "end"
    role: Role | None = None
    is_host: bool = False
    origin: str = ""
    shape: tuple[int, ...] = ()
    module: str = ""
    stream: int = 0

    def settled_role(self) -> Role:
        """The role in the light of the whole life: what outlives its forward (or its recompute) is an activation."""
        if self.role is not None:
            return self.role
        if self.born == "forward" and self.died in _AFTER_FORWARD:
            return "activation"
        if self.born == "recompute" and self.died != "recompute":
            return "activation"
        return "activation" if self.born == "start" else "temp"


@dataclass(frozen=True, slots=True)
class Peak:
    """Device bytes at the highest moment of a step.

    Attributes:
        nbytes: Live bytes.
        by_role: Bytes by role; sums to `nbytes`.
        phase, origin: Phase and operator of the allocation that reached it.
        event: Its number among the step's events.
        largest: The largest live storages: (bytes, role, shape, operator, module).
        by_module: Bytes by the module they were born in (`` for none).
        host_nbytes: Highest host bytes of the step (a moment of their own).
    """

    nbytes: int
    by_role: dict[str, int]
    phase: str
    origin: str
    event: int
    largest: tuple[tuple[int, str, tuple[int, ...], str, str], ...]
    by_module: dict[str, int]
    host_nbytes: int


@dataclass(frozen=True, slots=True)
class SegmentPeak:
    """The highest moment of a stretch of a step: device bytes by role, and the operator that reached it."""

    by_role: dict[str, int]
    origin: str

    @property
    def nbytes(self) -> int:
        """All roles together."""
        return sum(self.by_role.values())


@dataclass
class Ledger:
    """Births, resizes and deaths of storages, in order.

    `phase`, `origin` and `stream` are set by whoever watches the step; `events` are (record index, change in bytes).
    """

    phase: Phase = "start"
    origin: str = ""
    module: str = ""
    stream: int = 0
    records: list[Record] = field(default_factory=list)
    events: list[tuple[int, int]] = field(default_factory=list)
    phases: list[tuple[int, Phase]] = field(default_factory=list)
    _known: dict[int, int] = field(default_factory=dict)
    _guards: dict[int, weakref.ref[torch.UntypedStorage]] = field(default_factory=dict)
    _is_open: bool = True

    def enter(self, phase: Phase) -> None:
        """The step goes on to `phase`."""
        if phase != self.phase:
            self.phase = phase
            self.phases.append((len(self.events), phase))

    def see(
        self,
        storage: torch.UntypedStorage,
        *,
        shape: tuple[int, ...] = (),
        role: Role | None = None,
        is_host: bool = False,
    ) -> None:
        """Count `storage` from now on; a known one is checked for a change of size, and takes `role` if given."""
        key = storage._cdata
        index = self._known.get(key)
        if index is None:
            index = self._birth(storage, key, shape=shape, is_host=is_host)
        else:
            self._resize(index, storage.nbytes())
        if role is not None:
            self.records[index].role = role

    def mark(self, storage: torch.UntypedStorage, role: Role) -> None:
        """Settle the role of a storage that is known already (from its birth on); unknown ones are left out."""
        index = self._known.get(storage._cdata)
        if index is not None:
            self.records[index].role = role

    def mark_host(self, storage: torch.UntypedStorage) -> None:
        """A storage known already stands for host memory (from its birth on)."""
        index = self._known.get(storage._cdata)
        if index is not None:
            self.records[index].is_host = True

    def close(self) -> None:
        """Stop counting; what lives on has survived the step."""
        self._is_open = False
        self._guards.clear()

    def _birth(self, storage: torch.UntypedStorage, key: int, *, shape: tuple[int, ...], is_host: bool) -> int:
        index = len(self.records)
        nbytes = storage.nbytes()
        record = Record(
            nbytes,
            self.phase,
            is_host=is_host,
            origin=self.origin,
            shape=shape,
            module=self.module,
            stream=self.stream,
        )
        self.records.append(record)
        self._known[key] = index
        self._guards[key] = weakref.ref(storage, lambda _, key=key: self._death(key))
        self.events.append((index, nbytes))
        return index

    def _resize(self, index: int, nbytes: int) -> None:
        record = self.records[index]
        if nbytes != record.nbytes:
            self.events.append((index, nbytes - record.nbytes))
            record.nbytes = nbytes

    def _death(self, key: int) -> None:
        if not self._is_open:
            return
        self._guards.pop(key, None)
        index = self._known.pop(key, None)
        if index is None:
            return
        record = self.records[index]
        record.died = self.phase
        if record.nbytes:
            self.events.append((index, -record.nbytes))
            record.nbytes = 0

    def timeline(self) -> Iterator[int]:
        """Live device bytes after each event."""
        live = 0
        for index, change in self.events:
            if not self.records[index].is_host:
                live += change
            yield live

    def peak(self, *, num_largest: int = 20) -> Peak:
        """The highest moment and what it is made of."""
        best, at = 0, -1
        for event, live in enumerate(self.timeline()):
            if live > best:
                best, at = live, event
        sizes: dict[int, int] = {}
        for index, change in self.events[: at + 1]:
            sizes[index] = sizes.get(index, 0) + change
        by_role = dict.fromkeys(ROLES, 0)
        by_module: dict[str, int] = {}
        live_records: list[tuple[int, str, tuple[int, ...], str, str]] = []
        for index, nbytes in sizes.items():
            record = self.records[index]
            if record.is_host or not nbytes:
                continue
            role = record.settled_role()
            by_role[role] += nbytes
            by_module[record.module] = by_module.get(record.module, 0) + nbytes
            live_records.append((nbytes, role, record.shape, record.origin, record.module))
        live_records.sort(key=lambda row: -row[0])
        maker = self.records[self.events[at][0]] if at >= 0 else None
        return Peak(
            nbytes=best,
            by_role={str(role): nbytes for role, nbytes in by_role.items()},
            phase=self._phase_at(at),
            origin=maker.origin if maker else "",
            event=at,
            largest=tuple(live_records[:num_largest]),
            by_module=by_module,
            host_nbytes=self._host_peak(),
        )

    def segment_peaks(self, starts: list[int]) -> list[SegmentPeak]:
        """The highest moment of each stretch of events; `starts` are their first events, ascending."""
        events = len(self.events)
        bounds = [*(min(start, events) for start in starts), events]
        levels = list(self.timeline())
        picks: list[int] = []
        for first, last in itertools.pairwise(bounds):
            # A stretch begins at the level the one before left.
            inside = range(max(first - 1, 0), max(last, first))
            picks.append(max(inside, key=levels.__getitem__, default=-1))
        roles = [record.settled_role() for record in self.records]
        found: dict[int, dict[str, int]] = {}
        totals: dict[str, int] = {str(role): 0 for role in ROLES}
        wanted = set(picks)
        for event, (index, change) in enumerate(self.events):
            if not self.records[index].is_host:
                totals[roles[index]] += change
            if event in wanted:
                found[event] = dict(totals)
        empty: dict[str, int] = {str(role): 0 for role in ROLES}
        return [
            SegmentPeak(found.get(pick, empty), self.records[self.events[pick][0]].origin if pick >= 0 else "")
            for pick in picks
        ]

    def _phase_at(self, event: int) -> str:
        current = "start"
        for first, phase in self.phases:
            if first > event:
                break
            current = phase
        return current

    def _host_peak(self) -> int:
        live = best = 0
        for index, change in self.events:
            if self.records[index].is_host:
                live += change
                best = max(best, live)
        return best

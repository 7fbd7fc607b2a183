"""The one order in which every rank sends its reductions, whatever each of them used.

Collectives of a group meet by the order in which they are issued. Ranks may finish units in different orders (a head
that only some of them use, say), and reductions sent as they are finished would then meet another unit's: of the same
size, without any sign. So a unit is sent when its turn has come, and what is left is sent when the pass ends.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from .units import Unit


class SendOrder:
    """Whose turn it is to be sent, in one backward pass after another.

    Where any unit is gathered, all ranks call the same units in the same order (their gathers would meet wrongly
    otherwise), and the turns are those calls backwards. Where none is, ranks may call what they like: the first pass is
    sent at its end, and its calls are the order of all later ones if they were the same everywhere.

    Args:
        units: In an order that all ranks share.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = tuple(units)
        self._gathers = any(unit.moves for unit in units)
        self._agreed: tuple[Unit, ...] | None = None
        self._called: dict[Unit, None] = {}
        self._is_over = False
        self._is_sending = False
        self._queue: list[Unit] = []
        self._finished: set[Unit] = set()
        self._gathered: list[Unit] = []
        self._kept: set[Unit] = set()
        self._may_skip: set[Unit] = set()

    def note_gather(self, unit: Unit) -> None:
        """A unit's weights are gathered again, for its backward pass."""
        if self._is_sending:
            self._gathered.append(unit)

    def note_call(self, unit: Unit) -> None:
        """A forward call whose backward pass will end at its inputs."""
        if self._is_sending:  # run again by a checkpoint whose first run was not tracked
            if unit not in self._queue and unit not in self._finished:
                self._queue.append(unit)
            return
        if self._is_over:
            self._called.clear()
            self._is_over = False
        self._called.setdefault(unit)

    def begin(self) -> None:
        """A backward pass begins."""
        order = [unit for unit in self._called if unit.moves] if self._gathers else self._agreed or ()
        self._queue = list(reversed(order))
        self._finished.clear()
        self._gathered.clear()
        self._kept = {unit for unit in self._called if unit.state != "sharded"}
        self._is_sending = True

    def finish(self, unit: Unit) -> list[Unit]:
        """A unit's gradients are complete; gives the units that are to be sent now."""
        self._finished.add(unit)
        due = []
        while self._queue and self._queue[0] in self._finished:
            due.append(self._queue.pop(0))
        return due

    def rest(self) -> list[Unit]:
        """What has not been sent when the pass ends, in order."""
        queue, self._queue = self._queue, []
        return [*queue, *(unit for unit in reversed(self._units) if unit not in queue)]

    def end(self) -> None:
        """The backward pass is over, or was given up; another through the same graph has the same turns."""
        self._queue = []
        self._is_over, self._is_sending = True, False

    @property
    def fingerprint(self) -> int:
        """Calls and gathers of this pass as a number below 2^31, for ranks to compare."""
        names = [unit.name for unit in (*self._called, *self._gathered)]
        return zlib.crc32("\n".join(names).encode()) & 0x7FFFFFFF

    def skipped(self) -> list[Unit]:
        """Units that were called and that the backward pass did not come to, when other ranks may have gathered them
        for theirs; those that all ranks were seen to skip are no news."""
        return [
            unit
            for unit in self._called
            if unit.moves and unit.needs_weights_in_backward
            if unit not in self._finished and unit not in self._gathered
            if unit not in self._kept and unit not in self._may_skip
        ]

    def agree(self, is_same: bool) -> bool:
        """All ranks have compared their calls; False where different ones have gathered each other's weights."""
        if is_same:
            self._may_skip.update(self.skipped())
        if self._agreed is None:
            self._agreed = tuple(self._called) if is_same else self._units
        return is_same or not self._gathers

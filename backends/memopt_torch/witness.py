"""Whether all ranks take the same way through the units, asked only when this rank takes a new one.

Gathers meet by the order in which they are issued. A rank that calls another unit than its neighbours computes with
weights of which one part is another unit's; where units have one size, without any sign. Comparing in every step costs
a collective. But the way of the first pass is compared, so every rank knows when it leaves it: then, and only then, it
compares with the others through the process group's key-value store. A rank that leaves it alone waits there in vain,
and says so.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from datetime import timedelta
from typing import Literal

import torch.distributed as dist

from memopt.errors import MemoptError

Kind = Literal["training", "evaluation"]


class Witness:
    """Follows the calls of units whose weights are gathered over ranks.

    Args:
        group: The ranks that have to agree; None for a model whose ranks may go any way.
        timeout: For the others to come; None: the store's own.
    """

    def __init__(self, group: dist.ProcessGroup | None, *, timeout: timedelta | None = None) -> None:
        self._group = group
        self._timeout = timeout
        self._gathers = 0
        self._calls = 0
        self._passes: set[int] = set()
        self._is_inside = False
        self._has_strays = False
        self._known: dict[Kind, str] = {}
        self._num_asked = 0

    def note_gather(self, unit: str) -> None:
        """A unit's weights are gathered; kept as a number that grows with every gather of the run."""
        self._gathers = zlib.crc32(unit.encode(), self._gathers)

    def note_call(self, unit: str, *, is_training: bool) -> None:
        """A unit is called in a forward pass."""
        self._calls = zlib.crc32(unit.encode(), self._calls)
        self._has_strays |= not (is_training or self._is_inside)

    def begin_pass(self) -> None:
        """The whole model is called."""
        self._close_pass()
        self._is_inside = True

    def end_pass(self, *, is_training: bool) -> None:
        """The whole model has returned. A pass that is not for training is compared now: nothing comes after it."""
        self._is_inside = False
        if is_training:
            self._close_pass()
            return
        calls, self._calls = self._calls, 0
        self.leaves("evaluation", str(calls))

    def _close_pass(self) -> None:
        if self._calls:
            self._passes.add(self._calls)
        self._calls = 0

    def leaves_training(self, skipped: Iterable[str]) -> bool:
        """At the end of a backward pass: whether its way, by these skipped units, is another than the first one's.

        Raises:
            MemoptError: `units-called-differently`.
        """
        self._close_pass()
        way = " ".join(map(str, sorted(self._passes))) + " without " + " ".join(skipped)
        self._passes.clear()
        return self.leaves("training", way)

    def leaves(self, kind: Kind, way: str) -> bool:
        """Whether a pass went another way than the first of its kind; then all ranks have gone it.

        Raises:
            MemoptError: `units-called-differently`.
        """
        if self._group is None or (self._known.get(kind) == way and not self._has_strays):
            return False
        if dist.get_backend(self._group) != "fake":
            self._compare(self._group, kind, f"{kind} {way} {self._gathers}")
        self._has_strays = False
        self._known.setdefault(kind, way)
        return True

    def _compare(self, group: dist.ProcessGroup, kind: Kind, way: str) -> None:
        store = self._page(group, self._num_asked)
        first = store.compare_set("way", "", way).decode()
        if first != way:
            store.set("verdict", "different")
        elif store.add("count", 1) == group.size():
            store.set("verdict", "same")
        try:
            store.wait(["verdict"], *(() if self._timeout is None else (self._timeout,)))
        except RuntimeError as error:  # what stores raise when a wait is over
            what = f"in that this rank left the way of its first {kind} pass and nobody else came to compare ({error})"
            raise called_differently(what) from error
        if store.get("verdict") != b"same":
            raise called_differently(f"in a {kind} pass unlike the first one")
        if self._num_asked and dist.get_rank() == 0:  # everybody has come here, so nobody reads the last one any more
            for key in ("way", "count", "verdict"):
                self._page(group, self._num_asked - 1).delete_key(key)
        self._num_asked += 1

    def _page(self, group: dist.ProcessGroup, number: int) -> dist.PrefixStore:
        return dist.PrefixStore(f"memopt/ways/{number}", group.get_group_store())


def called_differently(what: str) -> MemoptError:
    """The refusal of a pass in which ranks have gathered, or sent, each other's units."""
    return MemoptError.of(
        "units-called-differently",
        "ranks have called different units, or their backward passes came to different ones, so they have gathered "
        f"weights of each other's: they differ {what}",
        hint="call and use every unit on every rank, make the modules that ranks choose from one unit "
        "(`{match: [...], group: true}`), or leave them out of `units`",
    )

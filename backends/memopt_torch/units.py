"""Units: modules whose parameters are gathered, reduced and freed together.

A unit holds one section for each combination of dtype, layout and trainability among its parameters (one, for most
models).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from torch import nn

from .collectives import Pending
from .handed import Handed
from .sections import Entry, Section


@dataclass(eq=False)
class Unit:
    """Modules that are gathered and freed together, and their state at run time.

    Attributes:
        group_size: Ranks its weights are split over between forward and backward; None for all of them.
        state: `sharded`, `gathering` or `ready`.
        active: Calls of its modules under way.
        in_backward: Its backward pass has begun and not ended.
        live_uses: Forward calls whose backward pass is still to come.
        has_part: Its weights are there, split over groups of `group_size`.
    """

    name: str
    index: int
    modules: tuple[nn.Module, ...]
    sections: list[Section]
    keep: bool
    resident: bool
    needs_weights_in_backward: bool
    prefetch_forward: int
    prefetch_backward: int
    group_size: int | None = None
    state: Literal["sharded", "gathering", "ready"] = "sharded"
    active: int = 0
    in_backward: bool = False
    live_uses: int = 0
    calls: list[Call] = field(default_factory=list)
    pending: list[Pending] = field(default_factory=list)
    evicted: bool = False
    has_part: bool = False

    def entries(self) -> Iterator[tuple[Section, Entry]]:
        """Every parameter with its section."""
        for section in self.sections:
            for entry in section.entries:
                yield section, entry

    @property
    def trainable(self) -> bool:
        """Whether any of its parameters has a gradient."""
        return any(section.trainable for section in self.sections)

    @property
    def moves(self) -> bool:
        """Whether its parameters are gathered or cast at all."""
        return any(not section.in_place for section in self.sections)


@dataclass(slots=True)
class Call:
    """A call of one of a unit's modules under way.

    Attributes:
        is_tracked: Its outputs tell when the backward pass begins.
        handed: Containers it was given copies of.
    """

    is_tracked: bool
    handed: Handed | None = None


class Use:
    """One forward call that a backward pass will come back to. Dies with its graph, so an abandoned forward pass does
    not hold up later ones.

    Attributes:
        weights_version: The engine's count of optimizer steps when the call was made.
    """

    __slots__ = ("_done", "_unit", "weights_version")

    def __init__(self, unit: Unit, weights_version: int) -> None:
        self._unit = unit
        self._done = False
        self.weights_version = weights_version
        unit.live_uses += 1

    def finish(self) -> None:
        """Counts the call as done; a second time does nothing."""
        if not self._done:
            self._done = True
            self._unit.live_uses -= 1

    def __del__(self) -> None:
        if hasattr(self, "_done"):  # a tracer may make one without calling __init__
            self.finish()

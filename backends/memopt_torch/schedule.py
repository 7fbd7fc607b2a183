"""The order in which units run: recorded in the first step, then used to gather ahead."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Literal

from memopt.errors import MemoptWarning

from .units import Unit

Pass = Literal["forward", "backward"]


class Track:
    """The calls of one pass, in order.

    Attributes:
        order: The recorded calls; a unit called twice appears twice.
        frozen: Recording is over.
    """

    def __init__(self, name: Pass) -> None:
        self.name = name
        self.order: list[Unit] = []
        self.frozen = False
        self.position = 0
        self.told = False

    def advance(self, unit: Unit) -> None:
        """Notes a call, or follows the recording; a unit that is not where it was expected is looked for further on."""
        if not self.frozen:
            self.order.append(unit)
            return
        for at in range(self.position, len(self.order)):
            if self.order[at] is unit:
                if at > self.position:
                    self._deviates(unit, at)
                self.position = at + 1
                return
        self._deviates(unit, self.position)

    def _deviates(self, unit: Unit, at: int) -> None:
        if self.told:
            return
        self.told = True
        expected = self.order[self.position].name if self.position < len(self.order) else "the end"
        warnings.warn(
            f"the {self.name} pass came to `{unit.name}` where the first step had `{expected}`; units out of order are "
            "gathered on demand, which is slower but right",
            MemoptWarning,
            stacklevel=2,
        )

    def next_units(self, count: int) -> Sequence[Unit]:
        """The units expected next."""
        return self.order[self.position : self.position + count] if self.frozen else ()


class Schedule:
    """Both passes of a step."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self.units = units
        self.forward = Track("forward")
        self.backward = Track("backward")
        self._now = self.forward
        self.warned: set[str] = set()

    def start_forward(self) -> None:
        """A pass over the model begins."""
        self._now = self.forward
        self.forward.position = 0
        if not self.forward.frozen:
            self.forward.order.clear()

    def start_backward(self) -> None:
        """A backward pass begins."""
        self._now = self.backward
        self.backward.position = 0
        if not self.backward.frozen:
            self.backward.order.clear()

    def freeze(self) -> None:
        """The first whole step is over: its order is the plan of all others."""
        if self.forward.order and self.backward.order:
            self.forward.frozen = self.backward.frozen = True

    @property
    def needs_weights(self) -> bool:
        """Whether a unit that is still to come in this pass needs its weights; in the first step nobody knows."""
        coming = self._now.order[self._now.position :] if self._now.frozen else ()
        return any(unit.needs_weights_in_backward or self._now is self.forward for unit in coming)

    def ahead_forward(self, unit: Unit | None) -> Sequence[Unit]:
        """Units to gather while `unit` (None: nothing yet) runs."""
        if unit is not None:
            self.forward.advance(unit)
            return self.forward.next_units(unit.prefetch_forward)
        return self.forward.next_units(1)

    def ahead_backward(self, unit: Unit) -> Sequence[Unit]:
        """Units to gather while `unit` runs backward."""
        self.backward.advance(unit)
        return [
            following
            for following in self.backward.next_units(unit.prefetch_backward)
            if following.needs_weights_in_backward
        ]

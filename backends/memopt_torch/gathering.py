"""Weights: gathered into the arena when a unit needs them, given back when it is done."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from memopt.errors import MemoptError

from .arena import Arena, Tenant
from .collectives import Collectives
from .reduction import Reduction
from .units import Section, Unit


class Gathering:
    """The half of the engine that moves weights.

    Attributes:
        collectives: Issues the gathers.
        arena: Where gathered weights lie.
        reduction: Asked to empty gradient slots whose memory is needed.
    """

    collectives: Collectives
    arena: Arena
    reduction: Reduction

    def gather(self, unit: Unit) -> None:
        """Issues what brings a unit's weights; `make_ready` waits for it."""
        if unit.state != "sharded":
            return
        if any(section.layout == "shard" for section in unit.sections):
            self.reduction.order.note_gather(unit)
        for section in unit.sections:
            if section.in_place:
                continue
            self._refresh(unit, section)
            section.gathered_version = section.shard._version
            if section.weights is None:
                continue
            self.acquire(section.weights)
            shard = section.shard
            if section.layout != "shard":  # every rank has the values: a cast is all it takes
                source = section.whole if section.whole is not None else shard
                section.gathered.copy_(source)
                continue
            if section.compute_dtype != section.held_dtype:  # cast into our own place and gather there: no second copy
                own = section.own_part(section.gathered)
                own.copy_(shard)
                shard = own
            unit.pending.append(self.collectives.all_gather(section.gathered, shard, unit=unit.name))
        unit.state = "gathering"

    def _refresh(self, unit: Unit, section: Section) -> None:
        """Whole parameters with sharded state: brings what other ranks have written, optimizers or users by hand."""
        written = section.stale or section.shard._version != section.gathered_version
        if section.layout in ("zero1", "zero2") and written:
            assert section.whole is not None  # such layouts keep every value
            self.collectives.all_gather(section.whole, section.shard, unit=unit.name).wait()
            section.stale = False

    def make_ready(self, unit: Unit) -> None:
        """Returns when the unit's modules see its whole weights."""
        if unit.state == "ready":
            return
        self.gather(unit)
        for pending in unit.pending:
            pending.wait()
        unit.pending.clear()
        for section in unit.sections:
            section.swap(used=True)
        unit.state = "ready"
        unit.evicted = False

    def release(self, unit: Unit) -> None:
        """Gives the unit's weight memory back; the modules see sharded parameters again, never another unit's data."""
        if unit.state == "sharded":
            return
        for pending in unit.pending:
            pending.wait()
        unit.pending.clear()
        for section in unit.sections:
            section.swap(used=False)
            if section.weights is not None:
                section.weights.occupied = False
        unit.state = "sharded"

    def acquire(self, tenant: Tenant) -> None:
        """Makes a block's memory ours: whoever shares it finishes first."""
        for other in tenant.neighbours:
            if other.occupied:
                self._vacate(other)
        tenant.occupied = True

    def _vacate(self, tenant: Tenant) -> None:
        section: Any = tenant.owner
        if tenant.kind == "gradients":
            self.reduction.flush(section)
            return
        if tenant.kind == "reduced":
            self.reduction.clear_reduced(section)
            return
        unit: Unit = section.unit
        if unit.active or unit.resident:
            raise MemoptError.of(
                "unit-overlap",
                f"another unit is called while `{unit.name}` runs, and the two share memory",
                path=unit.name,
                hint="put both modules in one unit (`group: true`), or use backend_options.torch.engine: fsdp2",
            )
        unit.evicted = unit.in_backward
        self.release(unit)

    def prefetch(self, units: Iterable[Unit]) -> None:
        """Gathers units ahead, as far as their memory is free."""
        for unit in units:
            if unit.state != "sharded" or unit.resident or not unit.moves:
                continue
            if any(o.occupied for s in unit.sections if s.weights is not None for o in s.weights.neighbours):
                return
            self.gather(unit)

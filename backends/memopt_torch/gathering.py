"""Weights: gathered into the arena when a unit needs them, given back when it is done."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from memopt.errors import MemoptError

from .collectives import Collectives
from .reduction import Reduction
from .schedule import Schedule
from .sections import Section
from .tenants import Arena, Tenant
from .units import Unit
from .witness import Witness


def in_backward_pass() -> bool:
    """Whether autograd is running on this thread: a forward call seen now is a recomputation."""
    return torch._C._current_graph_task_id() != -1


class Gathering:
    """The half of the engine that moves weights.

    Attributes:
        collectives: Issues the gathers.
        arena: Where gathered weights lie.
        reduction: Asked to empty gradient slots whose memory is needed.
        schedule: Says whether weights are needed again in this pass.
        witness: Told of every gather.
    """

    collectives: Collectives
    arena: Arena
    reduction: Reduction
    schedule: Schedule
    witness: Witness

    def gather(self, unit: Unit) -> None:
        """Issues what brings a unit's weights; `make_ready` waits for it."""
        if unit.state != "sharded":
            return
        if any(section.layout == "shard" for section in unit.sections):
            self.reduction.order.note_gather(unit)
            self.witness.note_gather(unit.name)
        for section in unit.sections:
            if section.in_place:
                continue
            if unit.has_part and section.part is not None and in_backward_pass():
                assert section.weights is not None  # what has a part is gathered
                self.acquire(section.weights)
                part = self.collectives.all_gather(
                    section.gathered, section.part, unit=unit.name, group_size=unit.group_size
                )
                unit.pending.append(part)
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
        self._wait(unit)
        for section in unit.sections:
            section.swap(used=True)
        unit.state = "ready"
        unit.evicted = False

    def release(self, unit: Unit) -> None:
        """Gives the unit's weight memory back; the modules see sharded parameters again, never another unit's data."""
        if unit.state == "sharded":
            return
        self._wait(unit)
        for section in unit.sections:
            section.swap(used=False)
            if section.weights is not None:
                section.weights.occupied = False
                if self.arena.plan.is_freed and not self.schedule.needs_weights:
                    section.weights.region.give_back()
        unit.state = "sharded"

    def _wait(self, unit: Unit) -> None:
        for pending in unit.pending:
            pending.wait()
        unit.pending.clear()

    def reshard(self, unit: Unit) -> None:
        """After forward: leaves this rank's part of the weights where the backward pass gathers them from, among few
        ranks, if the policy wants that; then gives the memory back."""
        parts = [section for section in unit.sections if section.resharded is not None]
        if parts and unit.state == "ready":
            for section in parts:
                assert section.resharded is not None  # as they were chosen
                self.acquire(section.resharded)
                section.keep_part()
            unit.has_part = True
        self.release(unit)

    def drop_part(self, unit: Unit) -> None:
        """What was left for the backward pass has been used, is out of date, or is in the way."""
        unit.has_part = False
        for section in unit.sections:
            if section.resharded is not None:
                section.resharded.occupied = False

    def acquire(self, tenant: Tenant) -> None:
        """Makes a block's memory ours: whoever shares it finishes first."""
        for other in tenant.neighbours:
            if other.occupied:
                self._vacate(other)
        tenant.region.bring()
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
        if tenant.kind == "resharded":  # all ranks will gather from everybody instead
            self._wait(unit)
            self.drop_part(unit)
            return
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

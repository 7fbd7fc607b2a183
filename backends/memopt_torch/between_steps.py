"""What the layer engine is to optimizers, checkpoints, measurements and comparisons: all outside of its passes."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from memopt.errors import MemoptWarning

from .arena import ArenaPlan
from .gathering import Gathering, in_backward_pass
from .sections import Section
from .sharded import whole_tensor
from .units import Unit

log = logging.getLogger("memopt")


class BetweenSteps(Gathering):
    """The part of the engine that others call.

    Attributes:
        units: In the order the forward pass runs them.
        arena_plan: The arena's layout.
        paused: Hooks do nothing.
        weights_version: Counts optimizer steps.
    """

    units: list[Unit]
    arena_plan: ArenaPlan
    paused: bool
    weights_version: int
    _handles: list[RemovableHandle]

    def recover(self) -> None:
        """After an exception in a step: finishes what is under way and forgets the rest, so that the next step is
        good."""
        if self.reduction.running:
            self.reduction.abandon()

    def before_step(self) -> None:
        """An optimizer is about to step: refused while gradients are not reduced."""
        self.reduction.check_reduced()

    def parameters_stepped(self) -> None:
        """An optimizer has written the parameters: gathered copies are out of date."""
        self.reduction.micro_step = 0
        self.weights_version += 1
        for unit in self.units:
            self.release(unit)
            self.drop_part(unit)
            for section in unit.sections:
                section.stale = section.layout in ("zero1", "zero2")

    def settle(self) -> None:
        """Between steps: modules show held parameters again where a forward pass without a backward one left gathered
        ones, so that whoever reads or writes parameters now means the real ones."""
        for unit in self.units:
            if not unit.active and not in_backward_pass():
                self.release(unit)

    @contextmanager
    def unsharded(self) -> Iterator[dict[str, nn.Parameter]]:
        """The model with whole parameters of its own, in the compute dtype, and without this engine: every rank holds
        everything. Yields path -> parameter. For comparisons."""
        self.recover()
        for unit in self.units:
            self.release(unit)
        self.paused = True
        whole: dict[str, nn.Parameter] = {}
        try:
            for unit in self.units:
                for section, entry in unit.entries():
                    value = whole_tensor(entry.held).to(section.compute_dtype).clone()
                    parameter = nn.Parameter(value, requires_grad=entry.held.requires_grad)
                    whole[entry.path] = parameter
                    for site in entry.sites:
                        site.module._parameters[site.name] = parameter
            yield whole
        finally:
            for unit in self.units:
                for _, entry in unit.entries():
                    for site in entry.sites:
                        site.module._parameters[site.name] = entry.held
            self.paused = False

    def buffers(self) -> Iterable[tuple[torch.Tensor, str]]:
        """Every tensor the engine holds between steps, with its role."""
        for region in self.arena.regions:
            yield region.memory, "gathered"
        for unit in self.units:
            for section in unit.sections:
                if not section.in_place:
                    yield (section.whole if section.whole is not None else section.shard), "param"
                if section.grad is not None and section.reduced is None:
                    yield section.grad, "grad"
                if section.slot is not None and section.gradients is None:
                    yield section.slot, "grad"

    def is_weight(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's memory holds weights (so that offload never takes them)."""
        storage = tensor.untyped_storage()._cdata
        if any(storage == region.memory.untyped_storage()._cdata for region in self.arena.regions):
            return True
        return any(
            entry.held.untyped_storage()._cdata == storage
            for unit in self.units
            for section, entry in unit.entries()
            if section.in_place
        )

    def note_kept_gradient(self, section: Section) -> None:
        """A gradient is still held when weights need its place in the arena."""
        log.info(
            "gradients of unit %s are kept through a forward pass: they get %d bytes of their own (with `accumulate: "
            "{steps: N}` in the policy they have them from the start, and the plan counts them)",
            section.unit.name,
            section.shard_numel * section.held_dtype.itemsize,
        )

    def remove(self) -> None:
        """Takes the hooks away; the parameters stay sharded."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def warn_once(self, key: str, text: str) -> None:
        """One warning a kind."""
        if key not in self.schedule.warned:
            self.schedule.warned.add(key)
            warnings.warn(text, MemoptWarning, stacklevel=3)

    @property
    def plan(self) -> ArenaPlan:
        """The arena's layout."""
        return self.arena_plan

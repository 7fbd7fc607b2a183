"""Gradients: collected into a unit's slot as autograd produces them, reduced once, handed to the optimizer."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import Variable

from memopt.errors import MemoptWarning

from .sections import Entry, Section
from .sending import SendOrder
from .sharded import local_tensor
from .units import Unit
from .unreduced import Unreduced, refuse_unreduced, was_zeroed
from .witness import called_differently

if TYPE_CHECKING:
    from .engine import Engine


class Reduction:
    """Everything between a gradient's arrival and the optimizer.

    Args:
        engine: Its units are complete when the first backward pass runs.
        accumulate_steps: With more than one, whole gradients are kept and reduced in every `accumulate_steps`-th
            backward pass.
        agree_on_unused: Ranks agree in every backward pass (one small all-reduce) on which parameters were used; else
            only while the first pass found unused ones.
    """

    def __init__(self, engine: Engine, *, accumulate_steps: int = 1, agree_on_unused: bool = False) -> None:
        self.engine = engine
        self.groups = engine.groups
        self.accumulate_steps = accumulate_steps
        self.agree_on_unused = agree_on_unused
        self.micro_step = 0
        self.running = False
        self.all_used: bool | None = None
        self.order = SendOrder([unit for unit in engine.units if any(map(self.manages, unit.sections))])
        self._under_way: list[Section] = []

    def manages(self, section: Section) -> bool:
        """Whether gradients of a section need anything done: a reduction, or a way to the held parameters."""
        return section.trainable and (not section.in_place or self.groups.world is not None)

    def sections(self) -> list[Section]:
        """Sections whose gradients pass through here and whose parameters are not all frozen by now."""
        return [
            section
            for unit in self.engine.units
            for section in unit.sections
            if self.manages(section) and any(entry.held.requires_grad for entry in section.entries)
        ]

    @property
    def reduces_now(self) -> bool:
        """Whether this backward pass is one whose gradients are sent."""
        return (self.micro_step + 1) % self.accumulate_steps == 0

    # ------------------------------------------------------------------ arrival

    def begin(self) -> None:
        """The first sign of a backward pass: asks autograd to be told of its end."""
        if self.running or self.engine.paused:
            return
        self.running = True
        self._follow_zero_grad()
        self.engine.collectives.step += 1
        self.engine.schedule.start_backward()
        self.order.begin()
        for unit in self.engine.units:
            if unit.resident:
                unit.in_backward = True
                self.engine.make_ready(unit)
        Variable._execution_engine.queue_callback(self._finalize)

    def grad_hook(self, section: Section, entry: Entry) -> Callable[[nn.Parameter], None]:
        """What runs when autograd has a parameter's gradient."""
        if section.in_place:
            return lambda parameter: self._arrived_in_place(section, entry, parameter)
        return lambda parameter: self._arrived(section, entry, parameter)

    def _arrived(self, section: Section, entry: Entry, parameter: nn.Parameter) -> None:
        grad = parameter.grad
        if grad is None or self.engine.paused:
            return
        unit = section.unit
        if unit.needs_weights_in_backward and unit.state != "ready" and unit.moves:
            raise self.engine.entered_unseen(unit)
        self.begin()
        self._open(section)
        assert entry.staging is not None  # managed sections have staging views
        adds = entry in section.arrived or entry in section.kept
        if adds or (section.carries and not section.stages_gradients):
            entry.staging.add_(grad)
        else:
            entry.staging.copy_(grad)
        parameter.grad = None
        self._note(section, entry)

    def _arrived_in_place(self, section: Section, entry: Entry, parameter: nn.Parameter) -> None:
        if self.engine.paused:
            return
        self.begin()
        self._open(section)
        grad = parameter.grad
        if grad is not entry.grad:
            assert entry.grad is not None  # autograd has just accumulated it
            assert grad is not None
            entry.grad.copy_(grad)
            parameter.grad = entry.grad
        self._note(section, entry)

    def _note(self, section: Section, entry: Entry) -> None:
        section.arrived.add(entry)
        # A unit none of whose inputs needs a gradient has no mark of its end. It is reduced when the pass ends, never
        # when its last gradient is there: a rank that does not use all of it would be out of step with the others.
        section.used.add(entry)

    def _open(self, section: Section) -> None:
        """Makes the staging memory the section's own before a gradient is written to it."""
        if section.launched:
            self._finish(section)
        if section.gradients is not None and not section.gradients.occupied:
            self.engine.acquire(section.gradients)
        if not section.opened:
            section.opened = True
            section.leave_held_gradients()
            if section.stages_gradients and any(entry.held.grad is not None for entry in section.entries):
                self._claim_reduced(section)  # kept gradients are about to be brought there
            # Parameters that modules use as they are carry their own gradients; autograd adds to them.
            section.carries = not section.in_place and section.accumulates()
            if section.carries and section.layout == "zero1" and section.grad is not None and not section.kept:
                # Only this rank's stretch is the user's; scaled so that the mean over ranks gives it back.
                mine = section.own_part(section.grad).clone()
                section.grad.zero_()
                section.own_part(section.grad).copy_(mine.mul_(section.size))

    # ------------------------------------------------------------------ reductions

    def launch(self, unit: Unit) -> None:
        """A unit is finished: sends its gradients, and those of others that have waited for it."""
        if not self.reduces_now:
            return
        for due in self.order.finish(unit):
            for section in due.sections:
                if self.manages(section) and not section.launched and section.num_expected:
                    self._launch(section)

    def _launch(self, section: Section) -> None:
        self._open(section)
        section.launched = section.sent = True
        self._under_way.append(section)
        if section.stages_gradients:
            self._launch_scatter(section)
        elif self.groups.world is not None:
            self._launch_whole(section)
        else:
            self._zero_missing(section)

    def _launch_scatter(self, section: Section) -> None:
        assert section.slot is not None  # staged sections have one
        self._zero_missing(section)
        section.direct = not section.carries and section.held_dtype == section.slot.dtype
        if section.direct:
            self._claim_reduced(section)
        out = section.grad if section.direct else section.own_part(section.slot)
        assert out is not None  # it has just been claimed
        section.pending = self.engine.collectives.reduce_scatter(out, section.slot, unit=section.unit.name)

    def _zero_missing(self, section: Section) -> None:
        """A parameter this rank did not use has gradient zero here; padding must not add noise."""
        if section.carries and not section.stages_gradients:
            return
        for entry in section.entries:
            carried = section.in_place and entry.held.grad is entry.grad
            if entry not in section.arrived and entry not in section.kept and not carried:
                assert entry.staging is not None  # managed sections have staging views
                entry.staging.zero_()
        if section.slot is not None and section.padded_numel > section.numel:
            section.slot[section.numel :].zero_()

    def _launch_whole(self, section: Section) -> None:
        """Whole gradients are averaged where they lie; kept ones are equal on all ranks, so they average to
        themselves."""
        assert section.grad is not None  # managed sections have one
        self._zero_missing(section)
        name = section.unit.name
        if section.reduce_dtype == section.held_dtype:
            section.pending = self.engine.collectives.all_reduce_mean(section.grad, unit=name, replicas_only=False)
            return
        wire = section.grad.to(section.reduce_dtype)
        self.engine.collectives.all_reduce_mean(wire, unit=name, replicas_only=False).wait()
        section.grad.copy_(wire)

    def _finish(self, section: Section) -> None:
        """Waits for a reduction, and for those sent before it: replicas then meet in the order of sending."""
        if section not in self._under_way:
            self._complete(section)
        while section in self._under_way:
            self._complete(self._under_way.pop(0))

    def _complete(self, section: Section) -> None:
        """What a reduction brought is added to gradients kept from before."""
        pending, section.pending = section.pending, None
        if pending is not None:
            pending.wait()
            if section.stages_gradients:
                self._take_part(section)
        section.launched = False
        section.arrived.clear()
        section.kept.clear()
        section.carries = True
        section.leave_slot()

    def _take_part(self, section: Section) -> None:
        assert section.slot is not None  # staged sections have one
        out = section.grad if section.direct else section.own_part(section.slot)
        assert out is not None  # claimed before it was sent
        if self.groups.replicas > 1:
            self.engine.collectives.all_reduce_mean(out, unit=section.unit.name, replicas_only=True).wait()
        if section.direct:
            return
        self._claim_reduced(section)
        assert section.grad is not None  # claimed
        if section.carries:
            section.grad.add_(out)
        else:
            section.grad.copy_(out)

    def flush(self, section: Section) -> None:
        """Empties a section's slot because another needs the memory; what may not be sent yet moves elsewhere."""
        if section.launched:
            self._finish(section)
            return
        assert section.slot is not None  # it is in use
        self.engine.warn_once(
            "gradients-wait",
            f"gradients of unit `{section.unit.name}` are there before those of units that come first on other ranks: "
            f"until those are sent they take {section.slot.nbytes} bytes that the plan does not count (others may too)",
        )
        section.move_slot_out()

    def _claim_reduced(self, section: Section) -> None:
        """Takes the memory of a reduced gradient. In a pass out of order weights may lie there: they stay."""
        section.bring_gradient()
        if section.reduced is None or section.reduced.occupied:
            return
        if any(other.occupied and other.kind == "weights" for other in section.reduced.neighbours):
            section.move_gradient_out()
        else:
            self.engine.acquire(section.reduced)

    def clear_reduced(self, section: Section) -> None:
        """Empties the arena's place of a reduced gradient: what is still wanted moves to memory of its own for good."""
        if section.launched:
            self._finish(section)
        section.leave_held_gradients()
        if section.holds_gradient:
            self.engine.note_kept_gradient(section)
            section.move_gradient_out()
        elif section.reduced is not None:
            section.reduced.occupied = False

    def before_forward(self) -> None:
        """Weights come where reduced gradients lay; the optimizer has used those, or they are kept elsewhere."""
        for unit in self.engine.units:
            for section in unit.sections:
                section.drop_gradient()
                if section.reduced is not None and (section.reduced.occupied or section.holds_gradient):
                    self.clear_reduced(section)

    # ------------------------------------------------------------------ the end of backward

    def _finalize(self) -> None:
        """Autograd has finished: the rest is reduced, and optimizers find `.grad` in place."""
        sections = self.sections()
        is_new = self.engine.witness.leaves_training(unit.name for unit in self.order.skipped())
        if self.reduces_now:
            used = self._agree(sections, is_new_way=is_new)
            for section in (section for unit in self.order.rest() for section in unit.sections):
                left_over = not section.sent or (section.arrived and not section.launched)
                if left_over and any(flag for _, flag in used.get(section, ())):
                    self._launch(section)
            for section in reversed(sections):
                self._finish(section)
            for section in sections:
                self._hand_over(section, used[section])
        else:
            for section in sections:
                self._keep(section)
        self._reset()
        self.micro_step += 1
        self.engine.schedule.freeze()

    def _agree(self, sections: list[Section], *, is_new_way: bool) -> dict[Section, list[tuple[Entry, bool]]]:
        """Which parameters any rank used in this backward pass (or in those since the last reduction)."""
        flags = [
            entry in section.used or entry in section.kept or not entry.held.requires_grad
            for section in sections
            for entry in section.entries
        ]
        asks = self.groups.world is not None and (self.all_used is not True or self.agree_on_unused or is_new_way)
        if asks and flags:
            calls, some_unused = self.order.fingerprint, not all(flags)
            told = [*flags, some_unused, calls, -calls]
            mask = torch.tensor(told, dtype=torch.int32, device=sections[0].device)
            self.engine.collectives.all_reduce_max(mask, unit="<used parameters>")
            if not isinstance(mask, FakeTensor):
                told = mask.tolist()
            *flags, some_unused = [bool(flag) for flag in told[:-2]]
            self.all_used = not some_unused if self.all_used is None else self.all_used
            if not self.order.agree(told[-2] == -told[-1]):
                raise called_differently("in the order of their backward passes")
        elif self.groups.world is not None and not all(flags):
            self.engine.warn_once(
                "unused",
                "parameters that every earlier step used got no gradient on this rank; they count as zero. If no rank "
                "uses them in some steps, set backend_options.torch.unused_parameters: agree",
            )
            flags = [True] * len(flags)
        result: dict[Section, list[tuple[Entry, bool]]] = {}
        it = iter(flags)
        for section in sections:
            result[section] = [(entry, next(it)) for entry in section.entries]
        return result

    def _hand_over(self, section: Section, used: list[tuple[Entry, bool]]) -> None:
        for entry, flag in used:
            grad = entry.held.grad
            if grad is entry.grad or not (flag and entry.held.requires_grad):
                continue
            if grad is not None and entry.grad_view is not None:
                # A loss term on the held parameter itself (weight norms and the like) left its own gradient.
                entry.grad_view.add_(local_tensor(grad).reshape(-1))
            entry.held.grad = entry.grad

    def _keep(self, section: Section) -> None:
        """Reduction is put off: what arrived stays whole until the last backward pass of the optimizer step."""
        section.kept |= section.arrived
        for entry in section.entries:
            if entry not in section.kept:
                continue
            if section.layout == "whole":
                entry.held.grad = entry.grad
            elif entry.held.grad is None or entry.held.grad is entry.grad:
                entry.held.grad = Unreduced.of(entry.held, replaces=entry.held.grad)  # type: ignore[arg-type]

    def _follow_zero_grad(self) -> None:
        """Gradients kept from earlier micro-batches go where the user has cleared them since; with all of them gone
        the accumulation starts again."""
        sections = [section for section in self.sections() if section.kept]
        for section in sections:
            for entry in section.entries:
                grad = entry.held.grad
                if was_zeroed(grad):
                    section.kept.discard(entry)
                if isinstance(grad, Unreduced):
                    entry.held.grad = None if grad.is_zeroed else grad.replaces
        if sections and not any(section.kept for section in sections):
            self.micro_step = 0

    def _reset(self) -> None:
        for unit in self.engine.units:
            for section in unit.sections:
                section.reset_backward()
                section.leave_slot()
            unit.in_backward = unit.evicted = False
            self.engine.release(unit)
            self.engine.drop_part(unit)
        self._under_way.clear()
        self.engine.arena.give_back()
        self.order.end()
        self.running = False

    def abandon(self) -> None:
        """An exception ended the last backward pass: what is under way is waited for and dropped."""
        for unit in self.engine.units:
            for section in unit.sections:
                if section.pending is not None:
                    section.pending.wait()
                    section.pending = None
        self._restart_accumulation()
        self._reset()

    def _restart_accumulation(self) -> None:
        """Whole gradients kept for a later reduction hold a part of the failed pass, which cannot be taken out."""
        sections = [section for section in self.sections() if section.kept]
        if not sections:
            return
        for section in sections:
            section.kept.clear()
            for entry in section.entries:
                entry.held.grad = None
        warnings.warn(
            f"a backward pass failed after {self.micro_step % self.accumulate_steps} of {self.accumulate_steps} "
            "micro-batches: their gradients are dropped and the accumulation starts again",
            MemoptWarning,
            stacklevel=2,
        )
        self.micro_step = 0

    def check_reduced(self) -> None:
        """An optimizer is about to step; see `refuse_unreduced`."""
        refuse_unreduced(self.micro_step, self.accumulate_steps)

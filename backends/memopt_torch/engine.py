"""The layer engine: gathers each unit's weights just before they are used, reduces its gradients just after they are
complete, and frees both; all in one arena, on public PyTorch hooks.

The first step is recorded; from then on the next units are gathered ahead in that order. A step that takes another path
is told once and served on demand: it costs time, never wrong data. Where correct data cannot be guaranteed the engine
stops with an error that names the unit.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.hooks import RemovableHandle

from memopt.errors import MemoptError

from .arena import plan_arena
from .assembly import check_requests, materialise, sizes_of, unit_from
from .between_steps import BetweenSteps
from .collectives import Collectives, Groups, stall_watch, timeout_of
from .gathering import in_backward_pass
from .handed import Handed
from .reduction import Reduction
from .requests import Dtypes, UnitRequest
from .schedule import Schedule
from .traversal import tensors_in
from .units import Call, Unit, Use
from .witness import Witness

log = logging.getLogger("memopt")


def _witness(groups: Groups, units: Sequence[Unit]) -> Witness:
    """Of calls that have to be the same on every rank: those of units that are gathered, or sent in order of them."""
    if groups.world is None or not any(unit.moves for unit in units):
        return Witness(None)
    return Witness(groups.world, timeout=timeout_of(groups.world))


class _UnitInput(torch.autograd.Function):
    """Identity on a unit's inputs. Its backward runs when every gradient of the unit has been produced."""

    @staticmethod
    def forward(ctx: Any, engine: Engine, unit: Unit, use: Use, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.engine, ctx.unit, ctx.use = engine, unit, use
        ctx.set_materialize_grads(False)
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        ctx.engine.after_backward(ctx.unit, ctx.use)
        return (None, None, None, *grads)


class Engine(BetweenSteps):
    """Shards a model by units and keeps it trainable by plain PyTorch code.

    Args:
        model: Its parameters are replaced by sharded ones; nothing else of it is changed.
        requests: The units, in the order the model runs them.
        groups: Process groups.
        dtypes: Precision.
        grad_slots: Gradient buffers in flight.
        blocking: Wait for each collective where it is issued.
        accumulate_steps: Backward passes per optimizer step when gradients are reduced at the last only.
        keeps_gradients: Reduced gradients are kept through forward passes (accumulation that reduces each time), so
            they share no memory with weights.
        agree_on_unused: Ranks agree in every backward pass on which parameters were used.
    """

    def __init__(
        self,
        model: nn.Module,
        requests: Sequence[UnitRequest],
        *,
        groups: Groups,
        dtypes: Dtypes = Dtypes(),  # noqa: B008  # frozen
        grad_slots: int = 1,
        blocking: bool = False,
        accumulate_steps: int = 1,
        keeps_gradients: bool = False,
        agree_on_unused: bool = False,
    ) -> None:
        check_requests(requests)
        self.model = model
        self.groups = groups
        self.dtypes = dtypes
        self.collectives = Collectives(groups, blocking=blocking, watch=stall_watch(model, groups))
        self.units = [
            unit_from(request, i, dtypes, size=groups.size, rank=groups.rank)
            for i, request in enumerate(requests)
            if request.parameters
        ]
        layers = {request.name for request in requests if request.is_layer}
        self.accumulate_steps = accumulate_steps
        self.keeps_gradients = keeps_gradients
        # Nothing gathered ahead: memory comes first, and what no unit uses now is given back.
        is_freed = not any(unit.prefetch_forward or unit.prefetch_backward for unit in self.units)
        self.arena_plan = plan_arena(sizes_of(self, layers), grad_slots=grad_slots, is_freed=is_freed)
        for unit in self.units:
            unit.keep = unit.keep or unit.name in self.arena_plan.kept
        self.schedule = Schedule(self.units)
        self.witness = _witness(groups, self.units)
        self.reduction = Reduction(self, accumulate_steps=accumulate_steps, agree_on_unused=agree_on_unused)
        self.paused = False
        self.weights_version = 0
        self._handles: list[RemovableHandle] = []
        self.arena = materialise(self)
        self._register()

    # ------------------------------------------------------------------ hooks

    def _register(self) -> None:
        for unit in self.units:
            if unit.moves or self._reduces(unit):
                for module in unit.modules:
                    self._register_module(unit, module)
            for section, entry in unit.entries():
                if section.trainable and self.reduction.manages(section):
                    hook = self.reduction.grad_hook(section, entry)
                    self._handles.append(entry.used.register_post_accumulate_grad_hook(hook))
        if self._handles:
            self._register_model()

    def _register_model(self) -> None:
        def before(module: nn.Module, args: tuple) -> None:
            self.before_model()

        def after(module: nn.Module, args: tuple, output: Any) -> None:
            self.after_model(output)

        self._handles.append(self.model.register_forward_pre_hook(before, prepend=True))
        self._handles.append(self.model.register_forward_hook(after, always_call=True))
        self._handles.append(self.model.register_state_dict_pre_hook(lambda *_: self.settle()))
        self._handles.append(self.model.register_load_state_dict_pre_hook(lambda *_: self.settle()))

    def _reduces(self, unit: Unit) -> bool:
        return any(self.reduction.manages(section) for section in unit.sections)

    def _register_module(self, unit: Unit, module: nn.Module) -> None:
        def before(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
            return self.before_forward(unit, args, kwargs)

        def after(module: nn.Module, args: tuple, output: Any) -> None:
            self.after_forward(unit, module, output)

        self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True, prepend=True))
        self._handles.append(module.register_forward_hook(after, always_call=True))

    # ------------------------------------------------------------------ forward

    def before_model(self) -> None:
        """The whole model is called: what earlier calls left gathered goes, shared parameters come."""
        if self.paused or in_backward_pass():
            return
        self.recover()
        self._refuse_unfrozen()
        self.witness.begin_pass()
        self.schedule.start_forward()
        self.reduction.before_forward()
        for unit in self.units:
            unit.active = 0
            unit.calls.clear()
            # Left gathered by a pass that had no backward: the values may have changed since.
            self.release(unit)
            self.drop_part(unit)
            if unit.resident:
                self.make_ready(unit)
        self.prefetch(self.schedule.ahead_forward(None))

    def _refuse_unfrozen(self) -> None:
        """A parameter that was frozen when the policy was applied has no gradient memory and no reduction."""
        for unit in self.units:
            for section in unit.sections:
                if section.trainable or (section.in_place and self.groups.world is None):
                    continue
                for entry in section.entries:
                    if entry.held.requires_grad:
                        raise MemoptError.of(
                            "unfrozen-after-policy",
                            "the parameter was frozen when the policy was applied, and so was given no gradient memory",
                            path=entry.path,
                            hint="set requires_grad before apply_policy for all that will be trained; freezing later "
                            "is fine, and so is thawing what was trainable then",
                        )

    def after_model(self, output: Any) -> None:
        """The whole model has returned."""
        if self.paused or in_backward_pass():
            return
        if output is not None:  # it has not raised
            self.witness.end_pass(is_training=torch.is_grad_enabled())
        if not torch.is_grad_enabled():
            for unit in self.units:
                self.release(unit)
            return
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(self._backward_begins)

    def _backward_begins(self, grad: torch.Tensor) -> None:
        self.reduction.begin()

    def before_forward(self, unit: Unit, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        """A module of the unit is called: its weights are there when this returns."""
        if self.paused:
            unit.calls.append(Call(is_tracked=False))
            return self._prepare_inputs(unit, args, kwargs, tracked=False)
        recomputing = in_backward_pass()
        if not recomputing:
            self.recover()
            self._drop_stale(unit)
            if unit.moves:
                self.witness.note_call(unit.name, is_training=torch.is_grad_enabled())
        self.make_ready(unit)
        unit.active += 1
        tracked = not unit.resident and torch.is_grad_enabled() and not (recomputing and unit.live_uses > 0)
        unit.calls.append(Call(is_tracked=tracked))
        if not recomputing and not unit.resident:
            self.prefetch(self.schedule.ahead_forward(unit))
        return self._prepare_inputs(unit, args, kwargs, tracked=tracked)

    def _prepare_inputs(self, unit: Unit, args: tuple, kwargs: dict, *, tracked: bool) -> tuple[tuple, dict] | None:
        """Casts floating-point inputs to the compute dtype and marks where the unit's backward pass ends."""
        cast = self.dtypes.compute
        leaves, tree = tree_flatten((args, kwargs))
        changed = False
        where = []
        for i, leaf in enumerate(leaves):
            if not isinstance(leaf, torch.Tensor):
                continue
            if cast is not None and leaf.is_floating_point() and leaf.dtype != cast:
                leaves[i] = leaf = leaf.to(cast)
                changed = True
            if tracked and leaf.requires_grad:
                where.append(i)
        if where:
            use = Use(unit, self.weights_version)
            self.reduction.order.note_call(unit)
            marked = _UnitInput.apply(self, unit, use, *[leaves[i] for i in where])
            for i, tensor in zip(where, marked, strict=True):
                leaves[i] = tensor
            changed = True
        if not changed:
            return None
        passed = tree_unflatten(leaves, tree)
        unit.calls[-1].handed = Handed.of((args, kwargs), passed)
        return passed

    def after_forward(self, unit: Unit, module: nn.Module, output: Any) -> None:
        """A module of the unit has returned (or raised: then `output` is None)."""
        if not unit.calls:
            return
        call = unit.calls.pop()
        added = list(call.handed.give_back()) if call.handed is not None else []
        if self.paused:
            return
        unit.active -= 1
        if call.is_tracked and output is not None:
            self._watch_outputs(unit, (output, *added) if added else output)
        if unit.resident or in_backward_pass() or unit.active or module is not unit.modules[-1]:
            return
        if self.schedule.forward.next_units(1)[:1] == [unit]:  # the same layer comes again
            return
        if not torch.is_grad_enabled():
            self.release(unit)
        elif not unit.keep:
            self.reshard(unit)

    def _watch_outputs(self, unit: Unit, output: Any) -> None:
        seen = False
        for tensor in tensors_in(output):
            seen = True
            if tensor.requires_grad:
                tensor.register_hook(lambda grad: self.before_backward(unit))
        if not seen and unit.trainable:
            raise MemoptError.of(
                "unit-output-unseen",
                f"the module returns a `{type(output).__qualname__}` in which no tensor can be found, so the engine "
                "cannot tell when its backward pass begins",
                path=unit.name,
                hint="return tensors, tuples, mappings, dataclasses or pytree-registered classes",
            )

    # ------------------------------------------------------------------ backward

    def before_backward(self, unit: Unit) -> None:
        """A gradient has reached one of the unit's outputs."""
        if self.paused:
            return
        self.reduction.begin()
        if unit.in_backward and unit.state == "ready":
            return
        first = not unit.in_backward
        unit.in_backward = True
        if unit.needs_weights_in_backward:
            self.make_ready(unit)
        if first:
            self.prefetch(self.schedule.ahead_backward(unit))

    def after_backward(self, unit: Unit, use: Use) -> None:
        """Every gradient of one call of the unit has been produced."""
        if self.paused:
            return
        if not unit.in_backward or unit.evicted:
            raise self.entered_unseen(unit)
        if use.weights_version != self.weights_version:
            raise MemoptError.of(
                "weights-changed-since-forward",
                "an optimizer stepped between this forward pass and its backward pass, so the gradients would belong "
                "to weights that are gone",
                path=unit.name,
                hint="run the forward pass again after optimizer.step()",
            )
        use.finish()
        if unit.live_uses == 0:
            self.finish_unit(unit)
        # Else it was called more than once (or has several modules): weights stay until the memory is needed, and
        # autograd delivers the gradients with the last call.

    def finish_unit(self, unit: Unit) -> None:
        """The unit's backward pass is over: weights go, gradients are sent."""
        if not unit.resident:
            self.release(unit)
            self.drop_part(unit)
            unit.in_backward = False
        self.reduction.launch(unit)

    def entered_unseen(self, unit: Unit) -> MemoptError:
        """The backward pass came into a unit by a tensor that is not one of its outputs."""
        return MemoptError.of(
            "backward-entered-unseen",
            f"the backward pass reached weights of `{unit.name}` without passing through the unit's outputs, when they "
            "were not gathered: its gradients would be wrong",
            path=unit.name,
            hint="return every tensor that reaches the loss from the unit's forward (auxiliary losses too), or make "
            "the module that produces it a unit of its own",
        )

    def _drop_stale(self, unit: Unit) -> None:
        """Weights left gathered that have been written since (by hand: optimizers announce themselves)."""
        if unit.state != "ready" or unit.active or unit.in_backward:
            return
        if any(s.gathered_version != s.shard._version for s in unit.sections if not s.in_place):
            self.release(unit)

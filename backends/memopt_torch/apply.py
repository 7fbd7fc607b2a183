"""Applies a plan to a torch model and gives the user one handle for what training needs.

Order, outermost last: recomputation and activation offload are put around each unit's forward, sharding around that,
`torch.compile` is the user's to call afterwards. Applied in another order a recomputation would find weights freed.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from memopt.applied import Check, Reference
from memopt.plan import Plan
from memopt.report import Report, rule_effects
from memopt.spec import ModelSpec

from . import checking, recompute
from .collectives import make_groups
from .compiling import compile_units
from .engine import Engine
from .guards import guard_model, refuse_unfit
from .inventory import Names, names_of
from .methods import register_method
from .optimizers import make_optimizer, note_state_rule, refuse_foreign_optimizer, repoint
from .placement import dtypes_of, requests_of
from .sharded import vector_norms

log = logging.getLogger("memopt")


class Applied:
    """A model under a policy.

    Attributes:
        model: The object that was passed in.
        plan: What was applied.
        spec: The inventory it was made from.
        engine: The sharding engine.
        regions: Recomputed and offloaded regions.
    """

    def __init__(
        self, model: nn.Module, plan: Plan, spec: ModelSpec, *, names: Names, engine: Any, regions: Any
    ) -> None:
        self.model = model
        self.plan = plan
        self.spec = spec
        self.engine = engine
        self.regions = regions
        self._names = names
        self._optimizers: list[Optimizer] = []
        self.optimizer_offloads: list[Any] = []
        self.waiting_state: Any = None
        self._saver: Any = None
        self._step_ends: list[float] = []
        self._measured: Any = None

    # ------------------------------------------------------------------ training

    def optimizer(self, factory: Callable[..., Optimizer], params: Any = None, **options: Any) -> Optimizer:
        """An optimizer over what is really trained, its state placed as the policy says.

        Args:
            factory: An optimizer class, or a callable from parameters to an optimizer.
            params: Parameters or parameter groups; left out: every trainable parameter. Parameters taken from the model
                before the policy was applied are exchanged for the ones that replaced them.
            options: Passed to `factory`.

        Raises:
            MemoptError: What optimizer-state rules refuse.
        """
        self._settle()
        return self.adopt(make_optimizer(factory, self.model, params, options))

    def adopt(self, optimizer: Optimizer) -> Optimizer:
        """Re-points an optimizer made before the policy and places its state; `apply_policy(optimizer=)` calls it."""
        repoint(optimizer)
        self._place_state(optimizer)
        self._optimizers.append(optimizer)
        if self.waiting_state is not None:
            from .checkpoint import claim_state

            claim_state(self, optimizer)
        optimizer.register_step_post_hook(lambda *_: self._after_step())
        return optimizer

    def _after_step(self) -> None:
        if not self._step_ends:
            self.regions.tell_of_idle_units()
        self._step_ends.append(time.perf_counter())

    def _place_state(self, optimizer: Optimizer) -> None:
        rows = [row for row in self.plan.rows_of("optimizer_state") if row.memory_kind == "pinned_host"]
        if not rows:
            return
        from . import optimizer_offload

        paths = {parameter: path for path, parameter in self.held_parameters().items()}
        offload = optimizer_offload.install(optimizer, self.plan, paths)
        if offload is not None:
            self.optimizer_offloads.append(offload)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scales all gradients so that their global norm is at most `max_norm`; one all-reduce.

        Returns:
            The norm before clipping, a 0-d tensor, the same on every rank.

        Raises:
            MemoptError: `accumulate-steps`, in the middle of an accumulation that reduces at its end.
        """
        if self._is_flat():
            self.engine.before_step()
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        grads = [p.grad for p in parameters if p.grad is not None]
        if not grads:
            return torch.zeros(())
        norms = vector_norms(grads, norm_type) if self._is_flat() else torch._foreach_norm(grads, norm_type)
        total = torch.linalg.vector_norm(torch.stack(list(norms)), norm_type)
        if hasattr(total, "full_tensor"):
            total = total.full_tensor()  # type: ignore[operator]  # DTensor of the fsdp2 engine
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
        return total

    def _is_flat(self) -> bool:
        return isinstance(self.engine, Engine)

    def register_method(self, module: nn.Module, name: str) -> None:
        """Lets another method than `forward` be called on a sharded module: weights are gathered around it."""
        register_method(self.engine, module, name)

    def compile(self, **options: Any) -> None:
        """Compiles each unit's forward with `torch.compile(**options)`; hooks stay outside and break no graph.

        The order is: build, `apply_policy`, `compile`.

        Raises:
            MemoptError: `compile-holds-values`: values inside a unit are kept or offloaded by name, and a compiled
                function shows no modules.
        """
        compile_units(self, options)

    def step(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Torch needs no step function: hooks do the work. Returns `fn` unchanged."""
        return fn

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """Those made by `optimizer` or adopted, in that order."""
        return tuple(self._optimizers)

    def weights_changed(self) -> None:
        """Parameters were written by hand (by `.data`, which leaves no trace): copies of them are dropped, gathered and
        those that an update on the host starts from. Optimizers announce themselves."""
        for offload in self.optimizer_offloads:
            offload.parameters_written()
        if isinstance(self.engine, Engine):
            self.engine.parameters_stepped()

    def module(self, path: str) -> nn.Module:
        """The module at a canonical path."""
        return self._names.module(path)

    def held_parameters(self) -> dict[str, nn.Parameter]:
        """Canonical path -> what the optimizer steps, tied parameters once."""
        self._settle()
        return {path: self._names.parameter(path) for path in self._names.parameters}

    def _settle(self) -> None:
        if isinstance(self.engine, Engine):
            self.engine.settle()
        for offload in self.optimizer_offloads:
            offload.settle()

    # ------------------------------------------------------------------ assurance

    def check(
        self,
        batch: Any,
        *,
        reference: Reference = "auto",
        layout: bool = False,
        loss: Callable[[nn.Module, Any], torch.Tensor] | None = None,
    ) -> Check:
        """One batch with the policy's recomputation and offload on and off; every gradient compared.

        Args:
            batch: What `loss` takes; without `loss` a mapping of keyword arguments whose result has `.loss`, or is the
                scalar itself. Each rank passes its own.
            reference: `plain` keeps every activation, `recompute` recomputes every unit. `auto` is `plain` where that
                fits the policy's device budget (without one: the GPU's memory), else `recompute`.
            layout: Also compares with the unsharded model on the same batches.
            loss: `loss(model, batch)`.

        Returns:
            The verdict, the same on every rank. Gradients, random state and buffers are as before.
        """
        return checking.check(self, batch, reference=reference, layout=layout, loss=loss)

    def report(self, step: Callable[[], Any] | None = None) -> Report:
        """Planned and measured bytes by role, traffic, collectives and step time.

        Args:
            step: Runs one whole training step, which is measured; left out: the last measurement, if any.
        """
        from .measure import StepMeter

        if step is not None:
            with StepMeter(self.model, optimizers=tuple(self._optimizers), engine=self.engine) as meter:
                step()
            self._measured = meter.result()
        figures: dict[str, Any] = {}
        if self._measured is not None:
            peak = self._measured.peak
            figures = {
                "measured_peak_bytes": peak.nbytes,
                "measured_by_role": dict(peak.by_role),
                "host_bytes": peak.host_nbytes,
                "collectives": {kind: calls.num_calls for kind, calls in self._measured.collectives.items()},
            }
        times = [b - a for a, b in zip(self._step_ends, self._step_ends[1:], strict=False)]
        return Report(
            backend="torch",
            counted=not torch.cuda.is_available(),
            step_time_s=statistics.median(times) if times else None,
            effects=rule_effects(self.plan),
            versions={"torch": torch.__version__},
            notes=self._notes(),
            **figures,
        )

    def _notes(self) -> tuple[str, ...]:
        notes = list(self.plan.warnings)
        if self._is_flat():
            arena = self.engine.arena_plan
            how = "given back while empty" if arena.is_freed else "in one allocation"
            notes.append(f"arena: {arena.nbytes} bytes {how}, {len(self.engine.units)} units")
        return tuple(notes)

    # ------------------------------------------------------------------ checkpoints

    def save(self, directory: Any, *, async_save: bool = False, **extra: Any) -> Any:
        """Writes a sharded checkpoint; it appears whole or not at all, and nothing is gathered.

        Args:
            directory: A folder that does not exist yet, or an earlier checkpoint to replace.
            async_save: Copies this rank's parts to host memory and writes them while training goes on.
            extra: Plain values to come back from `load` (step counts, seeds, data positions).

        Returns:
            With `async_save` a `memopt_torch.saving.PendingSave`, whose `wait()` returns when the checkpoint is there
            and raises what went wrong; else None. A save or load waits for the one under way, and raises its error if
            nobody has been told of it.

        Raises:
            MemoptError: `checkpoint-extra`, `checkpoint-target-occupied`, `checkpoint-write-failed`,
                `async-save-needs-gloo`.
        """
        from .checkpoint import contents_of

        self._settle()
        contents = contents_of(self.model, self.optimizers, extra)
        return self._save_with().save(contents, directory, in_background=async_save)

    def _save_with(self) -> Any:
        from .saving import Saver

        if self._saver is None:
            self._saver = Saver()
        return self._saver

    def load_pretrained(self, folder: Any, *, strict: bool = True) -> None:
        """Reads a Transformers checkpoint (safetensors); each rank reads only the parts it holds.

        Raises:
            MemoptError: `no-safetensors`, `pretrained-mismatch`.
        """
        from .pretrained import load_pretrained

        self._settle()
        load_pretrained(self, folder, strict=strict)

    def save_pretrained(self, folder: Any, *, max_file_bytes: int = 5 * 2**30) -> None:
        """Writes the weights as safetensors files that Transformers reads; whole tensors, a file's worth at a time."""
        from .pretrained import save_pretrained

        self._settle()
        save_pretrained(self, folder, max_file_bytes=max_file_bytes)

    def load(self, directory: Any) -> dict[str, Any]:
        """Reads a checkpoint made at any world size, under any policy or none; returns what `save` was given.

        State of optimizers that are made later is read when `optimizer` makes them.

        Raises:
            MemoptError: `checkpoint-mismatch`, naming every key that is missing, left over or of another shape.
        """
        from .checkpoint import load

        self._settle()
        self._save_with().settle()
        return load(self, directory)


def apply(model: nn.Module, plan: Plan, spec: ModelSpec, *, optimizer: Any, mesh: Any) -> Applied:
    """Applies a plan; see `memopt.apply_policy`."""
    names = names_of(model)
    refuse_unfit(model, plan, mesh)
    if optimizer is not None:
        refuse_foreign_optimizer(optimizer, model)
    regions = recompute.install(model, plan)
    engine = _engine(model, plan, names)
    regions.transfers.engine = engine  # weights are never offloaded as activations
    applied = Applied(model, plan, spec, names=names, engine=engine, regions=regions)
    _tell_arena(engine)
    guard_model(model, applied)
    held = applied.held_parameters()
    for row in plan.rows_of("optimizer_state"):
        if row.memory_kind == "pinned_host" and row.rule is not None and row.path in held:
            note_state_rule(held[row.path], row.rule)
    if optimizer is not None:
        applied.adopt(optimizer)
    return applied


def _tell_arena(engine: Any) -> None:
    """The arena's table, once a job: what is allocated is known before training."""
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    if isinstance(engine, Engine) and engine.arena_plan.nbytes and is_first:
        log.info("memory of gathered weights and gradients on each rank:\n%s", engine.arena_plan.table())


def _engine(model: nn.Module, plan: Plan, names: Names) -> Any:
    options = plan.options
    if options.get("engine", "layer") == "fsdp2":
        from .fsdp2 import Fsdp2Engine

        return Fsdp2Engine(model, plan, names)
    last = plan.accumulate_reduce == "last"
    reshard = {unit.reshard_after_forward for unit in plan.units}
    return Engine(
        model,
        requests_of(plan, names),
        groups=make_groups(
            plan.mesh,
            part_sizes=[n for n in reshard if not isinstance(n, bool)],
            timeout_s=options.get("timeout_s"),
        ),
        dtypes=dtypes_of(plan),
        grad_slots=options.get("gradient_slots", 1),
        blocking=options.get("communication", "async") == "blocking",
        accumulate_steps=plan.accumulate_steps if last else 1,
        keeps_gradients=plan.accumulate_steps > 1 and not last,
        agree_on_unused=options.get("unused_parameters", "auto") == "agree",
    )

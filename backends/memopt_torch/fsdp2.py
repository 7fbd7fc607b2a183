"""The `fsdp2` engine: torch's own `fully_shard` behind the same policy. Reference, and fallback for models that other
libraries have placed on further mesh axes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from memopt.errors import MemoptError, Problem
from memopt.plan import Plan, PlanUnit

from .collectives import device_mesh
from .inventory import Names
from .optimizers import note_owner, note_replacement
from .placement import dtypes_of, shared_outside
from .traversal import tensors_in
from .unreduced import refuse_unreduced


class Fsdp2Engine:
    """Wraps a plan's units with `fully_shard`, then the root.

    Args:
        model: Its parameters become DTensors, in place.
        plan: Every parameter of a unit must have the same layout: FSDP2 has no parameters kept whole inside one.
        names: The model's names.

    Raises:
        MemoptError: `fsdp2-kept-whole`.
    """

    def __init__(self, model: nn.Module, plan: Plan, names: Names) -> None:
        self.model = model
        self.units: tuple[Any, ...] = ()
        self.accumulate_steps = plan.accumulate_steps if plan.accumulate_reduce == "last" else 1
        self.micro_step = 0
        self._task = -1
        self._fsdp_size = plan.axis_size("fsdp")
        _refuse_precision(plan, names)
        _refuse_prefetch(plan)
        if plan.world_size == 1:
            return
        rows = {row.path: row for row in plan.rows_of("param")}
        kept = [path for path, row in rows.items() if "fsdp" not in row.layout]
        whole = self._all_whole(rows.values())
        if kept and not whole:
            raise MemoptError([_kept_whole(path, rows[path].rule) for path in kept])
        before = {path: names.parameter(path) for path in names.parameters}
        self.mesh = _mesh(plan, before.values(), replicate_all=whole)
        precision = _mixed(plan)
        # A parameter tied across units stays with the root, which outlives them.
        units = tuple(unit for unit in plan.units if not shared_outside(unit, names))
        wrapped = [self._wrap(unit, names, precision) for unit in units]
        fully_shard(model, mesh=self.mesh, mp_policy=precision)
        self._link(units, wrapped)
        for path, old in before.items():
            new = names.parameter(path)
            note_owner(new, self)
            if new is not old:
                note_replacement(old, new)
        if self.accumulate_steps > 1:
            model.register_forward_hook(self._watch_backward)

    def _all_whole(self, rows: Iterable[Any]) -> bool:
        return all(not row.layout for row in rows)

    def _wrap(self, unit: PlanUnit, names: Names, precision: MixedPrecisionPolicy) -> FSDPModule:
        modules = list(dict.fromkeys(names.module(member) for member in unit.members))
        group = unit.reshard_after_forward
        fully_shard(
            modules if len(modules) > 1 else modules[0],
            mesh=self.mesh,
            mp_policy=precision,
            reshard_after_forward=group if isinstance(group, bool) or group < self._fsdp_size else True,
        )
        first = modules[0]
        assert isinstance(first, FSDPModule)  # fully_shard changes the class
        return first

    def _link(self, units: tuple[PlanUnit, ...], wrapped: list[FSDPModule]) -> None:
        """FSDP2 gathers one unit ahead in backward by itself; further ahead, and forward, is set here."""
        for i, unit in enumerate(units):
            if unit.prefetch_forward:
                wrapped[i].set_modules_to_forward_prefetch(wrapped[i + 1 : i + 1 + unit.prefetch_forward])
            if unit.prefetch_backward > 1:
                wrapped[i].set_modules_to_backward_prefetch(wrapped[max(0, i - unit.prefetch_backward) : i][::-1])

    def _watch_backward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(self._backward_begins)

    def _backward_begins(self, grad: torch.Tensor) -> None:
        """Counts backward passes, each once, and says whether this one reduces."""
        task = torch._C._current_graph_task_id()
        if task == self._task:
            return
        self._task = task
        self.micro_step += 1
        assert isinstance(self.model, FSDPModule)  # the root is wrapped
        self.model.set_requires_gradient_sync(self.micro_step % self.accumulate_steps == 0)

    def before_step(self) -> None:
        """An optimizer is about to step: refused while gradients are not reduced."""
        refuse_unreduced(self.micro_step, self.accumulate_steps)

    def parameters_stepped(self) -> None:
        """An optimizer has stepped: a new accumulation begins."""
        self.micro_step = 0

    def buffers(self) -> Iterable[tuple[torch.Tensor, str]]:
        """FSDP2 holds nothing between steps but the parameters themselves."""
        return ()

    def is_weight(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's memory is a parameter's, gathered or sharded."""
        storage = tensor.untyped_storage()._cdata
        for parameter in self.model.parameters():
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter  # type: ignore[operator]
            if local.untyped_storage()._cdata == storage:
                return True
        return False


def _mesh(plan: Plan, parameters: Iterable[torch.Tensor], *, replicate_all: bool) -> DeviceMesh:
    """The mesh of the policy's axes; (replicate, fsdp) is hybrid sharding to FSDP2. A policy that shards nothing is
    replication over every rank."""
    device = next(iter(parameters)).device.type
    if replicate_all:
        return device_mesh((("replicate", plan.world_size), ("fsdp", 1)), device)
    sizes = dict(plan.mesh)
    axes = tuple((name, size) for name, size in plan.mesh if name in ("replicate", "fsdp") and size > 1)
    if "fsdp" not in dict(axes):
        axes = (*axes, ("fsdp", sizes.get("fsdp", 1)))
    others = tuple(name for name, size in plan.mesh if name not in ("replicate", "fsdp") and size > 1)
    whole = device_mesh(plan.mesh if others else axes, device)
    return whole[tuple(name for name, _ in axes)] if others else whole


def _mixed(plan: Plan) -> MixedPrecisionPolicy:
    dtypes = dtypes_of(plan)
    return MixedPrecisionPolicy(param_dtype=dtypes.compute, reduce_dtype=dtypes.reduce)


def _refuse_prefetch(plan: Plan) -> None:
    none = [unit.name for unit in plan.units if unit.prefetch_backward == 0]
    if none and plan.world_size > 1:
        raise MemoptError.of(
            "fsdp2-prefetch",
            f"`prefetch: {{backward: 0}}` (first for unit `{none[0]}`): FSDP2 always gathers one ahead in backward",
            path="unit_defaults.prefetch",
            hint="write `backward: 1` or more, or use the layer engine",
        )


def _refuse_precision(plan: Plan, names: Names) -> None:
    """FSDP2 casts what it gathers; it changes no parameter between steps, and gathers nothing in one process."""
    dtypes = dtypes_of(plan)
    problems = []
    if plan.world_size == 1 and plan.precision:
        problems.append(
            Problem(
                "fsdp2-precision",
                "in one process FSDP2 gathers nothing, so it would compute in the model's own dtype",
                path="precision",
                hint="use the layer engine (backend_options.torch.engine: layer)",
            )
        )
    for path in names.parameters:
        parameter = names.parameter(path)
        floats = parameter.requires_grad and parameter.dtype.is_floating_point
        if dtypes.master is not None and floats and parameter.dtype != dtypes.master:
            problems.append(
                Problem(
                    "fsdp2-precision",
                    f"the parameter is {parameter.dtype} and the policy's master dtype {dtypes.master}; FSDP2 keeps it "
                    "as it is",
                    path=path,
                    hint="cast the model before apply_policy, or use the layer engine",
                )
            )
    if problems:
        raise MemoptError(problems)


def _kept_whole(path: str, rule: str | None) -> Problem:
    return Problem(
        "fsdp2-kept-whole",
        f"rule `{rule}` keeps this parameter whole while others are sharded; FSDP2 shards every parameter of a unit",
        path=path,
        hint="shard it too, or use the layer engine (backend_options.torch.engine: layer)",
    )

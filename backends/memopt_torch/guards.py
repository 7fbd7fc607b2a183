"""What cannot work is refused before anything is changed; what would break a sharded model is refused afterwards."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from memopt.errors import MemoptError, Problem
from memopt.plan import Plan

APPLIED = "_memopt_applied"


def world_size(mesh: Any = None) -> int:
    """Ranks of this job.

    Raises:
        MemoptError: `process-group-missing`.
    """
    if mesh is not None:
        return mesh.size()
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    if dist.is_available() and dist.is_torchelastic_launched() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise MemoptError.of(
            "process-group-missing",
            f"torchrun started {os.environ['WORLD_SIZE']} ranks, but there is no process group yet",
            hint='call `torch.distributed.init_process_group("nccl")` (or "gloo" on CPUs) before apply_policy',
        )
    return 1


def refuse_unfit(model: nn.Module, plan: Plan, mesh: Any) -> None:
    """Checks everything that can be checked before the model is touched.

    Raises:
        MemoptError: With every problem found.
    """
    problems = [*_wrapped(model), *_placement(model, plan), *_mesh(plan, mesh), *_precision(plan)]
    if problems:
        raise MemoptError(problems)


def _wrapped(model: nn.Module) -> list[Problem]:
    from torch.nn.parallel import DistributedDataParallel

    if getattr(model, APPLIED, False):
        return [
            Problem(
                "already-applied",
                "a policy has been applied to this model already",
                hint="apply one policy with all rules, or build the model anew",
            )
        ]
    if isinstance(model, DistributedDataParallel):
        return [
            Problem(
                "wrapped-model",
                "the model is wrapped in DistributedDataParallel, which reduces whole gradients itself",
                hint="pass the bare model: the policy replaces the DDP line",
            )
        ]
    if hasattr(model, "_orig_mod"):
        return [
            Problem(
                "compiled-before",
                "the model is compiled already; its graph would not see the policy",
                hint="apply the policy to the plain model first, then compile: `run.compile()`",
            )
        ]
    return []


def _placement(model: nn.Module, plan: Plan) -> list[Problem]:
    problems = []
    engine = plan.options.get("engine", "layer")
    dtensors = [name for name, parameter in model.named_parameters() if hasattr(parameter, "device_mesh")]
    if dtensors and engine == "layer":
        problems.append(
            Problem(
                "existing-placement",
                f"{len(dtensors)} parameters are DTensors (first: `{dtensors[0]}`), which flat units cannot hold",
                path=dtensors[0],
                hint="set backend_options.torch.engine: fsdp2, which leaves placements on other axes alone",
            )
        )
    if engine == "fsdp2" and plan.world_size > 1 and any(parameter.is_meta for parameter in model.parameters()):
        problems.append(
            Problem(
                "meta-fsdp2",
                "the model is on the meta device, which the fsdp2 engine cannot give values to shard by shard",
                hint="use the layer engine, or build the model on a real device",
            )
        )
    devices = {parameter.device.type for parameter in model.parameters()}
    if "cuda" in devices and plan.world_size > 1 and not dist.is_nccl_available():
        problems.append(
            Problem(
                "nccl-missing",
                "sharding over GPUs needs NCCL, which this build of torch does not have",
                hint="install a Linux CUDA build of torch, train on one GPU with recompute and offload rules, or run "
                "on the CPU with gloo",
            )
        )
    if len(devices - {"meta"}) > 1:
        problems.append(
            Problem(
                "mixed-devices",
                f"parameters lie on {', '.join(sorted(devices))}",
                hint="move the whole model to one device before apply_policy",
            )
        )
    return problems


def _mesh(plan: Plan, mesh: Any) -> list[Problem]:
    """A mesh that was passed must be the policy's: the engine makes process groups of its own along the same axes."""
    if mesh is None:
        return []
    problems = []
    if dist.is_initialized() and mesh.size() != dist.get_world_size():
        problems.append(
            Problem(
                "mesh-world",
                f"the mesh has {mesh.size()} ranks, the process group {dist.get_world_size()}",
                path="mesh",
                hint=f"build the mesh over all {dist.get_world_size()} ranks",
            )
        )
    names = mesh.mesh_dim_names or tuple("fsdp" if mesh.ndim == 1 else f"axis{i}" for i in range(mesh.ndim))
    given = [(name, mesh.size(i)) for i, name in enumerate(names) if mesh.size(i) > 1]
    planned = [(name, size) for name, size in plan.mesh if size > 1]
    if given != planned:
        written = ", ".join(f"{name}: {size}" for name, size in given)
        problems.append(
            Problem(
                "mesh-world",
                f"the mesh passed is {{{written}}}, the policy's {{{', '.join(f'{n}: {s}' for n, s in planned)}}}",
                path="mesh",
                hint=f"write `mesh: {{{written}}}` in the policy, or leave `mesh=` out",
            )
        )
    return problems


def _precision(plan: Plan) -> list[Problem]:
    state, master = plan.precision.get("optimizer_state"), plan.precision.get("master")
    if state == master:
        return []
    return [
        Problem(
            "state-dtype",
            f"optimizer state in {state} beside master weights in {master}: torch optimizers keep state in the dtype "
            "of the parameters they step",
            path="precision.optimizer_state",
            hint=f"write `optimizer_state: {master}`",
        )
    ]


def guard_model(model: nn.Module, applied: Any) -> None:
    """Marks the model, and refuses what would silently break it: moving, casting and copying."""
    model.__dict__[APPLIED] = True
    engine = applied.engine
    touched = [module for region in applied.regions.regions for module in (region.module,)]
    for unit in getattr(engine, "units", ()):
        if unit.moves or (unit.trainable and plan_is_distributed(applied.plan)):
            touched.extend(unit.modules)
    if not touched:
        return
    for module in dict.fromkeys([model, *touched]):
        module.__dict__["__deepcopy__"] = _refuse_copy
        module.__dict__["_apply"] = _guarded_apply(module)


def plan_is_distributed(plan: Plan) -> bool:
    """Whether more than one rank takes part."""
    return plan.world_size > 1


def _refuse_copy(memo: dict) -> Any:
    raise MemoptError.of(
        "sharded-deepcopy",
        "a model under a policy cannot be deep-copied: the copy would share this one's buffers and process groups",
        hint="copy the model before memopt.apply_policy, or save it with run.save(dir) and load the copy",
    )


def _guarded_apply(module: nn.Module) -> Any:
    """`Module._apply` is what `.to()`, `.cuda()`, `.half()` and friends call; a call that changes nothing is let be."""

    def guarded(fn: Any, recurse: bool = True) -> nn.Module:
        kinds = {(tensor.dtype, tensor.device) for tensor in (*module.parameters(), *module.buffers())}
        for dtype, device in kinds:
            probe = torch.empty(0, dtype=dtype, device=device)
            moved = fn(probe)
            if (moved.dtype, moved.device) != (dtype, device):
                raise MemoptError.of(
                    "moved-after-policy",
                    f"the model is under a policy and cannot be moved or cast from {dtype} on {device} to "
                    f"{moved.dtype} on {moved.device}",
                    hint="move it before apply_policy; for another compute dtype write `precision: {compute: ...}`",
                )
        return module

    return guarded


def doctor() -> dict[str, Any]:
    """Versions, devices and process-group backends."""
    backends = [
        name
        for name, has in (
            ("gloo", dist.is_available() and dist.is_gloo_available()),
            ("nccl", dist.is_available() and dist.is_nccl_available()),
        )
        if has
    ]
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "installed": True,
        "versions": {"torch": torch.__version__},
        "devices": gpus or ["cpu"],
        "process_groups": backends,
    }

"""`memopt plan` on torch: what a step traced with fake tensors holds and does, told in the contract's words."""

from __future__ import annotations

import contextlib
import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from memopt.errors import MemoptError
from memopt.estimate import LiveTensor, Measured
from memopt.matching import canonical
from memopt.plan import Plan
from memopt.spec import ModelSpec

from .depths import Run, fit_step, reserved, tasks_of, unit_at
from .trace import Label
from .workloads import build

_LEFT_OUT = (
    "memory beyond live tensors, which the reserve stands for: contexts of CUDA, cuBLAS and NCCL",
    "torch.compile, which fuses operators and keeps other values",
    "staging buffers of the collectives' library (gloo copies what it reduces and scatters)",
    "kernels' own workspaces; operators are those torch picks on the CPU",
    "anything else the training loop does around the workload's step",
)

_NO_CLIPPING = "gradient clipping: the workload has no `clip_norm`"


def estimate(
    workload: Any, plan: Plan, spec: ModelSpec, *, target: Any = None, progress: Callable[[str], None] | None = None
) -> Measured:
    """The measured part of `memopt plan`: see `memopt.backend.Backend.estimate`.

    Args:
        workload: A `Workload`, `WorkloadConfig` or `HfWorkload`.
        plan: What to plan.
        spec: The model's inventory.
        target: Where it would run; live tensor bytes do not depend on it, what CUDA's allocator reserves is added.
        progress: Told in a short line what is being traced.

    Raises:
        MemoptError: `plan-target`, and what tracing refuses.
    """
    if getattr(target, "kind", None) == "tpu":
        raise MemoptError.of(
            "plan-target",
            f"this backend trains on CPUs and CUDA GPUs, not on `{target.name}`",
            hint="plan with `--backend jax`, or for a `gpu:` target",
        )
    if not hasattr(workload, "loss"):
        workload = build(workload, world_size=plan.world_size)
    fit = fit_step(workload, plan, spec, progress=progress or (lambda text: None))
    by_role = fit.segments[fit.peak]
    result = fit.deepest.result
    return Measured(
        method="fake-trace",
        by_role={role: nbytes for role, nbytes in by_role.items() if nbytes},
        host_bytes=fit.host_bytes,
        to_host_bytes=fit.amounts.to_host_bytes,
        to_device_bytes=fit.amounts.to_device_bytes,
        collectives={
            kind: {"count": calls, "bytes": nbytes} for kind, (calls, nbytes) in fit.amounts.collectives.items()
        },
        step_flops=fit.amounts.flops,
        recompute_flops=fit.amounts.recomputed_flops,
        timeline=tasks_of(fit, plan),
        reserved_bytes=reserved(fit) if getattr(target, "kind", None) == "gpu" else {},
        memory_timeline=tuple((phase, live) for live, phase in result.timeline),
        largest=tuple(
            LiveTensor(path=_place(module, origin), role=role, nbytes=nbytes, unit=unit_at(canonical(module), plan))
            for nbytes, role, _, origin, module in result.peak.largest
        ),
        by_unit=_by_unit(result.peak.by_module, plan) if fit.is_whole else {},
        peak_event=_told(fit.peak, fit.origins[fit.peak], fit.runs, spec),
        notes=(fit.note, "live tensor bytes of the second step"),
        left_out=_LEFT_OUT if workload.clip_norm is not None else (*_LEFT_OUT, _NO_CLIPPING),
        versions=_versions(),
    )


def _place(module: str, origin: str) -> str:
    """A parameter's path, or the module a value was made in and the operator that made it."""
    path = canonical(module)
    return path if not origin else f"{path} ({origin})" if path else origin


def _by_unit(by_module: Mapping[str, int], plan: Plan) -> dict[str, int]:
    """Bytes at the peak by unit, of what was made while a unit's modules ran, and its parameters."""
    found: dict[str, int] = {}
    for module, nbytes in by_module.items():
        unit = unit_at(canonical(module), plan)
        if unit is not None:
            found[unit] = found.get(unit, 0) + nbytes
    return found


def _told(label: Label, origin: str, runs: Sequence[Run], spec: ModelSpec) -> str:
    """The peak's place in words: `backward of layers.31 (mul.Tensor)`."""
    if len(label) == 1:
        where = {"start": "before the first layer", "optimizer": "the optimizer's step"}[label[0]]
        return f"{where} ({origin})"
    kind, stack, place = label
    number, turn, inner = place.split("/")
    run = runs[int(number)]
    if turn == "middle":
        return f"{kind if kind == 'after' else f'{kind} of'} a layer of {stack} ({origin})"
    at = run.first + (int(turn) % run.repeats) * run.period + int(inner)
    if kind == "after" and at + 1 == next(one.length for one in spec.stacks if one.path == stack):
        return f"after {stack}: head and loss ({origin})"
    return f"{kind if kind == 'after' else f'{kind} of'} {stack}.{at} ({origin})"


def _versions() -> dict[str, str]:
    found = {"torch": str(torch.__version__)}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # a model of the user's own needs none
        found["transformers"] = importlib.metadata.version("transformers")
    return found

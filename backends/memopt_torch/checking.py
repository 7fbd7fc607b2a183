"""One batch with the policy on and off: the same loss, the same gradients?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from memopt.applied import Check, Reference, known_reference
from memopt.errors import MemoptError

from .engine import Engine
from .fitting import fits_everywhere, limit_bytes, recompute_and_measure
from .sharded import ShardedTensor

if TYPE_CHECKING:
    from .apply import Applied

TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-10, torch.bfloat16: 2e-2, torch.float16: 5e-3}
"""Largest difference of a gradient over its norm that still counts as equal, by the dtype it is computed in."""


def check(
    applied: Applied,
    batch: Any,
    *,
    reference: Reference,
    layout: bool,
    loss: Callable[[nn.Module, Any], torch.Tensor] | None,
) -> Check:
    """See `Applied.check`."""
    reference = known_reference(reference)
    run = loss or default_loss
    with _untouched(applied):
        policy_loss, policy_grads = _run(applied, batch, run)
        mode, reference_loss, reference_grads = _run_reference(applied, batch, run, reference)
        loss_diff, diffs = _compare(policy_loss, reference_loss, policy_grads, reference_grads)
        if layout:
            whole_loss, whole_grads = _run_whole(applied, batch, run, mode)
            more_loss, more = _compare(policy_loss, whole_loss, policy_grads, whole_grads)
            loss_diff = max(loss_diff, more_loss)
            diffs = {path: max(diff, more.get(path, 0.0)) for path, diff in diffs.items()}
    return _verdict(applied, loss_diff, diffs, mode)


def default_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """The scalar a model returns, or its `.loss`, from a batch of keyword arguments.

    Raises:
        MemoptError: `check-loss`.
    """
    output = model(**batch) if isinstance(batch, Mapping) else model(batch)
    value = getattr(output, "loss", output)
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value
    raise MemoptError.of(
        "check-loss",
        f"the model returns a `{type(output).__qualname__}` without a scalar loss",
        hint="pass `loss=lambda model, batch: ...` to check, or a batch with labels",
    )


@contextmanager
def _untouched(applied: Applied) -> Iterator[None]:
    """Gradients, random state and buffers as they were."""
    model, engine = applied.model, applied.engine
    counts = engine.reduction if isinstance(engine, Engine) else engine
    if counts.micro_step % counts.accumulate_steps:
        raise MemoptError.of(
            "check-in-accumulation",
            "gradients of this optimizer step are not reduced yet, and a check would overwrite them",
            hint="call check between optimizer steps",
        )
    kept = {p: (p.grad, p.grad.detach().clone()) for p in model.parameters() if p.grad is not None}
    buffers = {buffer: buffer.detach().clone() for buffer in model.buffers()}
    steps = counts.micro_step, counts.accumulate_steps
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        try:
            counts.accumulate_steps = 1  # every pass of the check reduces
            yield
        finally:
            counts.micro_step, counts.accumulate_steps = steps
            for parameter in model.parameters():
                parameter.grad = None
            for parameter, (grad, value) in kept.items():
                grad.copy_(value)
                parameter.grad = grad
            with torch.no_grad():
                for buffer, value in buffers.items():
                    buffer.copy_(value)


def _seeded(applied: Applied) -> None:
    """The same random numbers in every run of a check; ranks differ."""
    for parameter in applied.model.parameters():
        parameter.grad = None
    torch.manual_seed(20230 + (dist.get_rank() if dist.is_initialized() else 0))


def _buffers(model: nn.Module) -> dict[torch.Tensor, torch.Tensor]:
    return {buffer: buffer.detach().clone() for buffer in model.buffers()}


def _run(applied: Applied, batch: Any, run: Callable[[nn.Module, Any], torch.Tensor]) -> tuple[float, dict]:
    _seeded(applied)
    before = _buffers(applied.model)
    loss = run(applied.model, batch)
    loss.backward()
    grads = {
        path: parameter.grad.detach().clone()
        for path, parameter in applied.held_parameters().items()
        if parameter.grad is not None
    }
    with torch.no_grad():
        for buffer, value in before.items():
            buffer.copy_(value)
    return float(loss.detach()), grads


def _run_reference(
    applied: Applied, batch: Any, run: Callable[[nn.Module, Any], torch.Tensor], reference: Reference
) -> tuple[Literal["plain", "recompute"], float, dict]:
    """The run to compare with. `auto`: with everything kept, if that fits; a run that recomputes every unit tells."""
    limit = limit_bytes(applied) if reference == "auto" and applied.regions.regions else None
    if limit is not None:
        result, needed_bytes = recompute_and_measure(applied, lambda: _run(applied, batch, run))
        if not fits_everywhere(needed_bytes, limit):
            return "recompute", *result
    mode = "recompute" if reference == "recompute" else "plain"
    with applied.regions.reference(mode):
        return mode, *_run(applied, batch, run)


def _run_whole(
    applied: Applied, batch: Any, run: Callable[[nn.Module, Any], torch.Tensor], mode: Any
) -> tuple[float, dict]:
    """The unsharded model on the same batch; its gradients averaged over ranks and cut as the policy's are."""
    if not isinstance(applied.engine, Engine):
        raise MemoptError.of(
            "check-layout-engine",
            "comparison with the unsharded model is offered by the layer engine",
            hint="leave `layout` out, or set backend_options.torch.engine: layer",
        )
    held = applied.held_parameters()
    _seeded(applied)
    before = _buffers(applied.model)
    grads: dict[str, torch.Tensor] = {}
    with applied.regions.reference(mode), applied.engine.unsharded() as whole:
        loss = run(applied.model, batch)
        loss.backward()
        for path, parameter in whole.items():
            if parameter.grad is None:
                continue
            grad = parameter.grad.to(held[path].dtype)
            if applied.engine.groups.world is not None:
                dist.all_reduce(grad, op=dist.ReduceOp.AVG)
            target = held[path]
            if isinstance(target, ShardedTensor):
                piece = target.slice
                grad = ShardedTensor(grad.reshape(-1)[piece.start : piece.stop], piece)
            grads[path] = grad
    with torch.no_grad():
        for buffer, value in before.items():
            buffer.copy_(value)
    return float(loss.detach()), grads


def _compare(loss: float, other_loss: float, grads: dict, other: dict) -> tuple[float, dict[str, float]]:
    """Absolute difference of the losses; per parameter the norm of the difference over the norm. NaN counts as
    infinitely different."""
    diffs = {}
    for path in dict.fromkeys((*grads, *other)):
        a, b = grads.get(path), other.get(path)
        if a is None or b is None:
            present = a if a is not None else b
            diffs[path] = 0.0 if present is not None and float(_norm(present)) == 0.0 else float("inf")
            continue
        difference, size = float(_norm(a - b)), float(_norm(b))
        relative = difference / size if size else difference
        diffs[path] = relative if relative == relative else float("inf")
    loss_diff = abs(loss - other_loss)
    return (loss_diff if loss_diff == loss_diff else float("inf")), diffs


def _norm(tensor: torch.Tensor) -> torch.Tensor:
    norm = torch.linalg.vector_norm(tensor)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # type: ignore[operator]


def _verdict(applied: Applied, loss_diff: float, diffs: dict[str, float], mode: Any) -> Check:
    held = applied.held_parameters()
    compute = applied.plan.precision.get("compute")
    ok = all(
        diff <= TOLERANCES.get(getattr(torch, compute) if compute else held[path].dtype, 1e-5)
        for path, diff in diffs.items()
    )
    tolerance = TOLERANCES.get(getattr(torch, compute) if compute else torch.float32, 1e-5)
    ok = ok and loss_diff <= tolerance * 10 and bool(diffs)  # nothing compared is nothing shown
    worst = max(diffs, key=lambda path: diffs[path], default=None)
    result = Check(
        ok=ok,
        loss_diff=loss_diff,
        max_grad_rel_diff=diffs[worst] if worst is not None else 0.0,
        worst_tensor=worst if worst is not None and diffs[worst] > 0 else None,
        reference=mode,
    )
    if not dist.is_initialized():
        return result
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, result)
    worst_rank = max(everyone, key=lambda one: (not one.ok, one.max_grad_rel_diff))
    return Check(
        ok=all(one.ok for one in everyone),
        loss_diff=max(one.loss_diff for one in everyone),
        max_grad_rel_diff=worst_rank.max_grad_rel_diff,
        worst_tensor=worst_rank.worst_tensor,
        reference=mode,
    )

"""One row of a comparison on torch: plain user code around `apply_policy`, run by every rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from memopt.api import apply_policy
from memopt.errors import MemoptError
from memopt.report import rule_effects
from memopt.workloads import HfWorkload, Workload, WorkloadConfig, load_workload

from .baselines import baseline
from .interpreter_exit import rest, uses_gloo
from .measure import StepMeter, StepResult
from .workloads import build, built_model

MEASURED_STEP = 1  # the second: the optimizer's state exists, and with it the peak


@dataclass(frozen=True, slots=True)
class _Training:
    """What is stepped: the model as the user calls it, its optimizer, and what a policy made of them."""

    model: Any
    optimizer: torch.optim.Optimizer
    applied: Any = None
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    notes: tuple[str, ...] = ()


def train(job: Any, *, emit: Callable[[Mapping[str, Any]], None]) -> None:
    """Trains the job's workload and emits its losses and figures; rank 0 alone speaks.

    Args:
        job: A `memopt.comparing.jobs.Job`.
        emit: Takes the events of `memopt.worker`.

    Raises:
        MemoptError: What the policy, the workload or the backend refuses, on every rank alike.
    """
    device = _start_ranks(job)
    try:
        workload, model = _workload_and_model(job, device)
        training = _plain(job, model, workload) if job.policy is None else _applied(job, model, workload)
        speak = emit if _rank() == 0 else _silent
        speak({"event": "stage", "text": "training"})
        result = _trained(job, workload, training, device, speak)
        speak({"event": "result", "result": result})
        if dist.is_initialized():
            dist.barrier()  # no rank takes its connections down while another is still in a collective
    finally:
        if dist.is_initialized():
            if uses_gloo():
                rest()
            dist.destroy_process_group()


def _silent(event: Mapping[str, Any]) -> None:
    del event


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _start_ranks(job: Any) -> torch.device:
    """The process group (none for one rank) and this rank's device."""
    device = torch.device("cpu")
    if job.device == "gpu":
        if not torch.cuda.is_available():
            raise MemoptError.of(
                "no-such-device", "the run's target is a GPU and torch sees none here", hint="use target: cpu"
            )
        if job.world_size > torch.cuda.device_count():
            raise MemoptError.of(
                "no-such-device",
                f"world torch: {job.world_size}, and this machine has {torch.cuda.device_count()} GPUs",
            )
    if job.world_size > 1:
        dist.init_process_group("nccl" if job.device == "gpu" else "gloo")
    if job.device == "gpu":
        device = torch.device("cuda", _rank())
        torch.cuda.set_device(device)
    return device


def _workload_and_model(job: Any, device: torch.device) -> tuple[Workload, torch.nn.Module]:
    workload = load_workload(job.workload)
    torch.manual_seed(job.seed)  # for models with an initialisation of their own
    if isinstance(workload, HfWorkload):
        workload = build(workload, world_size=job.world_size)
    elif isinstance(workload, WorkloadConfig):
        workload = build(workload, seed=job.seed, world_size=job.world_size)
    return workload, built_model(workload).to(device)


def _plain(job: Any, model: torch.nn.Module, workload: Workload) -> _Training:
    """As a user trains without memopt: DDP, its gradients lying in its buckets; or with a tool of torch's own."""
    if job.baseline is not None:
        made = baseline(job.baseline, model, workload.optimizer)
        return _Training(made.model, made.optimizer, around=made.around, notes=(made.note,) if made.note else ())
    optimizer = workload.optimizer(model.parameters())
    if job.world_size > 1:
        model = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return _Training(model, optimizer)


def _applied(job: Any, model: torch.nn.Module, workload: Workload) -> _Training:
    applied = apply_policy(model, job.policy)
    return _Training(applied.model, applied.optimizer(workload.optimizer), applied)


def _trained(job: Any, workload: Workload, training: _Training, device: torch.device, speak: Any) -> dict[str, Any]:
    batches = _batches(job, workload, device)
    losses, times_s, meter = [], [], None
    for step in range(job.steps):
        started_s = time.perf_counter()
        batch = batches(step)
        if step == MEASURED_STEP:
            with StepMeter(
                training.model, optimizers=(training.optimizer,), engine=_engine(training), batch=batch
            ) as running:
                loss = _step(workload, training, batch)
            meter = running.result()
        else:
            loss = _step(workload, training, batch)
        losses.append(_mean_over_ranks(loss))
        if step >= job.warmup_steps:
            times_s.append(time.perf_counter() - started_s)
        speak({"event": "step", "step": step, "loss": losses[-1]})
    assert meter is not None, "a comparison has at least two steps"
    return _figures(training, meter, losses, times_s, device)


def _step(workload: Workload, training: _Training, batch: Mapping[str, Any]) -> torch.Tensor:
    """One optimizer step; under `accumulate` over as many micro-batches, whose mean is the batch's."""
    num_micro = 1 if training.applied is None else training.applied.plan.accumulate_steps
    total = None
    for micro in _micro_batches(batch, num_micro):
        with training.around():
            loss = workload.loss(training.model, micro) / num_micro
        loss.backward()
        total = loss.detach() if total is None else total + loss.detach()
    if workload.clip_norm is not None:
        _clip(training, workload.clip_norm)
    training.optimizer.step()
    training.optimizer.zero_grad()
    assert total is not None, "there is at least one micro-batch"
    return total


def _clip(training: _Training, max_norm: float) -> None:
    if training.applied is None:
        torch.nn.utils.clip_grad_norm_(training.model.parameters(), max_norm)
    else:
        training.applied.clip_grad_norm_(max_norm)


def _micro_batches(batch: Mapping[str, Any], count: int) -> list[Mapping[str, Any]]:
    if count == 1:
        return [batch]
    for name, tensor in batch.items():
        if tensor.shape[0] % count:
            raise MemoptError.of(
                "workload-batch-not-divisible",
                f"`{name}` has {tensor.shape[0]} sequences on each rank, and {count} micro-batches do not divide them",
                hint=f"use a batch that is a multiple of ranks times {count}, or other accumulate.steps",
                path="accumulate.steps",
            )
    parts = {name: tensor.chunk(count) for name, tensor in batch.items()}
    return [{name: chunks[index] for name, chunks in parts.items()} for index in range(count)]


def _engine(training: _Training) -> Any:
    return None if training.applied is None else getattr(training.applied, "engine", None)


def _batches(job: Any, workload: Workload, device: torch.device) -> Callable[[int], Mapping[str, Any]]:
    """This rank's part of each step's batch."""
    if job.batches is None:
        for name, tensor in workload.batch.items():
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "meta":
                raise MemoptError.of(
                    "workload-batch-has-no-values",
                    f"`{workload.name}`: `{name}` of its batch has a shape but no values to train on",
                    hint="give real tensors in the workload's `batch`",
                )
        own = {name: tensor.to(device) for name, tensor in workload.batch.items()}
        return lambda step: own
    tokens = np.load(job.batches, mmap_mode="r")
    per_rank = tokens.shape[1] // job.world_size
    mine = slice(_rank() * per_rank, (_rank() + 1) * per_rank)
    return lambda step: {"tokens": torch.from_numpy(tokens[step, mine].astype(np.int64)).to(device)}


def _mean_over_ranks(loss: torch.Tensor) -> float:
    if not dist.is_initialized():
        return loss.item()
    total = loss.double()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def _figures(
    training: _Training, meter: StepResult, losses: list[float], times_s: list[float], device: torch.device
) -> dict[str, Any]:
    ranks = _gathered({"peak": meter.peak.nbytes, "by_role": meter.peak.by_role, "host": meter.peak.host_nbytes,
                       "flops": meter.flops})  # fmt: skip
    largest = max(ranks, key=lambda rank: rank["peak"])
    plan = None if training.applied is None else training.applied.plan
    notes = ["peak: live storages of the second step, counted by role; the largest rank", *training.notes]
    figures = {
        "losses": losses,
        "step_times_s": times_s,
        "peak_measured_bytes": largest["peak"],
        "measured_by_role": largest["by_role"],
        "attributed": False,
        "host_bytes": max(rank["host"] for rank in ranks),
        "step_flops": sum(rank["flops"] for rank in ranks),
        "collectives": {kind: calls.num_calls for kind, calls in meter.collectives.items()},
        "effects": [] if plan is None else [_as_data(effect) for effect in rule_effects(plan)],
        "notes": notes,
    }
    if device.type == "cuda":
        allocated, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
        figures["allocator"] = {"allocated_bytes": allocated, "reserved_bytes": reserved}
    return figures


def _gathered(own: dict[str, Any]) -> list[dict[str, Any]]:
    if not dist.is_initialized():
        return [own]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return everyone


def _as_data(effect: Any) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(effect)

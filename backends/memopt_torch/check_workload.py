"""`memopt check` on torch: a workload's model with seeded weights, one batch, the policy on and off."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from memopt.api import apply_policy
from memopt.applied import Check
from memopt.errors import MemoptError
from memopt.guarding import CRASHED, guarded
from memopt.workloads import HfWorkload, Workload, WorkloadConfig

from .testing import run_ranks
from .workloads import build, built_model


def check_workload(workload: Any, policy: Any, *, world_size: int = 1, seed: int = 0) -> Check:
    """Checks a policy on a workload, in this process or in `world_size` gloo ranks on this machine.

    Raises:
        MemoptError: What the policy or the workload refuses; `workload-batch-has-no-values`, `workload-other-backend`,
            `workload-crashed`, `check-rank-died`.
    """
    if world_size == 1:
        return _check(workload, policy, seed)
    outcomes = run_ranks(_on_rank, world_size, workload, policy, seed, timeout_s=600.0, may_fail=True)
    answers = sorted((one for one in outcomes if isinstance(one, _Answer)), key=lambda answer: answer.at_s)
    for answer in answers:
        if isinstance(answer.said, MemoptError):
            raise answer.said  # the first: the others fail for want of that rank
    checks = [answer.said for answer in answers if isinstance(answer.said, Check)]
    if len(checks) < world_size:
        num_silent = world_size - len(checks)
        raise MemoptError.of("check-rank-died", f"{num_silent} of {world_size} ranks died or did not answer")
    return checks[0]


@dataclass(frozen=True)
class _Answer:
    """What a rank has to say, and when it said it (the ranks are on one machine, with one clock)."""

    at_s: float
    said: Check | MemoptError


def _on_rank(workload: Any, policy: Any, seed: int) -> _Answer:
    """The check on one rank; what its code raises is told with its place, which no traceback takes to the caller."""
    name = getattr(workload, "name", workload)
    try:
        check = guarded(f"a step of `{name}`", lambda: _check(workload, policy, seed), code=CRASHED)
    except MemoptError as error:
        return _Answer(time.monotonic(), error)
    return _Answer(time.monotonic(), check)


def _check(workload: Any, policy: Any, seed: int) -> Check:
    size, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    torch.manual_seed(seed)
    vocab = workload.vocab if isinstance(workload, WorkloadConfig | HfWorkload) else None
    if isinstance(workload, WorkloadConfig):
        workload = build(workload, seed=seed, world_size=size)
    elif isinstance(workload, HfWorkload):
        workload = build(workload, world_size=size)
    run = apply_policy(built_model(workload), policy)
    torch.manual_seed(seed + rank)
    return run.check(_with_values(workload, vocab), loss=workload.loss)


def _with_values(workload: Workload, vocab: int | None) -> Mapping[str, torch.Tensor]:
    """The example batch; token ids are drawn where it has shapes only."""
    batch = {}
    for name, tensor in workload.batch.items():
        if tensor.device.type != "meta":
            batch[name] = tensor
        elif vocab is not None and not tensor.dtype.is_floating_point:
            batch[name] = torch.randint(0, vocab, tensor.shape, dtype=tensor.dtype)
        else:
            raise MemoptError.of(
                "workload-batch-has-no-values",
                f"`{workload.name}`: `{name}` of its batch has a shape but no values to check with",
                hint="give real tensors in the workload's `batch`",
            )
    return batch

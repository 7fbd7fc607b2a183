"""`memopt check` on torch: a workload's model with seeded weights, one batch, the policy on and off."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from memopt.api import apply_policy
from memopt.applied import Check
from memopt.errors import MemoptError
from memopt.workloads import HfWorkload, Workload, WorkloadConfig

from .testing import run_ranks
from .workloads import build


def check_workload(workload: Any, policy: Any, *, world_size: int = 1, seed: int = 0) -> Check:
    """Checks a policy on a workload, in this process or in `world_size` gloo ranks on this machine.

    Raises:
        MemoptError: What the policy or the workload refuses; `workload-batch-has-no-values`.
    """
    if world_size == 1:
        return _check(workload, policy, seed)
    outcomes = run_ranks(_check, world_size, workload, policy, seed, timeout_s=600.0, may_fail=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return next(outcome for outcome in outcomes if outcome is not None)


def _check(workload: Any, policy: Any, seed: int) -> Check:
    size, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    torch.manual_seed(seed)
    vocab = workload.vocab if isinstance(workload, WorkloadConfig | HfWorkload) else None
    if isinstance(workload, WorkloadConfig):
        workload = build(workload, seed=seed, world_size=size)
    elif isinstance(workload, HfWorkload):
        workload = build(workload, world_size=size)
    run = apply_policy(workload.model(), policy)
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

"""Optimizers that mix values of a matrix run on whole tensors, each at its owner, and equal plain training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import memopt
from memopt_torch.matrix_optimizers import OwnerOptimizer
from memopt_torch.testing import run_ranks


class Matrices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 6, bias=False), nn.Linear(6, 8, bias=False)) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def steps(model: nn.Module, optimizer: Any, numbers: range, *, plain: bool) -> list[float]:
    losses = []
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for number in numbers:
        generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
        loss = model(torch.randn(4, 8, generator=generator))
        loss.backward()
        if plain:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


OPTIMIZERS = {"muon": (torch.optim.Muon, {"lr": 0.02}), "adafactor": (torch.optim.Adafactor, {"lr": 0.02})}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_whole_tensor_optimizers_equal_plain_training(tools: Any, name: str) -> None:
    cls, options = OPTIMIZERS[name]

    def job() -> tuple[list[float], list[float], int]:
        plain = Matrices()
        expected = steps(plain, cls(plain.parameters(), **options), range(5), plain=True)
        run = memopt.apply_policy(Matrices(), tools.policy(tools.shard()))
        optimizer = run.optimizer(cls, **options)
        assert isinstance(optimizer, OwnerOptimizer)
        got = steps(run.model, optimizer, range(5), plain=False)
        return expected, got, len(optimizer.state)

    results = run_ranks(job, 2)
    for expected, got, _ in results:
        assert got == pytest.approx(expected, rel=1e-6)
    assert sum(count for _, _, count in results) == 6  # state of each parameter once


def test_their_state_is_saved_and_resumes_at_another_world_size(tools: Any, tmp_path: Path) -> None:
    cls, options = OPTIMIZERS["muon"]

    def job(load: bool) -> list[float]:
        run = memopt.apply_policy(Matrices(), tools.policy(tools.shard()))
        optimizer = run.optimizer(cls, **options)
        if load:
            run.load(tmp_path / "c")
        else:
            same_batches(run.model, optimizer, range(3))
            run.save(tmp_path / "c")
        return same_batches(run.model, optimizer, range(3, 5))

    expected = run_ranks(job, 2, False)[0]
    for losses in run_ranks(job, 4, True):
        assert losses == pytest.approx(expected, rel=1e-5)


def same_batches(model: nn.Module, optimizer: Any, numbers: range) -> list[float]:
    """Every rank on the same batch, so that the world size does not matter."""
    losses = []
    for number in numbers:
        loss = model(torch.randn(4, 8, generator=torch.Generator().manual_seed(number)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses

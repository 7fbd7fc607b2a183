"""Faults that users of neighbouring tools reported about resuming."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import memopt
from memopt_torch.testing import run_ranks

RULES = {
    "shard": [{"name": "shard", "action": "shard", "match": {"role": "param"}}],
    "recompute_too": [
        {"name": "shard", "action": "shard", "match": {"role": "param"}},
        {"name": "again", "action": "recompute", "match": {"unit": "blocks.*"}},
    ],
    "off": [],
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)  # a dimension smaller than the four ranks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.inner(x))


class Model(nn.Module):
    def __init__(self, fill: float | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(3, 1)
        self.register_buffer("seen", torch.zeros(1))
        if fill is not None:
            with torch.no_grad():
                for parameter in self.parameters():
                    parameter.fill_(fill)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        self.seen += 1
        return self.head(x).square().mean()


def steps(run: Any, optimizer: Any, numbers: range) -> list[float]:
    size = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    losses = []
    for number in numbers:
        whole = torch.randn(8, 3, generator=torch.Generator().manual_seed(number))
        loss = run.model(whole[rank * 8 // size : (rank + 1) * 8 // size])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        if dist.is_initialized():
            dist.all_reduce(total)
        losses.append(total.item() / size)
    return losses


def save(rules: Any, folder: Path) -> list[float]:
    run = memopt.apply_policy(Model(), {"version": 1, "rules": rules})
    optimizer = run.optimizer(torch.optim.AdamW, lr=0.01)
    steps(run, optimizer, range(3))
    run.save(folder, step=3)
    return [*steps(run, optimizer, range(3, 6)), run.model.seen.item()]


def load(rules: Any, folder: Path) -> list[float]:
    run = memopt.apply_policy(Model(fill=9.0), {"version": 1, "rules": rules})
    optimizer = run.optimizer(torch.optim.AdamW, lr=0.5)
    extra = run.load(folder)
    return [*steps(run, optimizer, range(extra["step"], 6)), run.model.seen.item()]


@pytest.mark.parametrize("world", [4, 1])
def test_resuming_on_another_number_of_devices_gives_the_same_next_loss(tmp_path: Path, world: int) -> None:
    """pytorch/torchtitan#811 (kin pytorch#102821, empty shards; orbax#648): resume on more devices fails."""
    expected = run_ranks(save, 2, RULES["shard"], tmp_path / "c")[0]
    for losses in run_ranks(load, world, RULES["shard"], tmp_path / "c"):
        assert losses == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("saved,loaded", [("recompute_too", "off"), ("off", "recompute_too"), ("shard", "off")])
def test_a_policy_may_change_or_go_between_save_and_load(tmp_path: Path, saved: str, loaded: str) -> None:
    """pytorch/pytorch#117446: keys differ with wrappers on and off, and a checkpoint fits only the run that made it."""
    expected = run_ranks(save, 2, RULES[saved], tmp_path / "c")[0]
    for losses in run_ranks(load, 2, RULES[loaded], tmp_path / "c"):
        assert losses == pytest.approx(expected, abs=1e-6)

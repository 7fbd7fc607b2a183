"""Parameters no rank uses, and backward passes that fail: the optimizer sees what it would see under DDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import memopt
from memopt.errors import MemoptWarning
from memopt_torch.sharded import local_tensor, whole_tensor
from memopt_torch.testing import run_ranks

SHARD = [{"name": "weights", "action": "shard", "match": {"role": "param"}}]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(8, 8)
        self.unused = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.used(x))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).mean()


def _unused_moved_by(rules: list[dict[str, Any]], num_micro: int) -> float:
    run = memopt.apply_policy(Stack(), {"version": 1, "rules": rules, "accumulate": {"steps": num_micro}})
    optimizer = run.optimizer(torch.optim.AdamW, lr=0.1, weight_decay=0.5)
    unused = [p for path, p in run.held_parameters().items() if ".unused." in path]
    before = [local_tensor(p.detach()).clone() for p in unused]
    for _ in range(2):
        for _ in range(num_micro):
            (run.model(torch.ones(2, 8) * (dist.get_rank() + 1)) / num_micro).backward()
        optimizer.step()
        optimizer.zero_grad()
    moved = [(local_tensor(p.detach()) - old).abs().sum().item() for p, old in zip(unused, before, strict=True)]
    return sum(moved)


@pytest.mark.parametrize("num_micro", [1, 2])
@pytest.mark.parametrize("rules", [[], SHARD], ids=["whole", "shard"])
def test_weight_decay_leaves_parameters_alone_that_no_rank_uses(rules: list[dict[str, Any]], num_micro: int) -> None:
    assert run_ranks(_unused_moved_by, 2, rules, num_micro) == [0.0, 0.0]


def _gradient_after_a_failed_micro_batch() -> tuple[float, int]:
    policy = {"version": 1, "rules": SHARD, "accumulate": {"steps": 2, "reduce": "last"}}
    run = memopt.apply_policy(Stack(), policy)
    run.optimizer(torch.optim.SGD, lr=1.0)
    batch = torch.ones(2, 8) * (dist.get_rank() + 1)
    (run.model(batch) / 2).backward()
    handle = run.model.layers[1].used.register_full_backward_hook(_fails)
    with pytest.raises(ValueError, match="broken"):
        (run.model(batch) / 2).backward()
    handle.remove()
    with pytest.warns(MemoptWarning, match="accumulation starts again"):
        (run.model(batch) / 2).backward()
    (run.model(batch) / 2).backward()
    ours = run.held_parameters()["head.weight"].grad
    assert ours is not None
    reference = Stack()
    for rank in range(2):
        (reference(torch.ones(2, 8) * (rank + 1)) / 2).backward()
    expected = reference.head.weight.grad
    assert expected is not None
    return (whole_tensor(ours) - expected).abs().max().item(), run.engine.reduction.micro_step


def _fails(*_: Any) -> None:
    raise ValueError("broken")


def test_a_failed_micro_batch_is_not_counted_twice_when_it_is_tried_again() -> None:
    for difference, micro_step in run_ranks(_gradient_after_a_failed_micro_batch, 2):
        assert difference <= 1e-6
        assert micro_step == 2

"""A unit that changes what it is given, or owns parameters without values, trains as it does without a policy."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import memopt
from memopt_torch.sharded import whole_tensor
from memopt_torch.testing import run_ranks

SHARD = {"name": "weights", "action": "shard", "match": {"role": "param"}}


class Block(nn.Module):
    """Adds an auxiliary loss to whatever it is given for them; its first parameter has no values."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.empty = nn.Parameter(torch.empty(0))
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor, given: Any) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        loss = hidden.square().mean() * self.scale + self.empty.sum()
        if self.how in ("list", "deque"):
            given.append(loss)
        elif self.how == "mapping":
            given[f"loss {len(given)}"] = loss
        elif self.how == "nested":
            given[1]["losses"].append(loss)
        elif self.how == "replaced":  # the caller's tensor, exchanged for another
            given[0] = given[0] + loss
        return x + self.second(hidden)


MAKE: dict[str, Any] = {
    "list": lambda x: [],
    "deque": lambda x: deque(),
    "mapping": lambda x: {"input": x},
    "nested": lambda x: (x, {"losses": []}),
    "replaced": lambda x: [x.sum() * 0],
}


class Model(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how = how
        self.inlet = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block(how) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inlet(x)
        given = MAKE[self.how](x)
        for block in self.blocks:
            x = block(x, given)
        flat = given[1]["losses"] if self.how == "nested" else list(getattr(given, "values", lambda: given)())
        scalars = [loss for loss in flat if loss.dim() == 0]
        assert len(scalars) == (1 if self.how == "replaced" else 3)
        if self.how == "mapping":
            assert given["input"].dim() == 2
        return x.square().mean() + torch.stack(scalars).sum()


@pytest.mark.parametrize("how", MAKE)
def test_what_a_unit_adds_to_a_container_reaches_its_caller(how: str) -> None:
    """Family: arguments rebuilt on the way in; what the module puts into its copy is gone without a word."""

    def job() -> float:
        plain, model = Model(how), Model(how)
        memopt.apply_policy(model, {"version": 1, "units": ["blocks.*"], "rules": [SHARD]})
        worst = 0.0
        for number in range(3):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * number + dist.get_rank()))
            losses = []
            for one in (plain, model):
                one.zero_grad()
                losses.append(one(x))
                losses[-1].backward()
            worst = max(worst, (losses[0] - losses[1]).abs().item())
            expected = dict(plain.named_parameters())
            for name, parameter in model.named_parameters():
                grad = expected[name].grad
                dist.all_reduce(grad, op=dist.ReduceOp.AVG)
                ours = whole_tensor(parameter.grad)
                assert ours.shape == grad.shape
                worst = max(worst, (ours - grad).abs().max().item() if grad.numel() else 0.0)
        return worst

    assert run_ranks(job, 2) == [0.0, 0.0]


POLICIES: dict[str, dict[str, Any]] = {
    "shard": {"rules": [SHARD]},
    "memory_first": {"rules": [SHARD], "unit_defaults": {"prefetch": {"forward": 0, "backward": 0}}},
    "low_precision": {"rules": [SHARD], "precision": {"compute": "bfloat16", "reduce": "float32"}},
    "accumulate": {"rules": [SHARD], "accumulate": {"steps": 2}},
    "zero2": {"rules": [{"name": "state", "action": "shard", "match": {"role": ["grad", "optimizer_state"]}}]},
    "zero1": {"rules": [{"name": "state", "action": "shard", "match": {"role": "optimizer_state"}}]},
    "whole": {"rules": []},
}


@pytest.mark.parametrize("same_graph", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_that_are_held_are_not_overwritten_by_the_next(policy: str, same_graph: bool) -> None:
    """Family: gradients of two losses combined (PCGrad): the first one's memory used for the second."""

    def job() -> list[bool]:
        model = Model("list")
        run = memopt.apply_policy(model, {"version": 1, "units": ["blocks.*"], **POLICIES[policy]})
        assert run.engine.units
        intact = []
        for number in range(3):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * number + dist.get_rank()))
            loss = model(x)
            loss.backward(retain_graph=same_graph)
            held = {name: p.grad for name, p in model.named_parameters()}
            value = {name: whole_tensor(grad).clone() for name, grad in held.items()}
            model.zero_grad()
            (loss * 3 if same_graph else model(2 * x)).backward()
            intact += [torch.equal(whole_tensor(held[name]), value[name]) for name in held if value[name].numel()]
            fresh = {name: whole_tensor(p.grad) for name, p in model.named_parameters()}
            intact.append(not torch.equal(fresh["blocks.1.first.weight"], value["blocks.1.first.weight"]))
            if same_graph:
                three = 3 * value["blocks.1.first.weight"]
                intact.append(bool((fresh["blocks.1.first.weight"] - three).norm() < 1e-2 * three.norm()))
            model.zero_grad()
        return intact

    for intact in run_ranks(job, 2):
        assert all(intact)

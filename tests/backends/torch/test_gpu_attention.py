"""Attention as GPUs have it: beside tensors it gives sizes, and the state of a random generator it has not used."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import memopt

WIDTH, LAYERS = 8, 3
calls: list[str] = []


@torch.library.custom_op("memopt_tests::scaled_dot_product_attention_with_sizes", mutates_args=())
def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int, torch.Tensor]:
    calls.append("forward")
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    return scores.softmax(-1) @ v, scores.logsumexp(-1), q.shape[-2], torch.zeros(2, dtype=torch.int64)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    out, statistics, size, _ = output
    ctx.save_for_backward(*inputs, out, statistics)
    ctx.size = size


def _backward(ctx: Any, grad: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v, out, statistics = ctx.saved_tensors
    assert ctx.size == q.shape[-2]
    weights = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5 - statistics.unsqueeze(-1)).exp()
    inner = weights * (grad @ v.transpose(-1, -2) - (grad * out).sum(-1, keepdim=True)) / q.shape[-1] ** 0.5
    return inner @ k, inner.transpose(-1, -2) @ q, weights.transpose(-1, -2) @ grad


torch.library.register_autograd(attend._opoverload, _backward, setup_context=_setup)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.out(attend(*self.qkv(hidden).chunk(3, dim=-1))[0])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden.square().mean()


def step(model: nn.Module) -> list[torch.Tensor]:
    model.zero_grad()
    model(torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(0))).backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("action", ["keep", "offload"])
def test_its_results_are_held_and_it_runs_once(action: str) -> None:
    """Flash attention's kernel for CUDA returns `max_q` and `max_k` as plain numbers."""
    plain, applied = Model(), Model()
    held = {"name": "held", "action": action, "match": {"op": "attention"}}
    rest = {"name": "rest", "action": "recompute", "match": {"unit": "layers.*"}}
    memopt.apply_policy(applied, {"version": 1, "units": ["layers.*"], "rules": [held, rest]})
    for _ in range(3):
        expected = step(plain)
        calls.clear()
        assert all(torch.equal(a, b) for a, b in zip(step(applied), expected, strict=True))
        assert len(calls) == LAYERS

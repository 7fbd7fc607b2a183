"""What people reported about recompute and offload of neighbouring tools: here each kind of fault cannot happen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import memopt
from memopt.errors import MemoptError
from memopt_torch.delayed_streams import DelayedStreams
from memopt_torch.testing import run_ranks

WIDTH = 16
RECOMPUTE = {"name": "rest", "action": "recompute", "match": {"unit": "layers.*"}}
SHARD = {"name": "weights", "action": "shard", "match": {"role": "param"}}
OFFLOAD = {"name": "all", "action": "offload", "match": {"role": "activation", "unit": "layers.*"}}


class Block(nn.Module):
    """Saves transposed, sliced and expanded tensors, and takes a mask by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.ones(1, WIDTH))

    def forward(self, hidden: torch.Tensor, *, mask: torch.Tensor | None = None) -> torch.Tensor:
        value, gate = self.up(hidden).tanh()[..., WIDTH : 3 * WIDTH], self.up(hidden)[..., ::2].exp()
        mixed = self.down(value * gate.tanh())
        scores = mixed @ mixed.transpose(-1, -2) / WIDTH
        if mask is not None:
            scores = scores.masked_fill(mask, 0.0)
        return hidden + scores @ (hidden * self.gain.expand_as(hidden))


class Model(nn.Module):
    def __init__(self, num_layers: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block() for _ in range(num_layers))

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden, mask=mask)
        return hidden.square().mean()


def policy(*rules: dict[str, Any]) -> dict[str, Any]:
    return {"version": 1, "units": ["layers.*"], "rules": [*rules]}


def gradients(model: nn.Module, seed: int = 0, mask: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(torch.randn(2, 6, WIDTH, generator=torch.Generator().manual_seed(seed)), mask).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in expected)


def test_gradients_of_layers_above_a_frozen_one_do_not_vanish_under_recompute() -> None:
    """Row 1: recomputation that needs an input with a gradient loses those of everything above a frozen layer."""
    plain, applied = Model(), Model()
    for model in (plain, applied):
        model.layers[0].requires_grad_(False)
    memopt.apply_policy(applied, policy(RECOMPUTE))
    expected = gradients(plain)
    assert {name.split(".")[1] for name in expected} == {"1", "2"}
    assert_same(gradients(applied), expected)


def test_shard_and_recompute_of_one_block_with_a_keyword_mask_run_and_agree_with_the_unsharded_model() -> None:
    """Row 3: sharding and recomputation in the wrong order recompute on other shapes; here nobody orders them."""
    mask = torch.ones(6, 6, dtype=torch.bool).triu(1)

    def on_rank() -> dict[str, torch.Tensor]:
        model = Model()
        run = memopt.apply_policy(model, policy(SHARD, RECOMPUTE))
        model(torch.randn(2, 6, WIDTH, generator=torch.Generator().manual_seed(0)), mask).backward()
        found = {}
        for path, parameter in run.held_parameters().items():
            held, grad = parameter.slice, parameter.grad
            found[path] = (held.start, held.stop, grad.local.clone())
        return found

    expected = gradients(Model(), mask=mask)
    for parts in run_ranks(on_rank, 2):
        assert parts.keys() == expected.keys()
        for path, (start, stop, part) in parts.items():
            assert torch.equal(part, expected[path].reshape(-1)[start:stop])


@pytest.mark.parametrize("rules", [[OFFLOAD], [{**OFFLOAD, "match": {"path": "layers.*.input"}}, RECOMPUTE]])
def test_overlapped_offload_frees_nothing_too_soon(rules: list[dict[str, Any]]) -> None:
    """Row 9: a tensor is freed, or read, while its copy runs; copies here are done at the last moment allowed."""
    plain, applied = Model(), Model()
    run = memopt.apply_policy(applied, policy(*rules))
    run.regions.transfers.streams = late = DelayedStreams()
    for repeat in range(20):
        for step in range(3):
            found = gradients(applied, seed=3 * repeat + step)
            assert_same(found, gradients(plain, seed=3 * repeat + step))
            assert all(bool(grad.isfinite().all()) for grad in found.values())
    assert late.faults == []


def test_a_synchronous_mode_exists_and_is_exact() -> None:
    """Row 9: a way to rule ordering faults out."""
    plain, applied = Model(), Model()
    options = {"backend_options": {"torch": {"offload": {"synchronous": True}}}}
    memopt.apply_policy(applied, {**policy(OFFLOAD), **options})
    assert_same(gradients(applied), gradients(plain))


def test_offload_of_transposed_sliced_and_expanded_saved_tensors_works_in_the_backward_pass() -> None:
    """Row 10: saved tensors that are not contiguous crash an offload, or come back as something else."""
    plain, applied = Model(), Model()
    run = memopt.apply_policy(applied, policy(OFFLOAD))
    for seed in range(3):
        assert_same(gradients(applied, seed), gradients(plain, seed))
    assert run.regions.transfers.to_device_bytes > 0


class Unknown(torch.optim.SGD):
    """An optimizer nobody has heard of."""


STATE = {"name": "state", "action": "offload", "match": {"role": "optimizer_state"}}


@pytest.mark.parametrize("factory", [Unknown, torch.optim.LBFGS])
def test_an_optimizer_unfit_for_offload_is_told_before_the_first_step(factory: Callable[..., Any]) -> None:
    """Row 14: optimizer offload accepts any optimizer and trains badly, or raises late."""
    run = memopt.apply_policy(Model(), policy(STATE))
    with pytest.raises(MemoptError, match=f"optimizer-not-offloadable.*{factory.__name__}"):
        run.optimizer(factory, lr=0.1)


def test_an_unknown_optimizer_can_be_vouched_for() -> None:
    """Row 14: and how to override it."""
    options = {"backend_options": {"torch": {"offload": {"trusted_optimizers": ["Unknown"]}}}}
    ends = []
    for rules in ([], [STATE]):
        model = Model()
        optimizer = memopt.apply_policy(model, {**policy(*rules), **options}).optimizer(Unknown, lr=0.1, momentum=0.9)
        for seed in range(3):
            gradients(model, seed)
            optimizer.step()
        ends.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*ends))


def test_a_fused_optimizer_is_offloaded_and_trains_to_the_same_bits() -> None:
    """Row 14: the fused form, which others refuse or ignore."""
    ends = []
    for rules in ([], [STATE]):
        model = Model()
        optimizer = memopt.apply_policy(model, policy(*rules)).optimizer(torch.optim.AdamW, fused=True)
        for seed in range(3):
            gradients(model, seed)
            optimizer.step()
        ends.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*ends))

"""A recomputation computes what the forward computed, and what the forward changed is changed once."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import memopt
from memopt.errors import MemoptError

WIDTH, LAYERS = 8, 3
REST = {"name": "rest", "action": "recompute", "match": {"unit": "layers.*"}}
PRODUCTS = {"name": "products", "action": "keep", "match": {"op": "matmul"}}
INPUTS = {"name": "inputs", "action": "offload", "match": {"path": "layers.*.input"}}
RULES = {"whole": [REST], "products kept": [PRODUCTS, REST], "inputs offloaded": [INPUTS, REST]}
every_rule = pytest.mark.parametrize("rules", RULES.values(), ids=RULES.keys())


class Stack(nn.Module):
    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(block() for _ in range(LAYERS))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden.square().mean()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.linear(hidden).tanh()


class UpdatedInPlace(Block):
    """Centres by a running mean that it has just updated."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out = self.linear(hidden)
        self.mean.mul_(0.9).add_(out.detach().mean((0, 1)), alpha=0.1)
        return hidden + (out - self.mean).tanh()


class SetAnew(Block):
    """The same by a new tensor, and a counter."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.num_calls = 0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out = self.linear(hidden)
        self.num_calls += 1
        self.mean = 0.9 * self.mean + 0.1 * out.detach().mean((0, 1))
        return hidden + (out - self.mean).tanh() / self.num_calls


class UpdatedSometimes(UpdatedInPlace):
    """Every second call restarts the mean; the first one, which is learnt from, does not."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out = self.linear(hidden)
        self.num_calls += 1
        if self.num_calls % 2 == 0:
            self.mean.copy_(0.5 * self.mean + out.detach().mean((0, 1)))
        return hidden + (out - self.mean).tanh()


class SetSometimes(Block):
    def __init__(self) -> None:
        super().__init__()
        self.num_calls, self.scale = 0, 1.0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        if self.num_calls > 1:
            self.scale = 0.7 * self.scale
        return hidden + (self.linear(hidden) * self.scale).tanh()


class SpectralNorm(Block):
    """Every forward is a step of a power iteration."""

    def __init__(self) -> None:
        super().__init__()
        torch.nn.utils.parametrizations.spectral_norm(self.linear)


class OwnGenerator(Block):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out = self.linear(hidden)
        return hidden + (out * torch.rand(out.shape, generator=self.generator)).tanh()


def policy(rules: list[dict[str, Any]]) -> dict[str, Any]:
    return {"version": 1, "units": ["layers.*"], "rules": rules}


def step(model: nn.Module, seed: int, *, again: bool = False) -> list[torch.Tensor]:
    model.zero_grad()
    loss = model(torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(seed)))
    loss.backward(retain_graph=again)
    if again:
        loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None), *model.buffers()]


def assert_alike(plain: nn.Module, applied: nn.Module, **kwargs: Any) -> None:
    for seed in range(6):
        assert all(torch.equal(a, b) for a, b in zip(step(plain, seed, **kwargs), step(applied, seed, **kwargs)))


STATEFUL = [UpdatedInPlace, SetAnew, UpdatedSometimes, SetSometimes, SpectralNorm, OwnGenerator]


@every_rule
@pytest.mark.parametrize("block", STATEFUL)
def test_a_forward_that_reads_what_it_changes_is_recomputed_from_what_was_there(block: Any, rules: Any) -> None:
    plain, applied = Stack(block), Stack(block)
    memopt.apply_policy(applied, policy(rules))
    assert_alike(plain, applied)
    if block is SetAnew:
        assert [layer.num_calls for layer in applied.layers] == [6, 6, 6]


@pytest.mark.parametrize("block", STATEFUL)
def test_a_second_backward_pass_starts_from_there_too(block: Any) -> None:
    plain, applied = Stack(block), Stack(block)
    memopt.apply_policy(applied, policy([REST]))
    assert_alike(plain, applied, again=True)


@pytest.mark.parametrize("block", [UpdatedInPlace, SetAnew, SpectralNorm, nn.BatchNorm1d])
def test_a_reference_run_that_recomputes_every_unit_changes_state_once(block: Any) -> None:
    plain, applied = (Stack(block if block is not nn.BatchNorm1d else lambda: nn.BatchNorm1d(4)) for _ in range(2))
    run = memopt.apply_policy(applied, policy([]))
    with run.regions.reference("recompute"):
        assert_alike(plain, applied)


def test_a_reference_run_refuses_a_buffer_that_only_some_calls_write() -> None:
    model = Stack(UpdatedSometimes)
    run = memopt.apply_policy(model, policy([]))
    with run.regions.reference("recompute"):
        step(model, 0)
        with pytest.raises(MemoptError, match="the buffer `mean` was written in this forward, and not in the one"):
            step(model, 1)


class Remembers(Block):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.last = self.linear(hidden)
        return hidden + self.last.tanh()


def test_a_result_stored_on_a_module_is_not_kept_for_a_step_more() -> None:
    model = Stack(Remembers)
    memopt.apply_policy(model, policy([REST]))
    step(model, 0)
    earlier = weakref.ref(model.layers[0].last)
    loss = model(torch.randn(2, 4, WIDTH))
    gc.collect()
    assert earlier() is None
    loss.backward()


class Collects(Block):
    def forward(self, hidden: torch.Tensor, losses: list[torch.Tensor], seen: dict[str, Any]) -> torch.Tensor:  # type: ignore[override]
        out = self.linear(hidden)
        losses.append(out.square().mean())
        seen["last"] = out.detach()
        return hidden + out.tanh()


class WithLosses(Stack):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        seen: dict[str, Any] = {}
        for layer in self.layers:
            hidden = layer(hidden, losses, seen=seen)
        assert len(losses) == LAYERS
        assert list(seen) == ["last"]
        return hidden.square().mean() + sum(losses)


@every_rule
def test_what_a_unit_adds_to_a_list_or_a_mapping_it_was_given_arrives_there(rules: Any) -> None:
    plain, applied = WithLosses(Collects), WithLosses(Collects)
    memopt.apply_policy(applied, policy(rules))
    assert_alike(plain, applied)


class Masked(Block):
    def forward(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return hidden + self.linear(hidden.masked_fill(mask.clone(), 0.0)).tanh()


class MovesMask(Stack):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(4, 1, dtype=torch.bool)
        for number, layer in enumerate(self.layers):
            mask[number] = True
            hidden = layer(hidden, mask)
        return hidden.square().mean()


@every_rule
def test_an_input_overwritten_after_its_unit_is_an_error_not_another_input(rules: Any) -> None:
    model = MovesMask(Masked)
    memopt.apply_policy(model, policy(rules))
    with pytest.raises(MemoptError, match=r"an input of shape \[4, 1\] was overwritten") as caught:
        step(model, 0)
    assert caught.value.problems[0].code == "held-value-overwritten"


class UnderAutocast(Stack):
    """One layer is called twice, so that autocast's cache has its weights the second time."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for layer in (*self.layers, self.layers[0]):
                hidden = layer(hidden)
        return hidden.float().square().mean()


@every_rule
@pytest.mark.parametrize("around", [False, True], ids=["around the model", "around the step"])
def test_casts_that_autocast_makes_or_has_made_already_are_no_other_forward(rules: Any, around: bool) -> None:
    plain, applied = UnderAutocast(Block), UnderAutocast(Block)
    memopt.apply_policy(applied, policy(rules))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=around):
        assert_alike(plain, applied)


class Scripted(Block):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.jit.trace(nn.Linear(WIDTH, WIDTH), torch.zeros(2, 4, WIDTH))  # type: ignore[assignment]


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return self.linear(a) * b


class HookGivesAnArgument(Block):
    def __init__(self) -> None:
        super().__init__()
        self.two = Two()
        self.two.register_forward_pre_hook(lambda module, args: (args[0], 2 * args[0]))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.two(self.linear(hidden)).tanh()


class Sparse(Block):
    """A graph's adjacency is a sparse matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("neighbours", torch.eye(4).roll(1, 0).to_sparse(), persistent=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        flat = self.linear(hidden).transpose(0, 1).flatten(1)
        mixed = torch.sparse.mm(self.neighbours, flat)
        return hidden + mixed.unflatten(1, (-1, WIDTH)).transpose(0, 1).tanh()


OFFLOAD_ALL = [{"name": "all", "action": "offload", "match": {"role": "activation", "unit": "layers.*"}}]


@pytest.mark.parametrize("rules", [*RULES.values(), OFFLOAD_ALL], ids=[*RULES, "all offloaded"])
@pytest.mark.parametrize("block", [Scripted, HookGivesAnArgument, Sparse])
@pytest.mark.filterwarnings("ignore:`torch.jit.trace:DeprecationWarning")
def test_unusual_modules_inside_a_unit_work(block: Any, rules: Any) -> None:
    plain, applied = Stack(block), Stack(block)
    memopt.apply_policy(applied, policy(rules))
    for seed in range(3):
        ours, theirs = step(applied, seed), step(plain, seed)
        assert all(torch.equal(a.to_dense(), b.to_dense()) for a, b in zip(ours, theirs, strict=True))

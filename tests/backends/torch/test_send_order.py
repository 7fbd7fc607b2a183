"""Ranks that use different units: reductions meet their own kind, or the step is refused."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import memopt
from memopt.errors import MemoptError, MemoptWarning
from memopt_torch.sharded import whole_tensor
from memopt_torch.testing import run_ranks

UNITS = ["trunk.*", "first", "second"]
SHARD = {"name": "weights", "action": "shard", "match": {"role": "param"}}
STATE = {"name": "state", "action": "shard", "match": {"role": "optimizer_state"}}
TRUNK_ALONE = {"name": "heads", "action": "keep", "match": {"role": "param", "unit": ["first", "second"]}}


class TwoHeads(nn.Module):
    """Heads of equal size, so that a gradient of one fits the other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, heads: tuple[str, ...]) -> dict[str, torch.Tensor]:
        for layer in self.trunk:
            x = torch.tanh(layer(x))
        return {name: getattr(self, name)(x) for name in heads}


def _loss(model: nn.Module, number: int, called: tuple[str, ...], used: tuple[str, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
    outputs = model(torch.randn(4, 8, generator=generator), called)
    return torch.stack([outputs[name].square().mean() for name in used]).sum()


def _own_head() -> tuple[str, ...]:
    return (("first", "second")[dist.get_rank() % 2],)


def _largest_difference(rules: list[Any], same_until: int, calls_all: bool, options: dict[str, Any]) -> float:
    warnings.simplefilter("ignore", MemoptWarning)  # about memory and unused parameters; the values are judged here
    reference, model = TwoHeads(), TwoHeads()
    policy = {"version": 1, "units": UNITS, "rules": rules, **options}
    memopt.apply_policy(model, policy)
    worst = 0.0
    for number in range(4):
        used = ("first", "second") if number < same_until else _own_head()
        called = ("first", "second") if calls_all else used
        for one in (reference, model):
            one.zero_grad()
            _loss(one, number, called, used).backward()
        expected = dict(reference.named_parameters())
        for name, parameter in model.named_parameters():
            mean = torch.zeros(parameter.shape) if expected[name].grad is None else expected[name].grad.clone()
            dist.all_reduce(mean, op=dist.ReduceOp.AVG)
            worst = max(worst, (whole_tensor(parameter.grad) - mean).abs().max().item())
    return worst


RULES = {"shard": [SHARD], "zero1": [STATE], "mixed": [TRUNK_ALONE, SHARD], "whole": []}


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("same_until", [0, 1], ids=["always", "later"])
def test_a_head_that_one_rank_uses_gets_its_own_gradient(rules: str, same_until: int) -> None:
    """Family: collectives that meet another unit's because a rank skipped one; of equal size, without any sign."""
    assert run_ranks(_largest_difference, 2, RULES[rules], same_until, True, {}) == [0.0, 0.0]


def test_a_head_that_one_rank_uses_gets_its_own_gradient_under_agreement() -> None:
    options = {"backend_options": {"torch": {"unused_parameters": "agree"}}}
    assert run_ranks(_largest_difference, 2, [SHARD], 1, True, options) == [0.0, 0.0]


def test_replicas_of_shards_meet_their_own_kind_too() -> None:
    options = {"mesh": {"replicate": 2, "fsdp": 2}}
    assert max(run_ranks(_largest_difference, 4, [SHARD], 0, True, options)) < 1e-7


@pytest.mark.parametrize("same_until", [0, 1], ids=["always", "later"])
def test_where_nothing_is_gathered_ranks_may_call_different_units(same_until: int) -> None:
    assert run_ranks(_largest_difference, 2, [], same_until, False, {}) == [0.0, 0.0]


@pytest.mark.parametrize("rules", ["shard", "mixed"])
@pytest.mark.parametrize("same_until", [0, 1, 3], ids=["always", "later", "last"])
def test_sharded_units_that_ranks_call_differently_are_refused(rules: str, same_until: int) -> None:
    """Each rank has gathered its own head's shard and the other head's from its neighbour."""
    options: dict[str, Any] = {"precision": {"compute": "bfloat16"}} if rules == "mixed" else {}

    def job() -> str:
        with pytest.raises(MemoptError) as caught:
            _largest_difference(RULES[rules], same_until, False, options)
        return caught.value.problems[0].code

    assert run_ranks(job, 2) == ["units-called-differently"] * 2


@pytest.mark.parametrize("is_trained", [False, True])
def test_an_evaluation_that_ranks_run_through_different_units_is_refused(is_trained: bool) -> None:
    def job() -> tuple[list[float], str]:
        warnings.simplefilter("ignore", MemoptWarning)
        reference, model = TwoHeads(), TwoHeads()
        memopt.apply_policy(model, {"version": 1, "units": UNITS, "rules": [SHARD]})
        both, alike = ("first", "second"), []
        with torch.no_grad():  # all ranks the same way, whatever way it is
            for number, heads in enumerate([both, ("first",), ("second",), both]):
                ours, theirs = (_loss(one, number, heads, heads) for one in (model, reference))
                alike.append((ours - theirs).item())
                if is_trained:
                    with torch.enable_grad():
                        _loss(model, number, both, both).backward()
            with pytest.raises(MemoptError) as caught:
                _loss(model, 5, _own_head(), _own_head())
        return alike, caught.value.problems[0].code

    assert run_ranks(job, 2) == [([0.0] * 4, "units-called-differently")] * 2


def test_a_rank_that_goes_another_way_alone_says_so() -> None:
    """The others take the way of every step and cannot know: the one that leaves it compares, and nobody comes."""

    def job() -> str:
        warnings.simplefilter("ignore", MemoptWarning)
        model = TwoHeads()
        policy = {"version": 1, "units": UNITS, "rules": [SHARD], "backend_options": {"torch": {"timeout_s": 4.0}}}
        memopt.apply_policy(model, policy)
        both = ("first", "second")
        _loss(model, 0, both, both).backward()
        heads = both if dist.get_rank() == 0 else ("first",)
        with pytest.raises(MemoptError) as caught:
            _loss(model, 1, heads, heads).backward()
        return caught.value.problems[0].code

    first, second = run_ranks(job, 2)
    assert first in ("collective-failed", "units-called-differently")
    assert second == "units-called-differently"


def test_new_ways_that_all_ranks_go_are_compared_once_each_and_old_ones_never() -> None:
    def job() -> tuple[list[int], bool]:
        warnings.simplefilter("ignore", MemoptWarning)
        reference, model = TwoHeads(), TwoHeads()
        run = memopt.apply_policy(model, {"version": 1, "units": UNITS, "rules": [SHARD]})
        both, asked, is_right = ("first", "second"), [], True
        for number, heads in enumerate([both, both, ("second",), both, ("first",)]):
            for one in (model, reference):
                one.zero_grad()
                _loss(one, number, heads, heads).backward()
            asked.append(run.engine.witness._num_asked)
            expected = dict(reference.named_parameters())
            for name, parameter in model.named_parameters():
                grad = expected[name].grad
                is_right &= (grad is None) == (
                    parameter.grad is None
                )  # unused on all: left alone, as in plain training
                if grad is not None:
                    dist.all_reduce(grad, op=dist.ReduceOp.AVG)
                    is_right &= torch.equal(whole_tensor(parameter.grad), grad)
        return asked, is_right

    assert run_ranks(job, 2) == [([1, 1, 2, 2, 3], True)] * 2


def test_memory_that_a_waiting_gradient_takes_is_told_and_given_back() -> None:
    def job() -> tuple[list[str], bool]:
        model = TwoHeads()
        run = memopt.apply_policy(model, {"version": 1, "units": UNITS, "rules": [SHARD]})
        in_arena = [(s.slot.data_ptr(), s.gradients) for unit in run.engine.units for s in unit.sections]
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for number in range(3):
                _loss(model, number, ("first", "second"), ("first",)).backward()
        after = [(s.slot.data_ptr(), s.gradients) for unit in run.engine.units for s in unit.sections]
        return [str(one.message) for one in told], after == in_arena

    for told, is_back in run_ranks(job, 2):
        assert [text for text in told if "`first`" in text and "320 bytes" in text], told
        assert len(told) == 1
        assert is_back


class ManyHeads(nn.Module):
    """More heads than stay gathered between forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(8, 8)
        self.heads = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        hidden = torch.tanh(self.trunk(x))
        return [torch.tanh(head(hidden)) for head in self.heads]


def _trains_or_refuses(heads_of: Any, agreement: str) -> str:
    warnings.simplefilter("ignore", MemoptWarning)
    policy = {"version": 1, "units": ["trunk", "heads.*"], "rules": [SHARD]}
    reference, model = ManyHeads(), ManyHeads()
    memopt.apply_policy(model, {**policy, "backend_options": {"torch": {"unused_parameters": agreement}}})
    for number in range(3):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * number + dist.get_rank()))
        for one in (reference, model):
            one.zero_grad()
            outputs = one(x)
            loss = torch.stack([outputs[k].square().mean() for k in heads_of(number, dist.get_rank())]).sum()
            try:
                loss.backward()
            except MemoptError as error:
                return error.problems[0].code
        expected = dict(reference.named_parameters())
        for name, parameter in model.named_parameters():
            mean = torch.zeros(parameter.shape) if expected[name].grad is None else expected[name].grad.clone()
            dist.all_reduce(mean, op=dist.ReduceOp.AVG)
            ours = torch.zeros(parameter.shape) if parameter.grad is None else whole_tensor(parameter.grad)
            if not torch.equal(ours, mean):
                return f"wrong gradient of {name} in step {number}"
    return "trained"


EVERY = range(5)
USES: dict[str, tuple[Any, str, str]] = {
    "own head": (lambda number, rank: [rank], "auto", "units-called-differently"),
    "own head later": (lambda number, rank: [rank] if number else EVERY, "auto", "units-called-differently"),
    "the same heads in turn": (lambda number, rank: [number] if number else EVERY, "auto", "trained"),
    "own head later, agreeing": (lambda number, rank: [rank] if number else EVERY, "agree", "units-called-differently"),
    "the same heads in turn, agreeing": (lambda number, rank: [number] if number else EVERY, "agree", "trained"),
    "one head all along": (lambda number, rank: [1], "auto", "trained"),
}


@pytest.mark.parametrize("use", USES)
def test_weights_of_another_unit_are_never_computed_with(use: str) -> None:
    """Family: gathers that meet another unit's in the backward pass; of equal size, without any sign."""
    heads_of, agreement, expected = USES[use]
    assert run_ranks(_trains_or_refuses, 2, heads_of, agreement) == [expected] * 2

"""Optimizers on sharded parameters: every value-wise one runs unchanged, groups are as the user wrote them, forgotten
optimizers are told."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.optim.optimizer import _default_to_fused_or_foreach

import memopt
from memopt.errors import MemoptError
from memopt_torch.sharded import ShardedTensor, whole_tensor
from memopt_torch.testing import run_ranks


class Lion(torch.optim.Optimizer):
    """Sign of an interpolated momentum (Chen et al. 2023, algorithm 2), as third parties write it."""

    def __init__(self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                momentum, (b1, b2) = state["exp_avg"], group["betas"]
                p.add_(torch.sign(momentum * b1 + p.grad * (1 - b1)), alpha=-group["lr"])
                momentum.mul_(b2).add_(p.grad, alpha=1 - b2)


OPTIMIZERS: dict[str, Callable[[Iterable[Any]], torch.optim.Optimizer]] = {
    "adamw_loop": lambda ps: torch.optim.AdamW(ps, lr=1e-3, foreach=False),
    "adamw_foreach": lambda ps: torch.optim.AdamW(ps, lr=1e-3, foreach=True, amsgrad=True),
    "adamw_fused": lambda ps: torch.optim.AdamW(ps, lr=1e-3, fused=True),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1),
    "sgd_foreach": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9, foreach=True),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=1e-3),
    "nadam": lambda ps: torch.optim.NAdam(ps, lr=1e-3),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=1e-2),
    "rprop": lambda ps: torch.optim.Rprop(ps, lr=1e-3),
    "rprop_foreach": lambda ps: torch.optim.Rprop(ps, lr=1e-3, foreach=True),
    "lion": Lion,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_value_wise_optimizers_run_unchanged_and_equal(tools: Any, name: str) -> None:
    def job() -> tuple[list[float], list[float]]:
        make = OPTIMIZERS[name]
        plain = tools.train_plain(tools.llama(layers=2), optimizer=make, steps=6)
        policy = tools.policy(tools.keep_norms(), tools.shard())
        return plain, tools.train_policy(tools.llama(layers=2), policy, optimizer=make, steps=6)[0]

    for plain, ours in run_ranks(job, 2):
        assert ours == plain


def test_sharded_parameters_get_the_foreach_form_where_plain_ones_would(
    tools: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU an optimizer takes it by default, for types it knows; a loop over parameters would be much slower."""
    monkeypatch.setattr(sys.modules["torch.optim.optimizer"], "_get_foreach_kernels_supported_devices", lambda: ["cpu"])

    def job() -> tuple[bool, bool]:
        run = memopt.apply_policy(tools.llama(layers=2), tools.policy(tools.shard()))
        parameters = list(run.model.parameters())
        assert isinstance(parameters[0], ShardedTensor)
        return _default_to_fused_or_foreach(parameters, False, False)

    assert run_ranks(job, 2) == [(False, True)] * 2


def decay_groups(model: Any) -> list[dict[str, Any]]:
    decayed = [p for name, p in model.named_parameters() if p.ndim >= 2 and "embed" not in name]
    rest = [p for name, p in model.named_parameters() if not (p.ndim >= 2 and "embed" not in name)]
    return [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0, "lr": 5e-4}]


@pytest.mark.parametrize("when", ["before_and_passed", "groups_before", "after"])
def test_groups_by_name_and_dimension_work_alike_before_and_after(tools: Any, when: str) -> None:
    def names(model: Any, opt: torch.optim.Optimizer) -> list[tuple[list[str], float, float]]:
        by_parameter = {p: name for name, p in model.named_parameters()}
        return [([by_parameter[p] for p in g["params"]], g["weight_decay"], g["lr"]) for g in opt.param_groups]

    def losses(model: Any, opt: torch.optim.Optimizer, average: Any) -> list[float]:
        found = []
        for number in range(4):
            loss = tools.loss(model, tools.batch(number, dist.get_rank()))
            loss.backward()
            average(model)
            opt.step()
            opt.zero_grad()
            found.append(loss.item())
        return found

    def job() -> tuple[Any, Any]:
        plain = tools.llama(layers=2)
        opt = torch.optim.AdamW(decay_groups(plain), lr=1e-3)
        expected = names(plain, opt), losses(plain, opt, tools.average)
        model = tools.llama(layers=2)
        policy = tools.policy(tools.shard())
        if when == "before_and_passed":
            opt = torch.optim.AdamW(decay_groups(model), lr=1e-3)
            memopt.apply_policy(model, policy, optimizer=opt)
        elif when == "groups_before":
            groups = decay_groups(model)
            opt = memopt.apply_policy(model, policy).optimizer(torch.optim.AdamW, groups, lr=1e-3)
        else:
            run = memopt.apply_policy(model, policy)
            opt = run.optimizer(torch.optim.AdamW, decay_groups(model), lr=1e-3)
        return expected, (names(model, opt), losses(model, opt, lambda model: None))

    for expected, got in run_ranks(job, 2):
        assert got == expected


def test_state_of_an_optimizer_made_before_is_cut_and_kept(tools: Any) -> None:
    def job() -> tuple[list[float], list[float]]:
        def steps(model: Any, opt: Any, numbers: Any, average: Any) -> list[float]:
            found = []
            for number in numbers:
                loss = tools.loss(model, tools.batch(number, dist.get_rank()))
                loss.backward()
                average(model)
                opt.step()
                opt.zero_grad()
                found.append(loss.item())
            return found

        plain = tools.llama(layers=2)
        opt = torch.optim.AdamW(plain.parameters(), lr=1e-3)
        expected = steps(plain, opt, range(6), tools.average)
        model = tools.llama(layers=2)
        opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
        got = steps(model, opt, range(3), tools.average)
        memopt.apply_policy(model, tools.policy(tools.shard()), optimizer=opt)
        return expected, got + steps(model, opt, range(3, 6), lambda model: None)

    for expected, got in run_ranks(job, 2):
        assert got == expected


def test_a_forgotten_optimizer_raises_at_its_first_step_with_the_fix(tools: Any) -> None:
    def job() -> tuple[str, str]:
        model = tools.llama(layers=2)
        forgotten = torch.optim.AdamW(model.parameters(), lr=1e-3)
        memopt.apply_policy(model, tools.policy(tools.shard()))
        tools.loss(model, tools.batch(0, dist.get_rank())).backward()
        with pytest.raises(MemoptError) as caught:
            forgotten.step()
        return caught.value.problems[0].code, caught.value.problems[0].hint or ""

    for code, hint in run_ranks(job, 2):
        assert code == "optimizer-made-before"
        assert "optimizer=optimizer" in hint


def test_names_shapes_and_dtypes_are_the_plain_models(tools: Any) -> None:
    def job() -> bool:
        plain, model = tools.llama(layers=2), tools.llama(layers=2)
        memopt.apply_policy(model, tools.policy(tools.shard()))
        ours = [(name, p.shape, p.ndim, p.dtype, p.numel()) for name, p in model.named_parameters()]
        same_values = all(
            torch.equal(whole_tensor(p), q) for p, q in zip(model.parameters(), plain.parameters(), strict=True)
        )
        return same_values and ours == [(n, p.shape, p.ndim, p.dtype, p.numel()) for n, p in plain.named_parameters()]

    assert run_ranks(job, 2) == [True, True]


def test_operations_that_need_the_whole_tensor_name_the_parameter(tools: Any) -> None:
    def job() -> list[tuple[str, str | None]]:
        model = tools.llama(layers=2)
        memopt.apply_policy(model, tools.policy(tools.shard()))
        weight = model.model.layers[0].mlp.up_proj.weight
        calls: list[Callable[[], Any]] = [
            lambda: weight @ weight.T,
            lambda: weight.view(-1),
            lambda: weight.mean(0),
            lambda: torch.zeros(weight.shape).add_(weight),
        ]
        found = []
        for call in calls:
            with torch.no_grad(), pytest.raises(MemoptError) as caught:
                call()
            found.append((caught.value.problems[0].code, caught.value.problems[0].path))
        return found

    for found in run_ranks(job, 2):
        assert found == [("sharded-parameter-op", "layers.0.mlp.up_proj.weight")] * 4


def test_norms_and_sums_are_those_of_the_whole_tensor(tools: Any) -> None:
    def job() -> list[tuple[float, float]]:
        plain, model = tools.llama(layers=2), tools.llama(layers=2)
        memopt.apply_policy(model, tools.policy(tools.shard()))
        a, b = model.model.layers[0].mlp.up_proj.weight.detach(), plain.model.layers[0].mlp.up_proj.weight.detach()
        assert isinstance(a, ShardedTensor)
        return [
            (a.norm().item(), b.norm().item()),
            (a.norm(float("inf")).item(), b.norm(float("inf")).item()),
            (a.sum().item(), b.sum().item()),
            (a.mean().item(), b.mean().item()),
            (a.max().item(), b.max().item()),
            (a.abs().min().item(), b.abs().min().item()),
        ]

    for pairs in run_ranks(job, 2):
        for ours, whole in pairs:
            assert ours == pytest.approx(whole, rel=1e-5, abs=1e-7)

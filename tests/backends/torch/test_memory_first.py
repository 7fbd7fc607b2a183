"""With nothing gathered ahead the arena's memory is there only while something lies in it; numbers stay the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import memopt
from memopt_torch.sharded import local_tensor
from memopt_torch.testing import run_fake, run_ranks

FIRST = {"unit_defaults": {"prefetch": {"forward": 0, "backward": 0}}}


def memory_first(tools: Any, *rules: Any, **rest: Any) -> dict[str, Any]:
    return tools.policy(tools.shard(), *rules, **FIRST, **rest)


def test_nothing_of_the_arena_is_there_between_the_passes(tools: Any) -> None:
    def job() -> dict[str, list[int]]:
        run = memopt.apply_policy(tools.llama(), memory_first(tools))
        arena = run.engine.arena
        seen: dict[str, list[int]] = {"policy": [arena.allocated_nbytes], "inside": [], "loss": [], "step": []}
        run.model.model.layers[1].mlp.register_forward_hook(lambda *_: seen["inside"].append(arena.allocated_nbytes))
        opt = run.optimizer(torch.optim.AdamW, lr=1e-3)
        for number in range(3):
            loss = tools.loss(run.model, tools.batch(number, tools.rank()))
            seen["loss"].append(arena.allocated_nbytes)
            loss.backward()
            seen["step"].append(arena.allocated_nbytes)
            opt.step()
            opt.zero_grad()
        seen["planned"] = [arena.plan.nbytes, max(arena.plan.region_nbytes)]
        seen["evaluation"] = [arena.allocated_nbytes]
        with torch.no_grad():
            tools.loss(run.model, tools.batch(9, tools.rank()))
        seen["evaluation"].append(arena.allocated_nbytes)
        return seen

    for seen in run_ranks(job, 2):
        assert seen["policy"] == [0]
        assert seen["loss"] == seen["step"] == [0, 0, 0]
        assert seen["evaluation"] == [0, 0]
        planned, largest = seen["planned"]
        assert all(0 < inside < planned for inside in seen["inside"])
        assert all(inside <= largest for inside in seen["inside"])


def test_regions_are_as_large_as_planned_and_the_default_stays_one_allocation(tools: Any) -> None:
    def job(policy: Any) -> tuple[int, int, int]:
        arena = memopt.apply_policy(tools.llama(), policy).engine.arena
        for region in arena.regions:
            region.bring()
        return arena.plan.nbytes, arena.allocated_nbytes, len(arena.regions)

    planned, allocated, num_regions = run_fake(job, 8, memory_first(tools))
    assert planned == allocated > 0
    assert num_regions == 2  # weights and gradients
    default_planned, default_allocated, one = run_fake(job, 8, tools.policy(tools.shard()))
    assert default_planned == default_allocated > planned
    assert one == 1


def plain_step(tools: Any, model: Any, opt: Any, number: int, reduce: Any) -> float:
    loss = tools.loss(model, tools.batch(number, tools.rank()))
    loss.backward()
    reduce(model)
    opt.step()
    opt.zero_grad()
    return loss.item()


def evaluation_between(tools: Any, model: Any, opt: Any, number: int, reduce: Any) -> tuple[float, float]:
    loss = tools.loss(model, tools.batch(number, tools.rank()))
    with torch.no_grad():
        seen = tools.loss(model, tools.batch(number + 100, tools.rank())).item()
    loss.backward()
    reduce(model)
    opt.step()
    opt.zero_grad()
    return loss.item(), seen


def two_forwards(tools: Any, model: Any, opt: Any, number: int, reduce: Any) -> float:
    losses = [tools.loss(model, tools.batch(number, tools.rank(), micro=micro)) for micro in range(2)]
    (losses[0] + losses[1]).backward()
    reduce(model)
    opt.step()
    opt.zero_grad()
    return losses[0].item() + losses[1].item()


def gradients_zeroed_in_place(tools: Any, model: Any, opt: Any, number: int, reduce: Any) -> float:
    loss = tools.loss(model, tools.batch(number, tools.rank()))
    loss.backward()
    reduce(model)
    opt.step()
    opt.zero_grad(set_to_none=number % 2 == 0)
    return loss.item()


def exception_in_backward(tools: Any, model: Any, opt: Any, number: int, reduce: Any) -> float:
    if number == 2:

        def fail(grad: torch.Tensor) -> None:
            raise ArithmeticError("on purpose")

        loss = tools.loss(model, tools.batch(number, tools.rank()))
        handle = model.model.layers[1].mlp.register_forward_hook(lambda m, a, out: out.register_hook(fail) and None)
        with pytest.raises(ArithmeticError):
            tools.loss(model, tools.batch(number, tools.rank())).backward()
        handle.remove()
        del loss
        opt.zero_grad()
    return plain_step(tools, model, opt, number, reduce)


STEPS = {
    "tied": plain_step,
    "recompute": plain_step,
    "evaluation_between": evaluation_between,
    "two_forwards": two_forwards,
    "gradients_zeroed_in_place": gradients_zeroed_in_place,
    "exception_in_backward": exception_in_backward,
}


@pytest.mark.parametrize("name", STEPS)
def test_losses_equal_data_parallel_training_to_the_bit(tools: Any, name: str) -> None:
    def step(model: Any, opt: Any, number: int, reduce: Any, run: Any) -> Any:
        return STEPS[name](tools, model, opt, number, reduce)

    def job() -> tuple[Any, Any]:
        rules = (tools.recompute(),) if name == "recompute" else ()
        plain = tools.train_plain(tools.llama(tie=name == "tied"), step=step, steps=6)
        ours, _ = tools.train_policy(tools.llama(tie=name == "tied"), memory_first(tools, *rules), step=step, steps=6)
        return plain, ours

    for plain, ours in run_ranks(job, 2):
        assert ours == plain


@pytest.mark.parametrize("kept", ["each", "last"])
def test_gradients_accumulate_over_micro_batches(tools: Any, kept: str) -> None:
    def job() -> tuple[Any, Any]:
        policy = memory_first(tools, accumulate={"steps": 3, "reduce": kept})
        plain = tools.train_plain(tools.llama(), step=tools.micro_batches, steps=4)
        return plain, tools.train_policy(tools.llama(), policy, step=tools.micro_batches, steps=4)[0]

    for plain, ours in run_ranks(job, 2):
        assert ours == pytest.approx(plain, abs=1e-6)


def test_reduced_gradients_go_with_the_next_forward_pass_unless_somebody_holds_them(tools: Any) -> None:
    def job() -> tuple[bool, bool, int, int]:
        run = memopt.apply_policy(tools.llama(), memory_first(tools))
        opt = run.optimizer(torch.optim.AdamW, lr=1e-3)
        sections = [section for unit in run.engine.units for section in unit.sections]
        tools.loss(run.model, tools.batch(0, tools.rank())).backward()
        weight = run.model.model.layers[1].mlp.up_proj.weight
        held, value = weight.grad, local_tensor(weight.grad).clone()
        opt.step()
        opt.zero_grad()
        loss = tools.loss(run.model, tools.batch(1, tools.rank()))
        num_between = sum(section.grad is not None for section in sections)
        loss.backward()
        num_after = sum(section.grad is not None for section in sections)
        fresh = weight.grad is not held
        return torch.equal(local_tensor(held), value), fresh, num_between, num_after

    for is_intact, is_fresh, num_between, num_after in run_ranks(job, 2):
        assert is_intact
        assert is_fresh
        assert num_between == 0
        assert num_after > 0

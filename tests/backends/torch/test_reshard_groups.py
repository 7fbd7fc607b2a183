"""`reshard_after_forward: N`: between forward and backward a unit's weights lie split over groups of N ranks, and the
backward pass gathers them there; nothing else changes."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch

import memopt
from memopt.errors import MemoptError
from memopt_torch import collectives
from memopt_torch.collectives import Collectives, Pending
from memopt_torch.gathering import Gathering
from memopt_torch.measure import StepMeter
from memopt_torch.testing import run_fake, run_ranks


def grouped(tools: Any, *rules: Any, size: int = 2, **rest: Any) -> dict[str, Any]:
    defaults = {"reshard_after_forward": size, **rest.pop("unit_defaults", {})}
    return tools.policy(tools.shard(), *rules, unit_defaults=defaults, **rest)


def test_groups_of_all_ranks_are_plain_resharding(tools: Any) -> None:
    def job() -> tuple[Any, Any, dict[str, int], int]:
        plain = tools.train_plain(tools.llama())
        ours, run = tools.train_policy(tools.llama(), grouped(tools))
        return plain, ours, dict(run.engine.collectives.counts), len(run.engine.groups.parts)

    for plain, ours, counts, num_groups in run_ranks(job, 2):
        assert ours == plain
        assert num_groups == 0
        assert set(counts) == {"all_gather", "reduce_scatter", "all_reduce"}


SETTINGS: dict[str, Any] = {
    "alone": lambda t: grouped(t),
    "recompute": lambda t: grouped(t, t.recompute()),
    "no_prefetch": lambda t: grouped(t, unit_defaults={"prefetch": {"forward": 0, "backward": 0}}),
    "some_units": lambda t: t.policy(
        t.shard(), units=[{"match": ["layers.0", "layers.2"], "reshard_after_forward": 2}, "layers.*"]
    ),
    "low_precision": lambda t: grouped(t, precision={"compute": "bfloat16", "reduce": "float32"}),
    "frozen_base": lambda t: grouped(t, t.recompute()),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_four_ranks_in_groups_of_two_train_as_without_groups(tools: Any, name: str) -> None:
    """Weights are only moved, so losses equal those of resharding over all ranks to the bit."""

    def make() -> Any:
        model = tools.llama(layers=5)
        if name == "frozen_base":
            model.model.layers[1].requires_grad_(False)
            model.model.layers[2].mlp.requires_grad_(False)
        return model

    def job() -> tuple[Any, Any, Any, list[tuple[str, int]]]:
        policy = SETTINGS[name](tools)
        over_all = {**policy, "unit_defaults": {**policy.get("unit_defaults", {}), "reshard_after_forward": True}}
        over_all["units"] = [unit for unit in policy.get("units", ["layers.*"]) if isinstance(unit, str)]
        expected, _ = tools.train_policy(make(), over_all, steps=6)
        with pytest.MonkeyPatch.context() as monkey:
            seen = watch_groups(monkey)
            ours, _ = tools.train_policy(make(), policy, steps=6)
        plain = tools.train_plain(make(), steps=6) if "precision" not in policy else None
        return expected, ours, plain, seen

    for expected, ours, plain, seen in run_ranks(job, 4):
        assert ours == expected
        assert plain is None or ours == pytest.approx(plain, rel=2e-6)
        assert ("layers.0", 2) in seen


def watch_groups(monkey: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """(unit, ranks) of every gather from now on; 0 for all ranks."""
    gather, seen = Collectives.all_gather, []

    def noted(self: Collectives, out: Any, shard: Any, *, unit: str, group_size: int | None = None) -> Pending:
        seen.append((unit, group_size or 0))
        return gather(self, out, shard, unit=unit, group_size=group_size)

    monkey.setattr(Collectives, "all_gather", noted)
    return seen


def test_forward_gathers_over_all_ranks_and_backward_within_the_group(tools: Any) -> None:
    def job() -> list[tuple[str, int]]:
        run = memopt.apply_policy(tools.llama(), grouped(tools))
        opt = run.optimizer(torch.optim.AdamW, lr=1e-3)
        with pytest.MonkeyPatch.context() as monkey:
            for number in range(3):
                seen = watch_groups(monkey)
                tools.loss(run.model, tools.batch(number, tools.rank())).backward()
                opt.step()
                opt.zero_grad()
                monkey.undo()
        return seen

    forward = [(unit, 0) for unit in ("embed_tokens", "layers.0", "layers.1", "layers.2", "layers.3", "norm+lm_head")]
    # The last layers and the head stay gathered: the backward pass begins with them.
    backward = [("layers.1", 2), ("layers.0", 2)]
    for seen in run_ranks(job, 4):
        assert seen == [*forward, *backward]


@pytest.mark.parametrize("between", ["evaluation", "second_forward", "exception", "written_by_hand"])
def test_what_happens_between_forward_and_backward_does_not_make_parts_wrong(tools: Any, between: str) -> None:
    def step(model: Any, opt: Any, number: int, reduce: Any, run: Any) -> Any:
        loss = tools.loss(model, tools.batch(number, tools.rank()))
        if between == "evaluation":
            with torch.no_grad():
                tools.loss(model, tools.batch(number + 100, tools.rank()))
        elif between == "second_forward":
            loss = loss + tools.loss(model, tools.batch(number + 100, tools.rank()))
        elif between == "exception" and number == 2:
            with pytest.raises(ValueError, match="size"):
                model(input_ids=tools.batch(number, tools.rank()), labels=torch.zeros(1, dtype=torch.long))
        loss.backward()
        reduce(model)
        opt.step()
        opt.zero_grad()
        if between == "written_by_hand":  # after the step: the next forward pass must see it
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.99)
        return loss.item()

    def job() -> tuple[Any, Any]:
        over_all, _ = tools.train_policy(tools.llama(), tools.policy(tools.shard()), step=step, steps=4)
        return over_all, tools.train_policy(tools.llama(), grouped(tools), step=step, steps=4)[0]

    for expected, ours in run_ranks(job, 4):
        assert ours == expected


def test_a_stale_part_is_caught_by_check(tools: Any) -> None:
    def job() -> tuple[bool, bool]:
        run = memopt.apply_policy(tools.llama(), grouped(tools, tools.recompute()))
        opt = run.optimizer(torch.optim.AdamW, lr=1e-1)
        tokens = tools.batch(0, tools.rank())
        batch = {"input_ids": tokens, "labels": tokens}
        good = run.check(batch, layout=True).ok
        keep = Gathering.reshard

        def broken(self: Gathering, unit: Any) -> None:
            kept = [section.part.clone() for section in unit.sections if section.part is not None]
            keep(self, unit)
            for section, part in zip(unit.sections, kept, strict=False):
                section.part.copy_(part)

        with pytest.MonkeyPatch.context() as monkey:
            monkey.setattr(Gathering, "reshard", broken)
            for number in range(2):
                tools.loss(run.model, tools.batch(number, tools.rank())).backward()
                opt.step()
                opt.zero_grad()
            bad = run.check(batch, layout=True).ok
        return good, bad

    assert run_ranks(job, 4) == [(True, False)] * 4


def test_parts_are_in_the_arena_and_in_what_is_measured(tools: Any) -> None:
    def job(policy: Any) -> tuple[int, int, list[int], int]:
        run = memopt.apply_policy(tools.llama(layers=8), policy)
        engine = run.engine
        opt = run.optimizer(torch.optim.AdamW, lr=1e-3)
        tokens = tools.batch(0, 0)

        def step() -> None:
            tools.loss(run.model, tokens).backward()
            opt.step()
            opt.zero_grad()

        step()
        with StepMeter(run.model, optimizers=(opt,), engine=engine, batch=tokens) as meter:
            step()
        parts = [block.nbytes for block, _ in engine.arena_plan.placed if block.kind == "resharded"]
        allocated = engine.arena.allocated_nbytes
        return engine.arena_plan.nbytes, allocated, parts, meter.result().collectives["all_gather"].num_calls

    over_all = run_fake(job, 8, tools.policy(tools.shard()))
    in_fours = run_fake(job, 8, grouped(tools, size=4))
    in_twos = run_fake(job, 8, grouped(tools, size=2))
    assert over_all[2] == []
    assert len(in_fours[2]) == len(in_twos[2]) == 6  # two layers of eight stay gathered whole
    for planned, allocated, parts, num_gathers in (in_fours, in_twos):
        assert planned == allocated
        assert planned - over_all[0] >= sum(parts) - max(parts)
        assert num_gathers == over_all[3]
    assert sum(in_twos[2]) == 2 * sum(in_fours[2])


@pytest.mark.parametrize(
    "axes, expected",
    [
        ((("fsdp", 8),), [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ((("replicate", 2), ("fsdp", 4)), [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ((("fsdp", 4), ("replicate", 2)), [[0, 2], [4, 6], [1, 3], [5, 7]]),
    ],
)
def test_groups_are_of_neighbours_on_the_sharding_axis(axes: Any, expected: list[list[int]]) -> None:
    def job() -> list[list[list[int]]]:
        made = []
        new = collectives._new_group

        def noted(ranks: list[list[int]], timeout: timedelta | None) -> Any:
            made.append(np.array(ranks).tolist())
            return new(ranks, timeout)

        with pytest.MonkeyPatch.context() as monkey:
            monkey.setattr(collectives, "_new_group", noted)
            collectives.make_groups(axes, part_sizes=[2, dict(axes)["fsdp"]])
        return made

    assert expected in run_fake(job, 8)


@pytest.mark.parametrize("engine", ["layer", "fsdp2"])
@pytest.mark.parametrize("size", [3, 8])
def test_groups_that_do_not_divide_the_axis_are_refused(tools: Any, engine: str, size: int) -> None:
    def job() -> tuple[str, str]:
        policy = grouped(tools, size=size, backend_options={"torch": {"engine": engine}})
        with pytest.raises(MemoptError) as refused:
            memopt.apply_policy(tools.llama(), policy)
        problem = refused.value.problems[0]
        return problem.code, f"{problem.message}; {problem.hint}"

    code, text = run_fake(job, 4)
    assert code == "reshard-group-size"
    assert f"groups of {size} ranks" in text
    assert "write 2 or true (all 4)" in text


def test_fsdp2_takes_the_same_group_sizes(tools: Any) -> None:
    def job() -> tuple[Any, Any]:
        fsdp2: dict[str, Any] = {"backend_options": {"torch": {"engine": "fsdp2"}}}
        ours, _ = tools.train_policy(tools.llama(), grouped(tools), steps=4)
        return ours, tools.train_policy(tools.llama(), grouped(tools, **fsdp2), steps=4)[0]

    for world in (2, 4):
        for ours, theirs in run_ranks(job, world):
            assert ours == pytest.approx(theirs, rel=2e-6)

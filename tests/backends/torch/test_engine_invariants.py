"""What the engine promises besides right losses: bytes of the arena, which collectives, no allocations, and that faults
put into it on purpose are caught."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

import memopt
from memopt.errors import MemoptError
from memopt_torch.arena import plan_arena
from memopt_torch.collectives import Collectives, Pending
from memopt_torch.engine import Engine
from memopt_torch.lifetimes import UnitSizes, lifetimes
from memopt_torch.measure import StepMeter
from memopt_torch.reduction import Reduction
from memopt_torch.sections import Section
from memopt_torch.testing import run_fake, run_ranks

sizes = st.builds(
    UnitSizes,
    name=st.uuids().map(str),
    weight_nbytes=st.integers(0, 5000),
    grad_nbytes=st.integers(0, 5000),
    needs_weights_in_backward=st.booleans(),
    is_layer=st.booleans(),
    keep=st.booleans(),
    resident=st.booleans(),
    prefetch_forward=st.integers(0, 2),
    prefetch_backward=st.integers(0, 2),
    resharded_nbytes=st.integers(0, 500),
    reduced_nbytes=st.integers(0, 2000),
)


@given(units=st.lists(sizes, max_size=8), grad_slots=st.sampled_from([1, 2]))
@settings(max_examples=200, deadline=None)
def test_blocks_in_use_together_never_share_memory(units: list[UnitSizes], grad_slots: int) -> None:
    plan = plan_arena(units, grad_slots=grad_slots)
    placed = plan.placed
    for i, (a, at) in enumerate(placed):
        assert at + a.nbytes <= plan.nbytes
        for b, bt in placed[i + 1 :]:
            if a.meets(b):
                assert at + a.nbytes <= bt or bt + b.nbytes <= at
    assert plan.floor_nbytes <= plan.nbytes
    alone = plan_arena([replace(unit, reduced_nbytes=0) for unit in units], grad_slots=grad_slots)
    assert plan.nbytes == alone.nbytes, "reduced gradients cost the arena nothing"


def test_the_arena_of_llama_3_8b_is_within_its_bound() -> None:
    # W = 2 bytes (bfloat16), D = 4 (float32); p of a layer, R of embedding and head.
    p, r = 218_112_000, 128256 * 4096
    layer = {"weight_nbytes": 2 * p, "grad_nbytes": 4 * p}
    root = {"weight_nbytes": 2 * r, "grad_nbytes": 4 * r, "is_layer": False}
    units = [
        UnitSizes("embed", needs_weights_in_backward=False, **root),
        *(UnitSizes(f"layers.{i}", **layer) for i in range(32)),
        UnitSizes("head", **root),
    ]
    plan = plan_arena(units)
    assert plan.nbytes <= max(4 * p + 4 * p, 2 * r + 4 * r + 4 * p) + 2048
    assert plan.nbytes / 1e9 <= 4.03
    thrifty = [UnitSizes(u.name, u.weight_nbytes, u.grad_nbytes, u.needs_weights_in_backward, u.is_layer,
                         prefetch_forward=0, prefetch_backward=0) for u in units]  # fmt: skip
    assert plan_arena(thrifty).nbytes < plan.nbytes


def test_lifetimes_alternate_between_neighbours() -> None:
    units = [UnitSizes(f"layers.{i}", 1000, 0) for i in range(6)]
    plan = plan_arena(units)
    assert plan.nbytes <= 2 * 1024
    assert len(lifetimes(units)) == 6  # nothing but weights


def engine_of(run: Any) -> Engine:
    assert isinstance(run.engine, Engine)
    return run.engine


def train(tools: Any, run: Any, opt: Any, numbers: range) -> None:
    for number in numbers:
        tools.loss(run.model, tools.batch(number, tools.rank())).backward()
        opt.step()
        opt.zero_grad()


def test_planned_arena_bytes_are_told_before_training_and_are_the_bytes_allocated(tools: Any) -> None:
    def job() -> tuple[int, int, int, int, list[str]]:
        told: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("memopt").addHandler(handler)
        logging.getLogger("memopt").setLevel(logging.INFO)
        run = memopt.apply_policy(tools.llama(), tools.policy(tools.shard()))
        engine = engine_of(run)
        arena = engine.arena
        allocated = arena.allocated_nbytes
        return arena.plan.nbytes, allocated, arena.plan.outside_nbytes, own_gradient_bytes(engine), told

    first, second = run_ranks(job, 2)
    for planned, allocated, planned_outside, outside, _ in (first, second):
        assert planned == allocated > 0
        assert planned_outside == outside
    (table,) = first[-1]
    assert f"{first[0]:,d} bytes in one allocation" in table
    assert "weights layers.3" in table
    assert second[-1] == []  # one rank tells


@pytest.mark.parametrize("world", [1, 2])
def test_a_check_compares_with_recomputation_where_keeping_everything_is_over_the_budget(
    tools: Any, world: int
) -> None:
    def job() -> list[str]:
        tokens = tools.batch(0, tools.rank())
        batch = {"input_ids": tokens, "labels": tokens}
        rules = [tools.recompute()] if world == 1 else [tools.shard(), tools.recompute()]
        taken = []
        with StepMeter(model := tools.llama(layers=8)) as meter:  # unsharded, everything kept: no less is enough
            tools.loss(model, tokens).backward()
        plain = meter.result().peak.nbytes
        for budget in (2 * plain, plain // 2):
            run = memopt.apply_policy(tools.llama(layers=8), tools.policy(*rules, budget={"device": budget}))
            check = run.check(batch)
            assert check.ok, check
            assert run.check(batch, reference="plain").reference == "plain"
            taken.append(check.reference)
        return taken

    assert run_ranks(job, world) == [["plain", "recompute"]] * world


def own_gradient_bytes(engine: Engine) -> int:
    return sum(t.nbytes for t, role in engine.buffers() if role == "grad")


@pytest.mark.parametrize("order", ["zero_before_forward", "zero_after_forward", "evaluates_before_step"])
def test_reduced_gradients_lie_in_the_arena_until_a_forward_pass_comes_while_they_are_held(
    tools: Any, order: str
) -> None:
    def step(model: Any, opt: Any, number: int, reduce: Callable[[Any], None], run: Any) -> float:
        tokens = tools.batch(number, tools.rank())
        if order == "zero_before_forward":
            opt.zero_grad()
        loss = tools.loss(model, tokens)
        if order == "zero_after_forward":
            opt.zero_grad()
        loss.backward()
        reduce(model)
        if order == "evaluates_before_step":
            with torch.no_grad():
                tools.loss(model, tools.batch(99, 0))
        opt.step()
        if order == "evaluates_before_step":
            opt.zero_grad()
        return loss.item()

    def job() -> tuple[list[float], list[float], int, int, int]:
        expected = tools.train_plain(tools.llama(), steps=6, step=step)
        model = tools.llama()
        policy = tools.policy(tools.shard())
        whole = sum(-(-p.numel() // 2) * 4 for p in model.parameters())
        run = memopt.apply_policy(model, policy)
        opt = run.optimizer(torch.optim.AdamW, lr=1e-3)
        before = own_gradient_bytes(run.engine)
        losses = [step(model, opt, number, lambda model: None, run) for number in range(6)]
        return expected, losses, before, own_gradient_bytes(run.engine), whole

    for expected, losses, before, after, whole in run_ranks(job, 2):
        assert losses == expected
        assert before < whole
        assert (after == before) == (order == "zero_before_forward")
        assert after <= whole + 1024


def test_the_weight_bound_peak_is_below_the_figures_of_others(tools: Any) -> None:
    def job(prefetch: int) -> float:
        torch.manual_seed(0)
        model = tools.llama(layers=8, hidden=256, vocab=2048, intermediate=688)
        ahead = {"unit_defaults": {"prefetch": {"forward": prefetch, "backward": prefetch}}}
        run = memopt.apply_policy(model, tools.policy(tools.shard(), **ahead))
        opt = run.optimizer(torch.optim.AdamW, lr=1e-3, fused=True)
        tokens = torch.zeros(1, 8, dtype=torch.long)
        for _ in range(2):
            tools.loss(model, tokens).backward()
            opt.step()
            opt.zero_grad()
        with StepMeter(model, optimizers=(opt,), engine=run.engine, batch=tokens) as meter:
            tools.loss(model, tokens).backward()
            opt.step()
            opt.zero_grad()
        peak = meter.result().peak
        return (peak.nbytes - peak.by_role["param"] - peak.by_role["optimizer_state"]) / 2**20

    assert run_fake(job, 8, 1) <= 16.8  # YaFSDP's, at its setting
    assert run_fake(job, 8, 0) <= 9.9  # FSDP2's is 14.8


@pytest.mark.parametrize("engine_options", [{}, {"communication": "blocking"}, {"gradient_slots": 2}])
def test_collectives_of_a_step(tools: Any, engine_options: dict[str, Any]) -> None:
    layers = 8

    def job() -> dict[str, int]:
        run = memopt.apply_policy(
            tools.llama(layers=layers), tools.policy(tools.shard(), backend_options={"torch": engine_options})
        )
        opt = run.optimizer(torch.optim.AdamW, lr=1e-3)
        train(tools, run, opt, range(2))
        counts = engine_of(run).collectives.counts
        counts.clear()
        train(tools, run, opt, range(2, 5))
        return dict(counts)

    units = layers + 2
    kept, embedding = 3, 1
    for counts in run_ranks(job, 2):
        assert counts == {"all_gather": 3 * (2 * units - kept - embedding), "reduce_scatter": 3 * units}


def allocations_in_step(step: Callable[[], None]) -> tuple[int, int]:
    """(how many, bytes) of allocations of 1 KiB and more, the size of the smallest tensor of the model."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        step()
    assert seen.profiler is not None
    events = [e.nbytes() for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    large = [nbytes for nbytes in events if nbytes >= 1024]
    return len(large), sum(large)


@pytest.mark.parametrize("injected", [False, True])
def test_no_allocations_beyond_the_plain_models(tools: Any, injected: bool) -> None:
    def job() -> tuple[tuple[int, int], tuple[int, int]]:
        plain = tools.llama()

        def plain_step() -> None:
            tools.loss(plain, tools.batch(0, 0)).backward()
            for parameter in plain.parameters():
                parameter.grad = None

        run = memopt.apply_policy(tools.llama(), tools.policy(tools.shard()))
        if injected:
            engine = engine_of(run)
            gather = engine.gather
            engine.gather = lambda unit: (torch.empty(4096), gather(unit))[1]  # type: ignore[method-assign]

        def our_step() -> None:
            tools.loss(run.model, tools.batch(0, 0)).backward()
            for parameter in run.model.parameters():
                parameter.grad = None

        for _ in range(3):
            plain_step()
            our_step()
        return allocations_in_step(plain_step), allocations_in_step(our_step)

    plain, ours = run_fake(job, 2)  # gloo's own staging is not the engine's
    assert (ours == plain) is not injected


def stale_buffer(monkey: pytest.MonkeyPatch) -> None:
    """Weights of the first gather for ever."""
    gather = Collectives.all_gather
    seen: set[str] = set()

    def broken(self: Collectives, out: torch.Tensor, shard: torch.Tensor, *, unit: str) -> Pending:
        if unit in seen and unit == "layers.1":
            return Pending(self, "all_gather", unit, None)
        seen.add(unit)
        return gather(self, out, shard, unit=unit)

    monkey.setattr(Collectives, "all_gather", broken)


def dropped_reduction(monkey: pytest.MonkeyPatch) -> None:
    """One unit's gradients stay this rank's own."""
    scatter = Collectives.reduce_scatter

    def broken(self: Collectives, out: torch.Tensor, whole: torch.Tensor, *, unit: str) -> Pending:
        if unit == "layers.1":
            out.copy_(whole[self.groups.rank * out.numel() : (self.groups.rank + 1) * out.numel()])
            return Pending(self, "reduce_scatter", unit, None)
        return scatter(self, out, whole, unit=unit)

    monkey.setattr(Collectives, "reduce_scatter", broken)


def wrong_divisor(monkey: pytest.MonkeyPatch) -> None:
    """Sums in place of means."""
    take = Reduction._finish

    def broken(self: Reduction, section: Section) -> None:
        under_way = section.pending is not None
        take(self, section)
        if under_way and section.unit.name == "layers.2" and section.grad is not None:
            section.grad.mul_(2)

    monkey.setattr(Reduction, "_finish", broken)


def neighbours_weights(monkey: pytest.MonkeyPatch) -> None:
    """A unit runs on whatever its memory holds."""
    release = Engine.release

    def broken(self: Engine, unit: Any) -> None:
        if unit.name == "layers.1" and unit.state == "ready":
            unit.sections[0].gathered.roll(1)
            unit.sections[0].gathered.mul_(1.5)
        release(self, unit)
        if unit.name == "layers.1":
            unit.state = "ready"
            for section in unit.sections:
                section.swap(used=True)

    monkey.setattr(Engine, "release", broken)


@pytest.mark.parametrize("fault", [stale_buffer, dropped_reduction, wrong_divisor, neighbours_weights])
def test_faults_put_in_on_purpose_are_caught_by_check(tools: Any, fault: Callable[[pytest.MonkeyPatch], None]) -> None:
    def job() -> tuple[bool, bool, str | None]:
        run = memopt.apply_policy(tools.llama(), tools.policy(tools.shard(), tools.recompute()))
        opt = run.optimizer(torch.optim.AdamW, lr=1e-1)
        tokens = tools.batch(0, tools.rank())
        batch = {"input_ids": tokens, "labels": tokens}
        good = run.check(batch, layout=True)
        monkey = pytest.MonkeyPatch()
        fault(monkey)
        try:
            train(tools, run, opt, range(2))
            bad = run.check(batch, layout=True)
        finally:
            monkey.undo()
        return good.ok, bad.ok, bad.worst_tensor

    for good, bad, worst in run_ranks(job, 2):
        assert good
        assert not bad
        assert worst is not None


def test_a_check_leaves_gradients_randomness_and_buffers_as_they_were(tools: Any) -> None:
    def job() -> bool:
        run = memopt.apply_policy(tools.llama(), tools.policy(tools.shard(), tools.recompute()))
        tokens = tools.batch(0, tools.rank())
        tools.loss(run.model, tokens).backward()
        before = [p.grad.local.clone() for p in run.model.parameters()]
        state = torch.get_rng_state()
        check = run.check({"input_ids": tokens, "labels": tokens})
        same = all(torch.equal(a, p.grad.local) for a, p in zip(before, run.model.parameters(), strict=True))
        return check.ok and check.max_grad_rel_diff == 0.0 and same and torch.equal(state, torch.get_rng_state())

    assert run_ranks(job, 2) == [True, True]


@pytest.mark.parametrize("how", ["killed", "stalled"])
def test_a_lost_rank_ends_in_an_error_that_says_where(tools: Any, how: str) -> None:
    def job() -> None:
        options = {"timeout_s": 5.0}
        run = memopt.apply_policy(tools.llama(), tools.policy(tools.shard(), backend_options={"torch": options}))
        opt = run.optimizer(torch.optim.AdamW, lr=1e-3)
        train(tools, run, opt, range(2))
        if dist.get_rank() == 1:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(12)
            os._exit(0)
        train(tools, run, opt, range(2, 4))

    error, gone = run_ranks(job, 2, may_fail=True, timeout_s=60)
    assert gone is None
    assert isinstance(error, MemoptError)
    problem = error.problems[0]
    assert problem.code == "collective-failed"
    assert "rank 0" in problem.message
    assert "step 2" in problem.message or "step 3" in problem.message
    assert problem.path in {"embed_tokens", "layers.0", "layers.1", "layers.2", "layers.3", "norm+lm_head"}


def test_collectives_stall_for_as_long_as_the_users_process_group_allows(tools: Any) -> None:
    """New groups get half an hour from torch, whatever `init_process_group(timeout=...)` said."""

    def job() -> set[float]:
        run = memopt.apply_policy(tools.llama(), tools.policy(tools.shard()))
        groups = run.engine.collectives.groups
        mine = (groups.gather, groups.reduce, groups.world, groups.control)
        return {group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in mine}

    assert run_ranks(job, 2, timeout_s=57) == [{57.0}, {57.0}]


def test_groups_of_the_engine_alone_wait_as_long_as_the_policy_says(tools: Any) -> None:
    """A timeout given to each wait would make a GPU's wait block the processor."""

    def job() -> tuple[set[float], float]:
        options = {"timeout_s": 33.0}
        run = memopt.apply_policy(tools.llama(), tools.policy(tools.shard(), backend_options={"torch": options}))
        groups = run.engine.collectives.groups
        mine = (groups.gather, groups.reduce, groups.world, groups.control)
        assert dist.group.WORLD is not None
        return {seconds_of(group) for group in mine}, seconds_of(dist.group.WORLD)

    assert run_ranks(job, 2, timeout_s=57) == [({33.0}, 57.0)] * 2


def seconds_of(group: Any) -> float:
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def test_profiler_ranges_name_the_units(tools: Any) -> None:
    def job() -> set[str]:
        run = memopt.apply_policy(tools.llama(), tools.policy(tools.shard()))
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            tools.loss(run.model, tools.batch(0, tools.rank())).backward()
        return {event.name for event in seen.events() or () if event.name.startswith("memopt::")}

    for names in run_ranks(job, 2):
        assert {"memopt::all_gather layers.2", "memopt::reduce_scatter norm+lm_head"} <= names

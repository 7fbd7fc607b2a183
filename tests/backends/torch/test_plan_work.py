"""The work of a planned torch step: what runs, is sent and copied, who waits for whom, and the seconds that follow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import memopt
from memopt.lowering import make_plan
from memopt.plan import Plan
from memopt.roofline import GUESS, rates_for
from memopt.simulate import simulate
from memopt.spec import ModelSpec
from memopt.step_time import overlap_of, step_time
from memopt.targets import load_target
from memopt.timeline import Task, check_order
from memopt.workloads import Workload
from memopt_torch import BACKEND
from memopt_torch.depths import Fit, fit_step, tasks_of
from memopt_torch.plan import estimate

WIDTH = 32
H100 = load_target("gpu:h100:8")
RECOMPUTE = {"name": "rest", "action": "recompute", "match": {"unit": "layers.*"}}
SHARD = {"name": "weights", "action": "shard", "match": {"role": "param"}}
INPUTS = {"name": "inputs", "action": "offload", "match": {"path": "layers.*.input"}}
STATE = {"name": "state", "action": "offload", "match": {"role": "optimizer_state"}}


class Block(nn.Module):
    def __init__(self, wide: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, wide), nn.Linear(wide, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(self.up(hidden).sin())


class Model(nn.Module):
    def __init__(self, num_layers: int, *, wide: tuple[int, ...] = (64,)) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH)
        self.layers = nn.ModuleList(Block(wide[i % len(wide)]) for i in range(num_layers))
        self.head = nn.Linear(WIDTH, 50, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def workload(build: Callable[[], nn.Module], *, batch: int = 4) -> Workload:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["tokens"].flatten())

    tokens = {"tokens": torch.zeros(batch, 16, dtype=torch.int64)}
    return Workload("toy", build, loss, tokens, lambda parameters: torch.optim.AdamW(parameters, lr=1e-3))


def policy(*rules: dict[str, Any], **extra: Any) -> dict[str, Any]:
    return {"version": 1, "units": ["layers.*", "embed", "head"], "rules": [*rules], **extra}


def lowered(job: Workload, source: dict[str, Any], world_size: int = 1) -> tuple[Plan, ModelSpec]:
    loaded = memopt.load_policy(source)
    options = BACKEND.options()(**loaded.backend_options.get("torch", {})).model_dump()
    spec = BACKEND.inspect_workload(job)
    return make_plan(loaded, spec, backend=BACKEND, world_size=world_size, options=options), spec


def fitted(job: Workload, source: dict[str, Any], world_size: int = 1) -> tuple[Fit, Plan]:
    plan, spec = lowered(job, source, world_size)
    return fit_step(job, plan, spec), plan


def tasks(job: Workload, source: dict[str, Any], world_size: int = 1) -> tuple[Task, ...]:
    found = tasks_of(*fitted(job, source, world_size))
    check_order(found)
    return found


def options(**given: Any) -> dict[str, Any]:
    return {"backend_options": {"torch": given}}


SOURCES = {
    "none": (policy(), 1),
    "offload, layers of two kinds taking turns": (policy(INPUTS, RECOMPUTE), 1),
    "shard, recompute": (policy(SHARD, RECOMPUTE), 4),
    "fsdp2": (policy(SHARD, RECOMPUTE, **options(engine="fsdp2")), 4),
    "offload": (policy(INPUTS, RECOMPUTE), 1),
    "accumulation": (policy(SHARD, accumulate={"steps": 2, "reduce": "each"}), 4),
}


@pytest.mark.parametrize("name", SOURCES)
def test_work_unrolled_from_few_layers_is_that_of_all_of_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source, world_size = SOURCES[name]
    wide = (64, 96) if name.endswith("turns") else (64,)
    job = workload(lambda: Model(18, wide=wide))
    fit, plan = fitted(job, source, world_size)
    assert not fit.is_whole
    monkeypatch.setattr("memopt_torch.depths._WHOLE_UP_TO", 100)
    assert tasks_of(fit, plan) == tasks(job, source, world_size)


def test_state_on_its_way_in_buckets_is_unrolled_to_the_whole_models_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets are cut by bytes, not by layers: bytes are kept, and nearly the time they take."""
    job = workload(lambda: Model(40))
    fit, plan = fitted(job, policy(STATE))
    assert not fit.is_whole
    found = tasks_of(fit, plan)
    check_order(found)
    monkeypatch.setattr("memopt_torch.depths._WHOLE_UP_TO", 100)
    whole = tasks(job, policy(STATE))
    assert fit.amounts.to_host_bytes == sum(task.nbytes for task in whole if task.stream == "to_host")
    for stream in ("to_host", "to_device"):
        moved = [sum(task.nbytes for task in one if task.stream == stream) for one in (found, whole)]
        assert moved[0] == pytest.approx(moved[1], rel=0.05)
    assert simulated(found).makespan_s == pytest.approx(simulated(whole).makespan_s, rel=0.15)


def test_work_adds_up_to_the_amounts_the_plan_prints() -> None:
    job = workload(lambda: Model(12))
    source = policy(INPUTS, SHARD, RECOMPUTE)
    measured = estimate(job, *lowered(job, source, 2))
    steps = measured.timeline
    assert sum(task.flops for task in steps) == measured.step_flops
    again = sum(task.flops for task in steps if task.phase == "recompute")
    assert again == measured.recompute_flops
    assert again > 0
    assert sum(task.nbytes for task in steps if task.stream == "to_host") == measured.to_host_bytes > 0
    assert sum(task.nbytes for task in steps if task.stream == "to_device") == measured.to_device_bytes
    calls = sum(figures["count"] for figures in measured.collectives.values())
    assert sum(task.stream == "collective" for task in steps) == calls > 0
    sent = measured.collectives["all_gather"]["bytes"] / 2  # half of each gather comes from the other rank
    assert sum(task.nbytes for task in steps if task.name.startswith("all_gather")) == sent


def test_more_micro_batches_than_are_traced_are_all_there() -> None:
    job = workload(lambda: Model(3))
    by_steps = {
        steps: tasks(job, policy(SHARD, accumulate={"steps": steps, "reduce": "each"}), 2) for steps in (3, 4, 6)
    }
    forward = {steps: sum(task.phase == "forward" for task in found) for steps, found in by_steps.items()}
    flops = {steps: sum(task.flops for task in found) for steps, found in by_steps.items()}
    assert flops == {3: flops[3], 4: flops[3] / 3 * 4, 6: flops[3] * 2}
    assert forward[6] - forward[4] == 2 * (forward[4] - forward[3]) > 0
    seconds = [simulated(found).makespan_s for found in by_steps.values()]
    assert seconds[2] - seconds[1] == pytest.approx(2 * (seconds[1] - seconds[0]), rel=1e-6)


def test_a_unit_waits_for_its_own_gather_and_the_next_ones_is_under_way() -> None:
    found = tasks(workload(lambda: Model(6)), policy(SHARD), 2)
    third = next(task for task in found if task.name == "forward layers.3")
    waited = [found[dep] for dep in third.after]
    assert [task.name for task in waited] == ["all_gather after layers.1"]
    assert found.index(waited[0]) < next(i for i, task in enumerate(found) if task.name == "forward layers.2")


def test_reductions_follow_the_unit_they_are_of_and_the_optimizer_waits_for_the_last() -> None:
    found = tasks(workload(lambda: Model(6)), policy(SHARD), 2)
    sent = [index for index, task in enumerate(found) if task.name.startswith("reduce_scatter")]
    assert len(sent) == 8
    update = next(task for task in found if task.phase == "optimizer")
    assert max(sent) in update.after
    for index in sent:
        before = found[max(found[index].after)]
        assert (before.stream, before.phase) == ("compute", "backward")


def test_gathers_ahead_hide_and_gathers_on_demand_do_not() -> None:
    waits = {}
    for ahead in (0, 1):
        source = policy(SHARD, unit_defaults={"prefetch": {"forward": ahead, "backward": ahead}})
        played = simulated(tasks(workload(lambda: Model(8)), source, 8))
        waits[ahead] = played.waits_s["collective"]
    assert waits[0] > 1.5 * waits[1]


def test_fsdp2_gathers_on_its_own_stream_ahead_of_the_computation() -> None:
    """Its order comes from torch's streams and events: a gather waits for copies in, not for the layer before."""
    found = tasks(workload(lambda: Model(6)), policy(SHARD, **options(engine="fsdp2")), 2)
    gathers = [task for task in found if task.name.startswith("all_gather")]
    computed = [index for index, task in enumerate(found) if task.stream == "compute"]
    free = [task for task in gathers if not any(found[dep].phase == "forward" for dep in task.after)]
    assert len(free) >= 6
    assert any(found[dep].stream == "collective" for index in computed for dep in found[index].after)


@pytest.mark.parametrize("num_synchronous", [0, 10])
def test_copies_on_the_compute_stream_are_exposed(num_synchronous: int) -> None:
    job = workload(lambda: Model(6))
    given = options(offload={"synchronous": num_synchronous > 0})
    plan, spec = lowered(job, policy(INPUTS, RECOMPUTE, **given))
    measured = estimate(job, plan, spec)
    time = step_time(measured, plan, H100)
    overlap = overlap_of(measured, time)
    assert overlap["transfers"] == 10
    assert overlap["synchronous"] == num_synchronous
    assert overlap["from"] == "simulation"
    assert time.model == "timeline"
    if num_synchronous:
        assert overlap["hidden_fraction"] == pytest.approx(0, abs=1e-9)
    else:
        assert overlap["hidden_fraction"] > 0


def test_an_update_on_the_host_is_host_work_that_what_follows_waits_for() -> None:
    state = {**STATE, "update_on": "host"}
    found = tasks(workload(lambda: Model(3)), policy(state))
    hosted = [index for index, task in enumerate(found) if task.stream == "host_compute"]
    assert hosted
    for index in hosted:
        assert found[index].hbm_bytes > 0
        assert any(found[dep].stream == "to_host" for dep in found[index].after)
        assert any(index in task.after for task in found if task.stream == "to_device")
    assert sum(task.flops for task in found if task.stream == "host_compute") == 0


def test_replicas_reduce_over_the_distance_between_them() -> None:
    found = tasks(workload(lambda: Model(3)), policy(SHARD, mesh={"replicate": 2, "fsdp": 4}), 8)
    reduced = [task for task in found if task.name.startswith("all_reduce")]
    assert {(task.group, task.stride) for task in reduced} == {(2, 4)}
    gathered = [task for task in found if task.name.startswith("all_gather")]
    assert {(task.group, task.stride) for task in gathered} == {(4, 1)}


def test_exposed_collectives_are_told_apart_from_copies() -> None:
    job = workload(lambda: Model(6))
    plan, spec = lowered(job, policy(SHARD), 8)
    measured = estimate(job, plan, spec)
    time = step_time(measured, plan, H100)
    overlap = overlap_of(measured, time)
    assert overlap["exposed_s"] == 0
    assert overlap["hidden_fraction"] is None
    assert overlap["collectives_exposed_s"] > 0
    assert time.bound_by in ("fabric", "hbm")


def simulated(found: tuple[Task, ...]) -> Any:
    from memopt.roofline import seconds_of

    rates = rates_for(H100, replace(GUESS))
    assert rates is not None
    return simulate(found, seconds_of(found, rates), link=rates.link)

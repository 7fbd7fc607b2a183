"""`memopt plan` on torch: what is planned is what runs, and what is extrapolated is what a whole trace says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import memopt
from memopt.errors import MemoptError
from memopt.lowering import make_plan
from memopt.plan import Plan
from memopt.spec import ModelSpec
from memopt.targets import load_target
from memopt.workloads import Workload
from memopt_torch import BACKEND, trace
from memopt_torch.depths import cuts_of, find_runs, fit_step, reserved
from memopt_torch.measure import StepMeter
from memopt_torch.plan import _told, estimate
from memopt_torch.shapes import shapes_of
from memopt_torch.testing import run_ranks
from memopt_torch.trace import LayerCut, cut_plan

WIDTH = 32
RECOMPUTE = {"name": "rest", "action": "recompute", "match": {"unit": "layers.*"}}
SHARD = {"name": "weights", "action": "shard", "match": {"role": "param"}}
INPUTS = {"name": "inputs", "action": "offload", "match": {"path": "layers.*.input"}}
STATE = {"name": "state", "action": "offload", "match": {"role": "optimizer_state"}}


class Block(nn.Module):
    def __init__(self, wide: int = 64) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, wide), nn.Linear(wide, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(self.up(hidden).sin())


class Model(nn.Module):
    def __init__(self, num_layers: int, *, num_wide: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(50, WIDTH)
        self.layers = nn.ModuleList(Block(96 if i < num_wide else 64) for i in range(num_layers))
        self.head = nn.Linear(WIDTH, 50, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def workload(build: Callable[[], nn.Module]) -> Workload:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["tokens"].flatten())

    batch = {"tokens": torch.zeros(4, 16, dtype=torch.int64)}
    return Workload("toy", build, loss, batch, lambda parameters: torch.optim.AdamW(parameters, lr=1e-3))


def policy(*rules: dict[str, Any], **extra: Any) -> dict[str, Any]:
    return {"version": 1, "units": ["layers.*", "embed", "head"], "rules": [*rules], **extra}


def lowered(job: Workload, source: dict[str, Any], world_size: int = 1) -> tuple[Plan, ModelSpec]:
    loaded = memopt.load_policy(source)
    options = BACKEND.options()(**loaded.backend_options.get("torch", {})).model_dump()
    spec = BACKEND.inspect_workload(job)
    return make_plan(loaded, spec, backend=BACKEND, world_size=world_size, options=options), spec


def planned(job: Workload, source: dict[str, Any], world_size: int = 1) -> Any:
    return estimate(job, *lowered(job, source, world_size))


def run_for_real(job: Workload, source: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    model = job.model()
    run = memopt.apply_policy(model, source)
    optimizer = run.optimizer(job.optimizer)
    batch = {"tokens": job.batch["tokens"].clone()}

    def step() -> None:
        for _ in range(run.plan.accumulate_steps):
            job.loss(model, batch).backward()
        if job.clip_norm is not None:
            run.clip_grad_norm_(job.clip_norm)
        optimizer.step()
        optimizer.zero_grad()

    step()
    moved = [run.regions.transfers, *run.optimizer_offloads]
    before = sum(one.to_host_bytes for one in moved)
    with StepMeter(model, (optimizer,), engine=run.engine, batch=batch) as meter:
        step()
    result = meter.result()
    return {
        "by_role": {role: nbytes for role, nbytes in result.peak.by_role.items() if nbytes},
        "host": result.peak.host_nbytes,
        "to_host": sum(one.to_host_bytes for one in moved) - before,
        "flops": result.flops,
        "recomputed": result.recomputed_flops,
        "collectives": {kind: calls.num_calls for kind, calls in result.collectives.items()},
    }


def assert_planned_is_real(measured: Any, real: dict[str, Any]) -> None:
    assert dict(measured.by_role) == real["by_role"]
    assert measured.host_bytes == real["host"]
    assert measured.to_host_bytes == real["to_host"]
    assert measured.step_flops == real["flops"]
    assert measured.recompute_flops == real["recomputed"]
    assert {kind: entry["count"] for kind, entry in measured.collectives.items()} == real["collectives"]


POLICIES = {
    "none": policy(),
    "recompute": policy(RECOMPUTE),
    "a value kept": policy({"name": "up", "action": "keep", "match": {"path": "layers.*.up"}}, RECOMPUTE),
    "offload": policy(INPUTS, RECOMPUTE),
    "state on the host": policy(STATE),
    "state on the host, updated there": policy({**STATE, "update_on": "host"}),
    "accumulation": policy(RECOMPUTE, accumulate={"steps": 5}),
}


@pytest.mark.parametrize("source", POLICIES.values(), ids=POLICIES.keys())
def test_planned_bytes_traffic_and_flops_are_those_of_the_run(source: dict[str, Any]) -> None:
    job = workload(lambda: Model(4))
    assert_planned_is_real(planned(job, source), run_for_real(job, source))


@pytest.mark.parametrize("engine", ["layer", "fsdp2"])
def test_planned_at_two_ranks_is_what_two_ranks_do(engine: str) -> None:
    job = workload(lambda: Model(4))
    source = policy(SHARD, RECOMPUTE, backend_options={"torch": {"engine": engine}})
    measured = planned(job, source, 2)
    for real in run_ranks(run_for_real, 2, job, source):
        assert_planned_is_real(measured, real)
    assert not dist.is_initialized()


@pytest.mark.parametrize("engine", ["layer", "fsdp2"])
def test_clipping_is_planned_where_the_workload_clips(engine: str) -> None:
    job = workload(lambda: Model(4))
    source = policy(SHARD, RECOMPUTE, backend_options={"torch": {"engine": engine}})
    plain, clipped = planned(job, source, 2), planned(replace(job, clip_norm=1.0), source, 2)
    for real in run_ranks(run_for_real, 2, replace(job, clip_norm=1.0), source):
        assert_planned_is_real(clipped, real)
    assert clipped.collectives != plain.collectives
    assert any("clip_norm" in text for text in plain.left_out)
    assert not any("clip" in text for text in clipped.left_out)


EXTRAPOLATED = {
    "offload, sharded": (12, policy(SHARD, INPUTS, RECOMPUTE), 8),
    "the first ones recomputed": (15, policy({**RECOMPUTE, "match": {"unit": "layers.*", "layers": {"first": 2}}}), 1),
    "every second": (16, policy({**RECOMPUTE, "match": {"unit": "layers.*", "layers": {"every": 2}}}), 1),
}


@pytest.mark.parametrize("num_layers, source, world_size", EXTRAPOLATED.values(), ids=EXTRAPOLATED.keys())
def test_what_few_layers_foretell_is_what_all_of_them_do(
    num_layers: int, source: dict[str, Any], world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = workload(lambda: Model(num_layers))
    plan, spec = lowered(job, source, world_size)
    few = fit_step(job, plan, spec)
    monkeypatch.setattr("memopt_torch.depths._WHOLE_UP_TO", 100)
    whole = fit_step(job, plan, spec)
    assert not few.is_whole
    assert f"of {num_layers} layers" in few.note
    assert whole.is_whole
    assert few.segments[few.peak] == whole.segments[whole.peak]
    assert few.amounts == whole.amounts
    assert few.host_bytes == whole.host_bytes


def test_the_peaks_place_is_told_with_the_layers_number_in_the_whole_model() -> None:
    _, spec = lowered(workload(lambda: Model(14)), policy(RECOMPUTE))
    runs = find_runs("layers", "A" * 13 + "B")
    assert _told(("backward", "layers", "0/-2/0"), "mul.Tensor", runs, spec) == "backward of layers.11 (mul.Tensor)"
    assert _told(("after", "layers", "1/0/0"), "mm.default", runs, spec) == "after layers: head and loss (mm.default)"
    assert _told(("after", "layers", "0/0/0"), "mm.default", runs, spec) == "after layers.0 (mm.default)"
    assert (
        _told(("forward", "layers", "0/middle/0"), "mm.default", runs, spec)
        == "forward of a layer of layers (mm.default)"
    )
    assert _told(("optimizer",), "sqrt.default", runs, spec) == "the optimizer's step (sqrt.default)"


UNROLLED = {
    "fsdp2, recomputed": (policy(SHARD, RECOMPUTE, backend_options={"torch": {"engine": "fsdp2"}}), 8),
    "layer engine": (policy(SHARD), 8),
    "offload": (policy(INPUTS, RECOMPUTE), 1),
    "accumulation": (policy(accumulate={"steps": 2}), 1),
    "the first ones recomputed": (policy({**RECOMPUTE, "match": {"unit": "layers.*", "layers": {"first": 10}}}), 1),
}


@pytest.mark.parametrize("source, world_size", UNROLLED.values(), ids=UNROLLED.keys())
def test_memory_the_allocator_reserves_follows_from_few_layers_too(
    source: dict[str, Any], world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = workload(lambda: Model(20))
    plan, spec = lowered(job, source, world_size)
    few = fit_step(job, plan, spec)
    monkeypatch.setattr("memopt_torch.depths._WHOLE_UP_TO", 100)
    whole = fit_step(job, plan, spec)
    assert not few.is_whole
    for setting, nbytes in reserved(few).items():
        assert nbytes == pytest.approx(reserved(whole)[setting], abs=2 * 2**20), setting  # a page of small tensors


def test_what_an_allocator_reserves_is_part_of_a_gpus_plan_alone() -> None:
    job = workload(lambda: Model(4))
    plan, spec = lowered(job, policy(), 1)
    assert estimate(job, plan, spec, target=load_target("cpu")).reserved_bytes == {}
    measured = estimate(job, plan, spec, target=load_target("gpu:h100"))
    assert set(measured.reserved_bytes) == {"default", "expandable_segments"}
    assert min(measured.reserved_bytes.values()) >= measured.peak_bytes


def test_a_small_model_is_traced_whole_and_split_by_unit() -> None:
    measured = planned(workload(lambda: Model(3)), policy())
    assert set(measured.by_unit) == {"layers.0", "layers.1", "layers.2", "embed", "head"}
    assert {tensor.unit for tensor in measured.largest} >= {"layers.0", "layers.2"}
    assert any("3 layers traced" in note for note in measured.notes)
    assert measured.method == "fake-trace"
    assert measured.peak_event
    assert measured.left_out
    assert measured.check() is measured


def test_repeating_layers_are_found_with_their_period() -> None:
    runs = [(run.first, run.period, run.repeats) for run in find_runs("layers", "AAABABABCCCC")]
    assert runs == [(0, 1, 3), (3, 2, 2), (7, 1, 1), (8, 1, 4)]


def test_layers_kept_are_named_from_the_nearer_end() -> None:
    (cut,) = cuts_of(find_runs("layers", "A" * 10), [5])
    assert cut.layers == (0, 1, 2, 8, 9)
    assert [place.split("/")[1] for place in cut.places] == ["0", "1", "middle", "-2", "-1"]


def test_a_plan_of_fewer_layers_renumbers_rows_and_units() -> None:
    plan, _ = lowered(workload(lambda: Model(6)), policy(RECOMPUTE))
    cut = cut_plan(plan, [LayerCut("layers", (0, 5), ("0/0/0", "0/-1/0"))])
    assert [unit.name for unit in cut.units] == ["embed", "layers.0", "layers.1", "head"]
    last = {row.path.replace("layers.5", "layers.1") for row in plan.rows if row.path.startswith("layers.5.")}
    assert {row.path for row in cut.rows if row.path.startswith("layers.1.")} == last


# Bad input.


def test_a_model_that_reads_values_is_told_the_line() -> None:
    class Reading(Model):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            hidden = super().forward(tokens)
            return hidden if hidden.sum().item() > 0 else -hidden  # the line to be named

    with pytest.raises(MemoptError, match=r"trace-reads-values\] .*test_plan_step\.py:\d+"):
        planned(workload(lambda: Reading(2)), policy())


def test_planning_under_a_real_process_group_is_refused() -> None:
    def on_rank() -> str:
        with pytest.raises(MemoptError) as refused:
            planned(workload(lambda: Model(2)), policy(), dist.get_world_size())
        return refused.value.problems[0].code

    assert run_ranks(on_rank, 2) == ["plan-in-process-group"] * 2


def test_after_a_failed_trace_nothing_is_left_behind() -> None:
    def failing() -> Iterator[None]:
        raise ValueError("the builder's own fault")

    job = workload(lambda: Model(2))
    plan, spec = lowered(job, policy(SHARD), 4)
    with pytest.raises(ValueError, match="own fault"):
        trace.trace_step(workload(lambda: failing()), plan, spec)  # type: ignore[arg-type, return-value]
    assert not dist.is_initialized()
    assert planned(job, policy()).peak_bytes > 0


def test_a_builder_that_converts_its_model_can_be_planned() -> None:
    job = workload(lambda: Model(3).to(torch.bfloat16))
    source = policy(RECOMPUTE)
    assert_planned_is_real(planned(job, source), run_for_real(job, source))


def test_buffers_that_layers_use_in_turn_do_not_force_a_trace_of_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Odd and even depths differ by a buffer; depths two apart agree."""
    original = trace.trace_step

    def alternating(*args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        extra = 1000 * (len(kwargs["cuts"][0].layers) % 2)
        segments = {
            label: replace(peak, by_role={**peak.by_role, "grad": peak.by_role["grad"] + extra})
            for label, peak in found.segments.items()
        }
        return replace(found, segments=segments)

    monkeypatch.setattr("memopt_torch.depths.trace_step", alternating)
    job = workload(lambda: Model(20))
    fit = fit_step(job, *lowered(job, policy()))
    assert fit.note.startswith("traced 4, 6, 8 of 20 layers")
    assert fit.segments[fit.peak] == original(job, *lowered(job, policy()), cuts=()).result.peak.by_role


def test_shapes_of_alike_layers_are_those_of_running_each(monkeypatch: pytest.MonkeyPatch) -> None:
    job = workload(lambda: Model(6, num_wide=2))
    few = shapes_of(job.model, job.loss, job.batch)
    monkeypatch.setattr("memopt_torch.shapes.kind_of", id)  # no two layers alike: each is run
    assert few == shapes_of(job.model, job.loss, job.batch)
    assert few["layers.1.up"][0][-1] == 96
    assert few["layers.5.up"][0][-1] == 64

"""Step time: an interval, what bounds it, and what calibration does to it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from memopt.calibrate import calibrated_rates, load_run
from memopt.errors import MemoptError
from memopt.estimate import Measured
from memopt.plan import Plan
from memopt.planning import plan_policies, plan_policy, prepare
from memopt.roofline import GUESS, bound_seconds, rates_for, task_seconds
from memopt.step_time import least_transfer_s, overlap_of, step_time
from memopt.targets import load_target
from memopt.timeline import Task

H100 = load_target("gpu:h100:8")
EMPTY = Plan(backend="sized", world_size=8, mesh=(("fsdp", 8),), units=(), rows=())


def traced(*tasks, **extra):
    return Measured(method="fake-trace", by_role={"param": 1}, timeline=tasks, **extra)


def test_a_matrix_product_is_bound_by_its_flops_and_a_sum_by_its_bytes():
    rates = rates_for(H100, GUESS)
    product = Task("matmul", "compute", flops=1e15, hbm_bytes=1e9)
    total = Task("add", "compute", flops=1e6, hbm_bytes=1e12)
    assert bound_seconds(product, rates)["hbm"] == 0
    assert task_seconds(product, rates) == pytest.approx(1e15 / rates.flops)
    assert bound_seconds(total, rates)["compute"] == 0
    assert task_seconds(total, rates) == pytest.approx(1e12 / rates.hbm_bytes_per_s)


def test_a_collective_over_nodes_runs_at_the_network_cards_rate():
    rates = rates_for(load_target("gpu:a100:64"), GUESS)
    inside = task_seconds(Task("all_gather", "collective", nbytes=1e9, group=8), rates)
    across = task_seconds(Task("all_gather", "collective", nbytes=1e9, group=64), rates)
    assert across == pytest.approx(1e9 / (25e9 * 8 * GUESS.fabric))
    assert across > inside


def test_an_uncalibrated_step_is_an_interval_and_says_so():
    time = step_time(traced(Task("step", "compute", flops=1e15)), EMPTY, H100)
    assert time.low_s < time.estimate_s < time.high_s
    assert not time.calibrated
    assert "not calibrated" in time.from_what
    assert time.bound_by == "compute"


def test_exposed_transfers_bound_the_step():
    tasks = [Task("in", "to_device", nbytes=500e9), Task("uses", "compute", (0,), flops=1e12)]
    time = step_time(traced(*tasks), EMPTY, H100)
    assert time.bound_by == "host link"
    assert time.exposed_s == pytest.approx(500e9 / (55e9 * GUESS.link))


def test_a_target_without_rates_gives_no_seconds():
    time = step_time(traced(Task("step", "compute", flops=1e15)), EMPTY, load_target("cpu"))
    assert (time.estimate_s, time.low_s, time.high_s) == (None, None, None)
    assert "--calibrate" in time.from_what


def test_no_step_is_shorter_than_its_bytes_over_the_link():
    """Both directions share the host's memory: on GB200 that binds, not the link."""
    measured = traced(to_host_bytes=int(255e9), to_device_bytes=int(255e9))
    assert least_transfer_s(measured, load_target("gpu:h100:8")) == pytest.approx(255 / 55)
    assert least_transfer_s(measured, load_target("gpu:gb200:4")) == pytest.approx(510 / 255.5)
    assert least_transfer_s(traced(), H100) == 0.0


def test_a_schedule_that_was_read_stands_for_the_simulated_exposure(sized_backend):
    setting = prepare(workload="configs/workloads/llama-3.1-8b.yaml", backend=sized_backend(), target="gpu:h100:8")
    result = plan_policy("configs/policies/recompute.yaml", setting)
    read = replace(result.measured, overlap={"exposed_s": 0.5, "transfers": 4, "synchronous": 0})
    with_schedule = step_time(read, result.plan, setting.target)
    assert with_schedule.estimate_s == pytest.approx(result.time.estimate_s + 0.5)
    assert overlap_of(read, with_schedule)["from"] == "schedule"
    assert overlap_of(result.measured, result.time)["from"] == "simulation"


def test_compute_is_stretched_to_the_programs_own_flops(sized_backend):
    setting = prepare(workload="configs/workloads/llama-3.1-8b.yaml", backend=sized_backend(), target="gpu:h100:8")
    result = plan_policy("configs/policies/none.yaml", setting)
    plain = step_time(replace(result.measured, step_flops=4e14), result.plan, setting.target)
    double = step_time(replace(result.measured, step_flops=8e14), result.plan, setting.target)
    assert double.estimate_s > 1.5 * plain.estimate_s


def results_json(path, *, device, rows, workload="llama-tiny"):
    data = {"rows": rows, "environment": {"device": device, "workload": {"name": workload}}}
    path.write_text(json.dumps(data), encoding="utf-8")
    return path


def row(policy="none", seconds=0.25, backend="sized", world=1, ok=True):
    return {"backend": backend, "policy": policy, "ok": ok, "step_time_s": seconds, "world_size": world}


def this_cpu():
    from memopt.processor import cpu_name

    return {"kind": "cpu", "cpu": cpu_name(), "num_cores": 2}


def test_one_measured_step_sets_the_rates(tmp_path, sized_backend):
    """On a CPU, which publishes none, seconds appear; the measured policy's interval holds what was measured."""
    setting = prepare(workload="configs/workloads/llama-tiny.yaml", backend=sized_backend(), target="cpu")
    file = results_json(tmp_path / "results.json", device=this_cpu(), rows=[row(seconds=0.25)])
    none, recompute = plan_policies(
        ["configs/policies/none.yaml", "configs/policies/recompute.yaml"], setting, calibrate=file
    )
    assert none.time.calibrated
    assert none.time.estimate_s == pytest.approx(0.25, rel=0.02)
    assert recompute.time.estimate_s > none.time.estimate_s
    assert "calibrated" in none.time.from_what


def test_calibration_on_a_gpu_scales_the_data_sheet(sized_backend):
    setting = prepare(workload="configs/workloads/llama-3.1-8b.yaml", backend=sized_backend(), target="gpu:h100:8")
    result = plan_policy("configs/policies/none.yaml", setting)
    rates = calibrated_rates([(result.measured, result.plan, 2 * result.time.estimate_s)], setting.target)
    calibrated = step_time(result.measured, result.plan, setting.target, rates=rates)
    assert calibrated.estimate_s == pytest.approx(2 * result.time.estimate_s, rel=0.02)
    assert calibrated.high_s - calibrated.low_s < result.time.high_s - result.time.low_s


@pytest.mark.parametrize(
    "device",
    [
        {"kind": "cpu", "cpu": "Some Other Processor"},
        {"kind": "gpu:a100", "name": "NVIDIA A100-SXM4-80GB"},
        {},
    ],
)
def test_results_of_other_hardware_are_refused(tmp_path, device):
    file = results_json(tmp_path / "results.json", device=device, rows=[row()])
    for target in ("cpu", "gpu:h100:8"):
        with pytest.raises(MemoptError) as error:
            load_run(file, target=load_target(target))
        assert error.value.problems[0].code == "calibrate-other-hardware"
        assert target in str(error.value)


def test_results_of_this_hardware_are_taken(tmp_path):
    device = {"kind": "gpu:h100", "name": "NVIDIA H100 80GB HBM3"}
    file = results_json(tmp_path / "results.json", device=device, rows=[row()])
    assert load_run(file, target=H100).seconds == {("sized", "none"): 0.25}


@pytest.mark.parametrize(
    "text, code",
    [("{", "calibrate-not-results"), ('{"rows": []}', "calibrate-not-results"), (None, "calibrate-not-found")],
)
def test_what_is_no_results_file_is_refused(tmp_path, text, code):
    file = tmp_path / "results.json"
    if text is not None:
        file.write_text(text, encoding="utf-8")
    with pytest.raises(MemoptError) as error:
        load_run(file, target=load_target("cpu"))
    assert error.value.problems[0].code == code


def test_rows_that_failed_calibrate_nothing(tmp_path):
    file = results_json(tmp_path / "results.json", device=this_cpu(), rows=[row(ok=False)])
    with pytest.raises(MemoptError) as error:
        load_run(file, target=load_target("cpu"))
    assert error.value.problems[0].code == "calibrate-no-step"


def test_a_run_of_other_policies_names_what_it_has(tmp_path, sized_backend):
    setting = prepare(workload="configs/workloads/llama-tiny.yaml", backend=sized_backend(), target="cpu")
    file = results_json(tmp_path / "results.json", device=this_cpu(), rows=[row(policy="mine")])
    with pytest.raises(MemoptError) as error:
        plan_policies(["configs/policies/none.yaml"], setting, calibrate=file)
    assert error.value.problems[0].code == "calibrate-no-match"
    assert "sized/mine" in str(error.value)


def test_operators_of_one_task_are_bound_each_by_its_own():
    """A product and a sum in one task: seconds add up, they do not hide each other."""
    rates = rates_for(H100, GUESS)
    both = Task("layer", "compute", flops=1e15, hbm_bytes=1e12, parts=((1e15, 0.0), (0.0, 1e12)))
    assert task_seconds(both, rates) == pytest.approx(1e15 / rates.flops + 1e12 / rates.hbm_bytes_per_s)


def test_replicas_that_are_apart_have_one_card_of_a_node_each():
    """Neighbours eight devices apart meet over the network, and each of a node's groups has its own card."""
    rates = rates_for(load_target("gpu:a100:16"), GUESS)
    apart = task_seconds(Task("all_reduce", "collective", nbytes=1e9, group=2, stride=8), rates)
    beside = task_seconds(Task("all_reduce", "collective", nbytes=1e9, group=2), rates)
    assert apart == pytest.approx(1e9 / (25e9 * GUESS.fabric))
    assert beside == pytest.approx(1e9 / (300e9 * GUESS.fabric))


def test_the_table_says_what_the_computation_waits_for():
    from memopt.plan_table import describe_waits

    waits = {"exposed_s": 0.031, "hidden_fraction": 0.914, "collectives_exposed_s": 0.012}
    assert describe_waits(waits) == "31.0 ms for host copies (91.4% of them hidden), 12.0 ms for collectives"
    assert describe_waits({"exposed_s": 0.0, "hidden_fraction": None, "collectives_exposed_s": 0.0}) == ""

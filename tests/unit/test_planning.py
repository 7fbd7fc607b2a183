"""`memopt plan` around a backend: the JSON's keys, verdicts, budgets, crashes, several policies."""

from __future__ import annotations

import json
import re

import pytest

from memopt.cli.plan import exit_code, to_document
from memopt.cli.sizes import parse_bytes
from memopt.errors import MemoptError
from memopt.plan_page import plan_page
from memopt.plan_table import render_result, side_by_side
from memopt.planning import Refused, plan_policies, plan_policy, prepare

WORKLOAD = "configs/workloads/llama-3.1-8b.yaml"
POLICIES = [f"configs/policies/{name}.yaml" for name in ("none", "recompute", "offload", "shard")]
KEYS = {
    "backend", "target", "method", "device", "host", "traffic", "recompute", "overlap", "step_time", "fits", "left_out",
    "versions", "elapsed_s",
}  # fmt: skip


@pytest.fixture
def setting(sized_backend):
    return prepare(workload=WORKLOAD, backend=sized_backend(), target="gpu:h100:8")


def test_the_json_has_every_key_of_the_contract(setting):
    data = plan_policy(POLICIES[0], setting).to_json()
    assert set(data) >= KEYS
    assert set(data["device"]) >= {"peak_bytes", "by_role", "capacity_bytes", "usable_bytes"}
    assert set(data["host"]) >= {"bytes_per_device", "bytes_per_node", "capacity_per_node"}
    assert set(data["traffic"]) >= {"to_host_bytes", "to_device_bytes", "collectives"}
    assert set(data["overlap"]) >= {"transfers", "synchronous", "exposed_s", "hidden_fraction", "offset_audit"}
    assert set(data["step_time"]) >= {"estimate_s", "low_s", "high_s", "bound_by"}
    assert sum(data["device"]["by_role"].values()) == data["device"]["peak_bytes"]
    json.dumps(data)


def test_several_policies_are_planned_side_by_side(setting):
    results = plan_policies(POLICIES, setting)
    document = to_document(results)
    assert [entry["policy"] for entry in document["plans"]] == ["none", "recompute", "offload", "shard"]
    peaks = {entry["policy"]: entry["device"]["peak_bytes"] for entry in document["plans"]}
    assert peaks["offload"] < peaks["recompute"] < peaks["none"]
    assert peaks["shard"] < peaks["none"]
    assert exit_code(results) == 0


def test_over_capacity_without_a_budget_is_said_but_no_failure(setting):
    result = plan_policy(POLICIES[0], setting)  # 8B with fp32 Adam, unsharded: 120 GiB
    assert result.fits is False
    assert exit_code((result,)) == 0


def test_over_budget_is_a_failure(sized_backend):
    setting = prepare(workload=WORKLOAD, backend=sized_backend(), target="gpu:h100:8", budget={"device": 20 * 2**30})
    assert exit_code((plan_policy(POLICIES[0], setting),)) == 1


def test_a_policys_own_budget_counts_and_the_command_lines_replaces_it(sized_backend, tmp_path):
    file = tmp_path / "tight.yaml"
    file.write_text("version: 1\nbudget: {device: 1GiB}\nrules: []\n", encoding="utf-8")
    own = prepare(workload=WORKLOAD, backend=sized_backend(), target="gpu:h100:8")
    assert exit_code((plan_policy(file, own),)) == 1
    larger = prepare(workload=WORKLOAD, backend=sized_backend(), target="gpu:h100:8", budget={"device": 10**12})
    assert plan_policy(file, larger).is_over_budget is False


def test_one_refused_policy_does_not_stop_the_others(setting, tmp_path):
    bad = tmp_path / "bad.yaml"
    bad.write_text(
        "version: 1\nrules:\n  - {name: x, action: keep, match: {path: nothing.like.it}}\n", encoding="utf-8"
    )
    results = plan_policies([bad, POLICIES[1]], setting)
    assert isinstance(results[0], Refused)
    assert results[1].measured.peak_bytes > 0
    assert exit_code(results) == 1
    entry = to_document(results)["plans"][0]
    assert entry["ok"] is False
    assert entry["problems"][0]["file"] == str(bad)
    with pytest.raises(MemoptError):
        plan_policies([bad], setting)


def test_a_crash_of_the_backend_is_one_error_that_names_the_place(sized_backend):
    class Crashing(sized_backend):
        def estimate(self, *args, **kwargs):
            raise ZeroDivisionError("division by zero in the tracer")

    setting = prepare(workload=WORKLOAD, backend=Crashing(), target="gpu:h100:8")
    with pytest.raises(MemoptError) as error:
        plan_policy(POLICIES[0], setting)
    problem = error.value.problems[0]
    assert problem.code == "plan-crashed"
    assert "ZeroDivisionError: division by zero in the tracer" in problem.message
    assert problem.file == __file__
    assert problem.line is not None


def test_a_backend_that_reports_nothing_is_not_believed(sized_backend):
    from memopt.estimate import Measured

    class Silent(sized_backend):
        def estimate(self, *args, **kwargs):
            return Measured(method="xla-aot", by_role={"param": 0, "temp": 0})

    setting = prepare(workload=WORKLOAD, backend=Silent(), target="gpu:h100:8")
    with pytest.raises(MemoptError) as error:
        plan_policy(POLICIES[0], setting)
    assert error.value.problems[0].code == "bad-measurement"


def test_a_backend_that_cannot_plan_says_so(fake_backend, llama_spec):
    class Inspecting(fake_backend):
        def inspect_workload(self, workload):
            return llama_spec()

    setting = prepare(workload=WORKLOAD, backend=Inspecting(), target="gpu:h100:8")
    with pytest.raises(MemoptError) as error:
        plan_policy(POLICIES[0], setting)
    assert error.value.problems[0].code == "plan-unsupported"


@pytest.mark.parametrize(
    "argument, code",
    [
        ({"target": "gpu:h101:8"}, "unknown-target"),
        ({"backend": "tensorflow"}, "unknown-backend"),
        ({"workload": "configs/workloads/lama-tiny.yaml"}, "workload-not-found"),
        ({"world_size": 0}, "bad-world-size"),
        ({"target": "tpu:v5e:2x2", "world_size": 3}, "target-devices"),
    ],
)
def test_a_name_that_is_wrong_is_found_before_anything_is_traced(sized_backend, argument, code):
    backend = sized_backend()
    with pytest.raises(MemoptError) as error:
        prepare(**{"workload": WORKLOAD, "backend": backend, "target": "gpu:h100:8", **argument})
    assert error.value.problems[0].code == code
    assert backend.calls == []


def test_everything_that_is_wrong_in_one_command_is_said_at_once():
    with pytest.raises(MemoptError) as error:
        prepare(workload="configs/workloads/lama.yaml", backend="tensorflow", target="gpu:h101")
    codes = [problem.code for problem in error.value.problems]
    assert codes == ["unknown-target", "unknown-backend", "workload-not-found"]


def test_a_mesh_that_is_not_the_world_prints_both_numbers(sized_backend, tmp_path):
    file = tmp_path / "mesh.yaml"
    file.write_text("version: 1\nmesh: {replicate: 1, fsdp: 2}\nrules: []\n", encoding="utf-8")
    setting = prepare(workload=WORKLOAD, backend=sized_backend(), target="gpu:h100:4")
    with pytest.raises(MemoptError) as error:
        plan_policy(file, setting)
    assert "4" in str(error.value)
    assert "2" in str(error.value)


def test_what_is_left_out_is_always_said(setting):
    left_out = plan_policy(POLICIES[0], setting).left_out
    assert "allocator rounding" in left_out
    assert any(sentence.startswith("assumed, no source: ") for sentence in left_out)


def test_the_band_goes_from_live_bytes_to_live_bytes_and_reserve(setting):
    result = plan_policy(POLICIES[3], setting)
    low, high = result.band_bytes
    assert low == result.measured.peak_bytes
    assert high - low == sum(size for _, size, _ in setting.target.reserve("sized"))


def test_what_jax_does_not_preallocate_is_no_part_of_the_band(sized_backend):
    setting = prepare(workload=WORKLOAD, backend=sized_backend(name="jax"), target="gpu:h100:8")
    low, high = plan_policy(POLICIES[3], setting).band_bytes
    assert low == high


def test_the_table_shows_every_role_the_verdicts_and_what_to_do(setting):
    from rich.console import Console

    console = Console(width=160, record=True, file=open("/dev/null", "w", encoding="utf-8"))  # noqa: SIM115
    results = plan_policies(POLICIES, setting)
    console.print(render_result(results[0]))
    console.print(side_by_side(results))
    text = console.export_text()
    for word in ("param", "optimizer_state", "activation", "over by", "step:", "left out:", "→", "bound by compute"):
        assert word in text, word
    console.file.close()


def test_the_page_opens_without_a_network(setting):
    page = plan_page(plan_policies(POLICIES, setting))
    assert "llama-3.1-8b on gpu:h100:8, before it runs" in page
    markup = re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)  # plotly's own text names its site
    assert "http" not in markup
    assert 'src="http' not in page


def test_sizes_are_spelt_as_in_a_policy():
    assert parse_bytes("70GiB", option="--budget") == 70 * 2**30
    for text in ("seventy", "0", "-3GiB"):
        with pytest.raises(MemoptError) as error:
            parse_bytes(text, option="--budget")
        assert error.value.problems[0].code == "bad-size"

"""`compare` around its workers: rows, refusals, crashes, stalls, interruption, and the files it leaves.

The workers here are small scripts that say what a worker may say; the real ones are in `tests/parity`.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

import memopt.comparing.run
import memopt.comparison
from memopt.backend import Launch
from memopt.comparing.rows import PLAIN
from memopt.comparison import Comparison, compare
from memopt.errors import MemoptError

WORKER = """
import json, sys, time
job = json.load(open(sys.argv[1]))
name = (job["policy"] or "none").rsplit("/", 1)[-1].removesuffix(".yaml")
def emit(event):
    with open(job["events"], "a") as file:
        file.write(json.dumps(event) + "\\n")
losses = [5.0 - step / 10 for step in range(job["steps"])]
shift = {"far": 0.5, "near": 1e-6}.get(name, 0.0)
if job["backend"] == "right":
    shift += 1e-5
if name == "refused":
    emit({"event": "problems", "problems": [{"code": "unsupported", "message": "rule `acts` cannot"}]})
    sys.exit(1)
for step, loss in enumerate(losses):
    emit({"event": "step", "step": step, "loss": loss + shift})
    if name == "crash" and step == 1:
        print("a step\\nthe last words of a crash")
        sys.exit(7)
    if name == "hang" and step == 1:
        time.sleep(60)
    if name == "nan" and step == 2:
        losses[2] = float("nan")
emit({"event": "result", "result": {
    "losses": [loss + shift for loss in losses], "step_times_s": [0.1, 0.2, 0.4], "peak_measured_bytes": 1000,
    "measured_by_role": {"param": 600, "temp": 400}, "attributed": False, "host_bytes": 0, "step_flops": 100.0,
    "collectives": {"all_gather": 2}, "effects": [], "notes": []}})
"""


class FakeBackend:
    """Starts the script above; `missing` stands for a framework that is not installed."""

    def __init__(self, name: str, script: Path) -> None:
        self.name, self.script = name, script

    def launch(self, job_file: str, *, world_size: int) -> Launch:
        if self.name == "missing":
            raise MemoptError.of("extra-missing", "frame not installed", hint="pip install 'memopt[frame]'")
        return Launch((sys.executable, str(self.script), job_file))


@pytest.fixture
def run(tmp_path, monkeypatch) -> Any:
    """Compares policies of the given names over fake backends."""
    script = tmp_path / "worker.py"
    script.write_text(WORKER, encoding="utf-8")
    monkeypatch.setattr(memopt.comparing.run, "backend_names", lambda: ("left", "missing", "right"))
    monkeypatch.setattr(memopt.comparison, "load_backend", lambda name: FakeBackend(name, script))
    workload = {"name": "t", "layers": 1, "hidden": 8, "intermediate": 8, "heads": 2, "kv_heads": 2, "vocab": 256}
    (tmp_path / "workload.yaml").write_text(json.dumps({**workload, "batch": 2, "sequence": 4}), encoding="utf-8")

    def start(*policies: str, backends: tuple[str, ...] = ("left",), out: Any = None, **settings: Any) -> Comparison:
        for policy in policies:
            rules = [] if policy == "none" else [{"name": "r", "action": "recompute", "match": {"unit": "layers.*"}}]
            (tmp_path / f"{policy}.yaml").write_text(json.dumps({"version": 1, "rules": rules}), encoding="utf-8")
        files = [str(tmp_path / f"{policy}.yaml") for policy in policies]
        progress = settings.pop("progress", None)
        description = {
            "workload": str(tmp_path / "workload.yaml"), "policies": files, "backends": list(backends), "steps": 4,
        }  # fmt: skip
        return compare({**description, **settings}, out=out, progress=progress)

    return start


def test_every_policy_runs_on_every_backend_and_is_compared_with_plain_and_with_the_other(run):
    comparison = run("none", "near", backends=("left", "right"))
    assert [(row.backend, row.policy) for row in comparison.rows] == [
        ("left", "none"), ("left", "near"), ("right", "none"), ("right", "near"),
    ]  # fmt: skip
    assert comparison.ok
    row = comparison.row("left", "near")
    assert row.max_abs_diff_vs_plain == pytest.approx(1e-6)
    assert row.max_abs_diff_vs_other_backend == pytest.approx(1e-5)
    assert comparison.row("right", "near").max_abs_diff_vs_plain == pytest.approx(1e-6, rel=1e-3)


def test_times_are_medians_with_quartiles_and_tokens_follow_from_them(run):
    row = run("none").rows[0]
    assert row.step_time_s == 0.2
    assert row.step_time_quartiles_s == pytest.approx((0.15, 0.3))
    assert row.num_timed_steps == 3
    assert row.tokens_per_s == pytest.approx(2 * 4 / 0.2)


def test_a_workload_with_a_batch_of_its_own_has_no_tokens_to_count(run, tmp_path):
    file = tmp_path / "own.py"
    file.write_text("def workload(): raise SystemExit('the workers alone load it')\n")
    row = run("none", workload=f"{file}:workload", out=tmp_path / "out").rows[0]
    assert (row.ok, row.step_time_s, row.tokens_per_s) == (True, 0.2, None)
    assert "tokens per step" not in (tmp_path / "out" / "index.html").read_text(encoding="utf-8")


def test_the_plain_run_is_added_where_it_is_missing_and_comes_first(run):
    comparison = run("near")
    assert [row.policy for row in comparison.rows] == [PLAIN, "near"]


def test_the_plain_runs_name_belongs_to_one_policy_that_does_nothing(run, tmp_path):
    """Another would stand in its row, and every difference from plain would be one from that policy."""
    acts = tmp_path / "sub" / "none.yaml"
    acts.parent.mkdir()
    acts.write_text("version: 1\naccumulate: {steps: 2}\n")
    idle = tmp_path / "idle.yaml"
    idle.write_text("version: 1\n")
    for files, said in (([acts], "is called `none`"), ([tmp_path / "none.yaml", idle], "both do nothing")):
        with pytest.raises(MemoptError) as caught:
            run("none", policies=[str(file) for file in files])
        (problem,) = caught.value.problems
        assert (problem.code, said in problem.message) == ("compare-same-name", True)


def test_losses_that_leave_the_plain_run_make_a_row_not_ok(run):
    comparison = run("none", "far")
    row = comparison.row("left", "far")
    assert not row.ok
    assert "differ from the plain left run by 0.5" in (row.reason or "")
    assert not comparison.ok


def test_a_loss_that_is_not_finite_makes_a_row_not_ok_and_the_json_stays_json(run):
    comparison = run("none", "nan")
    row = comparison.row("left", "nan")
    assert "the loss of step 3 is nan" in (row.reason or "")
    assert math.isnan(row.losses[2])
    losses = json.loads(comparison.to_json())["rows"][1]["losses"]
    assert losses[2] is None


def test_a_refused_policy_is_a_row_with_the_reason_and_the_rest_still_runs(run):
    comparison = run("none", "refused", "near")
    row = comparison.row("left", "refused")
    assert not row.ok
    assert row.reason == "[unsupported] rule `acts` cannot"
    assert row.peak_measured_bytes is None
    assert comparison.row("left", "near").ok


def test_a_dead_worker_is_a_row_with_its_exit_code_and_its_output_beside_the_results(run, tmp_path):
    out = tmp_path / "out"
    row = run("none", "crash", out=out).row("left", "crash")
    assert not row.ok
    assert row.reason == (
        "the worker ended with exit code 7 after 2 steps; its last line: the last words of a crash; "
        f"all it printed: {out / 'logs' / 'left-crash.log'}"
    )
    assert (out / "logs" / "left-crash.log").read_text().splitlines() == ["a step", "the last words of a crash"]
    assert len(row.losses) == 2
    assert [file.name for file in (out / "logs").iterdir()] == ["left-crash.log"]


def test_what_a_workload_raises_is_one_line_that_names_its_own(tmp_path, monkeypatch):
    """The worker's own code, in a process of its own; the backend calls the user's function."""
    mine = tmp_path / "mine.py"
    mine.write_text("def loss(batch):\n    return batch['no such']\n", encoding="utf-8")
    worker = tmp_path / "worker.py"
    worker.write_text(
        "import sys\nimport memopt.worker\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "class Backend:\n"
        "    def train(self, job, *, emit):\n"
        "        import mine\n"
        "        emit({'event': 'step', 'step': 0, 'loss': 1.0})\n"
        "        mine.loss({})\n"
        "Backend.__module__ = 'memopt_left'\n"
        "memopt.worker.load_backend = lambda name: Backend()\n"
        "sys.exit(memopt.worker.main(sys.argv[1:]))\n",
        encoding="utf-8",
    )
    monkeypatch.setattr(memopt.comparing.run, "backend_names", lambda: ("left",))
    monkeypatch.setattr(memopt.comparison, "load_backend", lambda name: FakeBackend(name, worker))
    (tmp_path / "none.yaml").write_text("version: 1\n")
    run = {"workload": f"{mine}:loss", "policies": [str(tmp_path / "none.yaml")], "backends": ["left"]}
    row = memopt.compare(run, out=tmp_path / "out").row("left", "none")
    log = tmp_path / "out" / "logs" / "left-none.log"
    assert row.reason == f"{mine}:2: training `{mine}:loss` raised KeyError: 'no such'; all it printed: {log}"
    assert "Traceback" in log.read_text()
    log.unlink()
    assert "all it printed" not in (memopt.compare(run).rows[0].reason or "")
    assert not log.exists()


def test_a_worker_that_goes_silent_is_ended(run):
    row = run("none", "hang", stall_s=1.5).row("left", "hang")
    assert not row.ok
    assert "no sign of life for 1.5 s after 2 steps" in (row.reason or "")


def test_a_missing_framework_is_reported_with_the_install_command_and_the_other_backend_runs(run):
    comparison = run("none", backends=("missing", "left"))
    assert "pip install 'memopt[frame]'" in (comparison.row("missing", "none").reason or "")
    assert comparison.row("left", "none").ok


def test_interruption_leaves_the_finished_rows_on_disk(run, tmp_path):
    class Interrupted:
        def row_started(self, backend: str, policy: str) -> None:
            if policy == "near":
                raise KeyboardInterrupt

        def event(self, event: Any) -> None: ...

        def row_finished(self, row: Any) -> None: ...

    comparison = run("none", "near", out=tmp_path / "out", progress=Interrupted())
    assert not comparison.complete
    assert not comparison.ok
    saved = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [row["policy"] for row in saved["rows"]] == ["none"]
    assert saved["complete"] is False
    assert "Interrupted" in (tmp_path / "out" / "index.html").read_text()


def test_interruption_in_the_middle_of_a_row_ends_its_worker_and_keeps_the_rows_before_it(run):
    class InterruptedLater:
        def row_started(self, backend: str, policy: str) -> None: ...

        def event(self, event: Any) -> None:
            if event["event"] == "step" and event["step"] == 1 and self.finished:
                raise KeyboardInterrupt

        finished = 0

        def row_finished(self, row: Any) -> None:
            self.finished += 1

    comparison = run("none", "hang", progress=InterruptedLater())
    assert [row.policy for row in comparison.rows] == ["none"]
    assert not comparison.complete
    assert psutil.Process().children(recursive=True) == []


def test_results_hold_the_contracts_keys_and_what_a_reader_needs_to_judge_them(run, tmp_path):
    run("none", "near", out=tmp_path / "out")
    saved = json.loads((tmp_path / "out" / "results.json").read_text())
    assert {
        "backend", "policy", "ok", "reason", "losses", "final_loss", "max_abs_diff_vs_plain",
        "max_abs_diff_vs_other_backend", "peak_planned_bytes", "peak_measured_bytes", "host_bytes", "step_time_s",
        "tokens_per_s", "recompute_flops", "collectives",
    } <= set(saved["rows"][0])  # fmt: skip
    assert saved["complete"] is True
    facts = saved["environment"]
    assert facts["versions"]["memopt"]
    assert facts["device"]["num_cores"] >= 1
    assert facts["workload"]["hidden"] == 8
    assert (facts["num_warmup_steps"], facts["num_timed_steps"]) == (3, 1)


def test_no_half_written_file_is_left(run, tmp_path):
    run("none", out=tmp_path / "out")
    assert sorted(file.name for file in (tmp_path / "out").iterdir() if file.is_file()) == [
        "index.html",
        "results.json",
    ]


def test_everything_wrong_with_a_run_is_reported_at_once():
    run = {
        "workload": "nowhere.yaml",
        "policies": ["a/p.yaml", "b/p.yaml"],
        "backends": ["jaxx"],
        "world": {"torhc": 2},
    }
    with pytest.raises(MemoptError) as caught:
        compare(run, steps=1)
    codes = sorted(problem.code for problem in caught.value.problems)
    assert codes == [
        "compare-no-such-file", "compare-no-such-file", "compare-no-such-file", "compare-same-name",
        "compare-too-few-steps", "unknown-backend", "unknown-backend",
    ]  # fmt: skip


def test_paths_of_a_run_are_looked_for_beside_its_file_first(tmp_path, monkeypatch):
    from memopt.comparing.run import load_run

    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "w.yaml").write_text("{}")
    (tmp_path / "sub" / "p.yaml").write_text("version: 1")
    (tmp_path / "q.yaml").write_text("version: 1")
    (tmp_path / "sub" / "run.yaml").write_text("workload: w.yaml\npolicies: [p.yaml, q.yaml]\n")
    monkeypatch.chdir(tmp_path)
    run = load_run("sub/run.yaml")
    assert run.workload == str(tmp_path / "sub" / "w.yaml")
    assert run.policies == (str(tmp_path / "sub" / "p.yaml"), str(tmp_path / "q.yaml"))


def test_planned_peaks_stand_beside_measured_ones_where_they_were_asked_for(run, monkeypatch, tmp_path):
    asked = {}

    def planned(policies: Any, **settings: Any) -> dict[str, int]:
        asked.update(settings)
        return dict.fromkeys(policies, 900)

    monkeypatch.setattr(memopt.comparison, "planned_peaks", planned)
    assert run("none", "near").row("left", "near").peak_planned_bytes is None
    row = run("none", "near", plan=True, out=tmp_path / "out").row("left", "near")
    assert (row.peak_planned_bytes, row.peak_measured_bytes) == (900, 1000)
    assert asked["world_size"] == 1
    assert "<th>planned</th>" in (tmp_path / "out" / "index.html").read_text(encoding="utf-8")


def test_a_policy_named_as_a_baseline_is_refused(tmp_path: Path) -> None:
    (tmp_path / "fsdp2.yaml").write_text("version: 1\nrules: []\n", encoding="utf-8")
    with pytest.raises(MemoptError, match="compare-same-name"):
        memopt.comparing.run.load_run(
            {
                "workload": "some.module:workload",
                "policies": [str(tmp_path / "fsdp2.yaml")],
                "baselines": ["fsdp2"],
                "backends": ["torch"],
            }
        )


def test_a_fault_of_the_run_file_hides_no_missing_policy(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        "workload: none.yaml\npolicies: [5, none.yaml]\nbackends: [jx]\nstep: 3\n", encoding="utf-8"
    )
    with pytest.raises(MemoptError) as error:
        memopt.comparing.run.load_run(tmp_path / "run.yaml")
    assert [(problem.code, problem.path) for problem in error.value.problems] == [
        ("wrong-type", "policies.0"),
        ("unknown-key", "step"),
        ("unknown-backend", "backends.0"),
        ("compare-no-such-file", "workload"),
        ("compare-no-such-file", "policies.1"),
    ]

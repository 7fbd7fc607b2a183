"""`memopt plan` and `memopt tune` from the command line: one JSON document, files written, exit codes."""

from __future__ import annotations

import json

import pytest

from memopt import planning
from memopt.cli import main

WORKLOAD = "configs/workloads/llama-3.1-8b.yaml"
NONE, RECOMPUTE = "configs/policies/none.yaml", "configs/policies/recompute.yaml"


@pytest.fixture
def run(monkeypatch, capfd, sized_backend):
    """Runs a command with the backend that needs no framework; gives exit code, stdout and stderr."""
    monkeypatch.setattr(planning, "load_backend", lambda name: sized_backend())

    def call(*arguments: str):
        with pytest.raises(SystemExit) as stopped:
            main([*arguments, "--workload", WORKLOAD, "--backend", "sized"])
        written = capfd.readouterr()
        return stopped.value.code, written.out, written.err

    return call


def test_one_policy_is_one_document_and_progress_is_apart(run):
    code, out, err = run("plan", RECOMPUTE, "--target", "gpu:h100:8", "--json")
    assert code == 0
    assert json.loads(out)["policy"] == "recompute"
    assert f"planning {RECOMPUTE}" in err


def test_several_policies_are_one_document(run):
    _, out, _ = run("plan", NONE, RECOMPUTE, "--target", "gpu:h100:8", "--json")
    assert [entry["policy"] for entry in json.loads(out)["plans"]] == ["none", "recompute"]


def test_over_budget_is_1_and_a_wrong_size_says_so(run):
    code, out, _ = run("plan", NONE, "--target", "gpu:h100:8", "--budget", "1GiB")
    assert code == 1
    assert "over by" in out
    code, out, _ = run("plan", NONE, "--target", "gpu:h100:8", "--budget", "plenty", "--json")
    assert code in (1, 2)
    assert json.loads(out)["problems"][0]["code"] == "bad-size"


def test_the_world_size_replaces_the_targets(run):
    _, out, _ = run("plan", NONE, "--target", "gpu:h100", "--world-size", "4", "--json")
    assert json.loads(out)["world_size"] == 4


def test_compiler_options_reach_every_policy_and_a_wrong_form_says_so(monkeypatch, run):
    seen = []
    original = planning.lowered
    monkeypatch.setattr(planning, "lowered", lambda policy, setting: seen.append(policy) or original(policy, setting))
    options = ["--compiler-option", "xla_b=8", "--compiler-option", "xla_c=true"]
    run("plan", NONE, RECOMPUTE, "--target", "gpu:h100:8", "--json", *options)
    assert [policy.backend_options for policy in seen] == [
        {"sized": {"compiler_options": {"xla_b": 8, "xla_c": True}}}
    ] * 2
    code, _, err = run("plan", NONE, "--target", "gpu:h100:8", "--compiler-option", "xla_b")
    assert code == 2
    assert "NAME=VALUE" in err


def test_a_page_and_the_json_are_written(run, tmp_path):
    _, _, err = run("plan", NONE, "--target", "gpu:h100:8", "--out", str(tmp_path / "plan"))
    assert json.loads((tmp_path / "plan" / "plan.json").read_text(encoding="utf-8"))["policy"] == "none"
    assert "before it runs" in (tmp_path / "plan" / "index.html").read_text(encoding="utf-8")
    assert "index.html" in err


def test_tune_writes_the_policy_the_frontier_and_says_why(run, tmp_path):
    file = tmp_path / "tuned.yaml"
    arguments = ("--target", "gpu:h100:8", "--budget", "24GiB", "-o", str(file), "--points", "3")
    code, out, _ = run("tune", *arguments, "--json", "--out", str(tmp_path / "page"))
    assert code == 0
    document = json.loads(out)
    assert document["policy"] == file.read_text(encoding="utf-8")
    assert {"policy", "plan", "frontier", "explain"} <= set(document)
    assert document["plan"]["fits"] is True
    assert "The frontier" in (tmp_path / "page" / "index.html").read_text(encoding="utf-8")
    code, out, _ = run("plan", str(file), "--target", "gpu:h100:8", "--budget", "24GiB", "--json")
    assert code == 0


def test_an_infeasible_budget_writes_no_file(run, tmp_path):
    file = tmp_path / "tuned.yaml"
    code, _, err = run("tune", "--target", "gpu:h100:8", "--budget", "9GiB", "-o", str(file))
    assert code == 1
    assert "[budget-infeasible]" in err
    assert not file.exists()

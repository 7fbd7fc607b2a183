"""The command line: exit codes, JSON on stdout, progress and problems on stderr."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from memopt.applied import Check
from memopt.backend import Capabilities
from memopt.cli import COMMANDS, main
from memopt.errors import Problem

GOOD = "version: 1\nrules: [{name: a, action: shard, match: {role: param}}]\n"
BAD = "version: 1\nrule: []\n"


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


@pytest.fixture
def good(tmp_path: Path) -> str:
    (tmp_path / "good.yaml").write_text(GOOD)
    return str(tmp_path / "good.yaml")


@pytest.fixture
def bad(tmp_path: Path) -> str:
    (tmp_path / "bad.yaml").write_text(BAD)
    return str(tmp_path / "bad.yaml")


def test_a_good_policy_is_ok_and_exits_zero(capsys, good) -> None:
    assert run(capsys, "validate", good) == (0, f"{good}: ok\n", "")
    code, out, _ = run(capsys, "validate", good, "--json")
    assert (code, json.loads(out)) == (0, {"ok": True, "problems": []})


def test_problems_exit_one_and_are_one_json_document(capsys, good, bad) -> None:
    code, out, err = run(capsys, "validate", good, bad, "--json")
    document = json.loads(out)
    assert (code, err, document["ok"]) == (1, "", False)
    (problem,) = document["problems"]
    assert set(problem) == {"code", "file", "line", "column", "path", "message", "hint"}
    assert (problem["code"], problem["line"], problem["column"]) == ("unknown-key", 2, 1)
    assert problem["hint"] == "did you mean `rules`?"


def test_problems_as_text_go_to_stderr(capsys, good, bad) -> None:
    code, out, err = run(capsys, "validate", bad, good)
    assert (code, out) == (1, f"{good}: ok\n")
    assert err.startswith(f"{bad}:2:1: [unknown-key] rule: ")
    assert err.endswith("1 problem\n")


@pytest.mark.parametrize(
    "arguments",
    [
        ("validat",),
        ("validate",),
        ("validate", "x.yaml", "--wrold-size", "2"),
        ("validate", "x.yaml", "--world-size", "0"),
        ("explain", "x.yaml"),
        ("validate", "{good}", "--backend", "jx"),
        ("validate", "{good}", "--workload", "nowhere.yaml"),
    ],
)
def test_wrong_usage_exits_two(capsys, good, arguments) -> None:
    code, out, err = run(capsys, *(argument.format(good=good) for argument in arguments))
    assert (code, out) == (2, "")
    assert err


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("validat",), "No such command 'validat'"),
        ((), "--json"),
        *(((command, "--nonsense"), "nonsense") for command in COMMANDS),
        (("validate",), "FILE..."),
        (("explain", "x.yaml"), "--workload"),
        (("plan", "x.yaml", "--workload", "w.yaml"), "--backend"),
        (("tune", "--workload", "w.yaml"), "--backend"),
        (("compare",), "RUN.yaml"),
        (("check", "x.yaml", "--workload", "w", "--backend", "jax", "--world-size", "0"), "--world-size"),
        (("validate", "{good}", "--backend", "jx"), "no backend is called `jx`"),
        (("plan", "{good}", "--workload", "nowhere.yaml", "--backend", "jx", "--target", "gpu:h101"), "h101"),
    ],
)
def test_wrong_usage_is_one_json_document_too(capsys, good, arguments, words) -> None:
    code, out, _ = run(capsys, *(argument.format(good=good) for argument in arguments), "--json")
    document = json.loads(out)
    assert (code, document["ok"]) == (2, False)
    assert set(document) == {"ok", "problems"}
    assert words in document["problems"][0]["message"]


@pytest.mark.parametrize(
    "command, option, place, words",
    [
        ("plan {good} --workload w.yaml --backend jax --target cpu", "--out", "{good}", "is a file, not a folder"),
        ("plan {good} --workload w.yaml --backend jax --target cpu", "--out", "{good}/in", "is a file, not a folder"),
        ("tune --workload w.yaml --backend jax --target cpu --budget 1GiB", "-o", "{folder}", "is a folder; name"),
        ("tune --workload w.yaml --backend jax --target cpu --budget 1GiB -o x", "--out", "{good}", "is a file"),
        ("compare {run}", "--out", "{good}", "is a file, not a folder"),
    ],
)
def test_a_place_that_cannot_be_written_is_found_before_the_work(
    capsys, good, tmp_path, command, option, place, words
) -> None:
    folder, run_file = tmp_path / "folder", tmp_path / "run.yaml"
    folder.mkdir()
    run_file.write_text("workload: some.module:function\npolicies: [good.yaml]\nbackends: [jax]\n")
    names = {"good": good, "folder": folder, "run": run_file}
    arguments = [part.format(**names) for part in (*command.split(), option, place)]
    code, out, _ = run(capsys, *arguments, "--json")
    (problem,) = json.loads(out)["problems"]
    assert (code, problem["code"]) == (2, "bad-output")
    assert words in problem["message"]


def test_the_version_is_told(capsys) -> None:
    code, out, _ = run(capsys, "--version")
    assert code == 0
    assert out.startswith("memopt ")


def test_a_reader_that_stops_reading_is_no_fault(tmp_path, bad) -> None:
    command = f"{sys.executable} -m memopt validate {bad} nowhere.yaml --json | head -c 1"
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert (ended.stdout, ended.stderr) == ("{", "")


def test_a_file_that_is_not_there_is_a_problem(capsys, tmp_path) -> None:
    code, out, _ = run(capsys, "validate", str(tmp_path / "none.yaml"), "--json")
    assert (code, json.loads(out)["problems"][0]["code"]) == (1, "file-not-found")


def test_a_world_is_checked_without_a_model(capsys, tmp_path) -> None:
    file = tmp_path / "mesh.yaml"
    file.write_text("version: 1\nmesh: {replicate: 1, fsdp: 2}\n")
    assert run(capsys, "validate", str(file), "--world-size", "2")[0] == 0
    code, out, _ = run(capsys, "validate", str(file), "--world-size", "4", "--json")
    (problem,) = json.loads(out)["problems"]
    assert (code, problem["code"], problem["line"]) == (1, "mesh-world", 2)


@pytest.mark.parametrize(
    "mesh, rule_axis, told",
    [
        ("mesh: {fsdp: 2, expert: 2}", "exprt", True),
        ("mesh: {fsdp: 2, expert: 2}", "expert", False),
        ("", "expert", True),
        ("", "fsdp", False),
        ("mesh: {dp: -1}", "fsdp", True),
    ],
)
def test_an_axis_that_the_mesh_lacks_is_told_without_a_model(capsys, tmp_path, mesh, rule_axis, told) -> None:
    file = tmp_path / "mesh.yaml"
    file.write_text(
        f"version: 1\n{mesh}\nrules:\n  - {{name: a, action: shard, match: {{role: param}}, axis: {rule_axis}}}\n"
    )
    code, out, _ = run(capsys, "validate", str(file), "--json")
    found = [(problem["code"], problem["line"], problem["path"]) for problem in json.loads(out)["problems"]]
    assert (code, found) == ((1, [("unknown-axis", 4, "rules.0.axis")]) if told else (0, []))


def test_an_axis_beside_one_of_the_mesh_may_be_the_models_own(capsys, tmp_path) -> None:
    file = tmp_path / "moe.yaml"
    rule = "{name: moe, action: shard, match: {role: param}, axis: {AXIS: 0, fsdp: auto}}"
    file.write_text(f"version: 1\nmesh: {{replicate: 2, fsdp: -1}}\nrules: [{rule.replace('AXIS', 'expert')}]\n")
    code, out, err = run(capsys, "validate", str(file))
    assert (code, out) == (0, f"{file}: ok\n")
    assert err.startswith(
        f"{file}: note: rule `moe` shards over `expert`, which the mesh does not have: the model must"
    )
    file.write_text(f"version: 1\nmesh: {{replicate: 2, fsdp: -1}}\nrules: [{rule.replace('AXIS', 'replicat')}]\n")
    assert run(capsys, "validate", str(file))[0] == 1


def test_what_is_wrong_with_a_file_hides_nothing_of_the_others_or_of_the_arguments(capsys, good, bad, tmp_path) -> None:
    tabs = tmp_path / "tabs.yaml"
    tabs.write_text("version: 1\n\trules: []\n")
    axis = tmp_path / "axis.yaml"
    axis.write_text("version: 1\nmesh: {fsdp: 3}\nrules: [{name: a, action: shard, match: {rol: x}, axis: fdsp}]\n")
    arguments = ("--workload", "nowhere.yaml", "--backend", "jx", "--world-size", "2", "--json")
    code, out, _ = run(capsys, "validate", str(tabs), good, bad, str(axis), "none.yaml", *arguments)
    found = [problem["code"] for problem in json.loads(out)["problems"]]
    assert (code, found[:2]) == (1, ["workload-not-found", "unknown-backend"])
    expected = ["yaml-syntax", "unknown-key", "mesh-world", "unknown-key", "unknown-axis", "file-not-found"]
    assert found[2:] == expected


def test_a_fault_of_the_policy_hides_no_rule_that_matches_nothing(
    capsys, tmp_path, fake_backend, everything, llama_spec, monkeypatch
) -> None:
    class Fake(fake_backend):
        def inspect_workload(self, workload):
            return llama_spec()

    lacks = Fake(supported=everything - {"accumulate"})
    monkeypatch.setattr("memopt.checking.load_backend", lambda name: lacks)
    monkeypatch.setattr("memopt.workloads.load_workload", lambda reference: reference)
    file = tmp_path / "policy.yaml"
    file.write_text(
        "version: 1\n"
        "accumulate: {steps: 4}\n"
        "rules:\n"
        "  - {name: a, action: shrad, match: {role: param, path: nowhere}}\n"
        "  - {name: b, action: shard, match: {role: param, path: nowhere}}\n"
        "  - {name: c, action: shard, match: {role: param}, axis: fdsp}\n"
    )
    arguments = ("--workload", "w", "--backend", "fake", "--json")
    _, out, _ = run(capsys, "validate", str(file), *arguments)
    assert [(problem["code"], problem["line"]) for problem in json.loads(out)["problems"]] == [
        ("unsupported-by-backend", 2),
        ("wrong-value", 4),
        ("dead-rule", 5),
        ("unknown-axis", 6),
    ]


def test_what_a_backend_cannot_do_is_refused_without_a_model(
    capsys, tmp_path, fake_backend, everything, monkeypatch
) -> None:
    lacks = fake_backend(supported=everything - {"offload:optimizer_state", "accumulate:last", "prefetch"})
    monkeypatch.setattr("memopt.checking.load_backend", lambda name: lacks)
    file = tmp_path / "policy.yaml"
    file.write_text(
        "version: 1\n"
        "unit_defaults: {prefetch: {forward: 2}}\n"
        "accumulate: {steps: 2, reduce: last}\n"
        "rules: [{name: adam, action: offload, match: {role: optimizer_state}}]\n"
    )
    code, out, _ = run(capsys, "validate", str(file), "--backend", "fake", "--json")
    problems = json.loads(out)["problems"]
    assert code == 1
    assert {(problem["code"], problem["line"]) for problem in problems} == {
        ("unsupported-by-backend", 2), ("unsupported-by-backend", 3), ("unsupported-by-backend", 4),
    }  # fmt: skip
    assert any("rule `adam`" in problem["message"] for problem in problems)


def test_without_a_backend_only_what_none_can_do_is_a_problem(
    capsys, tmp_path, fake_backend, everything, llama_spec, monkeypatch
) -> None:
    class Fake(fake_backend):
        def inspect_workload(self, workload):
            return llama_spec()

    able, unable = Fake(), Fake(supported=everything - {"offload:activation", "accumulate"})
    monkeypatch.setattr("memopt.checking.backend_names", lambda: ("able", "unable"))
    monkeypatch.setattr("memopt.checking.load_backend", lambda name: able if name == "able" else unable)
    monkeypatch.setattr("memopt.workloads.load_workload", lambda reference: reference)
    file = tmp_path / "policy.yaml"
    file.write_text("version: 1\nrules: [{name: a, action: offload, match: {tensor: q}}]\n")
    assert run(capsys, "validate", str(file), "--workload", "w")[0] == 0
    assert run(capsys, "validate", str(file), "--workload", "w", "--backend", "unable")[0] == 1
    file.write_text("version: 1\nrules: [{name: a, action: offload, match: {tensor: router}}]\n")
    code, out, _ = run(capsys, "validate", str(file), "--workload", "w", "--json")
    assert (code, [problem["code"] for problem in json.loads(out)["problems"]]) == (1, ["dead-rule"])


def test_a_missing_framework_is_one_line_with_the_install_command(capsys, good, monkeypatch) -> None:
    monkeypatch.setattr("memopt.backend.find_spec", lambda name: None if name == "torch" else name)
    monkeypatch.setattr("memopt.workloads.load_workload", lambda reference: reference)
    model = ("--workload", "w.yaml", "--backend", "torch")
    for command in ("validate", "explain", "check"):
        code, out, _ = run(capsys, command, good, *model, "--json")
        (problem,) = json.loads(out)["problems"]
        assert (code, problem["code"], problem["hint"]) == (1, "extra-missing", "pip install 'memopt[torch]'")


def test_a_framework_that_turns_out_to_be_missing_is_one_line_too(capsys, good, monkeypatch) -> None:
    def missing(*arguments, **keywords):
        raise ModuleNotFoundError("No module named 'flax'", name="flax.nnx")

    monkeypatch.setattr("memopt.checking.verdict_on", missing)
    code, _, err = run(capsys, "validate", good)
    assert (code, err) == (1, "[extra-missing] flax.nnx not installed\n  next: pip install 'memopt[jax]'\n")


def test_without_a_backend_the_installed_ones_judge(capsys, good, monkeypatch, fake_backend, llama_spec) -> None:
    class Fake(fake_backend):
        def inspect_workload(self, workload):
            return llama_spec()

    asked: list[str] = []
    monkeypatch.setattr("memopt.backend.find_spec", lambda name: None if name == "torch" else name)
    monkeypatch.setattr("memopt.checking.load_backend", lambda name: asked.append(name) or Fake())
    monkeypatch.setattr("memopt.workloads.load_workload", lambda reference: reference)
    assert run(capsys, "validate", good, "--workload", "w")[0] == 0
    assert asked == ["jax"]


@pytest.fixture
def explained(tmp_path, fake_backend, llama_spec, monkeypatch) -> tuple[str, ...]:
    """The arguments of an `explain` that needs no framework."""

    class Fake(fake_backend):
        def inspect_workload(self, workload):
            return llama_spec()

    monkeypatch.setattr("memopt.checking.load_backend", lambda name: Fake())
    monkeypatch.setattr("memopt.workloads.load_workload", lambda reference: reference)
    file = tmp_path / "policy.yaml"
    file.write_text(
        "version: 1\nmesh: {replicate: 2, fsdp: -1}\nrules:\n"
        "  - {name: weights, action: shard, match: {role: param}}\n"
        "  - {name: gates, action: offload, match: {tensor: mlp_gate}, fraction: 0.5}\n"
        "  - {name: rest, action: recompute, match: {unit: 'layers.*'}}\n"
    )
    return ("explain", str(file), "--workload", "w", "--backend", "fake")


def test_explain_gives_a_row_for_each_tensor(capsys, explained) -> None:
    code, out, _ = run(capsys, *explained, "--world-size", "4", "--json")
    document = json.loads(out)
    assert code == 0
    assert [unit["name"] for unit in document["units"]] == [f"layers.{i}" for i in range(4)]
    assert all(unit["inferred"] for unit in document["units"])
    assert document["mesh"] == {"replicate": 2, "fsdp": 2}
    rows = {(row["path"], row["role"]): row for row in document["tensors"]}
    assert set(rows["lm_head.weight", "param"]) >= {
        "path", "aliases", "role", "unit", "shape", "dtype", "nbytes", "global_nbytes", "layout", "memory_kind",
        "residual", "rule", "losers",
    }  # fmt: skip
    gates = [rows[f"layers.{i}.mlp.gate_proj", "activation"] for i in range(4)]
    assert [(row["residual"], row["rule"]) for row in gates] == 2 * [("offload", "gates")] + 2 * [("recompute", "rest")]
    assert gates[0]["losers"] == ["rest"]
    assert rows["lm_head.weight", "param"]["nbytes"] * 2 == rows["lm_head.weight", "param"]["global_nbytes"]


def test_explain_without_a_world_takes_the_least_the_mesh_takes(capsys, explained) -> None:
    assert json.loads(run(capsys, *explained, "--json")[1])["mesh"] == {"replicate": 2, "fsdp": 1}


def test_explain_shows_equal_layers_as_one_line_and_what_was_inferred(capsys, explained) -> None:
    code, out, err = run(capsys, *explained)
    assert code == 0
    assert "found: the policy names none" in out
    assert "layers.{0..1}.mlp.gate_proj" in out
    assert "layers.{2..3}.mlp.gate_proj" in out
    assert out.count("layers.*.self_attn.q_proj.weight") == 1
    assert "in all: param on device" in out
    assert err == ""


@pytest.mark.parametrize("command", ["explain", "check"])
def test_what_is_wrong_with_each_argument_is_said_at_once(capsys, bad, command) -> None:
    arguments = (command, bad, "--workload", "nowhere.yaml", "--backend", "jx", "--json")
    code, out, _ = run(capsys, *arguments)
    assert code == 1
    assert [problem["code"] for problem in json.loads(out)["problems"]] == [
        "unknown-backend",
        "unknown-key",
        "workload-not-found",
    ]


def test_explain_can_be_asked_about_one_tensor(capsys, explained) -> None:
    document = json.loads(run(capsys, *explained, "--tensor", "layers.*.mlp.gate_proj", "--json")[1])
    assert {row["path"] for row in document["tensors"]} == {f"layers.{i}.mlp.gate_proj" for i in range(4)}
    code, out, _ = run(capsys, *explained, "--tensor", "layers.*.gate", "--json")
    assert (code, json.loads(out)["problems"][0]["code"]) == (1, "tensor-matches-nothing")


def test_schema_prints_the_schema(capsys) -> None:
    code, out, _ = run(capsys, "schema")
    assert code == 0
    assert "rules" in json.loads(out)["properties"]


def test_targets_list_constants_and_sources(capsys) -> None:
    code, out, _ = run(capsys, "targets", "--json")
    targets = json.loads(out)["targets"]
    assert code == 0
    assert {"cpu", "gpu:gb200"} <= {target["name"] for target in targets}
    assert run(capsys, "targets")[1].startswith("targets")


def test_doctor_says_versions_and_what_is_missing(capsys, monkeypatch) -> None:
    class Missing:
        def doctor(self):
            raise ModuleNotFoundError("no", name="jax")

    class Here:
        def doctor(self):
            problem = Problem("target-plugin-missing", "no plugin", hint="install it")
            targets = {"cpu": {"ok": True, "problems": []}, "gpu": {"ok": False, "problems": [problem.to_json()]}}
            return {"devices": ["cpu:0"], "targets": targets}

    found = {"jax": Missing(), "torch": Here()}
    monkeypatch.setattr("memopt.doctor.backend_names", lambda: tuple(found))
    monkeypatch.setattr("memopt.doctor.load_backend", found.__getitem__)
    code, out, _ = run(capsys, "doctor", "--json")
    report = json.loads(out)
    assert code == 0
    assert report["packages"]["pydantic"]
    assert report["backends"]["jax"] == {"ok": False, "missing": "jax", "install": "pip install 'memopt[jax]'"}
    assert report["backends"]["torch"]["devices"] == ["cpu:0"]
    text = run(capsys, "doctor")[1]
    assert "install: pip install 'memopt[jax]'" in text
    assert "      gpu:\n        [target-plugin-missing] no plugin\n          next: install it\n" in text


@pytest.mark.parametrize("same, code", [(True, 0), (False, 1)])
def test_check_exits_by_its_verdict(capsys, good, monkeypatch, same, code) -> None:
    class Backend:
        def check(self, workload, policy, *, world_size, seed):
            assert (workload, policy.version, world_size, seed) == ("w.yaml", 1, 1, 7)
            return Check(ok=same, loss_diff=0.0, max_grad_rel_diff=0.5, worst_tensor="layers.0.w", reference="plain")

    monkeypatch.setattr("memopt.backend.load_backend", lambda name: Backend())
    monkeypatch.setattr("memopt.workloads.load_workload", lambda reference: reference)
    arguments = ("check", good, "--workload", "w.yaml", "--backend", "fake", "--seed", "7")
    assert run(capsys, *arguments)[0] == code
    ended, out, _ = run(capsys, *arguments, "--json")
    assert ended == code
    assert json.loads(out) == {
        "ok": same,
        "loss_diff": 0.0,
        "max_grad_rel_diff": 0.5,
        "worst_tensor": "layers.0.w",
        "reference": "plain",
    }


BROKEN = """
from memopt import Workload
def tiny():
    return Workload("mine", dict, lambda model, batch: batch["no such"], {}, None)
"""


@pytest.mark.parametrize("command", ["validate", "explain", "check"])
def test_what_a_workload_raises_is_one_problem_that_names_its_line(
    capsys, good, tmp_path, monkeypatch, command
) -> None:
    class Backend:
        name = "fake"

        def options(self):
            return None

        def capabilities(self, options):
            return Capabilities(frozenset({"shard:param"}))

        def inspect_workload(self, workload):
            workload.loss(workload.model(), workload.batch)

        def check(self, workload, policy, **_):
            workload.loss(workload.model(), workload.batch)

    monkeypatch.setattr("memopt.backend.load_backend", lambda name: Backend())
    monkeypatch.setattr("memopt.checking.load_backend", lambda name: Backend())
    monkeypatch.setattr("memopt.checking.validate_options", lambda policy, backend: {})
    file = tmp_path / f"broken_{command}.py"
    file.write_text(BROKEN)
    code, out, _ = run(capsys, command, good, "--workload", f"{file}:tiny", "--backend", "fake", "--json")
    (problem,) = json.loads(out)["problems"]
    assert (code, problem["code"]) == (1, "workload-crashed")
    assert "raised KeyError: 'no such'" in problem["message"]
    assert (problem["file"], problem["line"]) == (str(file), 4)


def test_help_lists_the_commands_that_are_there(capsys) -> None:
    code, out, _ = run(capsys, "--help")
    assert code == 0
    assert all(name in out for name in ("validate", "explain", "schema", "doctor", "targets"))
    assert set(COMMANDS) >= {"validate", "explain", "plan", "tune", "compare", "check", "doctor", "schema", "targets"}


def test_the_console_script_runs(good) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from memopt.cli import main; main()", "validate", good], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, f"{good}: ok\n")

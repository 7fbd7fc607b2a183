"""YAML to a policy: safe, strict, and every problem with its place."""

from __future__ import annotations

import re
import time
import tracemalloc
from pathlib import Path

import pytest
from pydantic import BaseModel, ConfigDict

from memopt import MemoptError, Policy, load_policy
from memopt.loading import load_document
from memopt.policy import Unit
from memopt.rules import Layers, Match, OffloadRule, ShardRule

EXAMPLE = """\
version: 1
mesh: {replicate: 2, fsdp: -1}
units:
  - "layers.*"
  - {match: [norm, lm_head], group: true}
  - {match: "layers.79", reshard_after_forward: false}
unit_defaults: {reshard_after_forward: true, prefetch: {forward: 1, backward: 1}}
precision: {compute: bfloat16, master: float32, reduce: float32, optimizer_state: float32}
accumulate: {steps: 4, reduce: each}
budget: {device: 70GiB, host: 400GiB}
rules:
  - {name: norms, action: keep,      match: {role: param, path: "**.*norm.*"}}
  - {name: moe,   action: shard,     match: {role: param, path: "**.experts.**"}, axis: {expert: 0, fsdp: auto}}
  - {name: state, action: shard,     match: {role: param}, axis: fsdp}
  - {name: adam,  action: offload,   match: {role: optimizer_state}, memory_kind: pinned_host, fraction: 0.5,
     update_on: device}
  - {name: input, action: offload,   match: {path: "layers.*.input"}}
  - {name: mlp,   action: offload,   match: {tensor: [mlp_gate, mlp_up]}, fraction: 0.6}
  - {name: some,  action: keep,      match: {op: attention, layers: {every: 2, offset: 1}}}
  - {name: rest,  action: recompute, match: {unit: "layers.*"}}
backend_options:
  torch: {engine: layer}
"""


def problems(text: str, tmp_path: Path) -> list[tuple[str, int | None, str | None]]:
    file = tmp_path / "policy.yaml"
    file.write_text(text)
    with pytest.raises(MemoptError) as error:
        load_policy(file)
    return [(problem.code, problem.line, problem.path) for problem in error.value.problems]


def test_the_documented_policy_loads(tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text(EXAMPLE)
    policy = load_policy(file)
    assert policy.budget is not None
    assert policy.budget.device == 70 * 2**30
    assert [rule.name for rule in policy.rules] == ["norms", "moe", "state", "adam", "input", "mlp", "some", "rest"]
    assert policy.rules[1].axes == {"expert": 0, "fsdp": "auto"}
    assert policy.rules[6].match.layers is not None
    assert policy.units is not None
    assert policy.units[0].match == ("layers.*",)


def test_path_mapping_and_policy_are_the_same_source(tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text("version: 1\nrules: [{name: a, action: keep, match: {role: param}}]\n")
    mapping = {"version": 1, "rules": [{"name": "a", "action": "keep", "match": {"role": "param"}}]}
    from_file = load_policy(str(file))
    assert from_file == load_policy(mapping) == load_policy(file)
    assert load_policy(from_file) is from_file
    assert (from_file.source.file, load_policy(mapping).source.file) == (str(file), None)


def test_a_policy_is_frozen(tmp_path: Path) -> None:
    policy = load_policy({"version": 1})
    with pytest.raises(ValueError, match="frozen"):
        policy.version = 1


def test_a_missing_file_names_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text("version: 1")
    with pytest.raises(MemoptError) as error:
        load_policy(tmp_path / "polcy.yaml")
    assert error.value.problems[0].code == "file-not-found"
    assert error.value.problems[0].hint == "did you mean `policy.yaml`?"


@pytest.mark.parametrize("source", [None, 3, ["version"], "version: 1\nrules: []\n"])
def test_what_is_no_source_is_refused(source) -> None:
    with pytest.raises(MemoptError) as error:
        load_policy(source)
    assert error.value.problems[0].code == "not-a-source"


@pytest.mark.parametrize(
    "line, hint",
    [
        ("units: layers.*", 'put it in a list: ["layers.*"]'),
        ("accumulate: 4", "its keys are steps, reduce"),
        ("mesh: {fsdp: auto}", "write a number of devices, or -1 for what is left"),
        ("rules: [{name: a, action: offload, match: {}, fraction: 60%}]", "it is a share between 0 and 1: half is 0.5"),
        (
            "rules: [{name: a, action: keep, match: {layers: first}}]",
            "its keys are first, last, every, offset, index, of",
        ),
    ],
)
def test_a_value_of_the_wrong_form_is_shown_the_right_one(line: str, hint: str, tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text(f"version: 1\n{line}\n")
    with pytest.raises(MemoptError) as error:
        load_policy(file)
    assert [problem.hint for problem in error.value.problems] == [hint]


def test_what_is_no_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_bytes(b"\xff\xfe\x00version")
    with pytest.raises(MemoptError) as error:
        load_policy(file)
    assert error.value.problems[0].code == "file-unreadable"
    with pytest.raises(MemoptError) as error:
        load_policy(tmp_path)
    assert error.value.problems[0].code == "file-unreadable"


def test_a_mapping_that_no_yaml_could_hold_is_refused() -> None:
    with pytest.raises(MemoptError) as error:
        load_policy({"version": 1, "budget": {"device": object()}})
    assert error.value.problems[0].code == "not-plain-data"


def test_every_problem_is_reported_at_once_in_order(tmp_path: Path) -> None:
    rules = "  - {name: a, action: kep, match: {}}\n  - {name: a, action: keep, match: {rol: x}}\n"
    text = f"version: 1\nmsh: {{}}\nrules:\n{rules}"
    assert problems(text, tmp_path) == [
        ("unknown-key", 2, "msh"),
        ("wrong-value", 4, "rules.0.action"),
        ("rule-name-twice", 5, "rules.1.name"),
        ("unknown-key", 5, "rules.1.match.rol"),
    ]


def test_a_misspelt_action_hides_no_fault_of_its_rule(tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text("version: 1\nrules:\n  - {name: v, action: shrad, match: {rol: x}}\n")
    with pytest.raises(MemoptError) as error:
        load_policy(file)
    assert [(p.code, p.path, p.line, p.column, p.hint) for p in error.value.problems] == [
        ("wrong-value", "rules.0.action", 3, 15, "did you mean `shard`?"),
        ("unknown-key", "rules.0.match.rol", 3, 38, "did you mean `role`?"),
    ]


@pytest.mark.parametrize(
    "rule, expected",
    [
        ("{name: v, match: {rol: x}}", ["action", "match.rol"]),
        ("{name: v, acton: shard, match: {rol: x}}", ["action", "match.rol"]),
        ("{name: v, action: zzz, match: {pth: x}, fraction: 60}", ["action", "match.pth", "fraction"]),
        ("{name: v, action: zzz, match: {}, fraction: 0.5}", ["action"]),
        ("{name: v, action: shard, mtach: {rol: x}}", ["match", "mtach", "match.rol"]),
        ("{name: v, action: recompute, match: {role: param, zzz: 1}}", ["match.role", "match.zzz"]),
        ("{name: v, action: keep, match: {layers: {every: 0, offset: 1}}}", ["match.layers.every"]),
        ("{name: v, action: keep, match: {role: [param, prm, zzz]}}", ["match.role.1", "match.role.2"]),
        ("{name: v, action: keep, match: {min_bytes: 5 lots, op: [x]}}", ["match.min_bytes", "match.op.0"]),
        ("{name: v, action: keep, match: {role: !!binary x, pth: y}}", ["match.role", "match.pth"]),
        ("{name: v, action: keep, <<: {}, match: {rol: y}}", ["<<", "match.rol"]),
    ],
)  # fmt: skip
def test_what_follows_from_a_fault_alone_is_not_reported(rule: str, expected: list[str], tmp_path: Path) -> None:
    found = [path for _, _, path in problems(f"version: 1\nrules:\n  - {rule}\n", tmp_path)]
    assert found == [f"rules.0.{path}" for path in expected]


def test_a_misspelt_block_is_judged_as_the_block_it_is_near_to(tmp_path: Path) -> None:
    text = "version: 1\nrule:\n  - {name: v, action: shrad, match: {}}\nunit_default: {prefetch: {forwrd: 1}}\n"
    assert [path for _, _, path in problems(text, tmp_path)] == [
        "rule",
        "rules.0.action",
        "unit_default",
        "unit_defaults.prefetch.forwrd",
    ]


def test_a_thousand_faults_are_told_in_a_second(tmp_path: Path) -> None:
    rules = "\n".join(f"  - {{name: r{i}, action: shrad, match: {{rol: x}}}}" for i in range(500))
    started = time.process_time()
    assert len(problems(f"version: 1\nrules:\n{rules}\n", tmp_path)) >= 500
    assert time.process_time() - started < 20


@pytest.mark.parametrize(
    "value, nbytes",
    [("70GiB", 70 << 30), ("70GB", 70 * 10**9), ("1024", 1024), ("512MiB", 512 << 20), ("1.5 GiB", 3 << 29)],
)
def test_sizes_are_written_with_units(value: str, nbytes: int, tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text(f"version: 1\nbudget: {{device: {value}}}\n")
    budget = load_policy(file).budget
    assert budget is not None
    assert budget.device == nbytes


@pytest.mark.parametrize("word", ["yes", "on", "no", "True "])
def test_words_are_no_booleans(word: str, tmp_path: Path) -> None:
    text = f'version: 1\nrules: [{{name: a, action: keep, match: {{}}, optional: "{word}"}}]\n'
    assert problems(text, tmp_path) == [("wrong-type", 2, "rules.0.optional")]


@pytest.mark.parametrize(
    "text, code",
    [
        ("", "yaml-empty"),
        ("# nothing but a comment\n", "yaml-empty"),
        ("version: 1\n---\nversion: 1\n", "yaml-documents"),
        ("version: 1\nversion: 1\n", "yaml-duplicate-key"),
        ("version: !!int 'x'\n", "yaml-tag"),
        ("version: .inf\n", "yaml-tag"),
        ("version: 2026-01-01\n", "yaml-tag"),
        ("? [a]\n: 1\n", "yaml-key"),
        ("version: &a [*a]\n", "yaml-too-deep"),
        ("- " * 500, "yaml-too-deep"),
        ("[" * 100_000, "yaml-too-deep"),
        ("version: 1 #" + "x" * (1 << 18), "file-too-large"),
        ("version: {", "yaml-syntax"),
        ("version: \x00", "yaml-syntax"),
        ("[]", "wrong-type"),
    ],
)
def test_what_is_no_plain_yaml_is_refused(text: str, code: str, tmp_path: Path) -> None:
    assert [found[0] for found in problems(text, tmp_path)] == [code]


def test_an_alias_may_stand_for_a_whole_value(tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text(
        "version: 1\nrules:\n"
        "  - {name: a, action: keep, match: &norms {path: '**.norm.*'}}\n"
        "  - {name: b, action: shard, match: *norms}\n"
    )
    first, second = load_policy(file).rules
    assert first.match == second.match


def test_a_billion_laughs_are_refused_in_a_second_and_a_hundred_megabytes(tmp_path: Path) -> None:
    levels = ["a: &a [x, x, x, x, x, x, x, x, x]"]
    for before, name in zip("abcdefghijk", "bcdefghijkl", strict=True):
        levels.append(f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]")
    file = tmp_path / "laughs.yaml"
    file.write_text("\n".join(levels))
    started_s = time.process_time()
    with pytest.raises(MemoptError) as error:
        load_policy(file)
    assert time.process_time() - started_s < 1.0  # of the processor: other work on the machine does not count
    assert [problem.code for problem in error.value.problems] == ["yaml-aliases"]
    tracemalloc.start()
    with pytest.raises(MemoptError):
        load_policy(file)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 100e6


class _Note(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    title: str
    steps: int = 1


def test_a_misspelt_key_hides_no_other_problem(tmp_path: Path) -> None:
    text = "version: 1\nmsh: {}\nmesh: {fsdp: 0}\nbackend_options:\n  jaxx: {}\n  torch: {engin: layer}\n"
    assert [code for code, _, _ in problems(text, tmp_path)] == [
        "unknown-key",
        "mesh-size",
        "unknown-backend",
        "unknown-key",
    ]


def test_any_document_gets_the_same_errors(tmp_path: Path) -> None:
    file = tmp_path / "note.yaml"
    file.write_text("titel: x\nsteps: many\n")
    with pytest.raises(MemoptError) as error:
        load_document(file, _Note)
    assert sorted((problem.code, problem.line) for problem in error.value.problems) == [
        ("missing-key", 1), ("unknown-key", 1), ("wrong-type", 2),
    ]  # fmt: skip
    file.write_text("title: x\n")
    assert load_document(file, _Note) == _Note(title="x")


def test_options_are_judged_by_the_backends_own_model(tmp_path: Path) -> None:
    found = problems("version: 1\nbackend_options:\n  torch: {engin: layer}\n", tmp_path)
    assert found == [("unknown-key", 3, "backend_options.torch.engin")]


def test_a_policy_survives_pickling() -> None:
    import pickle

    policy = load_policy({"version": 1, "rules": [{"name": "a", "action": "shard", "match": {"role": "param"}}]})
    assert pickle.loads(pickle.dumps(policy)) == policy


def test_policy_round_trips_through_json() -> None:
    policy = load_policy(
        {"version": 1, "units": ["layers.*"], "rules": [{"name": "a", "action": "keep", "match": {"layers": 3}}]}
    )
    assert Policy.model_validate_json(policy.model_dump_json(exclude_none=True)) == policy


REFERENCE = (Path(__file__).parents[2] / "docs" / "reference" / "policy.md").read_text()


def test_the_policies_of_the_reference_load(tmp_path: Path) -> None:
    snippets = re.findall(r"```yaml\n(.*?)```", REFERENCE, re.DOTALL)
    assert snippets
    for snippet in snippets:
        file = tmp_path / "policy.yaml"
        file.write_text(snippet)
        assert load_policy(file).rules


@pytest.mark.parametrize("model", [Policy, Match, Layers, Unit, OffloadRule, ShardRule])
def test_the_reference_names_every_key(model: type[BaseModel]) -> None:
    missing = [key for key in model.model_fields if not re.search(rf"\b{key}\b", REFERENCE)]
    assert missing in ([], ["index"])  # `index` is written as a bare list

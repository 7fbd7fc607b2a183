"""Reports about names: what a policy calls a thing and the model does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import memopt
from memopt import MemoptError
from memopt.cli import main
from memopt.spec import ModelSpec, ModuleSpec, StackSpec, TensorSpec


class _Toy:
    """Stands for a user's model of three `DecoderBlock`s."""


def _toy_spec() -> ModelSpec:
    blocks = [ModuleSpec(f"blocks.{i}", f"blocks.{i}", "DecoderBlock", 4) for i in range(3)]
    return ModelSpec(
        backend="fake",
        family=None,
        tensors=tuple(TensorSpec(f"blocks.{i}.weight", "param", (2, 2), "float32") for i in range(3)),
        modules=(ModuleSpec("", "", "Toy", 12), *blocks, ModuleSpec("head", "head", "Linear", 4)),
        stacks=(StackSpec("blocks", 3, "loop", "DecoderBlock"),),
    )


@pytest.fixture
def toy_backend(fake_backend, monkeypatch):
    """A backend that owns `_Toy`, and fails the test if a policy gets as far as the world or the model."""

    class Backend(fake_backend):
        def owns(self, model) -> bool:
            return isinstance(model, _Toy)

        def inspect(self, model, *, params=None, example_inputs=None) -> ModelSpec:
            return _toy_spec()

        def inspect_workload(self, workload) -> ModelSpec:
            return _toy_spec()

        def world_size(self, mesh=None) -> int:
            return 1

        def apply(self, *arguments, **keywords):
            pytest.fail("a wrong policy reached the model")

    backend = Backend()
    monkeypatch.setattr("memopt.api.backend_of", lambda model: backend)
    monkeypatch.setattr("memopt.checking.load_backend", lambda name: backend)
    return backend


def _says_what_exists(problem: dict) -> None:
    assert problem["code"] == "unit-matches-nothing"
    assert "`Decoderblock`" in problem["message"]
    assert "`DecoderBlock` × 3 at `blocks.*`" in problem["message"]
    assert "`DecoderBlock`" in problem["hint"]
    assert "`blocks.*`" in problem["hint"]


def test_a_wrong_capital_in_a_block_class_stops_apply_and_lists_the_blocks(toy_backend) -> None:
    """A name that matches nothing is found before anything costly starts, and the names that exist are listed.

    Family: late, mute failures on a misspelt wrapping class (stanford_alpaca#224).
    """
    with pytest.raises(MemoptError) as error:
        memopt.apply_policy(_Toy(), {"version": 1, "units": ["Decoderblock"]})
    (problem,) = error.value.problems
    _says_what_exists(problem.to_json())


def test_a_wrong_capital_in_a_block_class_is_found_by_validate(toy_backend, tmp_path, capsys, monkeypatch) -> None:
    """The same by `memopt validate` with a workload: exit code 1 and the same words (stanford_alpaca#224)."""
    monkeypatch.setattr("memopt.workloads.load_workload", lambda reference: reference)
    file = tmp_path / "policy.yaml"
    file.write_text('version: 1\nunits: ["Decoderblock"]\n')
    with pytest.raises(SystemExit) as ended:
        main(["validate", str(file), "--workload", "toy.yaml", "--backend", "fake", "--json"])
    assert ended.value.code == 1
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert problem["line"] == 2
    _says_what_exists(problem)


_RESHARD = "unit_defaults: {reshard_after_foward: false}"
_KIND = "rules: [{name: a, action: offload, match: {role: param}, memory_knd: pinned_host}]"
_OFFSET = "rules: [{name: a, action: keep, match: {layers: {ofset: 1, every: 2}}}]"
_RATIO = "rules: [{name: a, action: offload, match: {role: param}, ratio: 0.5}]"
DEPTHS = {
    "top": ("unit_default: {}", "unit_default", "unit_defaults"),
    "setting": (_RESHARD, "unit_defaults.reshard_after_foward", "reshard_after_forward"),
    "two deep": ("unit_defaults: {prefetch: {foward: 2}}", "unit_defaults.prefetch.foward", "forward"),
    "unit": ("units: [{match: 'a', groop: true}]", "units.0.groop", "group"),
    "precision": ("precision: {computes: bfloat16}", "precision.computes", "compute"),
    "accumulate": ("accumulate: {stepps: 2}", "accumulate.stepps", "steps"),
    "budget": ("budget: {devise: 1GiB}", "budget.devise", "device"),
    "rule": (_KIND, "rules.0.memory_knd", "memory_kind"),
    "match": ("rules: [{name: a, action: keep, match: {min_byte: 1}}]", "rules.0.match.min_byte", "min_bytes"),
    "layers": (_OFFSET, "rules.0.match.layers.ofset", "offset"),
    "backend": ("backend_options: {tosch: {}}", "backend_options.tosch", "torch"),
    "backend option": ("backend_options: {torch: {engin: layer}}", "backend_options.torch.engin", "engine"),
    "near miss": ("activation_checkpointing: true", "activation_checkpointing", "action: recompute"),
    "near miss in a rule": (_RATIO, "rules.0.ratio", "fraction"),
}


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_misspelt_key_at_any_depth_fails_with_its_path_and_the_nearest(depth, tmp_path, capsys) -> None:
    """A setting that does nothing fails loudly wherever it stands, and so does the right idea under another name.

    Family: misspelt memory settings that pass a dry run and train with defaults (Soup#627).
    """
    line, path, nearest = DEPTHS[depth]
    file = tmp_path / "policy.yaml"
    file.write_text(f"version: 1\n{line}\n")
    with pytest.raises(SystemExit) as ended:
        main(["validate", str(file), "--json"])
    assert ended.value.code == 1
    problems = json.loads(capsys.readouterr().out)["problems"]
    assert [problem["path"] for problem in problems] == [path]
    assert nearest in problems[0]["hint"]
    assert problems[0]["line"] == 2


def test_the_shipped_policies_have_no_problem(capsys) -> None:
    """The counterpart: what we ship passes the same check."""
    files = sorted((Path(__file__).parents[2] / "configs" / "policies").rglob("*.yaml"))
    assert files
    with pytest.raises(SystemExit) as ended:
        main(["validate", *map(str, files), "--json"])
    assert json.loads(capsys.readouterr().out) == {"ok": True, "problems": []}
    assert ended.value.code == 0

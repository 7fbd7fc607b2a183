"""What every backend must do, a third party's too: run it with the backend's package installed.

Each test takes every backend that is registered under the entry point group `memopt.backends`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from memopt import MemoptError, Plan, load_policy, make_plan
from memopt.backend import Backend, Capabilities, backend_names, load_backend
from memopt.loading import load_document
from memopt.spec import ModelSpec
from memopt.workloads import WorkloadConfig, load_workload
from memopt.workloads.initialise import weight_shapes

TINY = Path(__file__).parent / "tiny.yaml"
LAYERS = 2
RULE = "rules"

# A policy that needs the feature, and nothing else that a backend may lack.
NEEDS: dict[str, dict[str, Any]] = {
    "recompute:activation": {RULE: [{"action": "recompute", "match": {"unit": "layers.*"}}]},
    "offload:activation": {RULE: [{"action": "offload", "match": {"path": "layers.*.input"}}]},
    "offload:param": {RULE: [{"action": "offload", "match": {"role": "param"}}]},
    "offload:grad": {RULE: [{"action": "offload", "match": {"role": "grad"}}]},
    "offload:optimizer_state": {RULE: [{"action": "offload", "match": {"role": "optimizer_state"}}]},
    "shard:param": {RULE: [{"action": "shard", "match": {"role": "param"}}]},
    "shard:grad": {RULE: [{"action": "shard", "match": {"role": ["grad", "optimizer_state"]}}]},
    "shard:optimizer_state": {RULE: [{"action": "shard", "match": {"role": "optimizer_state"}}]},
    "shard:dimension": {
        RULE: [{"action": "shard", "match": {"role": "param", "path": "lm_head.*"}, "axis": {"fsdp": 1}}]
    },
    "fraction:activation": {RULE: [{"action": "recompute", "match": {"unit": "layers.*"}, "fraction": 0.5}]},
    "fraction:optimizer_state": {RULE: [{"action": "offload", "match": {"role": "optimizer_state"}, "fraction": 0.5}]},
    "fraction:param": {RULE: [{"action": "offload", "match": {"role": "param"}, "fraction": 0.5}]},
    "fraction:grad": {RULE: [{"action": "offload", "match": {"role": "grad"}, "fraction": 0.5}]},
    "update_on:host": {RULE: [{"action": "offload", "match": {"role": "optimizer_state"}, "update_on": "host"}]},
    "update_on:device": {RULE: [{"action": "offload", "match": {"role": "optimizer_state"}, "update_on": "device"}]},
    "reshard_after_forward:false": {"unit_defaults": {"reshard_after_forward": False}},
    "reshard_after_forward:int": {"unit_defaults": {"reshard_after_forward": 2}},
    "prefetch": {"unit_defaults": {"prefetch": {"forward": 2}}},
    "mesh:replicate": {"mesh": {"replicate": 2, "fsdp": 1}},
    "mesh:custom": {"mesh": {"expert": 2, "fsdp": 1}},
    "precision": {"precision": {"compute": "bfloat16"}},
    "precision:float16": {"precision": {"compute": "float16"}},
    "accumulate": {"accumulate": {"steps": 2}},
    "accumulate:last": {"accumulate": {"steps": 2, "reduce": "last"}},
    "op:matmul": {RULE: [{"action": "recompute", "match": {"op": "matmul"}}]},
    "op:attention": {RULE: [{"action": "recompute", "match": {"op": "attention"}}]},
}
# What rests on another feature: without that one the backend need not have the other.
RESTS_ON = {
    "shard:grad": ["shard:optimizer_state"],
    "shard:dimension": ["shard:param"],
    "fraction:activation": ["recompute:activation"],
    "fraction:optimizer_state": ["offload:optimizer_state"],
    "fraction:param": ["offload:param"],
    "fraction:grad": ["offload:grad"],
    "update_on:host": ["offload:optimizer_state"],
    "update_on:device": ["offload:optimizer_state"],
    "precision:float16": ["precision"],
    "accumulate:last": ["accumulate"],
    "op:matmul": ["recompute:activation"],
    "op:attention": ["recompute:activation"],
}
KNOWN = {*NEEDS, "layers:scan", "name", "op:topk", "op:random"}

backends = pytest.mark.parametrize("name", backend_names())


def _policy(settings: dict[str, Any]) -> Any:
    rules = [{"name": f"r{i}", **rule} for i, rule in enumerate(settings.get(RULE, []))]
    return load_policy({"version": 1, **settings, RULE: rules})


def _capabilities(backend: Backend) -> Capabilities:
    return backend.capabilities(backend.options()().model_dump())


@cache
def _spec(name: str) -> ModelSpec:
    return load_backend(name).inspect_workload(load_workload(TINY))


def _plan(name: str, settings: dict[str, Any], *, world_size: int = 2) -> Plan:
    return make_plan(_policy(settings), _spec(name), backend=name, world_size=world_size)


@backends
def test_the_backend_has_the_name_it_is_registered_under(name: str) -> None:
    assert load_backend(name).name == name


@backends
def test_options_are_strict_frozen_and_complete_without_being_given(name: str) -> None:
    options = load_backend(name).options()
    assert issubclass(options, BaseModel)
    assert options.model_config.get("extra") == "forbid"
    assert options.model_config.get("frozen")
    assert options.model_config.get("strict")
    assert options().model_dump(mode="json") is not None


@backends
def test_capabilities_are_known_words_and_alternatives_are_for_what_is_missing(name: str) -> None:
    capabilities = _capabilities(load_backend(name))
    assert capabilities.supported <= KNOWN
    assert set(capabilities.instead) <= KNOWN - capabilities.supported
    assert all(text and not text.endswith(".") for text in capabilities.instead.values())


@backends
def test_every_parameter_has_its_canonical_path_and_whole_shape(name: str) -> None:
    found = {t.path: t.shape for t in _spec(name).tensors_of("param")}
    assert found == dict(weight_shapes(load_document(TINY, WorkloadConfig)))


@backends
def test_the_inventory_is_one_row_a_tensor_with_the_layers_as_a_stack(name: str) -> None:
    spec = _spec(name)
    assert spec.backend == name
    assert spec.family == "llama"
    keys = [(tensor.role, tensor.path) for tensor in spec.tensors]
    assert len(keys) == len(set(keys))
    assert [(stack.path, stack.length) for stack in spec.stacks] == [("layers", LAYERS)]
    assert {tensor.role for tensor in spec.tensors} <= {"param", "buffer", "activation"}


@backends
def test_the_values_of_a_layer_have_their_neutral_names(name: str) -> None:
    named = {row.tensor: row for row in _plan(name, {}).rows_of("activation") if row.unit == "layers.1"}
    assert {"layer_input", "q", "k", "v", "attn_out", "o", "mlp_gate", "mlp_up", "mlp_act", "mlp_down"} <= set(named)


@backends
def test_left_out_units_are_the_layers(name: str) -> None:
    assert [unit.name for unit in _plan(name, {}).units] == [f"layers.{i}" for i in range(LAYERS)]


@backends
@pytest.mark.parametrize("feature", NEEDS)
def test_a_policy_is_planned_or_refused_by_feature_name(name: str, feature: str) -> None:
    supported = _capabilities(load_backend(name)).supported
    if feature in supported and all(base in supported for base in RESTS_ON.get(feature, [])):
        assert _plan(name, NEEDS[feature]).rows
        return
    with pytest.raises(MemoptError) as error:
        _plan(name, NEEDS[feature])
    refused = error.value.problems
    assert {problem.code for problem in refused} == {"unsupported-by-backend"}
    assert any(f"({feature})" in problem.message for problem in refused) or feature in supported
    assert all(f"the {name} backend" in problem.message and problem.hint for problem in refused)


@backends
def test_all_backends_hold_the_same_state(name: str) -> None:
    def state(of: str) -> set[tuple[Any, ...]]:
        rows = [row for row in _plan(of, {}).rows if row.role in ("param", "grad", "optimizer_state")]
        return {(row.path, row.role, row.shape, row.dtype, row.nbytes) for row in rows}

    assert state(name) == state(backend_names()[0])


@backends
def test_the_plan_is_the_same_twice_and_reads_back(name: str) -> None:
    first, second = _plan(name, NEEDS["recompute:activation"]), _plan(name, NEEDS["recompute:activation"])
    assert first.to_json() == second.to_json()
    assert Plan.from_json(first.to_json()).to_json() == first.to_json()


@backends
def test_doctor_says_versions(name: str) -> None:
    assert json.dumps(load_backend(name).doctor(), default=str)


@backends
def test_gradients_under_a_policy_are_those_of_the_plain_model(name: str, tmp_path: Path) -> None:
    """Everything the backend can do of sharding, offload and recompute, at two devices, in a process of its own."""
    supported = _capabilities(load_backend(name)).supported
    wanted = [
        ("shard:param", "{name: weights, action: shard, match: {role: param}}"),
        ("offload:activation", "{name: inputs, action: offload, match: {path: 'layers.*.input'}}"),
        ("offload:activation", "{name: gates, action: offload, match: {tensor: [mlp_gate, q]}}"),
        ("recompute:activation", "{name: rest, action: recompute, match: {unit: 'layers.*'}}"),
    ]
    rules = [rule for feature, rule in wanted if feature in supported]
    policy = tmp_path / "policy.yaml"
    policy.write_text("\n".join(["version: 1", "rules:", *(f"  - {rule}" for rule in rules)]))
    arguments = ["check", str(policy), "--workload", str(TINY), "--backend", name, "--world-size", "2", "--json"]
    code = "import sys; from memopt.cli import main; main(sys.argv[1:])"
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout)
    assert result["ok"]
    assert result["max_grad_rel_diff"] <= 1e-5


@backends
def test_values_that_have_a_neutral_name_have_the_same_bytes_on_every_backend(name: str) -> None:
    def values(of: str) -> dict[tuple[str | None, str | None], int | None]:
        rows = _plan(of, {}, world_size=2).rows_of("activation")
        return {(row.unit, row.tensor): row.nbytes for row in rows if row.tensor and row.tensor != "attn_stats"}

    mine, first = values(name), values(backend_names()[0])
    assert {key: mine[key] for key in mine.keys() & first.keys()} == {
        key: first[key] for key in mine.keys() & first.keys()
    }

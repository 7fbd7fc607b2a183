"""The plan: serialisable, sorted, comparable."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from memopt import Plan, make_plan
from memopt.errors import MemoptError
from memopt.explain import compress, compress_units, select_rows


@pytest.fixture
def plans(rules, llama_spec, fake_backend) -> tuple[Plan, Plan]:
    first = rules(
        {"name": "state", "action": "shard", "match": {"role": "param"}},
        {"name": "rest", "action": "recompute", "match": {"unit": "layers.*"}},
    )
    second = rules(
        {"name": "state", "action": "shard", "match": {"role": "param"}},
        {"name": "gates", "action": "offload", "match": {"tensor": "mlp_gate", "layers": {"first": 2}}},
        {"name": "rest", "action": "recompute", "match": {"unit": "layers.*"}},
    )
    backend = fake_backend()
    before, after = (make_plan(policy, llama_spec(), backend=backend, world_size=2) for policy in (first, second))
    return before, after


def test_json_is_sorted_and_reads_back(plans) -> None:
    plan, _ = plans
    text = plan.to_json()
    keys = [(row["path"], row["role"]) for row in json.loads(text)["rows"]]
    assert keys == sorted(keys)
    assert Plan.from_json(text).to_json() == text
    assert not plan.diff(Plan.from_json(text))


def test_the_same_policy_and_model_give_the_same_json(rules, llama_spec, fake_backend) -> None:
    texts = {
        make_plan(
            rules({"action": "shard", "match": {"role": "param"}}), llama_spec(), backend=fake_backend()
        ).to_json()
        for _ in range(2)
    }
    assert len(texts) == 1


def test_diff_names_what_changed_with_both_values(plans) -> None:
    before, after = plans
    changes = {(c.name, c.field): (c.before, c.after) for c in before.diff(after)}
    assert changes["layers.0.mlp.gate_proj", "residual"] == ("recompute", "offload")
    assert changes["layers.1.mlp.gate_proj", "rule"] == ("rest", "gates")
    assert not any(name.startswith("layers.2") for name, _ in changes)
    assert "row layers.0.mlp.gate_proj (activation): residual recompute -> offload" in str(before.diff(after))
    assert len(json.loads(before.diff(after).to_json())) == len(before.diff(after))


def test_diff_of_equal_plans_is_empty(plans) -> None:
    assert not plans[0].diff(plans[0])
    assert str(plans[0].diff(plans[0])) == "no difference"


def test_diff_shows_added_and_removed_units_and_settings(rules, llama_spec, fake_backend) -> None:
    before = make_plan(rules(), llama_spec(layers=2), backend=fake_backend())
    after = make_plan(rules(units=["layers.0"]), llama_spec(layers=2), backend=fake_backend(), world_size=2)
    texts = str(before.diff(after)).splitlines()
    assert "setting world_size: 1 -> 2" in texts
    assert "unit layers.1: removed" in texts
    assert "unit layers.1: added" in str(after.diff(before))


def test_equal_layers_are_one_line(plans) -> None:
    _, plan = plans
    lines = {(line.row.path, line.row.role): line for line in compress(plan, plan.rows)}
    assert lines["layers.*.self_attn.q_proj.weight", "param"].num_rows == 4
    assert lines["layers.{0..1}.mlp.gate_proj", "activation"].row.residual == "offload"
    assert lines["layers.{2..3}.mlp.gate_proj", "activation"].row.residual == "recompute"
    assert lines["lm_head.weight", "param"].num_rows == 1
    total = sum(line.nbytes or 0 for line in lines.values())
    assert total == sum(row.nbytes or 0 for row in plan.rows)


def test_units_alike_are_one_line(plans) -> None:
    assert [(name, count) for name, count, _ in compress_units(plans[1].units)] == [("layers.*", 4)]


def test_rows_are_selected_by_glob_or_alias(plans) -> None:
    plan = plans[0]
    assert {row.role for row in select_rows(plan, "lm_head.weight")} == {"param", "grad", "optimizer_state"}
    assert [row.path for row in select_rows(plan, "embed_tokens")] == ["layers.0.input"]
    with pytest.raises(MemoptError) as error:
        select_rows(plan, "lm_haed.weight")
    assert error.value.problems[0].hint == "did you mean `lm_head.weight`?"


def test_a_row_is_found_by_its_path_before_another_rows_alias(plans) -> None:
    plan = plans[0]
    first, second = plan.row("norm.weight", "param"), plan.row("lm_head.weight", "param")
    aliased = replace(first, aliases=(second.path,))
    assert replace(plan, rows=(aliased, second)).row(second.path, "param") is second
    assert replace(plan, rows=(aliased,)).row(second.path, "param") is aliased


def test_a_row_is_found_by_any_of_its_names(plans) -> None:
    assert plans[0].row("model.layers.0.mlp.gate_proj.weight", "param").path == "layers.0.mlp.gate_proj.weight"
    with pytest.raises(KeyError):
        plans[0].row("nowhere", "param")
    assert plans[0].axis_size("fsdp") == 2
    assert plans[0].axis_size("expert") == 1

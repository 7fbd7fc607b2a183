"""Regions: what happens to each value of a unit between forward and backward."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memopt import MemoptError, Plan, make_plan
from memopt.spec import TensorSpec


def residuals(plan: Plan, unit: str) -> dict[str, str | None]:
    return {row.path: row.residual for row in plan.rows if row.unit == unit and row.role == "activation"}


def codes(error: pytest.ExceptionInfo[MemoptError]) -> list[str]:
    return [problem.code for problem in error.value.problems]


def test_without_a_rule_no_unit_is_a_region_and_values_are_kept(rules, llama_spec, fake_backend) -> None:
    plan = make_plan(rules(), llama_spec(), backend=fake_backend())
    assert not any(unit.region for unit in plan.units)
    assert {row.residual for row in plan.rows_of("activation")} == {"keep"}
    assert not any(row.path.endswith("<unnamed>") for row in plan.rows)


def test_recomputing_a_unit_recomputes_its_values_and_keeps_its_input(rules, llama_spec, fake_backend) -> None:
    plan = make_plan(
        rules({"name": "rest", "action": "recompute", "match": {"unit": "layers.*"}}),
        llama_spec(),
        backend=fake_backend(),
    )
    found = residuals(plan, "layers.2")
    assert found.pop("layers.2.input") == "keep"
    assert found.pop("layers.2.mlp.router_choice") == "keep"
    assert set(found.values()) == {"recompute"}
    assert plan.unit_of("layers.2").region
    assert plan.unit_of("layers.2").unnamed_residual == "recompute"
    assert plan.row("layers.2.<unnamed>", "activation").rule == "rest"


def test_values_no_rule_matches_are_kept_in_a_region(rules, llama_spec, fake_backend) -> None:
    plan = make_plan(
        rules({"action": "recompute", "match": {"tensor": "mlp_gate"}}), llama_spec(), backend=fake_backend()
    )
    found = residuals(plan, "layers.0")
    assert found.pop("layers.0.mlp.gate_proj") == "recompute"
    assert set(found.values()) == {"keep"}
    assert plan.unit_of("layers.0").region
    assert plan.unit_of("layers.0").unnamed_residual == "keep"
    assert plan.row("layers.0.<unnamed>", "activation").rule is None


def test_each_value_follows_the_first_rule_that_matches_it(rules, llama_spec, fake_backend) -> None:
    plan = make_plan(
        rules(
            {"name": "input", "action": "offload", "match": {"path": "layers.*.input"}},
            {"name": "attention", "action": "keep", "match": {"op": "attention"}},
            {"name": "mlp", "action": "offload", "match": {"tensor": ["mlp_gate"]}},
            {"name": "rest", "action": "recompute", "match": {"unit": "layers.*"}},
        ),
        llama_spec(),
        backend=fake_backend(),
    )
    found = residuals(plan, "layers.1")
    assert found["layers.1.input"] == "offload"
    assert found["layers.1.self_attn.attn_out"] == "keep"
    assert found["layers.1.mlp.gate_proj"] == "offload"
    assert found["layers.1.self_attn.o_proj"] == "recompute"
    assert found["layers.1.<unnamed>"] == "recompute"
    assert plan.row("layers.1.input", "activation").memory_kind == "pinned_host"
    assert plan.row("layers.1.self_attn.attn_out", "activation").losers == ("rest",)


def test_a_layers_output_belongs_to_the_unit_that_takes_it_in(rules, llama_spec, fake_backend) -> None:
    plan = make_plan(rules({"action": "offload", "match": {"path": "layers.*"}}), llama_spec(), backend=fake_backend())
    offloaded = {row.path: row.unit for row in plan.rows if row.residual == "offload"}
    assert offloaded == {f"layers.{i}.input": f"layers.{i}" for i in (1, 2, 3)}
    assert any("`layers.3` lie in no unit" in warning for warning in plan.warnings)


@pytest.mark.parametrize("match", [{"path": "layers.*.input"}, {"tensor": ["q", "layer_input"]}, {"path": "**.input"}])
def test_naming_a_units_own_input_in_a_recompute_rule_is_an_error(rules, llama_spec, fake_backend, match) -> None:
    with pytest.raises(MemoptError) as error:
        make_plan(rules({"name": "r", "action": "recompute", "match": match}), llama_spec(), backend=fake_backend())
    assert codes(error) == ["recompute-unit-input"]
    assert "offload" in (error.value.problems[0].hint or "")


def test_recomputing_layers_by_the_name_of_their_output_points_at_unit(rules, llama_spec, fake_backend) -> None:
    with pytest.raises(MemoptError) as error:
        make_plan(
            rules({"action": "recompute", "match": {"path": "layers.*"}}, units=["layers.*", "norm"]),
            llama_spec(),
            backend=fake_backend(),
        )
    assert codes(error) == ["dead-rule"]
    assert "match: {unit: layers.1}" in (error.value.problems[0].hint or "")


def test_an_inner_modules_input_can_be_recomputed(rules, llama_spec, fake_backend) -> None:
    plan = make_plan(
        rules({"action": "recompute", "match": {"path": "layers.*.self_attn.input"}}),
        llama_spec(),
        backend=fake_backend(),
    )
    assert plan.row("layers.0.input_layernorm", "activation").residual == "recompute"


def test_topk_results_are_kept_unless_named_by_op(rules, llama_spec, fake_backend) -> None:
    by_unit = make_plan(
        rules({"action": "recompute", "match": {"unit": "layers.*"}}), llama_spec(), backend=fake_backend()
    )
    assert by_unit.row("layers.0.mlp.router_choice", "activation").residual == "keep"
    by_op = make_plan(rules({"action": "recompute", "match": {"op": "topk"}}), llama_spec(), backend=fake_backend())
    assert by_op.row("layers.0.mlp.router_choice", "activation").residual == "recompute"
    with pytest.raises(MemoptError) as error:
        make_plan(
            rules({"action": "recompute", "match": {"path": "**.router_choice"}}), llama_spec(), backend=fake_backend()
        )
    assert error.value.problems[0].hint == "select them with `op: topk`"


def test_values_outside_every_unit_are_out_of_reach_and_said_so(rules, llama_spec, fake_backend) -> None:
    with pytest.raises(MemoptError) as error:
        make_plan(rules({"action": "recompute", "match": {"path": "lm_head"}}), llama_spec(), backend=fake_backend())
    assert codes(error) == ["outside-units"]
    plan = make_plan(rules({"action": "recompute", "match": {"op": "matmul"}}), llama_spec(), backend=fake_backend())
    assert any("`lm_head` lie in no unit" in warning for warning in plan.warnings)
    assert plan.row("lm_head", "activation").residual == "keep"


def test_only_a_rule_without_selectors_of_values_governs_unnamed_values(rules, llama_spec, fake_backend) -> None:
    plan = make_plan(
        rules(
            {"name": "big", "action": "recompute", "match": {"unit": "layers.*", "min_bytes": "512B"}},
            {"name": "rest", "action": "offload", "match": {"role": "activation", "unit": "layers.*"}},
        ),
        llama_spec(),
        backend=fake_backend(),
    )
    assert plan.unit_of("layers.0").unnamed_residual == "offload"
    assert plan.row("layers.0.mlp.gate_proj", "activation").rule == "big"
    assert plan.row("layers.0.self_attn.q", "activation").rule == "rest"
    assert any("cannot be judged for values without a name" in warning for warning in plan.warnings)


def test_a_unit_with_no_known_values_can_still_be_recomputed(rules, llama_spec, fake_backend) -> None:
    spec = llama_spec()
    spec = replace(spec, tensors=tuple(t for t in spec.tensors if t.role != "activation"))
    plan = make_plan(rules({"action": "recompute", "match": {"unit": "layers.*"}}), spec, backend=fake_backend())
    assert all(unit.region for unit in plan.units)
    assert [row.path for row in plan.rows_of("activation")] == [f"layers.{i}.<unnamed>" for i in range(4)]


def test_a_group_starts_from_the_input_of_its_first_member_alone(rules, llama_spec, fake_backend) -> None:
    plan = make_plan(
        rules(
            {"name": "tail", "action": "recompute", "match": {"unit": "norm+lm_head"}},
            units=["layers.*", {"match": ["norm", "lm_head"], "group": True}],
        ),
        llama_spec(),
        backend=fake_backend(),
    )
    found = residuals(plan, "norm+lm_head")
    assert found["layers.3"] == "keep"
    assert found["norm"] == "recompute"


def test_a_layers_input_listed_under_its_makers_name_is_the_same_value(rules, llama_spec, fake_backend) -> None:
    spec = llama_spec()
    swapped = tuple(
        replace(t, path=t.aliases[0], aliases=(t.path,)) if t.path.endswith(".input") else t for t in spec.tensors
    )
    plan = make_plan(
        rules(
            {"action": "offload", "match": {"path": "layers.*.input"}},
            {"action": "recompute", "match": {"unit": "layers.*"}},
        ),
        replace(spec, tensors=swapped),
        backend=fake_backend(),
    )
    assert {row.path: row.unit for row in plan.rows if row.residual == "offload"} == {
        "embed_tokens": "layers.0", "layers.0": "layers.1", "layers.1": "layers.2", "layers.2": "layers.3",
    }  # fmt: skip
    assert plan.row("embed_tokens", "activation").tensor == "layer_input"


def test_activations_take_the_compute_dtype(rules, llama_spec, fake_backend) -> None:
    plan = make_plan(rules(precision={"compute": "bfloat16"}), llama_spec(), backend=fake_backend())
    row = plan.row("layers.0.self_attn.q", "activation")
    assert (row.dtype, row.nbytes) == ("bfloat16", 2 * 4 * 8 * 2)


def test_softmax_statistics_stay_in_float32(rules, llama_spec, fake_backend) -> None:
    spec = llama_spec()
    stats = TensorSpec("layers.0.self_attn.attn_stats", "activation", (2, 4), "float32", tensor="attn_stats")
    spec = replace(spec, tensors=(*spec.tensors, stats))
    plan = make_plan(rules(precision={"compute": "bfloat16"}), spec, backend=fake_backend())
    assert plan.row(stats.path, "activation").dtype == "float32"


def test_a_global_batch_is_split_over_the_devices(rules, llama_spec, fake_backend) -> None:
    plan = make_plan(rules(), llama_spec(batch=8), backend=fake_backend(), world_size=4)
    spec = llama_spec(batch=8)
    shared = make_plan(rules(), replace(spec, batch="global"), backend=fake_backend(), world_size=4)
    assert plan.row("layers.0.self_attn.q", "activation").nbytes == 8 * 4 * 8 * 4
    assert shared.row("layers.0.self_attn.q", "activation").nbytes == 8 * 4 * 8
    assert shared.row("layers.0.self_attn.q", "activation").global_nbytes == 8 * 4 * 8 * 4


def test_a_tensor_name_without_a_table_says_so(rules, llama_spec, fake_backend) -> None:
    spec = llama_spec()
    bare = tuple(replace(t, tensor=None) for t in spec.tensors)
    with pytest.raises(MemoptError) as error:
        make_plan(
            rules({"action": "offload", "match": {"tensor": "mlp_gate"}}),
            replace(spec, family=None, tensors=bare),
            backend=fake_backend(),
        )
    assert codes(error) == ["dead-rule"]
    assert "no table of tensor names" in (error.value.problems[0].hint or "")


def test_a_tensor_name_that_this_model_lacks_is_noted(rules, llama_spec, fake_backend) -> None:
    plan = make_plan(
        rules({"name": "mlp", "action": "offload", "match": {"tensor": ["mlp_gate", "router"]}}),
        llama_spec(),
        backend=fake_backend(),
    )
    assert "rule `mlp`: this model has no `router`" in plan.warnings

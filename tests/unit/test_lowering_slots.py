"""Rules and slots: the first match wins for each slot, the rest is inherited or left alone."""

from __future__ import annotations

import pytest

from memopt import MemoptError, make_plan


def codes(error: pytest.ExceptionInfo[MemoptError]) -> list[str]:
    return [problem.code for problem in error.value.problems]


def test_the_first_match_wins_for_each_slot_by_itself(rules, llama_spec, fake_backend) -> None:
    policy = rules(
        {"name": "shard", "action": "shard", "match": {"role": "param"}},
        {"name": "host", "action": "offload", "match": {"role": "param", "path": "layers.0.**"}},
    )
    plan = make_plan(policy, llama_spec(), backend=fake_backend(), world_size=2)
    row = plan.row("layers.0.mlp.gate_proj.weight", "param")
    assert row.rules == {"layout": "shard", "memory": "host"}
    assert row.layout == {"fsdp": 0}
    assert row.memory_kind == "pinned_host"
    assert row.rule == "shard"
    assert plan.row("layers.1.mlp.gate_proj.weight", "param").memory_kind == "device"


def test_keep_fills_every_slot(rules, llama_spec, fake_backend) -> None:
    policy = rules(
        {"name": "norms", "action": "keep", "match": {"role": "param", "path": "**.*norm.*"}},
        {"name": "shard", "action": "shard", "match": {"role": "param"}},
        {"name": "host", "action": "offload", "match": {"role": "param"}},
    )
    plan = make_plan(policy, llama_spec(), backend=fake_backend(), world_size=2)
    row = plan.row("layers.0.input_layernorm.weight", "param")
    assert row.layout == {}
    assert row.memory_kind == "device"
    assert row.losers == ("shard", "host")
    assert plan.row("lm_head.weight", "param").layout == {"fsdp": 0}


def test_gradients_and_state_follow_their_parameter(rules, llama_spec, fake_backend) -> None:
    plan = make_plan(
        rules({"name": "all", "action": "shard", "match": {"role": "param"}}),
        llama_spec(),
        backend=fake_backend(),
        world_size=4,
    )
    for role in ("grad", "optimizer_state"):
        row = plan.row("lm_head.weight", role)
        assert row.layout == {"fsdp": 0}
        assert row.rule == "all"
        assert row.nbytes == row.global_nbytes // 4
    assert plan.row("lm_head.weight", "optimizer_state").global_nbytes == 2 * 16 * 8 * 4


def test_state_sharded_alone_leaves_parameters_whole(rules, llama_spec, fake_backend) -> None:
    plan = make_plan(
        rules({"action": "shard", "match": {"role": "optimizer_state"}}),
        llama_spec(),
        backend=fake_backend(),
        world_size=2,
    )
    assert plan.row("lm_head.weight", "param").layout == {}
    assert plan.row("lm_head.weight", "grad").layout == {}
    assert plan.row("lm_head.weight", "optimizer_state").layout == {"fsdp": 0}


def test_a_rule_on_state_decides_it_and_the_layout_is_still_inherited(rules, llama_spec, fake_backend) -> None:
    plan = make_plan(
        rules(
            {"name": "all", "action": "shard", "match": {"role": "param"}},
            {"name": "adam", "action": "offload", "match": {"role": "optimizer_state"}, "update_on": "host"},
        ),
        llama_spec(),
        backend=fake_backend(),
        world_size=2,
    )
    row = plan.row("lm_head.weight", "optimizer_state")
    assert (row.rule, row.memory_kind, row.update_on) == ("adam", "pinned_host", "host")
    assert row.rules == {"layout": "all", "memory": "adam"}
    assert row.layout == {"fsdp": 0}


def test_keeping_state_keeps_it_as_its_parameter_is(rules, llama_spec, fake_backend) -> None:
    plan = make_plan(
        rules(
            {"action": "shard", "match": {"role": "param"}},
            {"name": "head", "action": "keep", "match": {"role": "optimizer_state", "path": "lm_head.**"}},
            {"action": "offload", "match": {"role": "optimizer_state"}},
        ),
        llama_spec(),
        backend=fake_backend(),
        world_size=2,
    )
    row = plan.row("lm_head.weight", "optimizer_state")
    assert (row.layout, row.memory_kind, row.rule) == ({"fsdp": 0}, "device", "head")


def test_a_rule_without_role_means_what_its_action_can_act_on(rules, llama_spec, fake_backend) -> None:
    plan = make_plan(
        rules(
            {"name": "r", "action": "recompute", "match": {"path": "layers.0.**"}},
            {"name": "o", "action": "offload", "match": {"tensor": "q"}},
            {"name": "s", "action": "shard", "match": {"path": "**"}},
        ),
        llama_spec(),
        backend=fake_backend(),
        world_size=2,
    )
    assert {row.role for row in plan.rows if row.rules.get("residual") == "r"} == {"activation"}
    assert {row.path for row in plan.rows if row.rules.get("residual") == "o"} == {
        f"layers.{i}.self_attn.q" for i in (1, 2, 3)
    }
    assert all(row.layout for row in plan.rows_of("param"))
    assert all(row.memory_kind == "device" for row in plan.rows_of("param"))


def test_offload_by_an_input_pattern_means_activations(rules, llama_spec, fake_backend) -> None:
    plan = make_plan(
        rules({"action": "offload", "match": {"path": "layers.*.input"}}), llama_spec(), backend=fake_backend()
    )
    assert {row.role for row in plan.rows if row.memory_kind == "pinned_host"} == {"activation"}


def test_a_dead_rule_is_an_error(rules, llama_spec, fake_backend) -> None:
    with pytest.raises(MemoptError) as error:
        make_plan(
            rules({"action": "offload", "match": {"role": "param", "path": "layers.*.mlp.gate_prj.weight"}}),
            llama_spec(),
            backend=fake_backend(),
        )
    assert codes(error) == ["dead-rule"]
    assert "layers.*.mlp.gate_proj.weight" in (error.value.problems[0].hint or "")


def test_an_optional_rule_may_match_nothing(rules, llama_spec, fake_backend) -> None:
    policy = rules({"action": "keep", "match": {"path": "nowhere.*"}, "optional": True})
    assert make_plan(policy, llama_spec(), backend=fake_backend()).rows


def test_a_shadowed_rule_is_an_error_that_names_what_is_above(rules, llama_spec, fake_backend) -> None:
    with pytest.raises(MemoptError) as error:
        make_plan(
            rules(
                {"name": "all", "action": "keep", "match": {"role": "param"}},
                {"name": "late", "action": "shard", "match": {"role": "param", "path": "lm_head.*"}},
            ),
            llama_spec(),
            backend=fake_backend(),
        )
    assert codes(error) == ["shadowed-rule"]
    assert "`late` decides nothing: `all`" in error.value.problems[0].message


def test_the_same_tensor_kept_and_offloaded_is_an_error(rules, llama_spec, fake_backend) -> None:
    with pytest.raises(MemoptError) as error:
        make_plan(
            rules(
                {"action": "keep", "match": {"tensor": "q"}},
                {"action": "offload", "match": {"path": "layers.*.self_attn.q"}},
            ),
            llama_spec(),
            backend=fake_backend(),
        )
    assert codes(error) == ["shadowed-rule"]


def test_one_pattern_of_a_list_that_matches_nothing_is_an_error(rules, llama_spec, fake_backend) -> None:
    with pytest.raises(MemoptError) as error:
        make_plan(
            rules({"action": "keep", "match": {"role": "param", "path": ["norm.*", "nrm.*"]}}),
            llama_spec(),
            backend=fake_backend(),
        )
    assert codes(error) == ["dead-pattern"]
    assert error.value.problems[0].path == "rules.0.match.path.1"


def test_every_problem_is_reported_at_once(rules, llama_spec, fake_backend) -> None:
    with pytest.raises(MemoptError) as error:
        make_plan(
            rules(
                {"action": "keep", "match": {"path": "nowhere"}},
                {"action": "shard", "match": {"role": "param"}, "axis": "tensor"},
                {"action": "offload", "match": {"role": "param"}},
            ),
            llama_spec(),
            backend=fake_backend(supported=frozenset({"shard:param"})),
        )
    assert codes(error) == ["dead-rule", "unknown-axis", "unsupported-by-backend"]


def test_frozen_parameters_have_no_gradient_and_no_state(rules, llama_spec, fake_backend) -> None:
    from dataclasses import replace

    spec = llama_spec()
    frozen = tuple(replace(t, trainable=not t.path.startswith("layers.0.")) for t in spec.tensors)
    plan = make_plan(rules(), replace(spec, tensors=frozen), backend=fake_backend())
    paths = {row.path for row in plan.rows if row.role in ("grad", "optimizer_state")}
    assert paths
    assert not any(path.startswith("layers.0.") for path in paths)
    assert plan.row("layers.0.mlp.gate_proj.weight", "param").trainable is False


def test_tied_parameters_are_one_row_with_aliases(rules, llama_spec, fake_backend) -> None:
    spec = llama_spec(ties=(("embed_tokens.weight", "lm_head.weight"),))
    plan = make_plan(
        rules({"action": "shard", "match": {"path": "lm_head.*"}}), spec, backend=fake_backend(), world_size=2
    )
    row = plan.row("lm_head.weight", "param")
    assert row.path == "embed_tokens.weight"
    assert row.layout == {"fsdp": 0}
    assert [r.path for r in plan.rows_of("param")].count("lm_head.weight") == 0


def test_a_parameter_that_two_units_share_belongs_to_the_root(rules, llama_spec, fake_backend) -> None:
    spec = llama_spec(ties=(("embed_tokens.weight", "lm_head.weight"),))
    plan = make_plan(rules(units=["layers.*", "embed_tokens", "lm_head"]), spec, backend=fake_backend())
    assert plan.row("embed_tokens.weight", "param").unit is None
    assert any("embed_tokens.weight" in warning for warning in plan.warnings)


@pytest.mark.parametrize(
    "match, count",
    [
        ({"role": "param", "min_bytes": "512B"}, 2 + 4 * 2),
        ({"role": "param", "dtype": "float32"}, 27),
        ({"role": "param", "trainable": True}, 27),
        ({"role": "param", "unit": "layers.1"}, 6),
        ({"role": "param", "path": "model.layers.1.**"}, 6),
    ],
)
def test_selectors_narrow(rules, llama_spec, fake_backend, match, count) -> None:
    plan = make_plan(rules({"action": "offload", "match": match}), llama_spec(), backend=fake_backend())
    assert sum(row.memory_kind == "pinned_host" for row in plan.rows) == count


def test_values_are_selected_by_the_name_the_users_code_gave_them(rules, llama_spec, fake_backend) -> None:
    from dataclasses import replace

    spec = llama_spec()
    named = tuple(
        replace(t, checkpoint_name="attn_block") if t.path.endswith("o_proj") and t.role == "activation" else t
        for t in spec.tensors
    )
    spec = replace(spec, tensors=named)
    plan = make_plan(rules({"action": "offload", "match": {"name": "attn_block"}}), spec, backend=fake_backend())
    assert {row.path for row in plan.rows if row.residual == "offload"} == {
        f"layers.{i}.self_attn.o_proj" for i in range(4)
    }
    with pytest.raises(MemoptError) as error:
        make_plan(rules({"action": "offload", "match": {"name": "atn_block"}}), spec, backend=fake_backend())
    assert error.value.problems[0].hint == "did you mean `attn_block`?"


def test_sizes_that_are_unknown_are_noted_by_min_bytes(rules, llama_spec, fake_backend) -> None:
    from dataclasses import replace

    spec = llama_spec(layers=2)
    unknown = tuple(replace(t, shape=None) if t.path == "layers.0.self_attn.q" else t for t in spec.tensors)
    policy = rules({"name": "big", "action": "offload", "match": {"role": "activation", "min_bytes": 1}})
    plan = make_plan(policy, replace(spec, tensors=unknown), backend=fake_backend())
    assert plan.row("layers.0.self_attn.q", "activation").residual == "keep"
    assert "rule `big`: `min_bytes` leaves out 1 tensors of unknown size, `layers.0.self_attn.q`" in plan.warnings


def test_a_mesh_that_does_not_fit_hides_no_other_problem(rules, llama_spec, fake_backend) -> None:
    policy = rules(
        {"action": "shard", "match": {"role": "param"}},
        {"action": "keep", "match": {"path": "nowhere"}},
        {"action": "keep", "match": {"role": "param", "path": "lm_head.*"}},
        mesh={"replicate": 1, "fsdp": 2},
    )
    with pytest.raises(MemoptError) as error:
        make_plan(policy, llama_spec(), backend=fake_backend(), world_size=3)
    assert sorted(codes(error)) == ["dead-rule", "mesh-world"]


def test_a_unit_that_is_not_there_hides_no_problem_of_state(rules, llama_spec, fake_backend) -> None:
    policy = rules(
        {"action": "recompute", "match": {"unit": "layer.*"}},
        {"action": "shard", "match": {"role": "param", "path": "lm_haed.*"}},
        {"action": "shard", "match": {"role": "param"}, "axis": "fdsp"},
        units=["layer.*"],
    )
    with pytest.raises(MemoptError) as error:
        make_plan(policy, llama_spec(), backend=fake_backend())
    assert sorted(codes(error)) == ["dead-rule", "unit-matches-nothing", "unknown-axis"]

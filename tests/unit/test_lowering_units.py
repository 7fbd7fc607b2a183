"""Units: what is gathered, recomputed and freed as a whole."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memopt import MemoptError, make_plan
from memopt.spec import ModelSpec, ModuleSpec, TensorSpec


def codes(error: pytest.ExceptionInfo[MemoptError]) -> list[str]:
    return [problem.code for problem in error.value.problems]


def test_left_out_units_are_the_repeated_layers(rules, llama_spec, fake_backend) -> None:
    plan = make_plan(rules(), llama_spec(layers=3), backend=fake_backend())
    assert [(u.name, u.stack, u.index, u.inferred) for u in plan.units] == [
        (f"layers.{i}", "layers", i, True) for i in range(3)
    ]
    assert plan.row("lm_head.weight", "param").unit is None


def test_units_of_scanned_stacks_need_no_module_for_each_layer(rules, llama_spec, fake_backend) -> None:
    spec = llama_spec(kind="scan")
    spec = replace(spec, modules=tuple(m for m in spec.modules if not m.path.startswith("layers")))
    plan = make_plan(rules(units=["layers.*"]), spec, backend=fake_backend())
    assert [unit.index for unit in plan.units] == [0, 1, 2, 3]


def test_a_group_is_one_unit_of_several_modules_in_model_order(rules, llama_spec, fake_backend) -> None:
    plan = make_plan(
        rules(units=[{"match": ["norm", "lm_head"], "group": True}, "embed_tokens", "layers.*"]),
        llama_spec(layers=2),
        backend=fake_backend(),
    )
    assert [unit.name for unit in plan.units] == ["embed_tokens", "layers.0", "layers.1", "norm+lm_head"]
    assert plan.row("lm_head.weight", "param").unit == "norm+lm_head"
    assert not any(unit.inferred for unit in plan.units)


def test_the_first_entry_that_matches_a_module_wins(rules, llama_spec, fake_backend) -> None:
    plan = make_plan(
        rules(
            units=[{"match": "layers.3", "reshard_after_forward": False, "prefetch": {"forward": 0}}, "layers.*"],
            unit_defaults={"reshard_after_forward": True, "prefetch": {"forward": 2, "backward": 3}},
        ),
        llama_spec(),
        backend=fake_backend(),
    )
    last, other = plan.unit_of("layers.3"), plan.unit_of("layers.0")
    assert (last.reshard_after_forward, last.prefetch_forward, last.prefetch_backward) == (False, 0, 1)
    assert (other.reshard_after_forward, other.prefetch_forward, other.prefetch_backward) == (True, 2, 3)


def test_an_entry_whose_modules_are_all_taken_is_an_error(rules, llama_spec, fake_backend) -> None:
    with pytest.raises(MemoptError) as error:
        make_plan(rules(units=["layers.*", {"match": "layers.3", "group": True}]), llama_spec(), backend=fake_backend())
    assert codes(error) == ["shadowed-unit"]
    assert error.value.problems[0].path == "units.1"


def test_units_inside_one_another_are_an_error(rules, llama_spec, fake_backend) -> None:
    with pytest.raises(MemoptError) as error:
        make_plan(rules(units=["layers.*", "layers.*.mlp"]), llama_spec(), backend=fake_backend())
    assert codes(error) == ["overlapping-units"]
    assert "`layers.0.mlp` lies inside unit `layers.0`" in error.value.problems[0].message


def test_a_pattern_that_matches_everything_is_an_error(rules, llama_spec, fake_backend) -> None:
    with pytest.raises(MemoptError) as error:
        make_plan(rules(units=["**"]), llama_spec(), backend=fake_backend())
    assert codes(error) == ["overlapping-units"]


def test_a_pattern_that_matches_nothing_lists_what_the_model_repeats(rules, llama_spec, fake_backend) -> None:
    with pytest.raises(MemoptError) as error:
        make_plan(rules(units=["layer.*"]), llama_spec(), backend=fake_backend())
    (problem,) = error.value.problems
    assert problem.code == "unit-matches-nothing"
    assert "`LlamaDecoderLayer` × 4 at `layers.*`" in problem.message
    assert "`layers.*`" in (problem.hint or "")


def test_one_pattern_of_a_group_that_matches_nothing_is_an_error(rules, llama_spec, fake_backend) -> None:
    with pytest.raises(MemoptError) as error:
        make_plan(
            rules(units=["layers.*", {"match": ["norm", "lm_haed"], "group": True}]),
            llama_spec(),
            backend=fake_backend(),
        )
    assert codes(error) == ["unit-matches-nothing"]
    assert "`lm_head`" in (error.value.problems[0].hint or "")


def test_raw_paths_name_units_too(rules, llama_spec, fake_backend) -> None:
    plan = make_plan(rules(units=["model.layers.*"]), llama_spec(), backend=fake_backend())
    assert len(plan.units) == 4


def test_everything_sharded_in_one_unit_is_noted(rules, llama_spec, fake_backend) -> None:
    plan = make_plan(
        rules(
            {"action": "shard", "match": {"role": "param", "path": "layers.**"}},
            units=[{"match": "layers.*", "group": True}],
        ),
        llama_spec(),
        backend=fake_backend(),
        world_size=2,
    )
    assert any("gathered at once" in warning for warning in plan.warnings)


def test_a_whole_parameter_inside_a_sharded_unit_is_noted_with_its_bytes(rules, llama_spec, fake_backend) -> None:
    plan = make_plan(
        rules(
            {"action": "keep", "match": {"role": "param", "path": "layers.*.input_layernorm.*"}},
            {"action": "shard", "match": {"role": "param"}},
        ),
        llama_spec(),
        backend=fake_backend(),
        world_size=2,
    )
    assert (
        "unit `layers.*`: `layers.*.input_layernorm.weight` stay whole inside a sharded unit: one all-reduce of 32 "
        "bytes a unit and step"
    ) in plan.warnings


@pytest.mark.parametrize(
    "paths, said",
    [
        (("", "encoder", "head"), "name modules: `units: [...]` of `encoder`, `head`"),
        (("",), "no repeated layers were found and the model is a single module, so there are no units"),
    ],
)
def test_a_model_without_repeated_layers_says_that_it_has_no_units(rules, fake_backend, paths, said) -> None:
    modules = tuple(ModuleSpec(path, path, "Linear", 4) for path in paths)
    tensors = (TensorSpec("weight", "param", (4, 4), "float32"),)
    spec = ModelSpec(backend="fake", family=None, tensors=tensors, modules=modules)
    with pytest.raises(MemoptError) as error:
        make_plan(rules({"action": "recompute", "match": {"unit": "layers.*"}}), spec, backend=fake_backend())
    (problem,) = error.value.problems
    assert problem.code == "dead-rule"
    assert problem.hint is not None
    assert problem.hint.endswith(said)
    assert "no repeated layers were found" in problem.hint

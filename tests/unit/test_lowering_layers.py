"""`layers:` and `fraction:` cut along the layers of a stack."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memopt import MemoptError, make_plan
from memopt.spec import StackSpec, TensorSpec


def chosen(plan) -> list[int]:
    return [int(row.path.split(".")[1]) for row in plan.rows if row.residual == "offload" and "<" not in row.path]


@pytest.mark.parametrize(
    "layers, expected",
    [
        ({"first": 2}, [0, 1]),
        ({"last": 2}, [3, 4]),
        ({"every": 2}, [0, 2, 4]),
        ({"every": 2, "offset": 1}, [1, 3]),
        ([0, 3], [0, 3]),
        (4, [4]),
        ({"index": [1]}, [1]),
        ({"first": 1, "of": "layers"}, [0]),
        ({"first": 1, "of": "lay*"}, [0]),
    ],
)
def test_layers_are_counted_from_zero(rules, llama_spec, fake_backend, layers, expected) -> None:
    policy = rules({"action": "offload", "match": {"tensor": "q", "layers": layers}})
    plan = make_plan(policy, llama_spec(layers=5), backend=fake_backend())
    assert chosen(plan) == expected


@pytest.mark.parametrize(
    "fraction, layers, expected",
    [
        (0.5, 4, [0, 1]),
        (0.6, 5, [0, 1, 2]),
        (0.5, 5, [0, 1, 2]),
        (0.01, 4, [0]),
        (0.99, 4, [0, 1, 2, 3]),
        (1.0, 3, [0, 1, 2]),
    ],
)
def test_a_fraction_takes_the_first_layers(rules, llama_spec, fake_backend, fraction, layers, expected) -> None:
    policy = rules({"action": "offload", "match": {"tensor": "q"}, "fraction": fraction})
    plan = make_plan(policy, llama_spec(layers=layers), backend=fake_backend())
    assert chosen(plan) == expected


def test_a_fraction_that_is_no_whole_number_of_layers_is_noted(rules, llama_spec, fake_backend) -> None:
    policy = rules({"name": "q", "action": "offload", "match": {"tensor": "q"}, "fraction": 0.3})
    plan = make_plan(policy, llama_spec(layers=5), backend=fake_backend())
    assert "rule `q`: a fraction 0.3 of 5 layers is 2 layers (0.400) of `layers`" in plan.warnings


def test_a_fraction_of_chosen_layers_counts_those(rules, llama_spec, fake_backend) -> None:
    policy = rules({"action": "offload", "match": {"tensor": "q", "layers": {"last": 4}}, "fraction": 0.5})
    assert chosen(make_plan(policy, llama_spec(layers=6), backend=fake_backend())) == [2, 3]


def test_layers_a_fraction_leaves_out_go_to_the_rules_below(rules, llama_spec, fake_backend) -> None:
    policy = rules(
        {"name": "some", "action": "offload", "match": {"unit": "layers.*", "role": "activation"}, "fraction": 0.5},
        {"name": "rest", "action": "recompute", "match": {"unit": "layers.*"}},
    )
    plan = make_plan(policy, llama_spec(), backend=fake_backend())
    assert [unit.unnamed_residual for unit in plan.units] == ["offload", "offload", "recompute", "recompute"]
    assert plan.row("layers.1.self_attn.q", "activation").rule == "some"
    assert plan.row("layers.2.self_attn.q", "activation").rule == "rest"


def test_a_fraction_of_the_state_is_whole_layers_and_leaves_the_rest(rules, llama_spec, fake_backend) -> None:
    policy = rules({"name": "adam", "action": "offload", "match": {"role": "optimizer_state"}, "fraction": 0.5})
    plan = make_plan(policy, llama_spec(), backend=fake_backend())
    offloaded = {row.path.split(".")[1] for row in plan.rows if row.memory_kind == "pinned_host"}
    assert offloaded == {"0", "1"}
    assert any("`embed_tokens.weight`, `norm.weight`, `lm_head.weight` lie in none" in note for note in plan.warnings)


def test_a_fraction_of_what_lies_in_no_layer_is_an_error(rules, llama_spec, fake_backend) -> None:
    policy = rules({"action": "offload", "match": {"role": "optimizer_state", "path": "lm_head.*"}, "fraction": 0.5})
    with pytest.raises(MemoptError) as error:
        make_plan(policy, llama_spec(), backend=fake_backend())
    assert [problem.code for problem in error.value.problems] == ["fraction-without-layers"]


@pytest.mark.parametrize(
    "layers, code",
    [
        ([0, 4], "layer-out-of-range"),
        ({"first": 5}, "layer-out-of-range"),
        ({"last": 9}, "layer-out-of-range"),
        ({"every": 2, "offset": 7}, "dead-rule"),
        ({"first": 1, "of": "layer"}, "unknown-stack"),
    ],
)
def test_layers_that_do_not_exist_are_an_error(rules, llama_spec, fake_backend, layers, code) -> None:
    with pytest.raises(MemoptError) as error:
        make_plan(
            rules({"action": "offload", "match": {"tensor": "q", "layers": layers}}),
            llama_spec(),
            backend=fake_backend(),
        )
    assert [problem.code for problem in error.value.problems] == [code]
    assert error.value.problems[0].path == "rules.0.match.layers"


def test_layers_of_what_lies_in_no_stack_is_an_error(rules, llama_spec, fake_backend) -> None:
    with pytest.raises(MemoptError) as error:
        make_plan(
            rules({"action": "keep", "match": {"path": "lm_head.*", "layers": {"first": 1}}}),
            llama_spec(),
            backend=fake_backend(),
        )
    assert [problem.code for problem in error.value.problems] == ["dead-rule"]


def _two_stacks(spec):
    decoder = tuple(
        replace(
            t,
            path=t.path.replace("layers", "decoder.block"),
            aliases=(),
            module=t.module.replace("layers", "decoder.block"),
        )
        for t in spec.tensors
        if t.path.startswith("layers.")
    )
    stacks = (*spec.stacks, StackSpec("decoder.block", 4, "loop", "Block"))
    return replace(spec, tensors=(*spec.tensors, *decoder), stacks=stacks)


def test_with_two_stacks_layers_asks_which(rules, llama_spec, fake_backend) -> None:
    spec = _two_stacks(llama_spec())
    with pytest.raises(MemoptError) as error:
        make_plan(rules({"action": "offload", "match": {"tensor": "q", "layers": 0}}), spec, backend=fake_backend())
    assert [problem.code for problem in error.value.problems] == ["ambiguous-stack"]
    assert "of: layers" in (error.value.problems[0].hint or "")
    policy = rules({"action": "offload", "match": {"tensor": "q", "layers": {"index": 0, "of": "decoder.block"}}})
    plan = make_plan(policy, spec, backend=fake_backend())
    assert [row.path for row in plan.rows if row.residual == "offload"] == ["decoder.block.0.self_attn.q"]
    narrowed = rules({"action": "offload", "match": {"path": "decoder.**.q", "layers": 0}})
    assert make_plan(narrowed, spec, backend=fake_backend())


def test_a_fraction_is_taken_of_each_stack(rules, llama_spec, fake_backend) -> None:
    policy = rules({"action": "offload", "match": {"tensor": "q"}, "fraction": 0.25})
    plan = make_plan(policy, _two_stacks(llama_spec()), backend=fake_backend())
    assert [row.path for row in plan.rows if row.residual == "offload"] == [
        "layers.0.self_attn.q",
        "decoder.block.0.self_attn.q",
    ]


def test_layers_of_an_inner_stack_can_be_named(rules, llama_spec, fake_backend) -> None:
    spec = llama_spec(layers=2)
    experts = [
        TensorSpec(
            f"layers.{i}.mlp.experts.{e}.w1", "activation", (2, 8), "float32", module=f"layers.{i}.mlp.experts.{e}.w1"
        )
        for i in range(2)
        for e in range(3)
    ]
    stacks = (*spec.stacks, *(StackSpec(f"layers.{i}.mlp.experts", 3, "loop", "Expert") for i in range(2)))
    spec = replace(spec, tensors=(*spec.tensors, *experts), stacks=stacks)
    policy = rules(
        {"action": "offload", "match": {"path": "**.w1", "layers": {"index": 1, "of": "layers.*.mlp.experts"}}}
    )
    plan = make_plan(policy, spec, backend=fake_backend())
    assert [row.path for row in plan.rows if row.residual == "offload"] == [
        f"layers.{i}.mlp.experts.1.w1" for i in range(2)
    ]
    outer = rules({"action": "offload", "match": {"path": "**.w1", "layers": 1}})
    plan = make_plan(outer, spec, backend=fake_backend())
    assert {row.unit for row in plan.rows if row.residual == "offload"} == {"layers.1"}
    assert [unit.name for unit in plan.units] == ["layers.0", "layers.1"]

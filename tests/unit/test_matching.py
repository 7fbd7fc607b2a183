"""Names and globs: what a pattern selects, and what it must not."""

from __future__ import annotations

import pytest

from memopt.matching import canonical, canonical_paths, is_input_name, matches, selects
from memopt.spec import TensorSpec


@pytest.mark.parametrize(
    "raw, path",
    [
        ("model.layers.3.mlp.up_proj.weight", "layers.3.mlp.up_proj.weight"),
        ("module.model.layers.0.x", "layers.0.x"),
        ("_orig_mod.model.norm", "norm"),
        ("model.layers.0._checkpoint_wrapped_module._fsdp_wrapped_module.mlp", "layers.0.mlp"),
        ("transformer.h.0.attn", "transformer.h.0.attn"),
        ("model", "model"),
        ("encoder.model.x", "encoder.model.x"),
    ],
)
def test_wrappers_and_one_leading_model_are_dropped(raw: str, path: str) -> None:
    assert canonical(raw) == path


def test_paths_that_would_collide_stay_raw() -> None:
    assert canonical_paths(["model.norm", "norm", "model.head"]) == {
        "model.norm": "model.norm",
        "norm": "norm",
        "model.head": "head",
    }


@pytest.mark.parametrize(
    "pattern, name, expected",
    [
        ("layers.*", "layers.3", True),
        ("layers.*", "layers.3.mlp", False),
        ("layers.**", "layers.3.mlp", True),
        ("layers.**", "layers", True),
        ("**.experts.**", "layers.0.mlp.experts.3.w1.weight", True),
        ("**.experts.**", "experts", True),
        ("**.*norm.*", "norm.weight", True),
        ("**.*norm.*", "layers.0.input_layernorm.weight", True),
        ("**.*norm.*", "layers.0.mlp.weight", False),
        ("layers.*.attn[0]", "layers.1.attn[0]", True),
        ("layers.*.attn[0]", "layers.1.attn0", False),
        ("layers.*.input[*]", "layers.1.input[2]", True),
        ("layers.?", "layers.10", False),
        ("model.layers.*", "layers.3", True),
        ("Layers.*", "layers.3", False),
        ("**", "", False),
    ],
)
def test_a_star_stays_within_one_part_and_two_span_any_number(pattern: str, name: str, expected: bool) -> None:
    assert matches(pattern, name) is expected


def _value(path: str, *aliases: str, module: str | None = None) -> TensorSpec:
    return TensorSpec(path, "activation", None, None, aliases, module=path if module is None else module)


def test_any_alias_of_a_value_is_enough() -> None:
    value = _value("layers.0.self_attn.o_proj", "layers.0.self_attn", "model.layers.0.self_attn")
    assert selects(["layers.*.self_attn"], value)
    assert selects(["model.layers.*.self_attn"], value)


def test_only_a_pattern_that_ends_in_input_selects_inputs() -> None:
    value = _value("layers.0.input_layernorm", "layers.0.self_attn.input")
    assert selects(["layers.*.self_attn.input"], value)
    assert selects(["**.input"], value)
    assert not selects(["layers.*.self_attn.*"], value)
    assert not selects(["layers.0.self_attn.**"], value)


def test_a_module_that_is_called_input_is_no_input() -> None:
    assert selects(["encoder.*"], _value("encoder.input"))
    assert not selects(["encoder.*"], _value("encoder.input", module="embed"))


def test_parameters_below_a_module_called_input_are_matched() -> None:
    parameter = TensorSpec("encoder.input", "param", (2,), "float32")
    assert selects(["encoder.*"], parameter)


@pytest.mark.parametrize(
    "name, expected", [("a.input", True), ("a.input[1]", True), ("input", True), ("a.input_x", False)]
)
def test_input_names(name: str, expected: bool) -> None:
    assert is_input_name(name) is expected

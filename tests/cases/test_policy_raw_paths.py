"""Patterns see raw paths as they see canonical ones, in every selector.

Family: a name that the user reads in their own code (`layers_3` in flax linen) and that a policy takes in one place and
not in another.
"""

from __future__ import annotations

from functools import cache

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

from memopt import inspect_model, make_plan
from memopt.explain import select_rows
from memopt.spec import ModelSpec


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(8, name="down")(nn.silu(nn.Dense(16, name="up")(x)))


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return x + Mlp(name="mlp")(nn.LayerNorm(name="norm")(x))


class Net(nn.Module):
    def setup(self) -> None:
        self.layers = [Block() for _ in range(3)]
        self.head = nn.Dense(4)

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@cache
def _spec(*, has_inputs: bool = True) -> ModelSpec:
    x = jax.ShapeDtypeStruct((2, 8), jnp.float32)
    model = Net()
    params = jax.eval_shape(model.init, jax.random.key(0), x)
    return inspect_model(model, params=params, example_inputs=(x,) if has_inputs else None)


def _decided(units: str, match: dict[str, str], *, action: str, has_inputs: bool = True) -> dict[tuple[str, str], str]:
    """(path, role) -> residual and layout, under one rule."""
    policy = {"version": 1, "units": [units], "rules": [{"name": "rule", "action": action, "match": match}]}
    plan = make_plan(policy, _spec(has_inputs=has_inputs), backend="jax", world_size=2)
    return {(row.path, row.role): f"{row.residual} {dict(row.layout)} {row.rule}" for row in plan.rows}


@pytest.mark.parametrize(
    "canonical, raw, action",
    [
        ({"unit": "layers.*"}, {"unit": "layers_*"}, "recompute"),
        ({"unit": "layers.1"}, {"unit": "layers_1"}, "recompute"),
        ({"path": "layers.*.input"}, {"path": "layers_*.input"}, "offload"),
        ({"path": "layers.*.mlp"}, {"path": "layers_*.mlp"}, "offload"),
        ({"path": "layers.1.mlp.up"}, {"path": "layers_1.mlp.up"}, "recompute"),
        ({"role": "param", "path": "layers.*.mlp.up.*"}, {"role": "param", "path": "layers_*.mlp.up.*"}, "shard"),
        ({"role": "grad", "path": "layers.0.**"}, {"role": "grad", "path": "layers_0.**"}, "keep"),
    ],
)  # fmt: skip
def test_a_raw_path_selects_what_its_canonical_path_does(canonical, raw, action) -> None:
    expected = _decided("layers.*", canonical, action=action)
    assert any(rule.endswith("rule") for rule in expected.values())
    assert _decided("layers_*", raw, action=action) == expected


@pytest.mark.parametrize("has_inputs", [True, False])
def test_units_are_found_by_raw_paths_with_and_without_inputs(has_inputs: bool) -> None:
    rule = {"unit": "layers_*"}
    assert _decided("layers_*", rule, action="recompute", has_inputs=has_inputs) == _decided(
        "layers.*", {"unit": "layers.*"}, action="recompute", has_inputs=has_inputs
    )


def test_explain_finds_rows_by_raw_paths() -> None:
    plan = make_plan({"version": 1}, _spec(), backend="jax")
    for canonical, raw in [("layers.1.mlp.up.*", "layers_1.mlp.up.*"), ("layers.*.input", "layers_*.input")]:
        rows = select_rows(plan, raw)
        assert rows
        assert rows == select_rows(plan, canonical)

"""The model's own remat beside a policy: it holds where the policy only lays weights out, and is refused where both
decide about the same values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from memopt import MemoptError, apply_policy
from memopt_jax.compiled import verify_no_user_remat
from memopt_jax.values import equations

WIDTH, HIDDEN, LAYERS = 16, 128, 3
SHARD = {"name": "s", "action": "shard", "match": {"role": "param"}}
OFFLOAD = {"name": "o", "action": "offload", "match": {"path": "layers.*.input"}}
RECOMPUTE = {"name": "r", "action": "recompute", "match": {"unit": "layers.*"}}


def batch() -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).standard_normal((4, WIDTH)), jnp.float32)


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(WIDTH, name="down")(jnp.tanh(nn.Dense(HIDDEN, name="up")(x)))


class LinenBlock(nn.Module):
    inner: bool

    @nn.compact
    def __call__(self, x: jax.Array, _: Any = None) -> tuple[jax.Array, None]:
        return x + (nn.remat(Mlp) if self.inner else Mlp)(name="mlp")(x), None


class LinenNet(nn.Module):
    """Remat around each layer, or around the layer's mlp."""

    where: str

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        block = nn.remat(LinenBlock, prevent_cse=False) if self.where == "unit" else LinenBlock
        stack = nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS)
        return stack(self.where == "inner", name="layers")(x, None)[0]


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(WIDTH, HIDDEN, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array, wrap: Callable[..., Any] = lambda f: f) -> jax.Array:
        return x + wrap(lambda block, x: block.down(jnp.tanh(block.up(x))))(self, x)


class NnxNet(nnx.Module):
    def __init__(self, where: str) -> None:
        self.layers = nnx.split_rngs(splits=LAYERS)(nnx.vmap(Block, in_axes=0, out_axes=0))(nnx.Rngs(0))
        self.where = where

    def __call__(self, x: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x: jax.Array, layer: Block) -> jax.Array:
            if self.where == "unit":
                return nnx.remat(lambda layer, x: layer(x))(layer, x)
            return layer(x, nnx.remat) if self.where == "inner" else layer(x)

        return run(x, self.layers)


def gradient_program(kind: str, where: str, rules: list[dict[str, Any]]) -> Any:
    policy, x = {"version": 1, "rules": rules}, batch()
    if kind == "linen":
        model = LinenNet(where)
        variables = model.init(jax.random.key(0), x)
        applied = apply_policy(model, policy, params=variables, example_inputs=x).model
        return jax.make_jaxpr(jax.grad(lambda v: (applied.apply(v, x) ** 2).mean()))(variables)
    net = NnxNet(where)
    apply_policy(net, policy, example_inputs=x)
    graph, state = nnx.split(net)
    return jax.make_jaxpr(jax.grad(lambda state: (nnx.merge(graph, state)(x) ** 2).mean()))(state)


def wide_residuals(program: Any) -> int:
    """Values of the hidden width that the forward loop saves for the backward loop."""
    scans = [eqn for eqn in equations(program.jaxpr) if eqn.primitive.name == "scan" and not eqn.params["reverse"]]
    return sum(var.aval.shape == (LAYERS, 4, HIDDEN) for var in scans[0].outvars)


@pytest.mark.parametrize("rules", [[], [SHARD], [OFFLOAD]], ids=["nothing", "sharded", "input offloaded"])
@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_a_remat_inside_a_unit_that_keeps_the_rest_still_drops_its_values(kind: str, rules: list[Any]) -> None:
    assert wide_residuals(gradient_program(kind, "none", rules)) > 0
    program = gradient_program(kind, "inner", rules)
    assert wide_residuals(program) == 0
    verify_no_user_remat(program.jaxpr)


@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_a_remat_around_a_unit_that_is_only_sharded_is_left_alone(kind: str) -> None:
    program = gradient_program(kind, "unit", [SHARD])
    assert wide_residuals(program) == 0
    verify_no_user_remat(program.jaxpr)


@pytest.mark.parametrize("rules", [[OFFLOAD], [RECOMPUTE], [SHARD, OFFLOAD]])
@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_a_remat_around_a_unit_that_the_policy_recomputes_or_offloads_is_refused(kind: str, rules: list[Any]) -> None:
    with pytest.raises(MemoptError, match="user-remat-around-unit"):
        verify_no_user_remat(gradient_program(kind, "unit", rules).jaxpr)

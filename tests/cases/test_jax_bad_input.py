"""Inputs that a model or a step cannot take: one error of ours that says what was passed, before anything compiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from memopt import MemoptError, apply_policy

WIDTH = 8
POLICY = {"version": 1, "rules": [{"name": "s", "action": "shard", "match": {"role": "param"}}]}


class Net(nnx.Module):
    def __init__(self) -> None:
        self.up = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.up(x)


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(WIDTH, name="up")(x)


def loss_fn(params: Any, x: jax.Array) -> jax.Array:
    return jnp.mean((x @ params["up"]) ** 2)


def applied(kind: str, inputs: Any) -> Any:
    if kind == "nnx":
        return apply_policy(Net(), POLICY, example_inputs=inputs)
    if kind == "linen":
        variables = LinenNet().init(jax.random.key(0), jnp.zeros((2, WIDTH)))
        return apply_policy(LinenNet(), POLICY, params=variables, example_inputs=inputs)
    return apply_policy(loss_fn, POLICY, params={"up": jnp.ones((WIDTH, WIDTH))}, example_inputs=inputs)


@pytest.mark.parametrize("kind", ["nnx", "linen", "function"])
def test_example_inputs_of_another_shape_are_one_error_with_what_was_passed(kind: str) -> None:
    """Shapes that do not fit show as a broadcast error deep in a framework. Family: whose fault it is."""
    with pytest.raises(MemoptError) as caught:
        applied(kind, jnp.zeros((2, WIDTH + 1)))
    (problem,) = caught.value.problems
    assert problem.code == "example-inputs-rejected"
    assert "float32[2,9]" in problem.message


def step_on(loss: Callable[[Any, jax.Array], jax.Array], batch: jax.Array) -> None:
    run = applied("nnx", jnp.zeros((2, WIDTH)))
    optimizer = run.optimizer(optax.sgd(1e-2))

    def fn(model: Any, optimizer: Any, batch: jax.Array) -> jax.Array:
        value, gradients = nnx.value_and_grad(lambda model: loss(model, batch))(model)
        optimizer.update(model, gradients)
        return value

    run.step(fn)(run.model, optimizer, batch)


@pytest.mark.parametrize("loss", [lambda model, x: jnp.argmax(model(x)), lambda model, x: model(x)])
def test_a_step_whose_loss_is_no_single_floating_number_is_not_differentiable(loss: Any) -> None:
    """An index or a vector as loss. Family: whose fault it is."""
    with pytest.raises(MemoptError, match="step-not-differentiable"):
        step_on(loss, jnp.ones((2, WIDTH)))


def test_a_batch_of_another_width_than_the_model_takes_is_named() -> None:
    """The first batch differs from the example. Family: whose fault it is."""
    with pytest.raises(MemoptError) as caught:
        step_on(lambda model, x: jnp.mean(model(x) ** 2), jnp.ones((2, WIDTH + 2)))
    (problem,) = caught.value.problems
    assert problem.code == "step-not-traceable"
    assert "float32[2,10]" in problem.message

"""Rows of `compare` in which JAX's own checkpoint does the work: gradients of the plain model, layers run again."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from memopt.errors import MemoptError
from memopt_jax import BACKEND
from memopt_jax.baselines import checkpoint_layers


def models() -> tuple[Any, Any]:
    """A model and its call; the classes are this call's own, since a baseline changes them."""

    class Block(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.up, self.down = nnx.Linear(8, 32, rngs=rngs), nnx.Linear(32, 8, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return x + self.down(jnp.sin(self.up(x)))

    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.layers = nnx.List([Block(rngs) for _ in range(3)])

        def __call__(self, x: jax.Array) -> jax.Array:
            for layer in self.layers:
                x = layer(x)
            return x

    return Model(nnx.Rngs(0)), lambda model: jnp.mean(model(jnp.ones((4, 8))) ** 2)


@pytest.mark.parametrize("name", BACKEND.baselines)
def test_checkpointed_layers_give_the_plain_gradients(name: str) -> None:
    model, loss = models()
    plain = jax.tree.leaves(nnx.grad(loss)(model))
    graph, state = nnx.split(model)

    def program() -> str:  # a new function each time: JAX keeps what it has traced
        return str(jax.make_jaxpr(jax.grad(lambda leaves: loss(nnx.merge(graph, leaves))))(state))

    assert "checkpoint" not in program()
    checkpoint_layers(name, model, loss)
    assert program().count("checkpoint[") + program().count("remat") >= 3
    for before, after in zip(plain, jax.tree.leaves(nnx.grad(loss)(model)), strict=True):
        np.testing.assert_allclose(before, after, rtol=1e-6, atol=1e-7)


def test_a_model_that_repeats_nothing_is_refused() -> None:
    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    with pytest.raises(MemoptError, match="baseline-no-layers"):
        checkpoint_layers("checkpoint", model, lambda called: called(jnp.ones((4, 8))).sum())

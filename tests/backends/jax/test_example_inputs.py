"""Example inputs may be shapes: an inventory allocates nothing."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from memopt import inspect_model

SHAPE = jax.ShapeDtypeStruct((2, 8), jnp.float32)
ARRAY = jnp.ones((2, 8), jnp.float32)


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(4, name="out")(nn.LayerNorm(name="norm")(x))


class Nnx(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(8, rngs=rngs)
        self.out = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(self.norm(x))


@pytest.mark.parametrize("form", [lambda x: x, lambda x: (x,), lambda x: {"x": x}], ids=["one", "tuple", "keywords"])
@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_shapes_give_the_inventory_that_values_give(kind, form) -> None:
    model = Linen() if kind == "linen" else Nnx(nnx.Rngs(0))
    params = Linen().init(jax.random.key(0), ARRAY) if kind == "linen" else None
    specs = [inspect_model(model, params=params, example_inputs=form(inputs)) for inputs in (SHAPE, ARRAY)]
    assert specs[0] == specs[1]
    (out,) = [tensor for tensor in specs[0].tensors if tensor.role == "activation" and tensor.path == "out"]
    assert out.shape == (2, 4)

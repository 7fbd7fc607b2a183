"""A workload whose layers lie in a Python list and whose optimizer's state outweighs its activations."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from memopt import Workload

WIDTH, HIDDEN, LAYERS = 512, 2048, 6


class Layer(nnx.Module):
    """A residual multilayer perceptron."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(WIDTH, HIDDEN, use_bias=False, rngs=rngs, dtype=jnp.bfloat16)
        self.down = nnx.Linear(HIDDEN, WIDTH, use_bias=False, rngs=rngs, dtype=jnp.bfloat16)

    def __call__(self, x: jax.Array) -> jax.Array:
        """`[B, S, WIDTH]` to the same."""
        return x + self.down(nnx.silu(self.up(x)))


class Net(nnx.Module):
    """The layers, one after the other."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([Layer(rngs) for _ in range(LAYERS)])

    def __call__(self, x: jax.Array) -> jax.Array:
        """`[B, S, WIDTH]` to the same."""
        for layer in self.layers:
            x = layer(x)
        return x


def make() -> Workload:
    """The workload: AdamW behind a clip of the global norm, which needs all gradients before any layer is updated."""
    return Workload(
        name="listed-layers",
        model=Net,
        loss=lambda model, batch: jnp.mean(model(batch["x"]).astype(jnp.float32) ** 2),
        batch={"x": jax.ShapeDtypeStruct((4, 128, WIDTH), jnp.bfloat16)},
        optimizer=optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
    )

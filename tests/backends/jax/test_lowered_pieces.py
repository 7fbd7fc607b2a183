"""A trainer of its own (scan over layers, own step, own optimizer) takes a policy in a few changed lines."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name

import memopt
import memopt_jax
from memopt import MemoptError
from memopt_jax.compiled import offloaded_bytes

LAYERS, WIDTH = 4, 16


def decoder_layer(x: jax.Array, w: dict[str, jax.Array]) -> tuple[jax.Array, None]:
    """As MaxText writes one: every projection has a name."""
    x = checkpoint_name(x, "decoder_layer_input")
    q, k, v = (checkpoint_name(x @ w[name], f"{name}_proj") for name in ("query", "key", "value"))
    out = checkpoint_name(jax.nn.softmax(q @ k.swapaxes(-1, -2)) @ v, "context")
    return x + checkpoint_name(out @ w["out"], "out_proj"), None


class Trainer:
    """Owns its model, placement, step and optimizer."""

    def __init__(self, policy: Any = None) -> None:
        rng = np.random.default_rng(0)
        shape = (LAYERS, WIDTH, WIDTH)
        names = ("query", "key", "value", "out")
        self.params = {"layers": {n: jnp.asarray(0.2 * rng.standard_normal(shape), jnp.float32) for n in names}}
        self.batch = jnp.asarray(rng.standard_normal((2, 8, WIDTH)), jnp.float32)
        self.tx = optax.adamw(1e-2)
        self.layer, self.options = decoder_layer, None
        if policy is not None:
            spec = memopt.inspect_model(self.loss, params=self.params, example_inputs=self.batch)
            lowered = memopt_jax.lower(memopt.make_plan(policy, spec, backend="jax", world_size=2))
            checkpoint = lowered.checkpoint_policy("layers.*")
            self.layer = jax.checkpoint(decoder_layer, policy=checkpoint, prevent_cse=False)
            self.params = jax.device_put(self.params, lowered.shardings(self.params))
            self.options = lowered.compiler_options or None
        self.state = self.tx.init(self.params)

    def loss(self, params: Any, batch: jax.Array) -> jax.Array:
        return jnp.mean(jax.lax.scan(self.layer, batch, params["layers"])[0] ** 2)

    def train(self, steps: int) -> list[float]:
        def step(params: Any, state: Any, batch: jax.Array) -> Any:
            loss, gradients = jax.value_and_grad(self.loss)(params, batch)
            updates, state = self.tx.update(gradients, state, params)
            return optax.apply_updates(params, updates), state, loss

        jitted = jax.jit(step, compiler_options=self.options)
        losses = []
        for _ in range(steps):
            self.params, self.state, loss = jitted(self.params, self.state, self.batch)
            losses.append(float(loss))
        return losses


MINIMAL_OFFLOADED = {
    "version": 1,
    "rules": [
        {"name": "shard", "action": "shard", "match": {"role": "param"}},
        {
            "name": "off",
            "action": "offload",
            "match": {"name": ["decoder_layer_input", "query_proj", "key_proj", "value_proj", "out_proj"]},
        },
        {"name": "rest", "action": "recompute", "match": {"unit": "layers.*"}},
    ],
}


def test_a_trainer_of_its_own_trains_the_same_under_the_lowered_pieces() -> None:
    plain, ours = Trainer(), Trainer(MINIMAL_OFFLOADED)
    jaxpr = jax.make_jaxpr(jax.grad(ours.loss))(ours.params, ours.batch)
    # four of the five: the sum does not need `out_proj` in the backward pass, so it is no residual at all
    assert offloaded_bytes(jaxpr.jaxpr) == LAYERS * 4 * ours.batch.nbytes
    assert {leaf.sharding.spec for leaf in jax.tree.leaves(ours.params)} == {jax.sharding.PartitionSpec(None, "fsdp")}
    np.testing.assert_allclose(ours.train(3), plain.train(3), rtol=1e-6)


def test_a_value_without_a_name_and_an_unknown_unit_are_refused() -> None:
    trainer = Trainer()
    spec = memopt.inspect_model(trainer.loss, params=trainer.params, example_inputs=trainer.batch)
    rules = [{"name": "x", "action": "offload", "match": {"path": "layers.*.input"}}, MINIMAL_OFFLOADED["rules"][2]]
    lowered = memopt_jax.lower(memopt.make_plan({"version": 1, "rules": rules}, spec, backend="jax"))
    with pytest.raises(MemoptError, match="not-lowerable"):
        lowered.checkpoint_policy("layers.*")
    with pytest.raises(MemoptError, match="did you mean"):
        lowered.checkpoint_policy("layer.*")

"""A small train step for the compile tests: a scanned layer of two products, its input or its state on the host."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec

from memopt.errors import MemoptError

LAYERS, WIDTH, ROWS = 12, 1024, 2048


@dataclass(frozen=True)
class TrainStep:
    """What a step builder returns."""

    fn: Any
    args: tuple[Any, ...]
    out_shardings: Any
    donate_argnums: tuple[int, ...] = (0, 1)
    offloaded: Mapping[str, int] = field(default_factory=dict)


def build(payload: Mapping[str, Any], mesh: Any) -> TrainStep:
    """The step: `payload` may say `offload` and `keep` (names), `host_state`, `layers`, `fails`."""
    if payload.get("fails") == "abort":
        print("F0000 the compiler has had enough", flush=True)
        os.abort()
    if payload.get("fails") == "memopt":
        raise MemoptError.of("toy-problem", "the builder found a problem")
    if payload.get("fails") == "user":
        raise RuntimeError("the user's model is broken")
    layers, axes = payload.get("layers", LAYERS), tuple(mesh.axis_names)
    rows, kind = ROWS * mesh.size, "pinned_host" if payload.get("host_state") else "device"

    def abstract(shape: tuple[int, ...], spec: PartitionSpec, memory_kind: str = "device") -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, spec, memory_kind=memory_kind)
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding)

    weights = abstract((layers, WIDTH, WIDTH), PartitionSpec(None, None, axes))
    state = abstract((layers, WIDTH, WIDTH), PartitionSpec(None, None, axes), kind)
    batch = abstract((rows, WIDTH), PartitionSpec(axes))
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=list(payload.get("keep", ())),
        names_which_can_be_offloaded=list(payload.get("offload", ())),
        offload_src="device",
        offload_dst="pinned_host",
    )

    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        x = checkpoint_name(x, "input")
        return checkpoint_name(jnp.tanh(x @ w) @ w.T + x, "output"), None

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        body = jax.checkpoint(layer, policy=policy, prevent_cse=False)
        return jax.lax.scan(body, x, w)[0].astype(jnp.float32).sum()

    def step(w: jax.Array, m: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        value, gradient = jax.value_and_grad(loss)(w, x)
        m = jax.device_put(m, jax.memory.Space.Device) if payload.get("host_state") else m
        m = (0.9 * m + gradient).astype(jnp.bfloat16)
        new = (w - 0.1 * m).astype(jnp.bfloat16)
        return new, (jax.device_put(m, jax.memory.Space.Host) if payload.get("host_state") else m), value

    planned = dict.fromkeys(payload.get("offload", ()), layers * ROWS * WIDTH * 2)
    return TrainStep(step, (weights, state, batch), (weights.sharding, state.sharding, None), offloaded=planned)

"""Building blocks with Transformers' names and weight layout: `weight` is `[out, in]`.

Shapes: B sequences, S positions, D the model's width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

_DEVIATION = 0.02


def normal(rngs: nnx.Rngs, shape: tuple[int, ...]) -> jax.Array:
    """Initial weights, float32, deviation 0.02 (Transformers' `initializer_range`)."""
    return _DEVIATION * jax.random.normal(rngs.params(), shape, jnp.float32)


class Buffer(nnx.Variable):
    """State that no gradient is taken by; it starts at zero."""


class Linear(nnx.Module):
    """`x @ weight.T`, no bias."""

    def __init__(self, inputs: int, outputs: int, *, rngs: nnx.Rngs) -> None:
        self.weight = nnx.Param(normal(rngs, (outputs, inputs)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.einsum("...i,oi->...o", x, self.weight[...])


class Embedding(nnx.Module):
    """Rows of `weight` `[vocab, D]`."""

    def __init__(self, vocab: int, width: int, *, rngs: nnx.Rngs) -> None:
        self.weight = nnx.Param(normal(rngs, (vocab, width)))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return jnp.take(self.weight[...], tokens, axis=0)


class RMSNorm(nnx.Module):
    """Root-mean-square norm, computed in float32 and cast back before the weight (Transformers' LlamaRMSNorm)."""

    def __init__(self, width: int, *, eps: float) -> None:
        self.weight = nnx.Param(jnp.ones((width,), jnp.float32))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return self.weight[...] * normed.astype(x.dtype)


class SwiGLU(nnx.Module):
    """`down(silu(gate(x)) * up(x))`; the product carries the name `act`."""

    def __init__(self, width: int, intermediate: int, *, rngs: nnx.Rngs) -> None:
        self.gate_proj = Linear(width, intermediate, rngs=rngs)
        self.up_proj = Linear(width, intermediate, rngs=rngs)
        self.down_proj = Linear(intermediate, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(checkpoint_name(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x), "act"))


def stacked(make: Callable[[nnx.Rngs], Any], layers: int, *, rngs: nnx.Rngs) -> Any:
    """`layers` modules as one, every parameter with a leading axis: what a scan runs over."""
    return nnx.split_rngs(splits=layers)(nnx.vmap(make, in_axes=0, out_axes=0))(rngs)


def run_stack(layers: Any, x: jax.Array, *args: Any) -> jax.Array:
    """`x` through every layer of a stack, in one scan; `args` are the same for all layers."""
    graph, state = nnx.split(layers)

    def step(x: jax.Array, layer: Any) -> tuple[jax.Array, None]:
        return nnx.merge(graph, layer)(x, *args), None

    return jax.lax.scan(step, x, state)[0]


def rotary_angles(inverse_frequencies: Any, length: int, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine `[S, rotated]` of every position, computed in float32."""
    angles = jnp.arange(length, dtype=jnp.float32)[:, None] * jnp.asarray(inverse_frequencies, jnp.float32)
    angles = jnp.concatenate([angles, angles], axis=-1)
    return jnp.cos(angles).astype(dtype), jnp.sin(angles).astype(dtype)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotary embedding of `[B, S, heads, rotated]`, halves paired (Transformers' `rotate_half`)."""
    low, high = jnp.split(x, 2, axis=-1)
    cos, sin = (half[:, None, : half.shape[-1] // 2] for half in (cos, sin))
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


def rotate_interleaved(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """As `rotate`, of numbers laid out in neighbouring pairs (Transformers' `apply_rotary_pos_emb_interleave`)."""
    return rotate(jnp.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1), cos, sin)


def mean_cross_entropy(
    head: Callable[[jax.Array], jax.Array], hidden: jax.Array, labels: jax.Array, *, max_logits: int = 1 << 26
) -> jax.Array:
    """Mean cross entropy of the next token, holding the logits of one block of positions at a time.

    Args:
        head: `[B, block, D]` to logits `[B, block, vocab]`.
        hidden: `[B, S, D]`.
        labels: int `[B, S]`.
        max_logits: Logits of one sequence that may exist at once; S is cut evenly until they fit.
    """
    length = hidden.shape[1]
    vocab = jax.eval_shape(head, jax.ShapeDtypeStruct((1, 1, hidden.shape[-1]), hidden.dtype)).shape[-1]
    wanted = max(1, -(-length * vocab // max_logits))
    blocks = next(count for count in range(wanted, length + 1) if length % count == 0)

    def total(part: jax.Array, targets: jax.Array) -> jax.Array:
        logits = head(part).astype(jnp.float32)
        chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        return jnp.sum(jax.nn.logsumexp(logits, axis=-1) - chosen)

    if blocks == 1:
        return total(hidden, labels) / labels.size
    parts = jnp.moveaxis(hidden.reshape(hidden.shape[0], blocks, -1, hidden.shape[-1]), 1, 0)
    targets = jnp.moveaxis(labels.reshape(labels.shape[0], blocks, -1), 1, 0)
    one = jax.checkpoint(total, prevent_cse=False)
    sums = jax.lax.map(lambda pair: one(*pair), (parts, targets))
    return jnp.sum(sums) / labels.size

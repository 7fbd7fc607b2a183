"""Causal attention that never holds a sequence by sequence matrix beyond one block of queries.

Shapes: B sequences, S positions, H query heads, G key heads, R = H / G, D and E the sizes of a key's and a value's
head.

The backward pass recomputes the scores of one block at a time from the softmax statistics, as in FlashAttention-2
(Dao 2023, section 3.1, algorithm 2), in plain JAX: it compiles for every target, with or without the device.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

BLOCK = 1024
_MASKED = -1e30


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def causal_attention(q: jax.Array, k: jax.Array, v: jax.Array, scale: float, block: int = BLOCK) -> jax.Array:
    """Softmax attention of each position over itself and the positions before it.

    The result and its statistics carry the names `attn_out` and `attn_stats`: with both kept or offloaded, the backward
    pass does not run the attention a second time.

    Args:
        q: `[B, S, H, D]`.
        k: `[B, S, G, D]`, `H` a multiple of `G`.
        v: `[B, S, G, E]`.
        scale: Factor on the scores.
        block: Queries taken at a time; a sequence up to this long is one block.

    Returns:
        `[B, S, H, E]` in `v`'s dtype.
    """
    return _forward(q, k, v, scale, block)[0]


def _forward(
    q: jax.Array, k: jax.Array, v: jax.Array, scale: float, block: int
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    def one(start: jax.Array, queries: jax.Array) -> tuple[jax.Array, jax.Array]:
        scores = _scores(queries, k, start, scale)
        statistics = jax.nn.logsumexp(scores, axis=-1)
        weights = jnp.exp(scores - statistics[..., None]).astype(v.dtype)
        out = jnp.einsum("bgrqk,bkge->bqgre", weights, v)
        return out, statistics.transpose(0, 3, 1, 2)

    grouped, blocks = _blocks_of(_grouped(q, k), block)
    out, statistics = _map_blocks(lambda start, part: one(start, part[0]), (grouped,), blocks)
    length = q.shape[1]
    result = _merged(out, length).reshape(*q.shape[:3], v.shape[-1])
    result = checkpoint_name(result, "attn_out")
    statistics = checkpoint_name(_merged(statistics, length), "attn_stats")
    return result, (q, k, v, result, statistics)


def _backward(
    scale: float, block: int, residuals: tuple[jax.Array, ...], gradient: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    q, k, v, result, statistics = residuals
    # Row sums of gradient times result stand for the softmax's own correction term (FlashAttention-2, algorithm 2,
    # line 4).
    correction = (gradient.astype(jnp.float32) * result.astype(jnp.float32)).sum(-1)
    parts = (_grouped(q, k), _grouped(gradient, k), statistics, correction.reshape(statistics.shape))
    blocked = [_blocks_of(part, block) for part in parts]
    blocks = blocked[0][1]

    def one(
        sums: tuple[jax.Array, jax.Array], start: jax.Array, part: tuple[jax.Array, ...]
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        queries, out_gradient, stats, terms = part
        weights = jnp.exp(_scores(queries, k, start, scale) - stats.transpose(0, 2, 3, 1)[..., None])
        v_sum = sums[1] + jnp.einsum(
            "bgrqk,bqgre->bkge", weights.astype(v.dtype), out_gradient, preferred_element_type=jnp.float32
        )
        weight_gradient = jnp.einsum("bqgre,bkge->bgrqk", out_gradient, v, preferred_element_type=jnp.float32)
        score_gradient = weights * (weight_gradient - terms.transpose(0, 2, 3, 1)[..., None]) * scale
        score_gradient = score_gradient.astype(q.dtype)
        k_sum = sums[0] + jnp.einsum("bgrqk,bqgrd->bkgd", score_gradient, queries, preferred_element_type=jnp.float32)
        return (k_sum, v_sum), jnp.einsum("bgrqk,bkgd->bqgrd", score_gradient, k)

    sums = (jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32))
    sums, q_gradient = _scan_blocks(one, sums, tuple(part for part, _ in blocked), blocks)
    q_gradient = _merged(q_gradient, q.shape[1]).reshape(q.shape)
    return q_gradient, sums[0].astype(k.dtype), sums[1].astype(v.dtype)


causal_attention.defvjp(_forward, _backward)


def _scores(queries: jax.Array, k: jax.Array, start: jax.Array, scale: float) -> jax.Array:
    """`[B, G, R, block, S]` in float32, positions after the query masked."""
    # Differentiating a loop computes what needs no data ahead of it, for all iterations at once. The mask would be such
    # a thing, as large as all scores; the barrier ties it to the queries of its own block.
    queries, start = jax.lax.optimization_barrier((queries, start))
    scores = jnp.einsum("bqgrd,bkgd->bgrqk", queries, k, preferred_element_type=jnp.float32) * scale
    before = jnp.arange(k.shape[1])[None, :] <= start + jnp.arange(queries.shape[1])[:, None]
    return jnp.where(before, scores, _MASKED)


def _grouped(value: jax.Array, k: jax.Array) -> jax.Array:
    """`[B, S, H, X]` to `[B, S, G, R, X]`."""
    batch, length, heads, size = value.shape
    return value.reshape(batch, length, k.shape[2], heads // k.shape[2], size)


def _blocks_of(value: jax.Array, block: int) -> tuple[jax.Array, int]:
    """`[B, S, ...]` to `[blocks, B, block, ...]`, padded at the end, and the number of blocks."""
    length = value.shape[1]
    blocks = -(-length // block)
    if blocks == 1:
        return value[None], 1
    padded = jnp.pad(value, [(0, 0), (0, blocks * block - length), *([(0, 0)] * (value.ndim - 2))])
    return jnp.moveaxis(padded.reshape(value.shape[0], blocks, block, *value.shape[2:]), 1, 0), blocks


def _merged(value: jax.Array, length: int) -> jax.Array:
    """`[blocks, B, block, ...]` back to `[B, S, ...]`."""
    merged = jnp.moveaxis(value, 0, 1)
    return merged.reshape(merged.shape[0], -1, *merged.shape[3:])[:, :length]


def _map_blocks(one, parts: tuple[jax.Array, ...], blocks: int):
    def step(carry: None, start: jax.Array, part: tuple[jax.Array, ...]):
        return carry, one(start, part)

    return _scan_blocks(step, None, parts, blocks)[1]


def _scan_blocks(step, carry, parts: tuple[jax.Array, ...], blocks: int):
    """Scan over blocks; a single block runs without a loop, which XLA would unroll anyway."""
    size = parts[0].shape[2]
    if blocks == 1:
        carry, out = step(carry, jnp.int32(0), tuple(part[0] for part in parts))
        return carry, jax.tree.map(lambda value: value[None], out)
    starts = jnp.arange(blocks, dtype=jnp.int32) * size
    return jax.lax.scan(lambda c, x: step(c, x[0], x[1]), carry, (starts, parts))

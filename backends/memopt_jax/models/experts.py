"""Routed experts without dynamic shapes, without dropped tokens, and never tokens x experts x hidden in memory.

Shapes: T tokens, K experts per token, E experts held here, D the model's width, F an expert's.

Assignments of tokens to experts are sorted by expert and walked in blocks of rows that belong to one expert each: a
block gathers its tokens, runs one expert's MLP and adds its rows to the result. `jax.lax.ragged_dot` would say the
same, but XLA for GPUs expands it to one masked copy of the tokens per expert. The backward pass walks the same blocks
and computes an expert's hidden values again instead of keeping them, as the attention does with its scores.

How many blocks there are depends on the routing: the loops say in their name scope how many an even routing makes, and
`flops` and `overlap` count that many.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ..jaxprs import EXPECTED_TRIPS

_MAX_BLOCK = 512
_MIN_BLOCK = 8


@dataclass(frozen=True)
class ExpertParallel:
    """How tokens and experts lie on the mesh; `apply_policy` tells it to modules with an `expert_parallel` attribute.

    Attributes:
        mesh: With or without devices.
        data_axes: Axes that split the batch.
        expert_axis: The one of them that splits the experts too; None where every device runs all of them.
    """

    mesh: Any
    data_axes: tuple[str, ...]
    expert_axis: str | None = None

    @property
    def num_data(self) -> int:
        """Parts the batch is split in."""
        sizes = dict(self.mesh.shape)
        count = 1
        for axis in self.data_axes:
            count *= sizes[axis]
        return count

    @property
    def num_expert_parts(self) -> int:
        """Parts the experts are split in."""
        return 1 if self.expert_axis is None else dict(self.mesh.shape)[self.expert_axis]

    @property
    def other_axes(self) -> tuple[str, ...]:
        """Axes over which a device's experts are repeated."""
        return tuple(axis for axis in self.data_axes if axis != self.expert_axis)


def routed_experts(
    x: jax.Array,
    weights: jax.Array,
    chosen: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    parallel: ExpertParallel | None = None,
) -> jax.Array:
    """The weighted sum of each token's experts, `down(silu(gate(x)) * up(x))`.

    Over a mesh, each device handles its own tokens. With an expert axis, the devices along it hold different experts:
    they see each other's tokens (one all-gather) and add up their parts (one reduce-scatter).

    Args:
        x: `[B, S, D]`.
        weights: `[B, S, K]`, of each chosen expert.
        chosen: int `[B, S, K]`.
        gate_up: `[E, 2F, D]`, gate first.
        down: `[E, D, F]`.
        parallel: The mesh; None on one device.

    Returns:
        `[B, S, D]` in `x`'s dtype.
    """
    return _routed(x, weights, chosen, gate_up, down, parallel)


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def _routed(
    x: jax.Array, weights: jax.Array, chosen: jax.Array, gate_up: jax.Array, down: jax.Array, parallel: Any
) -> jax.Array:
    return _forward(x, weights, chosen, gate_up, down, parallel)[0]


def _forward(
    x: jax.Array, weights: jax.Array, chosen: jax.Array, gate_up: jax.Array, down: jax.Array, parallel: Any
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    def local(x: jax.Array, weights: jax.Array, chosen: jax.Array, gate_up: jax.Array, down: jax.Array) -> jax.Array:
        tokens, shares, experts = (_flat_and_gathered(value, parallel) for value in (x, weights, chosen))
        blocks = _blocks(experts, gate_up.shape[0], parallel)
        out = _run(blocks, tokens, shares, gate_up, down)
        return _scattered(out, parallel).astype(x.dtype).reshape(x.shape)

    data, held = _specs(parallel)
    run = _over_mesh(local, parallel, (data, data, data, held, held), data)
    return run(x, weights, chosen, gate_up, down), (x, weights, chosen, gate_up, down)


def _backward(
    parallel: Any, residuals: tuple[jax.Array, ...], gradient: jax.Array
) -> tuple[jax.Array, jax.Array, None, jax.Array, jax.Array]:
    def local(
        x: jax.Array, weights: jax.Array, chosen: jax.Array, gate_up: jax.Array, down: jax.Array, gradient: jax.Array
    ) -> tuple[jax.Array, ...]:
        tokens, shares, experts, wanted = (
            _flat_and_gathered(value, parallel) for value in (x, weights, chosen, gradient)
        )
        blocks = _blocks(experts, gate_up.shape[0], parallel)
        of_tokens, of_shares, of_gate_up, of_down = _run_backward(blocks, tokens, shares, gate_up, down, wanted)
        if parallel is not None and parallel.other_axes:
            of_gate_up, of_down = jax.lax.psum(
                (of_gate_up.astype(gate_up.dtype), of_down.astype(down.dtype)), parallel.other_axes
            )
        return (
            _scattered(of_tokens, parallel).astype(x.dtype).reshape(x.shape),
            _scattered(of_shares, parallel).astype(weights.dtype).reshape(weights.shape),
            of_gate_up.astype(gate_up.dtype),
            of_down.astype(down.dtype),
        )

    data, held = _specs(parallel)
    run = _over_mesh(local, parallel, (data, data, data, held, held, data), (data, data, held, held))
    of_x, of_weights, of_gate_up, of_down = run(*residuals, gradient)
    return of_x, of_weights, None, of_gate_up, of_down


_routed.defvjp(_forward, _backward)


@dataclass(frozen=True)
class Blocks:
    """Assignments sorted by expert, in blocks of rows of one expert.

    Attributes:
        order: int `[T K + size]`, assignments by expert; those of experts held elsewhere come last.
        counts: int `[E]`, assignments of each expert.
        ends: int `[E]`, blocks of the experts up to and with this one.
        size: Rows of a block.
        per_token: K.
        expected: Blocks that an even routing over all experts makes here.
    """

    order: jax.Array
    counts: jax.Array
    ends: jax.Array
    size: int
    per_token: int
    expected: int

    @classmethod
    def of(cls, experts: jax.Array, *, num_experts: int, share: float = 1.0) -> Blocks:
        """Sort.

        Args:
            experts: int `[T, K]`; outside 0 to E - 1 for experts that are not held here.
            num_experts: E.
            share: Part of all experts that is held here.
        """
        flat = experts.reshape(-1)
        flat = jnp.where((flat >= 0) & (flat < num_experts), flat, num_experts)
        counts = jnp.zeros(num_experts + 1, jnp.int32).at[flat].add(1)[:num_experts]
        num_rows = int(flat.shape[0] * share)
        size = block_size(num_rows, num_experts)
        order = jnp.argsort(flat, stable=True).astype(jnp.int32)
        return cls(
            order=jnp.concatenate([order, jnp.zeros(size, jnp.int32)]),
            counts=counts,
            ends=jnp.cumsum((counts + size - 1) // size),
            size=size,
            per_token=experts.shape[1],
            expected=-(-num_rows // size) + num_experts // 2,  # an expert's last block is half full
        )

    def loop(self, block: Callable[[jax.Array, Any], Any], initial: Any) -> Any:
        """Run every block; how many there are is known with the data alone."""
        with jax.named_scope(f"{EXPECTED_TRIPS}{self.expected}"):
            return jax.lax.fori_loop(0, self.ends[-1], block, initial)

    def rows(self, block: jax.Array, num_tokens: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Expert, assignments and tokens of a block; rows past the expert's last are out of range, each its own."""
        expert = jnp.sum(self.ends <= block, dtype=jnp.int32)
        count = self.counts[expert]
        before = jnp.sum(jnp.where(jnp.arange(self.counts.shape[0]) < expert, self.counts, 0))
        start = (block - self.ends[expert] + (count + self.size - 1) // self.size) * self.size
        places = jnp.arange(self.size, dtype=jnp.int32)
        assignments = jax.lax.dynamic_slice_in_dim(self.order, before + start, self.size)
        is_row = start + places < count
        tokens = jnp.where(is_row, assignments // self.per_token, num_tokens + places)
        return expert, jnp.where(is_row, assignments, num_tokens * self.per_token + places), tokens


def block_size(num_assignments: int, num_experts: int) -> int:
    """Rows of a block: a power of two near a quarter of an expert's even share, so that few rows are padding.

    >>> block_size(32768, 256), block_size(262144, 32)
    (32, 512)
    """
    size = _MIN_BLOCK
    while size < _MAX_BLOCK and 4 * size * num_experts < num_assignments:
        size *= 2
    return size


def _run(blocks: Blocks, tokens: jax.Array, shares: jax.Array, gate_up: jax.Array, down: jax.Array) -> jax.Array:
    """`[T, D]` in float32."""

    def block(number: jax.Array, out: jax.Array) -> jax.Array:
        expert, assignments, rows = blocks.rows(number, tokens.shape[0])
        _, _, hidden = _hidden(_taken(tokens, rows), gate_up[expert])
        made = jnp.einsum("bf,df->bd", hidden, down[expert], preferred_element_type=jnp.float32)
        share = _taken(shares.reshape(-1), assignments).astype(jnp.float32)
        return out.at[rows].add(made * share[:, None], mode="drop", unique_indices=True)

    return blocks.loop(block, jnp.zeros(tokens.shape, jnp.float32))


def _run_backward(
    blocks: Blocks, tokens: jax.Array, shares: jax.Array, gate_up: jax.Array, down: jax.Array, gradient: jax.Array
) -> tuple[jax.Array, ...]:
    """Gradients of tokens, shares, gate_up and down, in float32."""

    def block(number: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        of_tokens, of_shares, of_gate_up, of_down = sums
        expert, assignments, rows = blocks.rows(number, tokens.shape[0])
        x, wanted = _taken(tokens, rows), _taken(gradient, rows)
        share = _taken(shares.reshape(-1), assignments).astype(jnp.float32)
        gate, up, hidden = _hidden(x, gate_up[expert])
        per_share = jnp.einsum("bd,df->bf", wanted, down[expert], preferred_element_type=jnp.float32)
        of_share = jnp.sum(per_share * hidden.astype(jnp.float32), axis=-1)
        of_hidden = per_share * share[:, None]
        weighted = (wanted.astype(jnp.float32) * share[:, None]).astype(x.dtype)
        of_down = of_down.at[expert].add(jnp.einsum("bd,bf->df", weighted, hidden, preferred_element_type=jnp.float32))
        wide = gate.astype(jnp.float32)
        sigmoid = jax.nn.sigmoid(wide)
        of_gate = of_hidden * up.astype(jnp.float32) * sigmoid * (1 + wide * (1 - sigmoid))
        of_both = jnp.concatenate([of_gate, of_hidden * wide * sigmoid], axis=-1).astype(x.dtype)
        of_gate_up = of_gate_up.at[expert].add(jnp.einsum("bf,bd->fd", of_both, x, preferred_element_type=jnp.float32))
        of_x = jnp.einsum("bf,fd->bd", of_both, gate_up[expert], preferred_element_type=jnp.float32)
        return (
            of_tokens.at[rows].add(of_x, mode="drop", unique_indices=True),
            of_shares.at[assignments].set(of_share, mode="drop", unique_indices=True),
            of_gate_up,
            of_down,
        )

    sums = tuple(jnp.zeros(shape, jnp.float32) for shape in (tokens.shape, (shares.size,), gate_up.shape, down.shape))
    of_tokens, of_shares, of_gate_up, of_down = blocks.loop(block, sums)
    return of_tokens, of_shares.reshape(shares.shape), of_gate_up, of_down


def _hidden(x: jax.Array, gate_up: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gate, up and their activated product, `[block, F]` in `x`'s dtype."""
    gate, up = jnp.split(jnp.einsum("bd,fd->bf", x, gate_up), 2, axis=-1)
    return gate, up, jax.nn.silu(gate) * up


def _taken(values: jax.Array, rows: jax.Array) -> jax.Array:
    return values.at[rows].get(mode="fill", fill_value=0)


def _over_mesh(local: Callable[..., Any], parallel: Any, inputs: Any, outputs: Any) -> Callable[..., Any]:
    if parallel is None:
        return local
    return jax.shard_map(local, mesh=parallel.mesh, in_specs=inputs, out_specs=outputs, check_vma=False)


def _specs(parallel: Any) -> tuple[PartitionSpec, PartitionSpec]:
    if parallel is None:
        return PartitionSpec(), PartitionSpec()
    return PartitionSpec(parallel.data_axes), PartitionSpec(parallel.expert_axis)


def _blocks(experts: jax.Array, num_held: int, parallel: Any) -> Blocks:
    if parallel is None or parallel.expert_axis is None:
        return Blocks.of(experts, num_experts=num_held)
    first = jax.lax.axis_index(parallel.expert_axis) * num_held
    return Blocks.of(experts - first, num_experts=num_held, share=1 / parallel.num_expert_parts)


def _flat_and_gathered(value: jax.Array, parallel: Any) -> jax.Array:
    """`[B, S, X]` to `[T, X]`, with the tokens of all devices along the expert axis."""
    flat = value.reshape(-1, value.shape[-1])
    if parallel is None or parallel.expert_axis is None:
        return flat
    return jax.lax.all_gather(flat, parallel.expert_axis, axis=0, tiled=True)


def _scattered(value: jax.Array, parallel: Any) -> jax.Array:
    """A device's own tokens, summed over the expert axis."""
    if parallel is None or parallel.expert_axis is None:
        return value
    return jax.lax.psum_scatter(value, parallel.expert_axis, scatter_dimension=0, tiled=True)

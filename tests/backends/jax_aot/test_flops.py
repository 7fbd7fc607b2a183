"""FLOPs of a step: on the jaxpr times loop lengths, and of the compiled program."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from memopt_jax import flops, hlo, scalars

PROGRAMS = Path(__file__).parent / "programs"
A = jax.ShapeDtypeStruct((8, 16), jnp.float32)
B = jax.ShapeDtypeStruct((16, 16), jnp.float32)
ONE = 2 * 8 * 16 * 16


def test_a_scan_counts_its_length_and_nesting_multiplies() -> None:
    def inner(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda c, _: (c @ w, None), x, None, length=3)[0]

    def outer(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda c, _: (inner(c, w), None), x, None, length=5)[0]

    assert flops.count(jax.make_jaxpr(outer)(A, B)).total == 15 * ONE


def test_recompute_shows_as_more_products_on_the_jaxpr() -> None:
    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sin(jnp.sin(x @ w) @ w).sum()

    plain = flops.count(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(A, B)).total
    recomputed = flops.count(jax.make_jaxpr(jax.grad(jax.checkpoint(loss), argnums=(0, 1)))(A, B)).total
    assert plain == 6 * ONE
    assert recomputed > plain


def test_of_a_conditional_the_costliest_branch_counts_and_open_loops_are_told() -> None:
    def branching(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.cond(x.sum() > 0, lambda: x @ w @ w, lambda: x @ w)

    def open_ended(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda c: c.sum() < 1, lambda c: c @ w, x)

    assert flops.count(jax.make_jaxpr(branching)(A, B)).total == 2 * ONE
    counted = flops.count(jax.make_jaxpr(open_ended)(A, B))
    assert (counted.total, counted.num_unknown_loops) == (ONE, 1)


def test_convolutions_count_by_output_and_kernel() -> None:
    image, kernel = jax.ShapeDtypeStruct((2, 3, 10, 10), jnp.float32), jax.ShapeDtypeStruct((4, 3, 3, 3), jnp.float32)
    jaxpr = jax.make_jaxpr(lambda x, w: jax.lax.conv_general_dilated(x, w, (1, 1), "VALID"))(image, kernel)
    assert flops.count(jaxpr).total == 2 * (2 * 4 * 8 * 8) * (3 * 3 * 3)


@pytest.mark.parametrize("name", ["h100_offload_jaxlib_0.10.2", "h100_pipelined_jaxlib_0.12.0.1"])
def test_a_compiled_gpu_program_counts_every_iteration(name: str) -> None:
    module = hlo.parse((PROGRAMS / f"{name}.hlo").read_text())
    layer = 2 * 2048 * 1024 * 1024  # one product of one layer
    # Forward 2, recomputed 1, backward 4 products per layer; the compiler drops what no gradient needs.
    assert flops.count_compiled(module).total == pytest.approx(12 * 7 * layer, rel=0.02)
    assert flops.count_compiled(module).num_unknown_loops == 0


def test_a_tpu_writes_products_as_convolutions_and_its_loops_are_followed() -> None:
    module = hlo.parse((PROGRAMS / "v5e_offload_libtpu_0.0.52.hlo").read_text())
    gpu = hlo.parse((PROGRAMS / "h100_pipelined_jaxlib_0.12.0.1.hlo").read_text())
    assert set(scalars.trip_counts(module).values()) == {11}
    assert flops.count_compiled(module).total == flops.count_compiled(gpu).total


def test_only_kernel_positions_that_meet_the_input_count() -> None:
    window = {"stride": (1,), "pad": (1, 1), "lhs_dilate": (1,), "rhs_dilate": (1,)}
    assert flops._meeting_positions(4, 3, 4, window) == 3 * 4 - 2  # "same" padding: two positions fall outside
    # A batch of 8 products written as a spatial dimension: each output meets one kernel position.
    batch = {"stride": (7,), "pad": (0, 0), "lhs_dilate": (8,), "rhs_dilate": (1,)}
    assert flops._meeting_positions(8, 8, 8, batch) == 8

"""What happens to a parameter on its way from where it rests to where it is used.

All three steps belong inside the unit's region, so that the backward pass repeats them instead of keeping their
results: a fetched, gathered or cast weight is never a residual unless the policy asks for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

GATHERED = "memopt.gathered"
"""The `checkpoint_name` of a weight ready for use; kept where `reshard_after_forward` is false."""

WEIGHT_PRIMITIVES = frozenset({"device_put", "convert_element_type", "sharding_constraint", "custom_vjp_call"})
"""Primitives behind the three steps: what a region that keeps everything else must not keep."""


@dataclass(frozen=True)
class WeightPlan:
    """How one parameter is made ready.

    Attributes:
        fetch: Copy from host memory.
        dtype: Compute dtype, or None to leave it.
        used: Sharding while in use (the policy's axes gathered), or None to leave it.
        rests: Sharding of the parameter and its gradient between uses.
    """

    fetch: bool = False
    dtype: str | None = None
    used: Any = None
    rests: Any = None

    def use(self, value: jax.Array) -> jax.Array:
        """The weight, ready for use; differentiable, the gradient arriving in the parameter's own dtype and layout."""
        if self.fetch:
            value = jax.device_put(value, jax.memory.Space.Device)
        if self.dtype is not None:
            value = value.astype(self.dtype)
        if self.used is not None:
            value = _gather(value, self.used, self.rests)
        return checkpoint_name(value, GATHERED)


def cast_floating(tree: Any, dtype: str | None) -> Any:
    """Floating arrays of a call's arguments in the compute dtype; everything else as it is."""
    if dtype is None:
        return tree

    def cast(leaf: Any) -> Any:
        is_floating = hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)
        return jnp.asarray(leaf).astype(dtype) if is_floating else leaf

    return jax.tree.map(cast, tree)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather(value: jax.Array, used: Any, rests: Any) -> jax.Array:
    del rests
    return jax.lax.with_sharding_constraint(value, used)


def _gather_forward(value: jax.Array, used: Any, rests: Any) -> tuple[jax.Array, None]:
    return _gather(value, used, rests), None


def _gather_backward(used: Any, rests: Any, _: None, gradient: jax.Array) -> tuple[jax.Array]:
    # Without this the gradient would inherit the gathered layout: an all-reduce where a reduce-scatter is enough.
    del used
    return (jax.lax.with_sharding_constraint(gradient, rests),)


_gather.defvjp(_gather_forward, _gather_backward)

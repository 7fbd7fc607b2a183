"""A user's own checkpoint inside a unit whose other values are kept.

A region that keeps everything answers for the programs nested in it too, so JAX would keep what the user's inner
checkpoint (around attention, say) is there to drop. In such a region the inner one becomes a function with a backward
pass of its own, whose only residuals are its inputs: the same saving, whatever the region's policy says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, Literal

from .values import equations, inner_jaxprs, is_checkpoint, is_region


def holds_checkpoint(jaxpr: Jaxpr) -> bool:
    """Whether a program holds a checkpoint of the user's that can be replaced."""
    return any(_is_replaceable(eqn) for eqn in equations(jaxpr))


def _is_replaceable(eqn: Any) -> bool:
    floats = all(jnp.issubdtype(var.aval.dtype, jnp.floating) for var in eqn.outvars)
    return is_checkpoint(eqn) and not is_region(eqn) and eqn.params["policy"] is None and floats


def respected(body: Callable[[list[Any]], list[Any]]) -> Callable[[list[Any]], list[Any]]:
    """`body` with the user's checkpoints replaced, calls entered; the same function where there are none."""

    def run(values: list[Any]) -> list[Any]:
        closed = jax.make_jaxpr(body)(values)
        return _evaluate(closed.jaxpr, closed.consts, values)

    return run


def _evaluate(jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    env: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
    for eqn in jaxpr.eqns:
        inputs = [atom.val if isinstance(atom, Literal) else env[atom] for atom in eqn.invars]
        with eqn.ctx.manager:
            env.update(zip(eqn.outvars, _equation(eqn, inputs), strict=True))
    return [atom.val if isinstance(atom, Literal) else env[atom] for atom in jaxpr.outvars]


def _equation(eqn: Any, inputs: list[Any]) -> list[Any]:
    if _is_replaceable(eqn):
        return list(_recomputed(eqn.params["jaxpr"])(*inputs))
    inner = eqn.params.get("jaxpr")
    if eqn.primitive.name in ("jit", "pjit", "closed_call") and any(map(holds_checkpoint, inner_jaxprs(eqn))):
        return _evaluate(inner.jaxpr, inner.consts, inputs)
    outputs = eqn.primitive.bind(*inputs, **eqn.primitive.get_bind_params(eqn.params))
    return list(outputs) if eqn.primitive.multiple_results else [outputs]


def _recomputed(jaxpr: Jaxpr) -> Callable[..., list[Any]]:
    """The program with its inputs as its only residuals."""

    @jax.custom_vjp
    def call(*args: Any) -> list[Any]:
        return _evaluate(jaxpr, (), args)

    def backward(args: tuple[Any, ...], gradients: list[Any]) -> tuple[Any, ...]:
        # Behind a barrier: outside a loop the compiler would see the forward pass's results and use them again.
        args = jax.lax.optimization_barrier(args)
        _, pullback = jax.vjp(lambda *values: _evaluate(jaxpr, (), values), *args)
        found = pullback(gradients)
        return tuple(None if gradient.dtype == jax.dtypes.float0 else gradient for gradient in found)

    call.defvjp(lambda *args: (call(*args), args), backward)
    return call

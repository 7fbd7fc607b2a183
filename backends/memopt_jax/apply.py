"""`apply_policy` on JAX: which kind of model it is, and the `Applied` that comes back."""

from __future__ import annotations

from typing import Any

import flax.linen as linen
from flax import nnx

from memopt.errors import MemoptError
from memopt.plan import Plan
from memopt.spec import ModelSpec

from .nnx_apply import caller
from .user_code import calling_on_examples


def inspect(model: Any, *, params: Any, example_inputs: Any) -> ModelSpec:
    """The inventory of a model.

    Raises:
        MemoptError: `params-missing` for a linen module or function without its parameters; `example-inputs-rejected`.
    """
    with calling_on_examples(example_inputs):
        return _inspect(model, params=params, example_inputs=example_inputs)


def _inspect(model: Any, *, params: Any, example_inputs: Any) -> ModelSpec:
    if isinstance(model, nnx.Module):
        from .nnx_inventory import inspect as inspect_nnx

        return inspect_nnx(model, caller(example_inputs))
    if params is None:
        raise MemoptError.of(
            "params-missing",
            "a linen module and a JAX function hold no parameters of their own",
            hint="pass params=; what model.init returns, or shapes made with jax.eval_shape",
        )
    if isinstance(model, linen.Module):
        from .linen_apply import inspect as inspect_linen

        return inspect_linen(model, params, example_inputs)
    from .function_apply import inspect as inspect_function

    return inspect_function(model, params, example_inputs)


def apply(
    model: Any, plan: Plan, spec: ModelSpec, *, optimizer: Any, params: Any, example_inputs: Any, mesh: Any
) -> Any:
    """Apply a plan; returns an `Applied`."""
    if isinstance(model, nnx.Module):
        from .nnx_applied import NnxApplied

        return NnxApplied(model, plan, spec, mesh=mesh, optimizer=optimizer, example_inputs=example_inputs)
    if not isinstance(model, linen.Module):
        from .function_apply import FunctionApplied

        return FunctionApplied(model, plan, spec, mesh=mesh, optimizer=optimizer)
    from .linen_apply import LinenApplied

    return LinenApplied(model, plan, spec, params=params, mesh=mesh, optimizer=optimizer)

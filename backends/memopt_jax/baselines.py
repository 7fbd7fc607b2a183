"""The same work with JAX's own `checkpoint` and nothing of memopt, as written by hand: rows to compare with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from memopt.errors import MemoptError

from .nnx_inventory import inspect

_POLICIES = {
    "checkpoint": None,  # nothing is kept
    "checkpoint_dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


def checkpoint_layers(name: str, model: nnx.Module, call: Callable[[Any], Any]) -> None:
    """Put `nnx.remat` around every repeated layer of `model`, in its class: for a process that trains only this.

    Args:
        name: `checkpoint` keeps nothing, `checkpoint_dots` the products without batch dimensions.
        model: As built.
        call: Runs it forward; never computed, it says what is repeated.

    Raises:
        MemoptError: `baseline-no-layers`.
    """
    kinds: dict[type, None] = {}
    for stack in inspect(model, call).stacks:
        held: Any = model
        for part in stack.path.split("."):
            held = held[int(part)] if part.isdigit() else getattr(held, part)
        layers = list(held) if isinstance(held, (list, tuple, nnx.List)) else [held]
        kinds |= {type(layer): None for layer in layers}
    if not kinds:
        raise MemoptError.of("baseline-no-layers", f"the baseline `{name}` works by layers, and the model repeats none")
    for kind in kinds:
        kind.__call__ = nnx.remat(kind.__call__, policy=_POLICIES[name])  # type: ignore[method-assign]

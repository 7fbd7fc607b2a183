"""Names for activations: every value a policy can reach carries a `checkpoint_name` that says its path.

A mark is an identity at run time and costs nothing; inside a recomputed region it is what the policy recognises. Paths
of scanned stacks hold `*` where the layer's index would be, because one traced body stands for all layers.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer

PREFIX = "memopt:"


def mark_name(path: str) -> str:
    """The `checkpoint_name` that stands for a canonical path."""
    return PREFIX + path


def marked_path(name: str) -> str | None:
    """The canonical path a `checkpoint_name` stands for; None for a user's own name."""
    return name[len(PREFIX) :] if name.startswith(PREFIX) else None


_SCOPE = re.compile(r"memopt<([^>]*)>")


def scope(path: str) -> contextlib.AbstractContextManager[Any]:
    """The name scope of a module while the model is being recorded; `module_of` reads it back."""
    return jax.named_scope(f"memopt<{path}>")


def module_of(name_stack: str) -> str:
    """The innermost recorded module of a name stack; empty outside all modules.

    >>> module_of("jit(f)/memopt<layers.0>/memopt<layers.0.mlp>/mul")
    'layers.0.mlp'
    """
    found = _SCOPE.findall(name_stack)
    return found[-1] if found else ""


def is_array(value: Any) -> bool:
    """Whether `value` is something JAX traces, as opposed to a flag or a Python number."""
    return isinstance(value, jax.Array) or (
        hasattr(value, "shape") and hasattr(value, "dtype") and hasattr(value, "__array__")
    )


def is_traced(value: Any) -> bool:
    """Whether `value` stands for an array in a trace."""
    return isinstance(value, Tracer)


def leaf_paths(tree: Any, path: str) -> list[tuple[str, Any]]:
    """The arrays of a module's output with their paths: `PATH` for a single array, `PATH[i]` for the leaves of a tree.

    >>> import numpy as np
    >>> [name for name, _ in leaf_paths((np.ones(1), np.ones(2)), "mlp")]
    ['mlp[0]', 'mlp[1]']
    """
    leaves = jax.tree.leaves(tree)
    if len(leaves) == 1 and leaves[0] is tree:
        return [(path, tree)] if is_array(tree) else []
    return [(f"{path}[{index}]", leaf) for index, leaf in enumerate(leaves) if is_array(leaf)]


def mark_outputs(tree: Any, path: str, *, active: frozenset[str] | None) -> Any:
    """Mark the arrays of a module's output.

    Args:
        tree: What the module returned.
        path: The module's path.
        active: The paths to mark; None marks all.
    """
    leaves, structure = jax.tree.flatten(tree)
    if len(leaves) == 1 and leaves[0] is tree:
        return _mark(tree, path, active)
    return structure.unflatten([_mark(leaf, f"{path}[{index}]", active) for index, leaf in enumerate(leaves)])


def in_signature_order(call: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments in the order of the signature they go to; those it does not name come last.

    >>> list(in_signature_order(lambda self, x, mask=None: x, {"mask": 1, "x": 2}))
    ['x', 'mask']
    """
    if len(kwargs) < 2:
        return kwargs
    order = {name: place for place, name in enumerate(inspect.signature(call).parameters)}
    return dict(sorted(kwargs.items(), key=lambda item: order.get(item[0], len(order))))


def mark_inputs(
    args: tuple[Any, ...], kwargs: dict[str, Any], path: str, *, active: frozenset[str] | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Mark a module's tensor arguments: the first is `PATH.input`, the others `PATH.input[i]`, `i` from 1.

    Args:
        args: Positional arguments, in signature order.
        kwargs: Keyword arguments, in signature order too.
        path: The module's path.
        active: The paths to mark; None marks all.
    """
    seen = 0

    def mark(leaf: Any) -> Any:
        nonlocal seen
        if not is_array(leaf):
            return leaf
        name = f"{path}.input" if seen == 0 else f"{path}.input[{seen}]"
        seen += 1
        return _mark(leaf, name, active)

    marked = jax.tree.map(mark, args)
    # JAX flattens a dict by its sorted keys, which is not the order of the signature.
    return marked, {name: jax.tree.map(mark, value) for name, value in kwargs.items()}


def _mark(value: Any, path: str, active: frozenset[str] | None) -> Any:
    if not is_array(value) or (active is not None and path not in active):
        return value
    return checkpoint_name(value, mark_name(path))

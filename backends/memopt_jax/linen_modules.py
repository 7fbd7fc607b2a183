"""A policy on a `flax.linen` model with no edit of it: every method call passes an interceptor that knows its path.

The interceptor names outputs and runs a unit's `__call__` as a lifted recomputed region, under `nn.scan`, loops and any
other lifted transform. It is active only inside the wrapper's `apply`, in the calling thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
from flax.core import lift
from flax.linen.transforms import lift_transform

from . import naming
from .inner_checkpoints import respected
from .remat import Region, Static, UnitPolicy
from .weights import cast_floating

_OPEN: ContextVar[tuple[str, ...]] = ContextVar("memopt_open_units", default=())
"""Raw paths of the units whose regions are being traced: a lifted body calls its module's `__call__` again."""


@dataclass(frozen=True)
class LinenConfig:
    """What the interceptor does.

    Attributes:
        paths: Raw module path -> canonical path with `*`.
        active: Paths to mark; None marks all (when recording).
        regions: Canonical path of a unit -> its region.
        batched: Canonical paths of modules whose outputs are constrained.
        compute: Dtype the floating inputs of the model and of units are cast to.
        constrain: Keeps the batch split over the mesh in those.
        on_call: Told each module and its raw path, when recording.
    """

    paths: Mapping[str, str]
    active: frozenset[str] | None
    regions: Mapping[str, Region]
    batched: frozenset[str] = frozenset()
    constrain: Callable[[Any], Any] | None = None
    compute: str | None = None
    on_call: Callable[[str, nn.Module], None] | None = None


def raw_path(module: nn.Module) -> str:
    """The dotted path of a bound module, below its root."""
    return ".".join(module.path)


def interceptor(config: LinenConfig) -> Callable[..., Any]:
    """The function for `nn.intercept_methods`."""

    def intercept(next_call: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        if context.method_name != "__call__":
            return next_call(*args, **kwargs)
        module = context.module
        raw = raw_path(module)
        if config.on_call is not None:
            config.on_call(raw, module)
        path = config.paths[raw]
        region = config.regions.get(path)
        if region is not None and raw not in _OPEN.get():
            return _lifted(module, args, kwargs, region, raw)
        kwargs = naming.in_signature_order(type(module).__call__, kwargs)
        if not raw or region is not None:
            args, kwargs = cast_floating((args, kwargs), config.compute)
        args, kwargs = naming.mark_inputs(args, kwargs, path, active=config.active)
        with naming.scope(path) if config.active is None else contextlib.nullcontext():
            outputs = next_call(*args, **kwargs)
        if config.constrain is not None and path in config.batched:
            outputs = config.constrain(outputs)
        return naming.mark_outputs(outputs, path, active=config.active)

    return intercept


def _lifted(module: nn.Module, args: Any, kwargs: Any, region: Region, raw: str) -> Any:
    """The module's `__call__` inside `nn.remat`: flags are closed over, whatever their place in the signature."""
    arrays, rest = Static.split((args, kwargs))
    static_out: list[Static] = []

    def body(inner: nn.Module, values: list[Any]) -> Any:
        call_args, call_kwargs = rest.join(values)
        token = _OPEN.set((*_OPEN.get(), raw))
        try:
            outputs, static = Static.split(inner(*call_args, **call_kwargs))
        finally:
            _OPEN.reset(token)
        static_out.append(static)
        return outputs

    def ready(variables: Any) -> Any:
        return _use_weights(variables, region)

    if region.weights:
        inner_body = nn.map_variables(body, "params", trans_in_fn=ready, init=False, mutable=False)
    else:
        inner_body = body
    if region.policy is None:
        outputs = inner_body(module, arrays)
    else:
        kept = isinstance(region.policy, UnitPolicy) and region.policy.unnamed == "keep"
        transform = _checkpoint_respecting_inner if kept else lift.checkpoint
        region_body = lift_transform(transform, inner_body, policy=region.policy, prevent_cse=region.prevent_cse)
        outputs = region_body(module, arrays)
    return static_out[-1].join(outputs)


def _checkpoint_respecting_inner(
    fn: Callable[..., Any], *, policy: UnitPolicy, prevent_cse: bool
) -> Callable[..., Any]:
    """`flax.core.lift.checkpoint` for a policy that keeps what it does not name: the model's own remats inside hold."""

    def inner(scope_fn: Any, repack_fn: Any, variables: Any, rngs: Any, *args: Any) -> Any:
        leaves, structure = jax.tree.flatten((variables, rngs, args))
        structure_out: list[Any] = []

        def body(values: list[Any]) -> list[Any]:
            variables, rngs, call_args = structure.unflatten(values)
            scope = scope_fn(variables, rngs)
            outputs = fn(scope, *call_args)
            flat, made = jax.tree.flatten((outputs, repack_fn(scope)))
            structure_out.append(made)
            return flat

        outputs = jax.checkpoint(respected(body), policy=policy, prevent_cse=prevent_cse)(leaves)
        return structure_out[-1].unflatten(outputs)

    return lift.pack(inner, (True,), (True,), (True,), name="remat")


def _use_weights(variables: Any, region: Region) -> Any:
    weights = dict(region.weights)

    def use(path: tuple[Any, ...], leaf: Any) -> Any:
        name = ".".join(str(getattr(entry, "key", entry)) for entry in path[1:])  # the first is the collection
        return weights[name].use(leaf) if name in weights else leaf

    return jax.tree_util.tree_map_with_path(use, variables)

"""Inventory of a `flax.nnx` model: its state, its modules, and one abstract call of a recording copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from memopt.spec import ModelSpec

from .consecutive import numbered_on
from .inventory import Module, Parameter, canonical_path, spec_of
from .nnx_modules import Functional, ModuleConfig, configure, dotted, modules_of, plain_class
from .placement import EXPERT_AXIS, existing_sharding
from .remat import Static
from .values import Program, read


def inspect(model: Any, call: Callable[[Any], Any] | None) -> ModelSpec:
    """The inventory.

    Args:
        model: The module; concrete or made under `nnx.eval_shape`.
        call: Calls the model it is given; None where no inputs are known, then activations have no shapes.
    """
    parameters = parameters_of(model)
    modules = [
        Module(raw, canonical_path(raw), plain_class(type(module)).__name__) for raw, module in modules_of(model)
    ]
    modules = [
        module for module in modules if module.class_name not in ("List", "Dict", "Sequential") or not module.raw
    ]
    spec = spec_of(parameters, modules, None if call is None else record(model, call), ties=ties_of(model))
    return numbered_on(spec, getattr(model, "consecutive_stacks", {}))


def parameters_of(model: Any) -> list[Parameter]:
    """Every variable of the model but random-number state."""
    found = []
    by_expert = {dotted(raw) for raw, module in nnx.iter_modules(model) if hasattr(module, "expert_parallel")}
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        value = variable.get_raw_value()
        if isinstance(variable, nnx.RngState) or not hasattr(value, "shape"):
            continue
        raw = dotted(path)
        sharding, sizes = existing_sharding(value)
        found.append(
            Parameter(
                raw,
                canonical_path(raw),
                tuple(value.shape),
                str(value.dtype),
                trainable=isinstance(variable, nnx.Param),
                sharding=sharding,
                axis_sizes=sizes,
                split_in_use={EXPERT_AXIS: 0} if raw.rpartition(".")[0] in by_expert else {},
            )
        )
    return found


def ties_of(model: Any) -> list[tuple[str, ...]]:
    """Canonical paths of variables reached by more than one path; the first is the one in the state."""
    first = {canonical_path(dotted(path)) for path, _ in nnx.to_flat_state(nnx.state(model))}
    paths: dict[int, list[str]] = {}
    for raw, module in modules_of(model):
        for name, value in vars(module).items():
            if isinstance(value, nnx.Variable):
                paths.setdefault(id(value), []).append(canonical_path(f"{raw}.{name}" if raw else name))
    groups = [sorted(group, key=lambda path: path not in first) for group in paths.values() if len(group) > 1]
    return [tuple(group) for group in groups]


def record(model: Any, call: Callable[[Any], Any]) -> Program:
    """Trace `call` on a copy of the model whose modules mark everything they take and give."""
    graph, state = nnx.split(model)
    recording = nnx.merge(graph, jax.tree.map(_abstract, state))
    for raw, module in modules_of(recording):
        configure(module, ModuleConfig(canonical_path(raw), active=None))
    functional = Functional(recording)
    static: list[Static] = []

    def traced(leaves: list[Any]) -> list[Any]:
        outputs, rest = Static.split(call(functional.merge(leaves)))
        static.append(rest)
        return outputs

    return read(jax.make_jaxpr(traced)(functional.leaves))


def _abstract(leaf: Any) -> Any:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if hasattr(leaf, "shape") else leaf

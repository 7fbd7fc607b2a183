"""Inventory of a `flax.linen` model: its parameters, and one abstract call under a recording interceptor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax

from memopt.spec import ModelSpec

from .inventory import Module, Parameter, canonical_path, spec_of
from .linen_modules import LinenConfig, interceptor
from .placement import existing_sharding, leaf_path
from .remat import Static
from .values import Program, read


def inspect(model: nn.Module, variables: Mapping[str, Any], call: Callable[[Any], Any] | None) -> ModelSpec:
    """The inventory.

    Args:
        model: The unbound module.
        variables: Its variable collections, `params` among them.
        call: Runs the model on the variables it is given; None where no inputs are known.
    """
    parameters = parameters_of(variables)
    if call is None:
        owners = {parameter.raw.rpartition(".")[0] for parameter in parameters} - {""}
        every = {".".join(raw.split(".")[:depth]) for raw in owners for depth in range(1, raw.count(".") + 2)}
        modules = [Module(raw, canonical_path(raw), "Module") for raw in sorted(every)]
        modules.insert(0, Module("", "", type(model).__name__))
        return spec_of(parameters, modules, None)
    modules, program = record(model, variables, call)
    return spec_of(parameters, modules, program)


def parameters_of(variables: Mapping[str, Any]) -> list[Parameter]:
    """Every array of the variable collections; `params` are trainable, the others are buffers."""
    found = []
    for collection in sorted(variables, key=lambda name: name != "params"):
        for path, leaf in jax.tree_util.tree_flatten_with_path(variables[collection])[0]:
            raw = ".".join(leaf_path(path))
            sharding, sizes = existing_sharding(leaf)
            found.append(
                Parameter(
                    raw,
                    canonical_path(raw),
                    tuple(leaf.shape),
                    str(leaf.dtype),
                    trainable=collection == "params",
                    sharding=sharding,
                    axis_sizes=sizes,
                )
            )
    return found


def record(model: nn.Module, variables: Mapping[str, Any], call: Callable[[Any], Any]) -> tuple[list[Module], Program]:
    """Trace `call` with every module marking what it takes and gives."""
    classes: dict[str, str] = {}

    def called(raw: str, module: nn.Module) -> None:
        classes.setdefault(raw, type(module).__name__)

    config = LinenConfig(
        paths=_Canonical(),
        active=None,
        regions={},
        on_call=called,
    )

    def traced(values: Any) -> list[Any]:
        with nn.intercept_methods(interceptor(config)):
            return Static.split(call(values))[0]

    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), dict(variables))
    program = read(jax.make_jaxpr(traced)(abstract))
    classes.setdefault("", type(model).__name__)
    modules = [Module(raw, canonical_path(raw), name) for raw, name in classes.items()]
    return sorted(modules, key=lambda module: module.raw != ""), program


class _Canonical(dict[str, str]):
    """Raw module path -> canonical path, worked out as asked for."""

    def __missing__(self, raw: str) -> str:
        self[raw] = canonical_path(raw)
        return self[raw]

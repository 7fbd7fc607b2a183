"""A policy on a `flax.nnx` model with no edit of it: instances get a cached subclass of their own class.

The subclass keeps the class's name, so printing, `isinstance` and saving see no difference; `nnx.split` carries it in
the graph definition, so stacks under `nnx.scan`, `nnx.vmap` or a hand-written `jax.lax.scan` over split state are
reached too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from memopt.errors import MemoptError

from . import naming
from .models.experts import ExpertParallel
from .placement import leaf_path
from .remat import Region, run_region
from .weights import WeightPlan, cast_floating

_MARKER = "_memopt_config"


@dataclass(frozen=True)
class ModuleConfig:
    """What one module instance does beside its own `__call__`.

    Attributes:
        path: Canonical path; `*` for the index of a scanned stack.
        active: Paths to mark among its inputs and outputs; None marks all (when recording).
        region: Given for units, and for modules whose own weights are fetched or cast.
        compute: Dtype its floating inputs are cast to, as its weights are; None leaves them.
        constrain: Applied to its outputs: keeps the batch split over the mesh.
        expert_parallel: How tokens and experts lie on the mesh, for a module that asks for it.
        root: Wraps the whole call of the model (cutting scans); given for the root alone.
    """

    path: str
    active: frozenset[str] | None
    region: Region | None = None
    compute: str | None = None
    constrain: Callable[[Any], Any] | None = None
    expert_parallel: ExpertParallel | None = None
    root: Callable[[Callable[[Any], Any], Any], Any] | None = None


def dotted(path: tuple[Any, ...]) -> str:
    """The raw dotted path of a module or a variable."""
    return ".".join(str(part) for part in path)


def modules_of(model: Any) -> list[tuple[str, Any]]:
    """Every module instance with its raw path, root first, each instance once."""
    found = [(dotted(path), module) for path, module in nnx.iter_modules(model)]
    return sorted(found, key=lambda item: item[0] != "")


def configure(module: Any, config: ModuleConfig) -> None:
    """Give one instance the behaviour of `config`, in place.

    Raises:
        MemoptError: `applied-twice` when it has one already.
    """
    if hasattr(type(module), _MARKER):
        raise MemoptError.of(
            "applied-twice",
            f"`{config.path or 'the model'}` has a policy already",
            hint="build the model again and apply the second policy to the new one",
            path=config.path,
        )
    object.__setattr__(module, "__class__", _subclass(type(module), config))


def restore(module: Any) -> None:
    """Give one instance its own class back, in place."""
    if hasattr(type(module), _MARKER):
        object.__setattr__(module, "__class__", plain_class(type(module)))


def plain_class(cls: type) -> type:
    """The user's class behind a configured one."""
    return cls.__mro__[1] if _MARKER in vars(cls) else cls


@functools.cache
def _subclass(cls: type, config: ModuleConfig) -> type:
    call = cls.__call__

    @functools.wraps(call)
    def marked(self: Any, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = cast_floating((args, naming.in_signature_order(call, kwargs)), config.compute)
        args, kwargs = naming.mark_inputs(args, kwargs, config.path, active=config.active)
        recording = config.active is None
        name = config.path.rpartition(".")[2] or plain_class(cls).__name__
        with naming.scope(config.path) if recording else jax.named_scope(name):
            outputs = call(self, *args, **kwargs)
        if config.constrain is not None:
            outputs = config.constrain(outputs)
        return naming.mark_outputs(outputs, config.path, active=config.active)

    entry = marked
    if config.region is not None:
        entry = _region_call(marked, config.path, config.region)
    if config.root is not None:
        entry = _root_call(entry, config.root)
    members: dict[str, Any] = {"__call__": entry, "__module__": cls.__module__, _MARKER: config}
    if config.expert_parallel is not None:
        members["expert_parallel"] = config.expert_parallel
    return type(cls.__name__, (cls,), members)


def _region_call(call: Callable[..., Any], path: str, region: Region) -> Callable[..., Any]:
    weights = dict(region.weights)

    @functools.wraps(call)
    def entry(self: Any, *args: Any, **kwargs: Any) -> Any:
        if region.policy is None and not weights:
            return call(self, *args, **kwargs)

        def body(inputs: tuple[list[Any], Any]) -> Any:
            leaves, (call_args, call_kwargs) = inputs
            return functional.call(call, _use_weights(functional, leaves, weights), call_args, call_kwargs, path=path)

        functional = Functional(self)
        outputs, changed = run_region(
            body,
            (functional.leaves, (args, kwargs)),
            policy=region.policy,
            prevent_cse=region.prevent_cse,
        )
        functional.write_back(self, changed)
        return outputs

    return entry


def _use_weights(functional: Functional, leaves: list[Any], weights: Mapping[str, WeightPlan]) -> list[Any]:
    return [
        weights[name].use(leaf) if name in weights else leaf
        for name, leaf in zip(functional.names, leaves, strict=True)
    ]


def _root_call(call: Callable[..., Any], root: Callable[[Callable[[Any], Any], Any], Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def entry(self: Any, *args: Any, **kwargs: Any) -> Any:
        functional = Functional(self)

        def body(inputs: tuple[list[Any], Any]) -> Any:
            leaves, (call_args, call_kwargs) = inputs
            return functional.call(call, leaves, call_args, call_kwargs, path="")

        outputs, changed = root(body, (functional.leaves, (args, kwargs)))
        functional.write_back(self, changed)
        return outputs

    return entry


class Functional:
    """A module split into its graph and the arrays it holds, so that a transformation sees them as inputs.

    Only variables a call really changed are written back: handing every weight through as an output would make a scan
    stack copies of them.

    Attributes:
        names: Dotted path of each array, relative to the module.
        leaves: The arrays.
    """

    def __init__(self, module: Any) -> None:
        self.graph, self._state = nnx.split(module)
        paths, self._structure = jax.tree_util.tree_flatten_with_path(self._state)
        self.names = [dotted(leaf_path(path)) for path, _ in paths]
        self.leaves = [leaf for _, leaf in paths]

    def merge(self, leaves: list[Any]) -> Any:
        """A copy of the module that holds `leaves`."""
        return nnx.merge(self.graph, self._structure.unflatten(leaves))

    def call(self, call: Callable[..., Any], leaves: list[Any], args: Any, kwargs: Any, *, path: str) -> Any:
        """Call on a copy that holds `leaves`; returns the output and {index of a changed array: its new value}.

        Raises:
            MemoptError: `unit-changes-structure` when the call adds or removes variables.
        """
        module = self.merge(leaves)
        before = [leaf for _, leaf in jax.tree_util.tree_flatten_with_path(nnx.state(module))[0]]
        outputs = call(module, *args, **kwargs)
        graph, state = nnx.split(module)
        after, structure = jax.tree.flatten(state)
        if structure != self._structure or graph != self.graph:
            raise MemoptError.of(
                "unit-changes-structure",
                f"calling `{path or 'the model'}` adds or removes variables (`sow`, or a cache made on first call), "
                "which a recomputed region cannot do",
                hint="create the variables before apply_policy, or take the unit out of the policy's units",
                path=path,
            )
        changed = {index: new for index, (old, new) in enumerate(zip(before, after, strict=True)) if old is not new}
        return outputs, changed

    def write_back(self, module: Any, changed: Mapping[int, Any]) -> None:
        """Put the changed arrays into `module`."""
        if not changed:
            return
        leaves = [changed.get(index, leaf) for index, leaf in enumerate(self.leaves)]
        nnx.update(module, self._structure.unflatten(leaves))

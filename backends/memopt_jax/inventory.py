"""The inventory of a JAX model: parameters from its state, activations from one abstract trace; nothing is allocated.

Without example inputs activations have paths but no shapes, and only what the model's structure shows has a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from memopt.matching import canonical, is_input_name
from memopt.spec import ModelSpec, ModuleSpec, StackSpec, TensorSpec
from memopt.vocabulary import family_of, tensor_name

from .naming import module_of
from .values import Program, Value


@dataclass(frozen=True)
class Parameter:
    """One array of the model's state.

    Attributes:
        raw: Dotted path in the state.
        path: Canonical path.
        shape, dtype: As held, stacking axis included.
        trainable: Whether a gradient is taken by it.
        sharding: Existing placement: mesh axis -> dimension, stacking axis included.
        axis_sizes: Sizes of those axes.
        split_in_use: Axes its module can compute with while they split it: axis -> dimension of one layer's tensor.
    """

    raw: str
    path: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool = True
    sharding: Mapping[str, int] = field(default_factory=dict)
    axis_sizes: Mapping[str, int] = field(default_factory=dict)
    split_in_use: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Module:
    """One module: raw and canonical path (no index for scanned stacks), class name."""

    raw: str
    path: str
    class_name: str


def spec_of(
    parameters: Sequence[Parameter],
    modules: Sequence[Module],
    program: Program | None,
    *,
    ties: Iterable[tuple[str, ...]] = (),
) -> ModelSpec:
    """Put the inventory together."""
    scanned = scanned_stacks(parameters, modules, program)
    stacks = sorted((*scanned, *_loop_stacks(modules)), key=lambda stack: -_stack_bytes(stack, parameters))
    family = family_of(module.class_name for module in modules)
    lengths = {stack.path: stack.length for stack in scanned}
    tensors = [tensor for parameter in parameters for tensor in parameter_rows(parameter, lengths)]
    if program is None:
        tensors += _structural_rows(modules, stacks, lengths, family)
    else:
        tensors += ActivationRows(program, stacks, family).rows()
    return ModelSpec(
        backend="jax",
        family=family,
        tensors=tuple(tensors),
        modules=tuple(_module_rows(modules, lengths, parameters)),
        stacks=tuple(stacks),
        ties=tuple(ties),
        batch="global",
    )


def as_arrays(inputs: Any) -> Any:
    """Example inputs that a model can be called with inside a trace: zeros where shapes alone were given."""
    return jax.tree.map(
        lambda leaf: jax.numpy.zeros(leaf.shape, leaf.dtype) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf, inputs
    )


def canonical_path(raw: str) -> str:
    """The canonical path of a raw one, `layers_3` and `layers.3` alike.

    >>> canonical_path("model.layers_3.mlp.kernel")
    'layers.3.mlp.kernel'
    """
    parts = []
    for part in canonical(raw).split("."):
        stem, _, index = part.rpartition("_")
        parts.extend([stem, index] if stem and index.isdigit() else [part])
    return ".".join(parts)


def scanned_stacks(
    parameters: Sequence[Parameter], modules: Sequence[Module], program: Program | None
) -> list[StackSpec]:
    """Stacks whose layers are one traced body: modules called inside a scan whose parameters all have its length
    first."""
    classes = {module.path: module.class_name for module in modules}
    if program is None:
        return _guessed_stacks(parameters, classes)
    found: dict[str, StackSpec] = {}
    for site in program.scans:
        paths = {_module_path(name) for name in site.names if "@" not in name}
        for path in _outermost(paths):
            owned = [parameter.shape for parameter in parameters if parameter.path.startswith(path + ".")]
            inside = any(path.startswith(outer + ".") for outer in found)
            if path and owned and not inside and all(shape and shape[0] == site.length for shape in owned):
                found.setdefault(path, StackSpec(path, site.length, "scan", classes.get(path, "")))
    return list(found.values())


def _guessed_stacks(parameters: Sequence[Parameter], classes: Mapping[str, str]) -> list[StackSpec]:
    """Without a trace: a module whose parameters all share a leading size, biases and norm scales included."""
    found: list[StackSpec] = []
    for path, class_name in sorted(classes.items()):
        owned = [parameter for parameter in parameters if parameter.path.startswith(path + ".")]
        vectors = [p for p in owned if p.path.rpartition(".")[2] in ("bias", "scale", "weight") and len(p.shape) >= 2]
        leading = {parameter.shape[:1] for parameter in owned}
        inside = any(path.startswith(stack.path + ".") for stack in found)
        children = {parameter.path.removeprefix(path + ".").partition(".")[0] for parameter in owned}
        if path and not inside and len(leading) == 1 and len(children) > 1 and vectors and () not in leading:
            ranks = {len(p.shape) for p in owned if p.path.rpartition(".")[2] in ("bias", "scale") or "norm" in p.path}
            if ranks and min(ranks) == 2:
                found.append(StackSpec(path, next(iter(leading))[0], "scan", class_name))
    return found


def _loop_stacks(modules: Sequence[Module]) -> list[StackSpec]:
    children: dict[str, dict[int, str]] = {}
    for module in modules:
        parent, _, index = module.path.rpartition(".")
        if index.isdigit():
            children.setdefault(parent, {})[int(index)] = module.class_name
    return [
        StackSpec(parent, len(members), "loop", members[0])
        for parent, members in children.items()
        if len(members) > 1 and sorted(members) == list(range(len(members))) and len(set(members.values())) == 1
    ]


def _outermost(paths: set[str]) -> list[str]:
    return sorted(path for path in paths if not any(path.startswith(other + ".") for other in paths if other != path))


def _module_path(name: str) -> str:
    """The module an activation's name belongs to.

    >>> _module_path("layers.mlp.input[1]"), _module_path("layers.mlp[0]")
    ('layers.mlp', 'layers.mlp')
    """
    base = name.partition("[")[0]
    return base.removesuffix(".input") if base != "input" else ""


def _stack_bytes(stack: StackSpec, parameters: Sequence[Parameter]) -> int:
    return sum(_nbytes(p.shape, p.dtype) for p in parameters if p.path.startswith(stack.path + "."))


def _nbytes(shape: Sequence[int], dtype: str) -> int:
    size = 1
    for dimension in shape:
        size *= dimension
    return size * jax.numpy.dtype(dtype).itemsize if dtype else 0


def stack_above(path: str, lengths: Mapping[str, int]) -> str | None:
    """The scanned stack a canonical path without index lies in."""
    return next((stack for stack in lengths if path == stack or path.startswith((stack + ".", stack + "["))), None)


def indexed(path: str, stack: str, index: int | str) -> str:
    """The path with the layer's index.

    >>> indexed("layers.mlp", "layers", 3)
    'layers.3.mlp'
    """
    return f"{stack}.{index}{path[len(stack) :]}"


def parameter_rows(parameter: Parameter, lengths: Mapping[str, int]) -> list[TensorSpec]:
    """A parameter's rows: one, or one per layer of its scanned stack."""
    stack = stack_above(parameter.path, lengths)
    role = "param" if parameter.trainable else "buffer"
    if stack is None:
        shapes = [(parameter.path, parameter.shape, parameter.sharding)]
    else:
        sharding = {axis: dimension - 1 for axis, dimension in parameter.sharding.items() if dimension > 0}
        shapes = [
            (indexed(parameter.path, stack, index), parameter.shape[1:], sharding) for index in range(lengths[stack])
        ]
    return [
        TensorSpec(
            path=path,
            role=role,
            shape=shape,
            dtype=parameter.dtype,
            aliases=() if parameter.raw == path else (parameter.raw,),
            module=path.rpartition(".")[0],
            trainable=parameter.trainable,
            sharding=sharding,
            axis_sizes=parameter.axis_sizes,
            split_in_use=parameter.split_in_use,
        )
        for path, shape, sharding in shapes
    ]


def _module_rows(
    modules: Sequence[Module], lengths: Mapping[str, int], parameters: Sequence[Parameter]
) -> Iterable[ModuleSpec]:
    for module in modules:
        below = [p for p in parameters if not module.path or p.path.startswith(module.path + ".")]
        total = sum(_nbytes(p.shape, p.dtype) for p in below)
        stack = stack_above(module.path, lengths)
        if stack is None:
            yield ModuleSpec(module.path, module.raw, module.class_name, total)
            continue
        for index in range(lengths[stack]):
            # The raw path has no index: as a second name of every layer's module, `layers.*` would match it.
            path = indexed(module.path, stack, index)
            yield ModuleSpec(path, path, module.class_name, total // lengths[stack])


def _structural_rows(
    modules: Sequence[Module], stacks: Sequence[StackSpec], lengths: Mapping[str, int], family: str | None
) -> list[TensorSpec]:
    layers = {f"{stack.path}.{index}" for stack in stacks for index in range(stack.length)}
    rows = []
    for module in modules:
        stack = stack_above(module.path, lengths)
        paths = [module.path] if stack is None else [indexed(module.path, stack, i) for i in range(lengths[stack])]
        for path in paths:
            if path in layers:
                path = f"{path}.input"
            if path and not any(stack.path == path for stack in stacks):
                rows.append(TensorSpec(path, "activation", None, None, module=path, tensor=tensor_name(family, path)))
    return rows


class ActivationRows:
    """One row per value: its path, and its other names as aliases."""

    def __init__(self, program: Program, stacks: Sequence[StackSpec], family: str | None) -> None:
        self._program = program
        self._family = family
        self._scanned = {stack.path: stack.length for stack in stacks if stack.kind == "scan"}
        self._layers = {f"{stack.path}.{index}" for stack in stacks for index in range(stack.length)}

    def rows(self) -> list[TensorSpec]:
        """The rows, in program order, layers of scanned stacks one after another."""
        values = [value for value in self._program.named if value.shape]
        by_layer: dict[tuple[str, int], list[TensorSpec]] = {}
        order: dict[tuple[str, int] | int, list[TensorSpec]] = {}
        for position, value in enumerate(values):
            stack = self._stack_of(value)
            for index in range(self._scanned[stack]) if stack is not None else (None,):
                row = self._row(value, stack, index)
                if row is None:
                    continue
                key = position if stack is None or index is None else (stack, index)
                target = order.setdefault(key, [])
                if not isinstance(key, int):
                    by_layer[key] = target
                target.append(row)
        return [row for rows in order.values() for row in rows] + self._op_rows()

    def _stack_of(self, value: Value) -> str | None:
        if not value.scans:
            return None
        return next((stack for name in value.names if (stack := stack_above(_plain(name), self._scanned))), None)

    def _row(self, value: Value, stack: str | None, index: int | None) -> TensorSpec | None:
        names = self._names(value, stack, index)
        own = [name for name in names if "@" not in name]
        user = [name.rpartition("@") for name in names if "@" in name]
        own = [
            name for name in own if _module_path(name)
        ]  # what the model itself takes and gives is not its own to place
        paths = [*own, *(f"{module}.{name}" if module else name for module, _, name in user)]
        path = self._primary(paths, shared=value.constant)
        if path is None:
            return None
        tensors = (tensor_name(self._family, name) for name in (path, *paths))
        inner = value.scans[1:] if stack is not None else value.scans
        return TensorSpec(
            path=path,
            role="activation",
            shape=(*inner, *value.shape),
            dtype=value.dtype,
            aliases=tuple(dict.fromkeys(name for name in paths if name != path)),
            module=_module_path(path),
            checkpoint_name=user[0][2] if user else None,
            tensor=next((name for name in tensors if name is not None), None),
            op=value.op,
        )

    def _names(self, value: Value, stack: str | None, index: int | None) -> list[str]:
        """The value's names, with those it had on its way in: the layer before, or what came before the first layer."""
        if stack is None or index is None:
            carried = [] if value.previous is None else self._last_layer(value.previous)
            return [*carried, *value.names]
        names = [
            indexed(name, stack, index) if stack_above(_plain(name), self._scanned) else name for name in value.names
        ]
        if value.previous is not None and index > 0:
            names = [*(indexed(name, stack, index - 1) for name in value.previous.names), *names]
        elif value.initial is not None and index == 0:
            names = [*value.initial.names, *names]
        return names

    def _last_layer(self, value: Value) -> list[str]:
        stack = self._stack_of(value)
        return [] if stack is None else [indexed(name, stack, self._scanned[stack] - 1) for name in value.names]

    def _primary(self, paths: list[str], *, shared: bool) -> str | None:
        """A layer's input is called so; else the module that made the value names it; a layer's own output has no
        row."""
        layer_inputs = [path for path in paths if is_input_name(path) and _module_path(path) in self._layers]
        if len(layer_inputs) > 1 or (layer_inputs and shared):
            return None  # one value that all layers receive (rotary angles, masks): no layer holds it
        if layer_inputs:
            return layer_inputs[0]
        made = [path for path in paths if not is_input_name(path) and path.partition("[")[0] not in self._layers]
        inputs = [path for path in paths if is_input_name(path)]
        return next(iter((*made, *inputs)), None)

    def _layer_above(self, module: str) -> str | None:
        return next((path for path in self._layers if module == path or module.startswith(path + ".")), None)

    def _op_rows(self) -> list[TensorSpec]:
        """One row per unit and `op:` class for values no name reaches."""
        classes: dict[tuple[str, str], None] = {}
        attention_is_named = any(value.op == "attention" for value in self._program.named)
        for value in self._program.unnamed_ops:
            if value.op is None or value.covered or (value.op == "attention" and attention_is_named):
                continue
            module = module_of(value.scope)
            stack = stack_above(module, self._scanned)
            if stack is not None:
                for index in range(self._scanned[stack]):
                    classes[(f"{stack}.{index}", value.op)] = None
            elif (layer := self._layer_above(module)) is not None:
                classes[(layer, value.op)] = None
        return [
            TensorSpec(f"{layer}.<{op}>", "activation", None, None, module=layer, op=op)
            for layer, op in sorted(classes)
        ]


def _plain(name: str) -> str:
    return name.partition("@")[0] if "@" in name else name

"""The inventory of a torch module: every parameter, buffer and named value by canonical path, read without running it.

A value is known by the module whose output it is (`layers.3.mlp.up_proj`) or that takes it first
(`layers.3.mlp.down_proj.input`). Shapes of activations need a run and are unknown here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from memopt.matching import canonical_paths
from memopt.spec import ModelSpec, ModuleSpec, StackSpec, TensorSpec
from memopt.vocabulary import family_of

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
OPS = ("matmul", "attention", "topk", "random")


@dataclass(frozen=True)
class Names:
    """Canonical paths of a model's modules and parameters, and back.

    Attributes:
        modules: Canonical path -> module; "" is the root. A module with several paths is listed under the first.
        aliases: Other canonical paths of shared modules -> the first.
        raw_modules: Canonical path -> raw path.
        parameters: Canonical path -> every (module, attribute) that holds it, tied places included.
        raw_parameters: Canonical path -> raw path.
        ties: Groups of canonical paths of one parameter.
    """

    modules: Mapping[str, nn.Module]
    aliases: Mapping[str, str]
    raw_modules: Mapping[str, str]
    parameters: Mapping[str, tuple[tuple[nn.Module, str], ...]]
    raw_parameters: Mapping[str, str]
    ties: tuple[tuple[str, ...], ...]

    def module(self, path: str) -> nn.Module:
        """The module at a canonical path, by any of its names."""
        return self.modules[self.aliases.get(path, path)]

    def parameter(self, path: str) -> nn.Parameter:
        """The parameter at a canonical path."""
        module, name = self.parameters[path][0]
        parameter = module._parameters[name]
        assert parameter is not None  # only real parameters are listed
        return parameter


def names_of(model: nn.Module) -> Names:
    """Canonical names; a parameter reachable by several names is listed under the first, in `ties` under all."""
    raw_modules = [raw for raw, _ in model.named_modules(remove_duplicate=False)]
    module_paths = canonical_paths(raw_modules)
    # A shared module keeps its first path; its others are aliases only.
    modules = {module_paths[raw]: module for raw, module in model.named_modules()}
    first_path = {id(module): path for path, module in modules.items()}
    aliases = {
        module_paths[raw]: first_path[id(module)]
        for raw, module in model.named_modules(remove_duplicate=False)
        if module_paths[raw] not in modules
    }
    places: dict[int, list[tuple[str, str, nn.Module, str]]] = {}
    raw_parameters = [raw for raw, _ in model.named_parameters(remove_duplicate=False)]
    paths = canonical_paths(raw_parameters)
    for raw_module, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module._parameters.items():
            if parameter is not None:
                raw = f"{raw_module}.{name}" if raw_module else name
                places.setdefault(id(parameter), []).append((paths[raw], raw, module, name))
    parameters = {}
    raw_of = {}
    ties = []
    for found in places.values():
        first = found[0][0]
        parameters[first] = tuple(dict.fromkeys((module, name) for _, _, module, name in found))
        raw_of[first] = found[0][1]
        if len(found) > 1:
            ties.append(tuple(path for path, *_ in found))
    raw_modules = {module_paths[raw]: raw for raw, _ in model.named_modules()}
    return Names(modules, aliases, raw_modules, parameters, raw_of, tuple(ties))


def inspect(model: nn.Module) -> ModelSpec:
    """The inventory of a module; runs and allocates nothing."""
    names = names_of(model)
    return ModelSpec(
        backend="torch",
        family=family_of(type(module).__name__ for module in model.modules()),
        tensors=(*_parameters(names), *_buffers(model), *_activations(names)),
        modules=tuple(_modules(names)),
        stacks=_stacks(names),
        ties=names.ties,
    )


def dtype_name(dtype: torch.dtype) -> str:
    """numpy-style name.

    >>> dtype_name(torch.bfloat16)
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


def _parameters(names: Names) -> Iterator[TensorSpec]:
    tied = {group[0]: group[1:] for group in names.ties}
    for path in names.parameters:
        parameter = names.parameter(path)
        sharding, sizes = _placement(parameter)
        aliases = dict.fromkeys((names.raw_parameters[path], *tied.get(path, ())))
        yield TensorSpec(
            path=path,
            role="param",
            shape=tuple(parameter.shape),
            dtype=dtype_name(parameter.dtype),
            aliases=tuple(alias for alias in aliases if alias != path),
            module=path.rpartition(".")[0],
            trainable=parameter.requires_grad,
            sharding=sharding,
            axis_sizes=sizes,
        )


def _placement(parameter: torch.Tensor) -> tuple[dict[str, int], dict[str, int]]:
    """Axis -> dimension of a DTensor that another library has placed, and the axes' sizes."""
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None:
        return {}, {}
    axes = mesh.mesh_dim_names or tuple(f"axis{i}" for i in range(mesh.ndim))
    sharding = {
        axis: placement.dim
        for axis, placement in zip(axes, parameter.placements, strict=True)  # type: ignore[attr-defined]
        if placement.is_shard()
    }
    return sharding, {axis: mesh.size(i) for i, axis in enumerate(axes) if axis in sharding}


def _buffers(model: nn.Module) -> Iterator[TensorSpec]:
    buffers = dict(model.named_buffers())
    for raw, path in canonical_paths(buffers).items():
        buffer = buffers[raw]
        yield TensorSpec(
            path=path,
            role="buffer",
            shape=tuple(buffer.shape),
            dtype=dtype_name(buffer.dtype),
            aliases=() if raw == path else (raw,),
            module=path.rpartition(".")[0],
            trainable=False,
        )


def _modules(names: Names) -> Iterator[ModuleSpec]:
    """Every module that is called; a list of modules has no forward to gather for or to run again."""
    for path, module in names.modules.items():
        if isinstance(module, CONTAINERS) and type(module).forward is nn.Module.forward:
            continue
        nbytes = sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
        yield ModuleSpec(path, names.raw_modules[path], type(module).__name__, nbytes)


def _stacks(names: Names) -> tuple[StackSpec, ...]:
    """Lists of blocks of one class (mappings whose keys are indices too), the one with most parameters first."""
    found = []
    for path, module in names.modules.items():
        blocks = _blocks(module)
        if not blocks or len({type(block) for block in blocks}) != 1:
            continue
        if all(any(block.children()) and any(True for _ in block.parameters()) for block in blocks):
            size = sum(parameter.numel() for parameter in module.parameters())
            found.append((size, StackSpec(path, len(blocks), "loop", type(blocks[0]).__name__)))
    found.sort(key=lambda pair: -pair[0])
    return tuple(stack for _, stack in found)


def _blocks(module: nn.Module) -> list[nn.Module]:
    """The members of a list of blocks; none for other modules. A lone member of a Sequential is no stack."""
    if isinstance(module, nn.ModuleDict):
        return list(module.values()) if list(module) == [str(i) for i in range(len(module))] else []
    if isinstance(module, nn.ModuleList) or (isinstance(module, nn.Sequential) and len(module) > 1):
        return list(module)
    return []


def _activations(names: Names) -> Iterator[TensorSpec]:
    """Two values a module, its first input and its output, and the values inside attention and MLPs that are no
    module's output."""
    layers = {f"{stack.path}.{i}" if stack.path else str(i) for stack in _stacks(names) for i in range(stack.length)}
    for path, module in names.modules.items():
        if not path or isinstance(module, CONTAINERS):
            continue
        raw = names.raw_modules[path]
        act = _feeds_from_activation(path, names)
        yield TensorSpec(
            path=act or f"{path}.input",
            role="activation",
            shape=None,
            dtype=None,
            aliases=_without(act or f"{path}.input", f"{path}.input", f"{raw}.input"),
            module=act.rpartition(".")[0] if act else path,
        )
        yield TensorSpec(
            path=path,
            role="activation",
            shape=None,
            dtype=None,
            aliases=_without(path, raw),
            module=path,
            op=_op_of(module),
        )
        if "Attention" in type(module).__name__ and any(module.children()):
            eager = getattr(getattr(module, "config", None), "_attn_implementation", None) == "eager"
            for name in ("q", "k", "v", "attn_out", "attn_stats"):
                if name == "v" and f"{path}.v_proj" in names.modules:
                    continue  # its output is that value
                if f"{path}.{name}" not in names.modules and not (eager and name == "attn_stats"):
                    op = "attention" if name.startswith("attn") else None
                    yield TensorSpec(f"{path}.{name}", "activation", None, None, module=path, op=op)
        if path in layers:
            for op in OPS:
                yield TensorSpec(f"{path}.<{op}>", "activation", None, None, module=path, op=op)


def _without(path: str, *aliases: str) -> tuple[str, ...]:
    return tuple(alias for alias in dict.fromkeys(aliases) if alias != path)


def _feeds_from_activation(path: str, names: Names) -> str | None:
    """`mlp.act` for the down projection of a gated MLP: its input is act(gate) * up, the output of no module."""
    parent, _, last = path.rpartition(".")
    pseudo = f"{parent}.act"
    return pseudo if last == "down_proj" and pseudo not in names.modules else None


def _op_of(module: nn.Module) -> str | None:
    if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D":
        return "matmul"
    return "random" if isinstance(module, nn.modules.dropout._DropoutNd) else None

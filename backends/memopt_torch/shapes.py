"""Shapes of a model's values, from one forward pass on fake tensors: nothing is computed and nothing allocated."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._pytree import tree_flatten, tree_map

from memopt.spec import ModelSpec

from .alike import kind_of
from .fake import NO_FAKE, READS_VALUES, fake_gaps, lacks_fake
from .inventory import dtype_name, names_of
from .traversal import tensors_in

Shape = tuple[tuple[int, ...], str]


def shapes_of(build: Callable[[], nn.Module], run: Callable[[nn.Module, Any], Any], batch: Any) -> Mapping[str, Shape]:
    """Canonical path (`PATH`, `PATH.input`, `PATH.q` ...) -> shape and dtype, for one rank's batch.

    Args:
        build: Builds the model; called under the fake mode.
        run: `run(model, batch)`, such as a workload's loss.
        batch: Tensors (shapes are enough), any pytree.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    found: dict[str, Shape] = {}
    # A model that reads values stops there: the shapes seen until then hold, the others stay unknown.
    with mode, fake_gaps(), _stops_where_fakes_end():
        with unset_fake_temporarily(), torch.device("meta"):  # builders may convert and copy there
            built = build()
        model = _all_fake(built)
        fake = tree_map(lambda leaf: _fake(leaf) if isinstance(leaf, torch.Tensor) else leaf, batch)
        modules = names_of(model).modules
        handles = [_watch(module, path, found) for path, module in modules.items() if path]
        with torch.no_grad(), _alike_layers_once(modules, found):
            run(model, fake)
        for handle in handles:
            handle.remove()
    return found


@contextlib.contextmanager
def _alike_layers_once(modules: Mapping[str, nn.Module], found: dict[str, Shape]) -> Iterator[None]:
    """Run one layer of each kind in a stack; the others give results of the same shapes, as do the values in them.

    Alike are layers of equal modules, settings and weights that are called on tensors of equal shapes.
    """
    seen: dict[Any, tuple[str, Any]] = {}
    replaced: list[nn.Module] = []
    for path, module in modules.items():
        if isinstance(module, nn.ModuleList):
            for number, layer in enumerate(module):
                if "forward" not in vars(layer):
                    setattr(layer, "forward", _once(layer, f"{path}.{number}", path, seen, found))  # noqa: B010
                    replaced.append(layer)
    try:
        yield
    finally:
        for layer in replaced:
            del layer.forward


def _once(
    layer: nn.Module, path: str, stack: str, seen: dict[Any, tuple[str, Any]], found: dict[str, Shape]
) -> Callable[..., Any]:
    original, kind = layer.forward, kind_of(layer)

    def forward(*args: Any, **kwargs: Any) -> Any:
        leaves, form = tree_flatten((args, kwargs))
        described = tuple(
            (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else None for leaf in leaves
        )
        key = (stack, kind, described, str(form))
        if key not in seen:
            output = original(*args, **kwargs)
            seen[key] = path, tree_map(lambda leaf: _fake(leaf) if isinstance(leaf, torch.Tensor) else leaf, output)
            return output
        source, output = seen[key]
        alike = {name: shape for name, shape in found.items() if name.startswith(f"{source}.")}
        found.update({path + name[len(source) :]: shape for name, shape in alike.items()})
        return output

    return forward


@contextlib.contextmanager
def _stops_where_fakes_end() -> Iterator[None]:
    try:
        yield
    except READS_VALUES:
        pass
    except (*NO_FAKE, RuntimeError) as error:
        if not lacks_fake(error):
            raise


def called_with(model: nn.Module, inputs: Any) -> Any:
    """Calls a model on example inputs: a mapping is keyword arguments, a tuple positional ones."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)


def _fake(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype)


def _all_fake(model: nn.Module) -> nn.Module:
    """The model itself where it was built under the fake mode; else a copy of its structure with fake tensors."""
    if all(isinstance(tensor, FakeTensor) for tensor in (*model.parameters(), *model.buffers())):
        return model
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        if not isinstance(tensor, FakeTensor):
            fake = _fake(tensor)
            memo[id(tensor)] = nn.Parameter(fake, requires_grad=False) if isinstance(tensor, nn.Parameter) else fake
    return copy.deepcopy(model, memo)


def _watch(module: nn.Module, path: str, found: dict[str, Shape]) -> Any:
    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        first = next(tensors_in((args, kwargs)), None)
        made = next(tensors_in(output), None)
        if first is not None:
            found.setdefault(f"{path}.input", (tuple(first.shape), dtype_name(first.dtype)))
        if made is not None:
            found.setdefault(path, (tuple(made.shape), dtype_name(made.dtype)))

    return module.register_forward_hook(note, with_kwargs=True)


def with_shapes(spec: ModelSpec, shapes: Mapping[str, Shape]) -> ModelSpec:
    """The inventory with the shapes of the values that were seen."""
    tensors = []
    for tensor in spec.tensors:
        seen = None
        if tensor.role == "activation" and tensor.shape is None:
            seen = next((shapes[name] for name in (tensor.path, *tensor.aliases) if name in shapes), None)
            seen = seen or _inside_attention(tensor.path, shapes)
        tensors.append(tensor if seen is None else replace(tensor, shape=seen[0], dtype=seen[1]))
    return replace(spec, tensors=tuple(tensors))


def _inside_attention(path: str, shapes: Mapping[str, Shape]) -> Shape | None:
    """q and k after rotary embedding have the projections' sizes; the attention's result is o_proj's input."""
    module, _, name = path.rpartition(".")
    source = {"q": "q_proj", "k": "k_proj", "attn_out": "o_proj.input"}.get(name)
    return shapes.get(f"{module}.{source}") if source is not None else None

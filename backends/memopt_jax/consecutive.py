"""Stacks that follow one another as one: `layers.0` to `layers.60`, whether one scan runs them or two.

A model whose first layers are of another kind scans each kind by itself. To the policy they are the layers of one
stack, numbered on, as in a framework that keeps them in a list.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from memopt.spec import ModelSpec, ModuleSpec, StackSpec, TensorSpec


def numbered_on(spec: ModelSpec, consecutive: Mapping[str, Sequence[str]]) -> ModelSpec:
    """The inventory with consecutive stacks put together.

    Args:
        spec: With one stack for each scan.
        consecutive: Name of the whole -> the scanned stacks it consists of, in order; those the model lacks are passed
            over.
    """
    for whole, names in consecutive.items():
        found = {stack.path: stack for stack in spec.stacks if stack.path in names and stack.kind == "scan"}
        parts = [found[name] for name in names if name in found]
        if parts:
            spec = _joined(spec, whole, parts)
    return spec


def _joined(spec: ModelSpec, whole: str, parts: Sequence[StackSpec]) -> ModelSpec:
    first, firsts = 0, {}
    for part in parts:
        firsts[part.path] = first
        first += part.length
    stack = StackSpec(
        whole, first, "scan", parts[-1].block_class, scans=tuple((part.path, part.length) for part in parts)
    )

    def name(path: str) -> str:
        """A layer's path with the whole's name and number; any other path as it is."""
        for part, offset in firsts.items():
            if path.startswith(part + "."):
                index, _, rest = path[len(part) + 1 :].partition(".")
                number, bracket, tail = index.partition("[")
                if number.isdigit():
                    return f"{whole}.{int(number) + offset}" + bracket + tail + (f".{rest}" if rest else "")
        return path

    stacks = [stack, *(other for other in spec.stacks if other.path not in firsts)]
    return replace(
        spec,
        tensors=tuple(_tensor(tensor, name) for tensor in spec.tensors),
        modules=tuple(_module(module, name) for module in spec.modules),
        stacks=tuple(stacks),
        ties=tuple(tuple(name(path) for path in group) for group in spec.ties),
    )


def _tensor(tensor: TensorSpec, name: Callable[[str], str]) -> TensorSpec:
    aliases = tuple(name(alias) for alias in tensor.aliases)
    return replace(tensor, path=name(tensor.path), aliases=aliases, module=name(tensor.module))


def _module(module: ModuleSpec, name: Callable[[str], str]) -> ModuleSpec:
    return replace(module, path=name(module.path), raw_path=name(module.raw_path))

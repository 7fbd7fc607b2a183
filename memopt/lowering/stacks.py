"""The `layers:` selector: which layers of which stack."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import did_you_mean
from ..matching import matches
from ..rules import Layers
from ..spec import ModelSpec, StackSpec
from .entries import Entry
from .units import outer_stacks

Fault = tuple[str, str, str | None]
"""code, message, hint"""


def pick_layers(
    layers: Layers, selected: Sequence[int], entries: Sequence[Entry], spec: ModelSpec
) -> tuple[list[int], list[Fault]]:
    """Those of the selected entries that lie in the chosen layers."""
    stacks, faults = _stacks(layers, selected, entries, spec)
    chosen: list[int] = []
    for stack in stacks:
        indices = _indices(layers, stack.length)
        missing = sorted(index for index in indices if index >= stack.length)
        if missing or max(layers.first or 0, layers.last or 0) > stack.length:
            faults.append(_out_of_range(layers, stack, missing))
        chosen += [n for n in selected if entries[n].layers.get(stack.path) in indices]
    if stacks and not chosen and not faults:
        faults.append(("dead-rule", "no tensor that the rule matches lies in those layers", "loosen `layers`"))
    return sorted(chosen), faults


def _stacks(
    layers: Layers, selected: Sequence[int], entries: Sequence[Entry], spec: ModelSpec
) -> tuple[list[StackSpec], list[Fault]]:
    names = ", ".join(f"`{stack.path}` ({stack.length} × {stack.block_class})" for stack in spec.stacks) or "none"
    if layers.of is not None:
        named = [stack for stack in spec.stacks if matches(layers.of, stack.path)]
        if named:
            return named, []
        hint = did_you_mean(layers.of, [stack.path for stack in spec.stacks])
        return [], [("unknown-stack", f"`of: {layers.of}` is no stack of layers; the model has {names}", hint)]
    inside = [
        stack for stack in outer_stacks(spec) if any(entries[n].layers.get(stack.path) is not None for n in selected)
    ]
    if len(inside) == 1:
        return inside, []
    if not inside:
        return [], [
            ("dead-rule", f"the tensors that the rule matches lie in no stack of layers; the model has {names}", None)
        ]
    return [], [
        (
            "ambiguous-stack",
            f"the rule matches tensors of several stacks: {', '.join(f'`{stack.path}`' for stack in inside)}",
            f"say which: `layers: {{..., of: {inside[0].path}}}`",
        )
    ]


def _indices(layers: Layers, length: int) -> set[int]:
    if layers.index is not None:
        return set(layers.index)
    if layers.first is not None:
        return set(range(min(layers.first, length)))
    if layers.last is not None:
        return set(range(max(0, length - layers.last), length))
    return set(range(layers.offset or 0, length, layers.every or 1))


def _out_of_range(layers: Layers, stack: StackSpec, missing: Sequence[int]) -> Fault:
    asked = f"layer {missing[0]}" if missing else f"{layers.first or layers.last} layers"
    return (
        "layer-out-of-range",
        f"it asks for {asked} of `{stack.path}`, which has {stack.length} (0 to {stack.length - 1})",
        "indices count from 0",
    )

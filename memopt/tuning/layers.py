"""Reads a plan's repeated layers: named values, weights and their sizes, per layer and device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..estimate import ITEMSIZE
from ..plan import Plan, PlanRow

# The modules whose weights make a value, by the end of their path (Transformers' names, older spellings too).
MODULES: Mapping[str, tuple[str, ...]] = {
    "q": ("q_proj", "q_a_proj", "q_b_proj", "Attention.q"),
    "k": ("k_proj", "kv_a_proj_with_mqa", "kv_b_proj", "Attention.k", "attn.c_attn", "qkv_proj"),
    "v": ("v_proj", "Attention.v"),
    "o": ("o_proj", "attn.c_proj", "Attention.o"),
    "router": ("mlp.gate", "block_sparse_moe.gate"),
    "mlp_gate": ("gate_proj", "w1", "wi_0", "gate_up_proj"),
    "mlp_up": ("up_proj", "w3", "mlp.c_fc", "wi_1", "wi"),
    "mlp_down": ("down_proj", "w2", "mlp.c_proj", "wo"),
}
_EMBEDDINGS = ("embed", "wte", "wpe", "shared", "position")


@dataclass(frozen=True, slots=True)
class Weight:
    """One matrix (or stack of experts' matrices) of a layer; `numel` over all devices."""

    module: str
    numel: int
    num_experts: int
    trainable: bool


@dataclass(slots=True)
class Layer:
    """One layer as the plan sees it.

    Attributes:
        stack, index: Where it is.
        values: Neutral name -> activation rows (several where shared and routed experts share a name).
        weights: In plan order.
    """

    stack: str
    index: int
    unit: str
    values: dict[str, list[PlanRow]] = field(default_factory=dict)
    weights: list[Weight] = field(default_factory=list)

    def numel(self, name: str) -> float:
        """Elements per device of all values of that name."""
        return sum(row.nbytes / ITEMSIZE[row.dtype] for row in self.known(name) if row.nbytes and row.dtype)

    def nbytes(self, name: str) -> float:
        """Bytes per device of all values of that name."""
        return sum(row.nbytes or 0 for row in self.known(name))

    def known(self, name: str) -> list[PlanRow]:
        """Rows of that name whose shape, dtype and bytes are known."""
        return [row for row in self.values.get(name, []) if row.nbytes and row.shape and row.dtype in ITEMSIZE]

    @property
    def tokens(self) -> float | None:
        """Tokens per device, from the layer's input; None where it is not known."""
        rows = self.known("layer_input")
        return self.numel("layer_input") / rows[0].shape[-1] if rows and rows[0].shape else None

    @property
    def sequence(self) -> int | None:
        """Length of the attended sequence."""
        rows = self.known("layer_input")
        return rows[0].shape[-2] if rows and rows[0].shape and len(rows[0].shape) > 1 else None

    def signature(self) -> tuple[object, ...]:
        """What makes two layers alike."""
        values = tuple(sorted((name, self.nbytes(name)) for name in self.values))
        return values, tuple((weight.module.split(".", 2)[-1], weight.numel) for weight in self.weights)


def read_layers(plan: Plan) -> list[Layer]:
    """The layers of the plan's stacks, in model order; layers without known values are left out."""
    layers = {
        unit.name: Layer(unit.stack, unit.index, unit.name)
        for unit in plan.units
        if unit.stack is not None and unit.index is not None
    }
    for row in plan.rows:
        layer = layers.get(row.unit or "")
        if layer is None:
            continue
        if row.role == "activation" and row.tensor is not None:
            layer.values.setdefault(row.tensor, []).append(row)
        elif row.role == "param" and row.shape is not None and len(row.shape) >= 2:
            layer.weights.append(_weight(row))
    return [layer for layer in layers.values() if layer.tokens]


def _weight(row: PlanRow) -> Weight:
    shape = row.shape or ()
    module = row.path.rsplit(".", 1)[0]
    num_experts = shape[0] if len(shape) == 3 else 1
    return Weight(module, math.prod(shape), num_experts, row.trainable)


def classes_of(layers: list[Layer]) -> list[list[Layer]]:
    """Runs of layers of one stack that are alike, in model order."""
    runs: list[list[Layer]] = []
    for layer in layers:
        if runs and runs[-1][0].stack == layer.stack and runs[-1][0].signature() == layer.signature():
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return runs


def outside_numel(plan: Plan, layers: list[Layer]) -> int:
    """Elements of the matrices outside the stacks that multiply every token: the head, or the tied embedding."""
    inside = {layer.unit for layer in layers}
    found = [row for row in plan.rows_of("param") if row.unit not in inside and row.shape and len(row.shape) == 2]
    heads = [row for row in found if not any(word in row.path for word in _EMBEDDINGS)]
    if heads:
        return sum(math.prod(row.shape or ()) for row in heads)
    return max((math.prod(row.shape or ()) for row in found), default=0)

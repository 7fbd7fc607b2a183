"""What each named tensor of a layer costs to hold and to make again: from a plan's rows and a device's rates.

FLOPs follow from the rows: a projection makes `2 * tokens * numel(weight)`, attention what its shapes say (causal: half
of the pairs). Everything else in a layer moves bytes. The chain of a layer - what reads what - is the neutral
vocabulary's, so one table serves every family that has names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import MemoptError
from ..estimate import ITEMSIZE, unit_whole_bytes
from ..plan import Plan
from ..roofline import Rates, task_seconds
from ..timeline import Task
from .layers import MODULES, Layer, Weight, classes_of, outside_numel, read_layers
from .problem import Action, Choice, LayerClass

# What a value is made from: the first entry whose names the layer has. Norms and residual sums have no names; inside a
# recomputed region they are always made again, from the names below.
CHAIN: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "layer_input": ((),),
    "q": (("layer_input",),),
    "k": (("layer_input",),),
    "v": (("layer_input",),),
    "attn_out": (("q", "k", "v"), ("layer_input",)),
    "attn_stats": (("q", "k", "v"), ("layer_input",)),
    "o": (("attn_out",), ("layer_input",)),
    "router": (("layer_input", "o"), ("layer_input",)),
    "expert_in": (("layer_input", "o"), ("layer_input",)),
    "mlp_gate": (("expert_in",), ("layer_input", "o"), ("layer_input",)),
    "mlp_up": (("expert_in",), ("layer_input", "o"), ("layer_input",)),
    "mlp_act": (("mlp_gate", "mlp_up"), ("mlp_up",), ("layer_input",)),
    "expert_out": (("mlp_act",), ("layer_input",)),
}
# `mlp_down` is left out: nothing in the backward pass reads it, the next layer's input is a name of its own.
_ONE_OPERATION = (("attn_out", "attn_stats"),)
_ATTENTION_BACKWARD = 2.5  # five products of the scores' size where the forward has two (FlashAttention-2, section 3)
_POINTWISE_PASSES = 12.0  # reads and writes of the hidden state by norms, rotary embedding and sums in a forward pass
_RECOMPUTED_PASSES = 6.0  # the part of them a recomputed region runs again


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """A model's layers as the solver wants them, and what runs outside the layers.

    Attributes:
        classes: In model order.
        middle_s: Head and loss, forward and backward.
        tail_s: The optimizer's update: bytes of weights, gradients and state, and host copies of offloaded state.
        step_flops: Matrix FLOPs of a micro-batch, nothing recomputed.
        host_state_bytes: Host bytes of offloaded parameters, gradients and state.
    """

    classes: tuple[LayerClass, ...]
    middle_s: float
    tail_s: float
    step_flops: float
    host_state_bytes: float


def model_costs(plan: Plan, rates: Rates, *, causal: bool = True) -> ModelCosts:
    """Costs per layer and tensor.

    Args:
        plan: Any plan of the model in the wanted layout; its activation rows need shapes.
        rates: Of the target.
        causal: Attention sees half of the pairs.

    Raises:
        MemoptError: `nothing-to-tune`: no repeated layers with named values whose sizes are known.
    """
    layers = read_layers(plan)
    if not layers:
        raise MemoptError.of(
            "nothing-to-tune",
            "the model has no repeated layers with named values of known size",
            hint="costs go by neutral tensor names: a family of `memopt.vocabulary`, and a batch to know sizes from",
        )
    runs = classes_of(layers)
    stacks = [run[0].stack for run in runs]
    classes, flops = [], 0.0
    for run in runs:
        costs = _LayerCosts(plan, run[0], rates, causal=causal)
        name = (
            run[0].stack if stacks.count(run[0].stack) == 1 else f"{run[0].stack}[{run[0].index}:{run[-1].index + 1}]"
        )
        classes.append(costs.layer_class(name, len(run)))
        flops += (costs.forward_flops() + costs.backward_flops()) * len(run)
    head = 6.0 * (layers[0].tokens or 0) * outside_numel(plan, layers)
    host_bytes = sum(row.nbytes or 0 for row in plan.rows if row.role != "activation" and row.memory_kind != "device")
    return ModelCosts(tuple(classes), head / rates.flops, _tail_s(plan, rates), flops + head, host_bytes)


class _LayerCosts:
    """One layer's FLOPs, bytes and seconds."""

    def __init__(self, plan: Plan, layer: Layer, rates: Rates, *, causal: bool) -> None:
        self.plan, self.layer, self.rates, self.causal = plan, layer, rates, causal
        self.tokens = layer.tokens or 0.0
        self.hidden_bytes = layer.nbytes("layer_input")

    def weights_of(self, name: str) -> list[Weight]:
        return [weight for weight in self.layer.weights if weight.module.endswith(MODULES.get(name, ("\0",)))]

    def matmul_flops(self, weight: Weight) -> float:
        """Forward FLOPs; an expert's rows are the tokens routed to it."""
        if weight.num_experts == 1 and ".experts." not in f"{weight.module}.":
            return 2.0 * self.tokens * weight.numel
        routed = self.layer.numel("expert_in") * self.tokens / max(1.0, self.layer.numel("layer_input"))
        lists = len(
            {w.module for w in self.layer.weights if w.module.rsplit(".", 1)[-1] == weight.module.rsplit(".", 1)[-1]}
        )
        num_experts = weight.num_experts if weight.num_experts > 1 else max(1, lists)
        return 2.0 * (routed or self.tokens) * weight.numel / num_experts

    def attention_flops(self) -> float:
        """Scores and their product with the values; half of it where causal."""
        if "attn_out" not in self.layer.values and "o" not in self.layer.values:
            return 0.0
        sequence = self.layer.sequence or 0
        width = self.layer.numel("attn_out") or self.tokens * self._hidden()
        scores = self.layer.numel("q") or width
        return 2.0 * sequence * (width + scores) * (0.5 if self.causal else 1.0)

    def _hidden(self) -> float:
        return self.layer.numel("layer_input") / max(1.0, self.tokens)

    def forward_flops(self) -> float:
        return sum(self.matmul_flops(weight) for weight in self.layer.weights) + self.attention_flops()

    def backward_flops(self) -> float:
        """Gradient of the input always, of the weight where it is trained."""
        matmuls = sum(self.matmul_flops(weight) * (2.0 if weight.trainable else 1.0) for weight in self.layer.weights)
        return matmuls + _ATTENTION_BACKWARD * self.attention_flops()

    def value_s(self, name: str) -> float:
        """Seconds to make a value from what it reads."""
        if name in ("attn_out", "attn_stats"):
            return self.attention_flops() / self.rates.flops
        weights = self.weights_of("mlp_down" if name == "expert_out" else name)
        flops = sum(self.matmul_flops(weight) for weight in weights)
        passes = 3.0 if name == "mlp_act" else 2.0
        return flops / self.rates.flops + passes * self.layer.nbytes(name) / self.rates.hbm_bytes_per_s

    def choices(self) -> tuple[Choice, ...]:
        groups = _groups(self, [name for name in CHAIN if self.layer.known(name)])
        of = {name: "+".join(group) for group in groups for name in group}
        choices = []
        for group in groups:
            parents = {of[parent] for name in group for parent in _parents(name, of) if parent not in group}
            making = max if group in _ONE_OPERATION else sum
            actions: tuple[Action, ...] = (
                ("keep", "offload") if "layer_input" in group else ("keep", "offload", "recompute")
            )
            choices.append(
                Choice(
                    name="+".join(group),
                    nbytes=sum(self.layer.nbytes(name) for name in group),
                    recompute_s=making([self.value_s(name) for name in group]),
                    parents=tuple(sorted(parents)),
                    actions=actions,
                )
            )
        return tuple(choices)

    def layer_class(self, name: str, count: int) -> LayerClass:
        hbm = self.rates.hbm_bytes_per_s
        gather_s, reduce_s = self._collectives()
        unit = self.plan.unit_of(self.layer.unit)
        reshard = unit.reshard_after_forward
        pointwise = _POINTWISE_PASSES * self.hidden_bytes + 3 * self.layer.nbytes("mlp_act")
        return LayerClass(
            name=name,
            count=count,
            choices=self.choices(),
            forward_s=self.forward_flops() / self.rates.flops + pointwise / hbm,
            backward_s=self.backward_flops() / self.rates.flops + 2 * pointwise / hbm,
            recompute_s=_RECOMPUTED_PASSES * self.hidden_bytes / hbm if unit.region else 0.0,
            gather_s=gather_s,
            reduce_s=reduce_s,
            gather_again=reshard is not False,
            group_gather_s=None if isinstance(reshard, bool) else self._gather_s(reshard),
        )

    def _gather_s(self, group: int) -> float:
        """Seconds in which so many neighbours on `fsdp` bring a layer's weights together."""
        moved = unit_whole_bytes(self.plan).get(self.layer.unit, 0) * (group - 1) / group
        gather = Task("all_gather", "collective", nbytes=moved, group=group, stride=_stride(self.plan, "fsdp"))
        return task_seconds(gather, self.rates)

    def _collectives(self) -> tuple[float, float]:
        """Seconds of the unit's all-gather and of its gradients' reduction."""
        plan, unit = self.plan, self.layer.unit
        whole = unit_whole_bytes(plan).get(unit, 0)
        group = plan.axis_size("fsdp")
        if not whole or group == 1:
            return 0.0, 0.0
        width = ITEMSIZE.get(plan.precision.get("reduce", "float32"), 4)
        held = ITEMSIZE.get(plan.precision.get("compute", "float32"), 4)
        moved = whole * (group - 1) / group
        stride = _stride(plan, "fsdp")
        reduce = Task("reduce_scatter", "collective", nbytes=moved * width / held, group=group, stride=stride)
        replicas = plan.axis_size("replicate")
        extra_s = 0.0
        if replicas > 1:
            shard = 2 * whole * width / held / group * (replicas - 1) / replicas
            between = Task("all_reduce", "collective", nbytes=shard, group=replicas, stride=_stride(plan, "replicate"))
            extra_s = task_seconds(between, self.rates)
        return self._gather_s(group), task_seconds(reduce, self.rates) + extra_s


def _stride(plan: Plan, axis: str) -> int:
    """Devices between neighbours along a mesh axis: the product of the axes inside it."""
    names = [name for name, _ in plan.mesh]
    inside = plan.mesh[names.index(axis) + 1 :] if axis in names else ()
    return math.prod(size for _, size in inside)


def _groups(costs: _LayerCosts, names: list[str]) -> list[tuple[str, ...]]:
    """Names that one operation makes, decided together: attention's two results, and projections fused into one."""
    groups: list[tuple[str, ...]] = []
    projections = [name for name in ("q", "k", "v") if name in names]
    fused = [name for name in projections if not costs.weights_of(name)]
    if fused:
        fused = [name for name in projections if name in fused or name == "k"]
    for name in names:
        known = next((group for group in (*_ONE_OPERATION, tuple(fused)) if name in group), (name,))
        present = tuple(member for member in known if member in names)
        if present not in groups:
            groups.append(present)
    return groups


def _parents(name: str, present: Mapping[str, str]) -> tuple[str, ...]:
    for parents in CHAIN[name]:
        if all(parent in present for parent in parents):
            return parents
    return ()


def _tail_s(plan: Plan, rates: Rates) -> float:
    """The update reads weights, gradients and state and writes weights and state; offloaded state crosses the link."""
    moved, hosted = 0.0, 0.0
    for row in plan.rows:
        if row.nbytes is None or row.role not in ("param", "grad", "optimizer_state") or not row.trainable:
            continue
        moved += row.nbytes * (1.0 if row.role == "grad" else 2.0)
        if row.role == "optimizer_state" and row.memory_kind != "device":
            hosted += row.nbytes
    copies_s = 0.0 if rates.link is None else hosted / rates.link.rate(2)
    return max(moved / rates.hbm_bytes_per_s, copies_s)


def assignment_of(plan: Plan, classes: tuple[LayerClass, ...]) -> tuple[tuple[Action, ...], ...]:
    """What a plan does with each choice of each layer; a value that nobody decided is kept."""
    layers = read_layers(plan)
    order = [layer_class for layer_class in classes for _ in range(layer_class.count)]
    found = []
    for layer, layer_class in zip(layers, order, strict=True):
        actions: list[Action] = []
        for choice in layer_class.choices:
            residuals = {row.residual or "keep" for name in choice.name.split("+") for row in layer.known(name)}
            action: Action = (
                "recompute" if "recompute" in residuals else "offload" if "offload" in residuals else "keep"
            )
            actions.append(action if action in choice.actions else "keep")
        found.append(tuple(actions))
    return tuple(found)

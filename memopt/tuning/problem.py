"""The choice `tune` makes, as frozen values: layer classes, their tensors, what each action costs, and the budgets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from ..simulate import HostLink

Action = Literal["keep", "offload", "recompute", "drop"]


@dataclass(frozen=True, slots=True)
class Choice:
    """Tensors of a layer that one operation makes and that are therefore decided together.

    Attributes:
        name: Neutral names joined by `+`, e.g. `attn_out+attn_stats`.
        nbytes: Bytes per layer and device.
        recompute_s: Seconds to make them again from `parents`.
        parents: Choices of the same layer that making them again reads; none of those may be dropped.
        needed: Whether the backward pass reads them; otherwise they may be dropped with nobody to make them again.
        actions: What is allowed. A layer's own input can only be kept or offloaded: nothing of the layer makes it.
    """

    name: str
    nbytes: float
    recompute_s: float
    parents: tuple[str, ...] = ()
    needed: bool = True
    actions: tuple[Action, ...] = ("keep", "offload", "recompute")


@dataclass(frozen=True, slots=True)
class LayerClass:
    """Layers that follow each other and are alike.

    Attributes:
        name: The stack's path, `layers`.
        count: How many.
        choices: What is decided in each.
        forward_s, backward_s: Compute of one layer; the backward without any recompute.
        recompute_s: What every backward pays on top because values nobody can name are made again (norms).
        gather_s, reduce_s: The collectives of one layer: its weights before each use, its gradients after.
        gather_again: Whether the weights are gathered again for the backward pass.
        group_gather_s: What that takes where they are resharded over a small group; None: as much as the first.
    """

    name: str
    count: int
    choices: tuple[Choice, ...]
    forward_s: float
    backward_s: float
    recompute_s: float = 0.0
    gather_s: float = 0.0
    reduce_s: float = 0.0
    gather_again: bool = True
    group_gather_s: float | None = None

    @property
    def again_s(self) -> float:
        """Seconds of the gather for the backward pass."""
        if not self.gather_again:
            return 0.0
        return self.gather_s if self.group_gather_s is None else self.group_gather_s


@dataclass(frozen=True, slots=True)
class Problem:
    """One tuning problem: a layout and a number of micro-batches are fixed already.

    Attributes:
        classes: In model order.
        static_bytes: Device bytes no choice changes: weights, gradients, state, gathered units, temporaries.
        device_bytes: Device budget.
        host_bytes: Host bytes one device's rank may use for activations.
        link: The host link; None: nothing can be offloaded.
        middle_s: Compute between the last layer's forward and its backward (norm, head, loss).
        tail_s: Optimizer, after the last reduction.
        buffers: Staging buffers for offloaded layers: copies of layer `i` have left before `i + buffers` runs.
        steps: Micro-batches; the layers run once for each.
    """

    classes: tuple[LayerClass, ...]
    static_bytes: float
    device_bytes: float
    host_bytes: float
    link: HostLink | None
    middle_s: float = 0.0
    tail_s: float = 0.0
    buffers: int = 2
    steps: int = 1

    def layers(self) -> Iterator[LayerClass]:
        """Every layer in model order."""
        for layer_class in self.classes:
            for _ in range(layer_class.count):
                yield layer_class

    @property
    def num_layers(self) -> int:
        """Layers in all."""
        return sum(layer_class.count for layer_class in self.classes)

    @property
    def num_decisions(self) -> int:
        """Layers times what is decided in each."""
        return sum(layer_class.count * len(layer_class.choices) for layer_class in self.classes)


Assignment = tuple[tuple[Action, ...], ...]
"""Per layer, per choice: the action."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """An assignment as the event simulator judges it.

    Attributes:
        step_s: Simulated seconds of the step.
        peak_bytes: Device bytes at the peak.
        host_bytes: Host bytes of activations.
        exposed_s: Seconds transfers alone account for.
        recompute_s: Seconds spent making values again.
        waits_s: Stream -> seconds compute waited for it.
    """

    step_s: float
    peak_bytes: float
    host_bytes: float
    exposed_s: float
    recompute_s: float
    waits_s: dict[str, float] = field(default_factory=dict)

    def fits(self, problem: Problem) -> bool:
        """Within both budgets (to a relative 1e-9: sums of floats)."""
        slack = 1 + 1e-9
        return self.peak_bytes <= problem.device_bytes * slack and self.host_bytes <= problem.host_bytes * slack

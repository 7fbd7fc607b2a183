"""What planning and comparing need to know of a training step: the model, its loss, a batch, an optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import MemoptError, Problem

_CALLED = {"model": "give what builds it: `model=lambda: Net()`", "loss": "give a function `loss(model, batch)`"}


@dataclass(frozen=True, slots=True)
class Workload:
    """A training step, described and not yet allocated.

    A planned step is forward, backward, `optimizer.step`, `zero_grad`.

    Attributes:
        name: Shown in tables and pages.
        model: Builds the model; called without arguments, under fake tensors or `jax.eval_shape`.
        loss: `loss(model, batch)` gives the scalar that is differentiated.
        batch: Example tensors by name; shapes and dtypes are enough. torch: what one rank passes to one step. JAX: the
            whole batch, over all devices.
        optimizer: torch: a callable from parameters (or from `named_parameters`, when it has an argument of that name)
            to an optimizer. JAX: an optax transformation.
        ref: What `load_workload` was given (its file made absolute), so that another process can load it again; None
            for a workload built in this process.
        clip_norm: torch: gradients are clipped to this global norm between the backward pass and the optimizer's step.
            In JAX clipping is part of the optax transformation.

    Raises:
        MemoptError: `workload-wrong-type`, for each of `model`, `loss` and `batch` that is of another kind;
            `workload-clip-with-optax`.
    """

    name: str
    model: Callable[[], Any]
    loss: Callable[[Any, Mapping[str, Any]], Any]
    batch: Mapping[str, Any]
    optimizer: Any
    ref: str | None = None
    clip_norm: float | None = None

    def __post_init__(self) -> None:
        if self.clip_norm is not None and hasattr(self.optimizer, "update"):
            raise MemoptError.of(
                "workload-clip-with-optax",
                f"`{self.name}` has a clip_norm, and its optimizer is an optax transformation",
                hint="optax.chain(optax.clip_by_global_norm(...), ...) as the optimizer, and no clip_norm",
            )
        wrong = []
        for name in ("model", "loss"):
            if not callable(value := getattr(self, name)):
                wrong.append((name, f"a {type(value).__name__}, which cannot be called", _CALLED[name]))
        if not isinstance(self.batch, Mapping):
            made = "the function that makes it" if callable(self.batch) else f"a {type(self.batch).__name__}"
            wrong.append(("batch", f"{made}, not a mapping of names to tensors", 'give `batch={"x": x, "y": y}`'))
        if wrong:
            raise MemoptError(
                Problem("workload-wrong-type", f"`{name}` of workload `{self.name}` is {got}", hint=hint, path=name)
                for name, got, hint in wrong
            )


@dataclass(frozen=True, slots=True)
class HfWorkload:
    """A local Transformers model: the folder (or `config.json`) it is described in; weights are not read.

    Attributes:
        name: The folder's name.
        path: Absolute path of `config.json`.
        model_type: Transformers' name of the architecture, such as `llama`.
        batch_per_rank: Sequences of one rank's batch: with more ranks the step has more sequences, as nothing in a
            model's description says how many there are in all.
        sequence: Tokens of one sequence that are predicted.
        vocab: Token ids are below this.
    """

    name: str
    path: str
    model_type: str
    batch_per_rank: int
    sequence: int
    vocab: int

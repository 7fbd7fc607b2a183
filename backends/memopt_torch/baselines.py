"""The same work with torch's own tools and nothing of memopt, as their documentation has it: rows to compare with."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from memopt.errors import MemoptError

from .inventory import inspect, names_of


@dataclass(frozen=True, slots=True)
class Baseline:
    """A model under a tool of torch's.

    Attributes:
        model: To be called.
        optimizer: Over its parameters, made when the tool wants it made.
        around: Context in which each micro-batch's loss is computed.
        note: What a reader of the figures should know.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    note: str | None = None


def baseline(name: str, model: nn.Module, make: Callable[[Any], torch.optim.Optimizer]) -> Baseline:
    """`model` under that tool.

    Args:
        name: `fsdp2`: `fully_shard` on every layer, then on the root. `checkpoint`: torch's own around every
            layer. `save_on_cpu`: its hooks around the forward pass. The last two are data parallel by DDP.
        model: As built.
        make: Parameters to optimizer.

    Raises:
        MemoptError: `baseline-needs-ranks`, `baseline-no-layers`.
    """
    if name == "fsdp2":
        if not dist.is_initialized():
            raise MemoptError.of(
                "baseline-needs-ranks", "the baseline `fsdp2` shards over ranks, and there is one", hint="world: 2"
            )
        for layer in _layers(model, name):
            fully_shard(layer)
        fully_shard(model)
        return Baseline(model, make(model.parameters()))
    if name == "checkpoint":
        for layer in _layers(model, name):
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
        return Baseline(_parallel(model), make(model.parameters()))
    is_gpu = next(model.parameters()).is_cuda
    note = None if is_gpu else "save_on_cpu copies nothing where the device is the CPU: values stay where they are"
    around = partial(save_on_cpu, pin_memory=is_gpu)
    return Baseline(_parallel(model), make(model.parameters()), around, note)


def _parallel(model: nn.Module) -> nn.Module:
    if not dist.is_initialized():
        return model
    return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)


def _layers(model: nn.Module, name: str) -> list[nn.Module]:
    """The repeated layers, outermost stacks."""
    modules = names_of(model).modules
    paths = [stack.path for stack in inspect(model).stacks]
    outer = [path for path in paths if not any(path.startswith(f"{other}.") for other in paths)]
    layers = [layer for path in outer for layer in modules[path].children()]
    if not layers:
        raise MemoptError.of("baseline-no-layers", f"the baseline `{name}` works by layers, and the model repeats none")
    return layers

"""Optimizers that need whole matrices (Muon, Adafactor and kin) over sharded parameters.

Each parameter has an owner among the ranks that share it. For a step the owner gathers it and its gradient, the
optimizer updates what the owner holds, and every rank takes its slice back. State lives whole at the owner, so it is
spread over ranks like a shard is. Cost: each owner keeps its parameters whole as well (1/N of them), and a step moves
every parameter twice and every gradient once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from .sharded import ShardedTensor

MATRIX_OPTIMIZERS = frozenset({"Muon", "Adafactor", "Shampoo", "SOAP", "CAME", "DistributedShampoo"})
"""Class names (anywhere among the bases) whose updates mix values along rows or columns."""


def needs_matrices(factory: Any) -> bool:
    """Whether a factory is one of the classes known to need whole tensors."""
    return isinstance(factory, type) and any(base.__name__ in MATRIX_OPTIMIZERS for base in factory.__mro__)


class OwnerOptimizer(Optimizer):
    """Runs another optimizer on whole tensors, each at its owner.

    Args:
        factory: The optimizer's class.
        params: Parameters or groups, sharded ones among them.
        options: Of the optimizer; a group's own come first. Learning-rate schedulers act on this optimizer's groups.
    """

    def __init__(self, factory: Callable[..., Optimizer], params: Any, options: dict[str, Any]) -> None:
        super().__init__(_named_groups(params), {})
        self._whole: dict[torch.Tensor, nn.Parameter] = {}
        self._owner: dict[torch.Tensor, int] = {}
        groups = []
        counter = 0
        for group in self.param_groups:
            mine = []
            for parameter in group["params"]:
                counter += 1
                whole = self._claim(parameter, counter)
                if whole is not None:
                    mine.append(whole)
            groups.append({**{k: v for k, v in group.items() if k != "params"}, "params": mine})
        self.inner = factory(groups, **options)
        for outer, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            outer.update({key: value for key, value in inner.items() if key != "params"})

    def _claim(self, parameter: torch.Tensor, number: int) -> nn.Parameter | None:
        """This rank's whole stand-in for a parameter, if it is the owner; whole parameters stand for themselves."""
        if not isinstance(parameter, ShardedTensor):
            assert isinstance(parameter, nn.Parameter)  # optimizers hold parameters
            self._whole[parameter] = parameter
            return parameter
        group = parameter.slice.group
        size = dist.get_world_size(group) if group is not None else 1
        self._owner[parameter] = number % size
        if group is not None and dist.get_rank(group) != number % size:
            return None
        whole = nn.Parameter(torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device))
        self._whole[parameter] = whole
        return whole

    def owns(self, parameter: torch.Tensor) -> bool:
        """Whether state of the parameter lives in this process."""
        return parameter in self._whole

    def state_of(self, parameter: torch.Tensor) -> dict[str, Any]:
        """The inner optimizer's state of a parameter this rank owns."""
        return self.inner.state[self._whole[parameter]]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Gathers, updates, and hands every rank its slice."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        sharded = [p for group in self.param_groups for p in group["params"] if isinstance(p, ShardedTensor)]
        for parameter in sharded:
            self._collect(parameter)
        for outer, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner.update({key: value for key, value in outer.items() if key != "params"})
        self.inner.step()
        for parameter in sharded:
            self._hand_back(parameter)
            if self.owns(parameter):
                self._whole[parameter].grad = None
        for parameter in self._whole:
            self.state[parameter] = self.state_of(parameter)
        return loss

    def _collect(self, parameter: ShardedTensor) -> None:
        whole = self._whole.get(parameter)
        value = self._reduced(parameter.detach(), self._owner[parameter])  # type: ignore[arg-type]
        grad = parameter.grad
        gathered = None if grad is None else self._reduced(grad, self._owner[parameter])  # type: ignore[arg-type]
        if whole is not None:
            whole.copy_(value)
            whole.grad = gathered

    def _reduced(self, tensor: ShardedTensor, owner: int) -> torch.Tensor:
        """The whole tensor, at the owner; others get unspecified values."""
        held = tensor.slice
        flat = torch.zeros(held.shape.numel(), dtype=tensor.dtype, device=tensor.device)
        flat[held.start : held.stop].copy_(tensor.local)
        if held.group is not None:
            dist.reduce(flat, group_dst=owner, group=held.group)
        return flat.view(held.shape)

    def _hand_back(self, parameter: ShardedTensor) -> None:
        if parameter.grad is None:
            return
        held = parameter.slice
        whole = self._whole.get(parameter)
        flat = (
            torch.empty(held.shape.numel(), dtype=parameter.dtype, device=parameter.device)
            if whole is None
            else whole.detach().reshape(-1)
        )
        if held.group is not None:
            dist.broadcast(flat, group_src=self._owner[parameter], group=held.group)
        parameter.detach().local.copy_(flat[held.start : held.stop])  # type: ignore[attr-defined]


def _named_groups(params: Any) -> Any:
    """Groups as torch wants them; names, where given, are dropped."""
    items = list(params) if isinstance(params, Iterable) and not isinstance(params, torch.Tensor) else [params]
    if items and isinstance(items[0], tuple):
        return [parameter for _, parameter in items]
    return items

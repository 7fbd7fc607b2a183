"""What the plan asks of the layer engine: units, their parameters and layouts, before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

Layout = Literal["shard", "zero2", "zero1", "whole"]
"""What is split over ranks: parameters, gradients and state; gradients and state; state alone; nothing."""


@dataclass(frozen=True, slots=True)
class Site:
    """A place in the model that refers to a parameter (tied parameters have several)."""

    module: nn.Module
    name: str


@dataclass(frozen=True, slots=True)
class ParameterRequest:
    """One parameter to put in a unit."""

    path: str
    parameter: nn.Parameter
    sites: tuple[Site, ...]
    layout: Layout


@dataclass(frozen=True, slots=True)
class UnitRequest:
    """One unit as the plan wants it.

    Attributes:
        reshard_after_forward: Free the weights between forward and backward; a number leaves them split over groups of
            that many ranks.
        resident: Gathered for the whole step: its weights are used outside its modules' own calls (ties, root).
    """

    name: str
    modules: tuple[nn.Module, ...]
    parameters: tuple[ParameterRequest, ...]
    reshard_after_forward: bool | int = True
    resident: bool = False
    is_layer: bool = True
    prefetch_forward: int = 1
    prefetch_backward: int = 1


@dataclass(frozen=True, slots=True)
class Dtypes:
    """Dtypes of the policy's `precision`; None keeps each parameter's own."""

    compute: torch.dtype | None = None
    master: torch.dtype | None = None
    reduce: torch.dtype | None = None

    def of(self, parameter: torch.Tensor) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
        """(compute, held, reduce) dtypes of one parameter. Frozen ones keep theirs between steps."""
        own = parameter.dtype
        if not own.is_floating_point:
            return own, own, own
        held = self.master if self.master is not None and parameter.requires_grad else own
        return self.compute or own, held, self.reduce or held

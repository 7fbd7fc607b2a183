"""Layers that are alike: one of them tells the shapes and the cost of all."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import nn


def kind_of(layer: nn.Module) -> Hashable:
    """What makes two layers of one model alike: classes, settings, weights' shapes; a layer's number is no part of it.

    >>> kind_of(nn.Linear(2, 3)) == kind_of(nn.Linear(2, 3)) != kind_of(nn.Linear(3, 2))
    True
    """
    modules = tuple(
        (name, type(module).__qualname__, tuple(sorted((k, v) for k, v in vars(module).items() if _is_setting(k, v))))
        for name, module in layer.named_modules()
    )
    weights = tuple((name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in layer.named_parameters())
    return modules, weights


def _is_setting(name: str, value: Any) -> bool:
    return name not in ("layer_idx", "layer_id", "index", "idx") and isinstance(value, bool | int | float | str)

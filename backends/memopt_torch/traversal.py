"""Finds tensors in what modules return."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in tuples, lists, mappings, dataclasses and classes registered with pytree."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name))
    elif value is not None and not isinstance(value, int | float | str | bool):
        yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))

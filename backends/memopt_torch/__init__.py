"""The PyTorch backend of memopt: layer sharding in one arena, recomputation, offload; or FSDP2 by the same policy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .backend import BACKEND

if TYPE_CHECKING:
    from .lowered import lower

__all__ = ["BACKEND", "lower"]


def __getattr__(name: str) -> object:
    if name == "lower":
        from .lowered import lower

        return lower
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

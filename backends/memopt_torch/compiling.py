"""`torch.compile` under a policy: each unit's forward by itself, hooks outside, so that they break no graph."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from memopt.errors import MemoptError, Problem

if TYPE_CHECKING:
    from .apply import Applied


def compile_units(applied: Applied, options: dict[str, Any]) -> None:
    """See `Applied.compile`."""
    regions = {id(region.module): region for region in applied.regions.regions}
    held = [region for region in regions.values() if not region.wanted.is_whole]
    if held:
        raise MemoptError(
            Problem(
                "compile-holds-values",
                f"rules hold values inside `{region.path}` by name; a compiled function shows no modules",
                path=region.path,
                hint="recompute the unit whole, or leave it uncompiled",
            )
            for region in held
        )
    for unit in applied.plan.units:
        for member in unit.members:
            module = applied.module(member)
            region = regions.get(id(module))
            if region is None:
                module.forward = torch.compile(module.forward, **options)
            else:
                region.compile(options)

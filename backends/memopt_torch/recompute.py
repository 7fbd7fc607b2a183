"""Recompute a unit's activations in the backward pass: all of them, or all but the values the policy holds.

`install` puts a region around the `forward` of each unit whose activations a rule touches. Nothing else of the model
changes: no module is wrapped or renamed.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memopt.errors import MemoptWarning
from memopt.matching import canonical_paths
from memopt.plan import Plan

from .meta import real_device
from .offload import Transfers, settings_of
from .own_checkpointing import own_checkpointing, refuse_own_checkpointing
from .region import Mode, Region
from .values import wanted_of


@dataclass
class Regions:
    """The regions installed in one model.

    Attributes:
        regions: In the order of the plan's units.
        transfers: Copies to and from host memory.
    """

    model: nn.Module
    plan: Plan
    regions: tuple[Region, ...]
    transfers: Transfers

    def __post_init__(self) -> None:
        if not self.transfers.settings.keep_last_unit:
            # The last unit's copies have the head's time; what follows the model (the loss) finds the memory free.
            self.model.register_forward_hook(lambda *_: self.transfers.settle_all())

    def tell_of_idle_units(self) -> None:
        """A step is over: warns of units whose rules had nothing to act on, because nobody called them."""
        idle = [region.path for region in self.regions if not region.is_entered]
        if idle:
            warnings.warn(
                f"the first step never called {len(idle)} of {len(self.regions)} units that rules recompute or "
                f"offload (first: `{idle[0]}`), so nothing was done for them. A unit must be a module that is called "
                "itself: name the modules inside a container that the model walks through",
                MemoptWarning,
                stacklevel=2,
            )

    def remove(self) -> None:
        """Take all regions out again."""
        for region in self.regions:
            region.remove()

    @contextmanager
    def reference(self, mode: Mode, *, around: AbstractContextManager[Any] | None = None) -> Iterator[None]:
        """Run without the policy's residual slots: `plain` keeps everything, `recompute` recomputes every unit, each
        recomputation inside `around`."""
        extra: list[Region] = []
        if mode == "recompute":
            extra = _regions(self.model, self.plan, self.transfers, skip={id(region.module) for region in self.regions})
        for region in (*self.regions, *extra):
            region.mode, region.around = mode, around or nullcontext()
        try:
            yield
        finally:
            for region in extra:
                region.remove()
            for region in self.regions:
                region.mode, region.around = "policy", nullcontext()


def _regions(model: nn.Module, plan: Plan, transfers: Transfers, *, skip: set[int] | None = None) -> list[Region]:
    raw = dict(model.named_modules(remove_duplicate=False))
    canonical = canonical_paths(raw)
    by_path = {canonical[name]: module for name, module in raw.items()}
    paths = {id(module): canonical[name] for name, module in reversed(raw.items())}  # a shared module's first path
    found, told = [], set[str]()
    seen = set(skip or ())
    for unit in plan.units:
        for member in unit.members:
            module = by_path[member]
            if (unit.region or skip is not None) and id(module) not in seen:
                seen.add(id(module))
                refuse_own_checkpointing(module, member, is_deep=True)
                found.append(Region(module, member, wanted_of(plan, unit), paths, transfers, told))
    return found


def install(model: nn.Module, plan: Plan, engine: Any = None) -> Regions:
    """Recompute and offload the activations the plan says, unit by unit.

    Args:
        model: Its units' `forward` is replaced; modules, names and parameters stay.
        plan: Rows of role `activation` and units with `region` say what to do.
        engine: Anything with `is_weight(tensor)`: its gathered weights are never offloaded.

    Raises:
        MemoptError: `own-checkpointing`.
    """
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False) is True and any(unit.region for unit in plan.units):
            raise own_checkpointing(type(module).__name__, "the model's own gradient checkpointing is on")
    transfers = Transfers(settings_of(plan), engine, device=_device_of(model))
    regions = tuple(_regions(model, plan, transfers))
    if regions:
        regions[0].before = _Idle(plan, regions)
    return Regions(model, plan, regions, transfers)


def _device_of(model: nn.Module) -> torch.device:
    """Where the model is, or will be once it has values."""
    devices = {parameter.device for parameter in model.parameters()}
    return next((device for device in devices if device.type != "meta"), real_device())


class _Idle:
    """Tells, when the second step begins, of rules that have held nothing in the first."""

    def __init__(self, plan: Plan, regions: tuple[Region, ...]) -> None:
        order = {name: index for index, name in enumerate(plan.rule_order)}
        units = {unit.name for unit in plan.units if unit.region}
        self._rules = {
            row.rule: order.get(row.rule, len(order))
            for row in plan.rows_of("activation")
            if row.rule is not None and row.unit in units and row.residual in ("keep", "offload")
        }
        self._regions = regions
        self._num_calls = 0

    def __call__(self) -> None:
        self._num_calls += 1
        if self._num_calls != 2:
            return
        used = {number for region in self._regions for number in region.used_rules()}
        for rule, number in self._rules.items():
            if number not in used:
                warnings.warn(
                    f"rule `{rule}` has held nothing: autograd keeps none of the values it names for the backward "
                    "pass, and nothing is recomputed from them; take it out, or name the value that is saved instead",
                    MemoptWarning,
                    stacklevel=2,
                )

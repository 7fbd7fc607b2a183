"""Builds an engine's units: sections, shards, and their places in the arena."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from memopt.errors import MemoptError

from .lifetimes import BlockKind, UnitSizes
from .meta import MetaInitialiser, has_meta
from .optimizers import note_owner, note_replacement
from .requests import Dtypes, ParameterRequest, UnitRequest
from .sections import Section
from .tenants import Arena, Tenant
from .units import Unit

if TYPE_CHECKING:
    from .engine import Engine


def sections_of(unit: Unit, requests: Sequence[ParameterRequest], dtypes: Dtypes, *, size: int, rank: int) -> None:
    """Fills `unit.sections`: parameters that can share a collective share one."""
    groups: dict[tuple, list[ParameterRequest]] = {}
    for request in requests:
        parameter = request.parameter
        layout = request.layout if size > 1 else "whole"
        key = (layout, parameter.requires_grad, parameter.dtype, dtypes.of(parameter), parameter.device)
        groups.setdefault(key, []).append(request)
    for group in groups.values():
        unit.sections.append(Section(unit, group, dtypes, size=size, rank=rank))


def free_replaced(parameter: nn.Parameter) -> None:
    """Frees the memory of a parameter that is no longer the model's, whoever still holds it."""
    parameter.grad = None
    parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)


def embedding_only(modules: Sequence[nn.Module]) -> bool:
    """Whether weights are not read in backward: torch's own embedding, whose gradient is a scatter of the output's."""
    return all(type(module) is nn.Embedding and "forward" not in vars(module) for module in modules)


def unit_from(request: UnitRequest, index: int, dtypes: Dtypes, *, size: int, rank: int) -> Unit:
    """A unit with its sections; nothing is allocated and the model is not touched."""
    reshard = request.reshard_after_forward
    is_grouped = reshard is not True and 1 < reshard < size
    unit = Unit(
        name=request.name,
        index=index,
        modules=request.modules,
        sections=[],
        keep=reshard is False,
        resident=request.resident,
        needs_weights_in_backward=request.resident or not embedding_only(request.modules),
        prefetch_forward=request.prefetch_forward,
        prefetch_backward=request.prefetch_backward,
        group_size=int(reshard) if is_grouped else None,
    )
    sections_of(unit, request.parameters, dtypes, size=size, rank=rank)
    return unit


def check_requests(requests: Sequence[UnitRequest]) -> None:
    """Refuses parameters claimed twice.

    Raises:
        MemoptError: `overlapping-units`.
    """
    owner: dict[int, str] = {}
    for request in requests:
        for parameter in request.parameters:
            other = owner.setdefault(id(parameter.parameter), request.name)
            if other != request.name:
                raise MemoptError.of(
                    "overlapping-units",
                    f"`{parameter.path}` is in the units `{other}` and `{request.name}`",
                    path=parameter.path,
                    hint="make the patterns disjoint, or put tied modules in one unit with `group: true`",
                )


def sizes_of(engine: Engine, layers: set[str]) -> list[UnitSizes]:
    """What each unit asks of the arena; `layers` names the repeated ones."""
    return [
        UnitSizes(
            name=unit.name,
            weight_nbytes=sum(s.padded_numel * s.compute_dtype.itemsize for s in unit.sections if s.gathers_into_arena),
            grad_nbytes=sum(
                s.padded_numel * s.reduce_dtype.itemsize for s in unit.sections if _slot_in_arena(engine, s)
            ),
            needs_weights_in_backward=unit.needs_weights_in_backward,
            is_layer=unit.name in layers,
            keep=unit.keep,
            resident=unit.resident,
            prefetch_forward=unit.prefetch_forward,
            prefetch_backward=unit.prefetch_backward,
            resharded_nbytes=sum(s.part_numel * s.compute_dtype.itemsize for s in unit.sections if s.is_resharded),
            reduced_nbytes=0
            if engine.keeps_gradients
            else sum(s.shard_numel * s.held_dtype.itemsize for s in unit.sections if s.stages_gradients),
        )
        for unit in engine.units
    ]


def _slot_in_arena(engine: Engine, section: Section) -> bool:
    """Gradients kept whole between micro-batches cannot share memory with other units'."""
    return section.stages_gradients and engine.accumulate_steps == 1


def materialise(engine: Engine) -> Arena:
    """Allocates shards unit by unit (letting each unit's own parameters go), then the arena."""
    meta = MetaInitialiser(engine.model) if has_meta(engine.model) else None
    for unit in engine.units:
        if meta is not None:
            meta.initialise_unit(unit)
        originals = [entry.held for _, entry in unit.entries()]
        for section in unit.sections:
            section.materialise()
            section.make_parameters(engine.groups.gather)
            section.swap(used=False)
        for original, (section, entry) in zip(originals, unit.entries(), strict=True):
            note_owner(entry.held, engine)
            if not section.in_place:
                note_replacement(original, entry.held)
                free_replaced(original)
    if meta is not None:
        meta.initialise_buffers(engine.model)
    device = next((s.device for unit in engine.units for s in unit.sections), torch.device("cpu"))
    arena = Arena(engine.arena_plan, device=device)
    for unit in engine.units:
        place = _Place(arena, engine.arena_plan.offsets(unit.name))
        for section in unit.sections:
            place.lay_out(engine, section)
    arena.give_back()
    return arena


@dataclass
class _Place:
    """Where in the arena a unit's next section goes: byte offsets of its blocks, by kind."""

    arena: Arena
    offsets: dict[BlockKind, int]

    def lay_out(self, engine: Engine, section: Section) -> None:
        """Gives a section its memory."""
        if section.gathers_into_arena:
            section.gathered, section.weights = self._take(
                "weights", section, section.padded_numel, section.compute_dtype
            )
        elif section.whole is not None:
            section.gathered = section.whole
        if section.is_resharded and "resharded" in self.offsets:
            section.part, section.resharded = self._take(
                "resharded", section, section.part_numel, section.compute_dtype
            )
        if section.stages_gradients and _slot_in_arena(engine, section):
            section.slot, section.gradients = self._take(
                "gradients", section, section.padded_numel, section.reduce_dtype
            )
        elif section.stages_gradients:
            section.slot = torch.zeros(section.padded_numel, dtype=section.reduce_dtype, device=section.device)
        section.make_views()
        section.brings_gradient = self.arena.plan.is_freed and section.stages_gradients
        if engine.reduction.manages(section):
            section.make_gradients(self._reduced(section))

    def _take(self, kind: BlockKind, section: Section, numel: int, dtype: torch.dtype) -> tuple[torch.Tensor, Tenant]:
        """The section's stretch of the unit's block of that kind; blocks of nothing lie anywhere."""
        offset = self.offsets.setdefault(kind, 0)
        view, tenant = self.arena.tenant(kind, section, offset=offset, numel=numel, dtype=dtype)
        self.offsets[kind] += view.nbytes
        return view, tenant

    def _reduced(self, section: Section) -> torch.Tensor | None:
        """Arena memory for the reduced gradient, if there is room for the unit's."""
        if "reduced" not in self.offsets or not section.stages_gradients:
            return None
        memory, section.reduced = self._take("reduced", section, section.shard_numel, section.held_dtype)
        return memory

"""Sections: flat padded runs of a unit's parameters that share dtypes, layout and trainability.

A section is one collective: one all-gather brings its parameters, one reduce-scatter takes its gradients.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .collectives import Pending
from .requests import Dtypes, Layout, ParameterRequest
from .sharded import FlatSlice, ShardedTensor, local_tensor
from .tenants import Tenant

if TYPE_CHECKING:
    from .units import Unit

ALIGNMENT = 8  # values; keeps every rank's shard on a 16-byte border in 2-byte dtypes


class Entry:
    """One parameter inside a section.

    Attributes:
        offset: First flat index in the section.
        held: What the model, the optimizer and checkpoints see between uses.
        used: What the module sees while the unit is gathered; the same object as `held` where nothing moves.
        grad_view: This rank's stretch of the section's gradient, or the whole one.
        grad: The tensor put into `held.grad`.
        staging: Where the whole gradient goes before it is reduced.
    """

    __slots__ = (
        "grad", "grad_view", "held", "numel", "offset", "path", "shape", "sites", "staging", "start", "stop", "used",
    )  # fmt: skip

    def __init__(self, request: ParameterRequest, offset: int) -> None:
        self.path = request.path
        self.sites = request.sites
        self.shape = request.parameter.shape
        self.numel = request.parameter.numel()
        self.offset = offset
        self.start = self.stop = 0
        self.held: nn.Parameter = request.parameter
        self.used: nn.Parameter = request.parameter
        self.grad_view: torch.Tensor | None = None
        self.grad: torch.Tensor | None = None
        self.staging: torch.Tensor | None = None


_alone = Entry.__new__(Entry)
_alone.grad = torch.empty(0)
_ALONE = sys.getrefcount(_alone.grad)  # of a gradient that nobody but its entry holds


class Section:
    """A flat run of parameters that share dtypes, layout and trainability.

    Attributes:
        shard: This rank's values, [shard_numel]; for whole layouts a view of `whole`.
        whole: Every value in the held dtype where each rank keeps all, else None.
        gathered: Every value in the compute dtype while in use: in the arena, or `whole` itself.
        part: This rank's part of the gathered values where the unit is resharded over groups.
        grad: Reduced gradient, held dtype: [shard_numel], or [padded_numel] for `zero1` and `whole`.
        reduced: The place of `grad` in the arena; None where it has memory of its own.
        brings_gradient: That memory comes with the reduction and goes with the next forward pass.
        slot: Where whole gradients are staged for the reduce-scatter; None where they are reduced in `grad`.
    """

    def __init__(self, unit: Unit, requests: Sequence[ParameterRequest], dtypes: Dtypes, *, size: int, rank: int):
        first = requests[0]
        self.unit = unit
        self.layout: Layout = first.layout if size > 1 else "whole"
        self.trainable = first.parameter.requires_grad
        self.compute_dtype, self.held_dtype, self.reduce_dtype = dtypes.of(first.parameter)
        self.device = first.parameter.device
        self.size, self.rank = (size, rank) if self.layout != "whole" else (1, 0)
        self.entries: list[Entry] = []
        self.numel = 0
        for request in requests:
            self.entries.append(Entry(request, self.numel))
            self.numel += request.parameter.numel()
        quantum = self.size * ALIGNMENT
        self.padded_numel = -(-self.numel // quantum) * quantum
        self.shard_numel = self.padded_numel // self.size
        self.weights: Tenant | None = None
        self.gradients: Tenant | None = None
        self.resharded: Tenant | None = None
        self.reduced: Tenant | None = None
        self.shard: torch.Tensor
        self.whole: torch.Tensor | None = None
        self.gathered: torch.Tensor
        self.part: torch.Tensor | None = None
        self.brings_gradient = False
        self.grad: torch.Tensor | None = None
        self.slot: torch.Tensor | None = None
        self.pending: Pending | None = None
        self._arena_slot: tuple[torch.Tensor, Tenant] | None = None
        self.kept: set[Entry] = set()  # those whose whole gradient is kept from earlier backward passes
        self.reset_backward()
        self.stale = False
        self.gathered_version = -1

    def reset_backward(self) -> None:
        """Forgets what the current backward pass has brought."""
        self.arrived: set[Entry] = set()  # those whose gradient lies in the staging memory
        self.used: set[Entry] = set()  # those that got a gradient at any time in this backward pass
        self.opened = False
        self.launched = False  # what lies in staging has been sent
        self.sent = False  # something has been sent in this backward pass
        self.direct = False  # the reduction writes `grad` itself
        self.carries = False  # `grad` holds gradients that the reduction must add to

    @property
    def in_place(self) -> bool:
        """Every rank keeps all values in the compute dtype: modules use the held parameters themselves."""
        return self.layout == "whole" and self.compute_dtype == self.held_dtype

    @property
    def gathers_into_arena(self) -> bool:
        """Whether use of the weights takes arena memory."""
        return self.layout == "shard" or self.compute_dtype != self.held_dtype

    @property
    def num_expected(self) -> int:
        """Parameters that can get a gradient now (users may freeze some later)."""
        return sum(entry.held.requires_grad for entry in self.entries)

    @property
    def stages_gradients(self) -> bool:
        """Whether gradients pass through a slot before they are reduced."""
        return self.trainable and self.layout in ("shard", "zero2")

    @property
    def is_resharded(self) -> bool:
        """Whether its weights are split over a small group between forward and backward."""
        return self.layout == "shard" and self.unit.group_size is not None

    @property
    def part_numel(self) -> int:
        """Values of one rank of such a group."""
        assert self.unit.group_size is not None  # only asked of sections that are resharded
        return self.padded_numel // self.unit.group_size

    def keep_part(self) -> None:
        """Copies this rank's part of the gathered weights to where it stays until the backward pass."""
        if self.part is not None and self.unit.group_size is not None:
            place = self.rank % self.unit.group_size
            self.part.copy_(self.gathered[place * self.part_numel : (place + 1) * self.part_numel])

    def own_part(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's stretch of a flat [padded_numel] tensor."""
        return whole[self.rank * self.shard_numel : (self.rank + 1) * self.shard_numel]

    def materialise(self) -> None:
        """Allocates what stays between steps and copies this rank's values into it; nothing whole is allocated for
        sharded parameters."""
        if self.in_place:
            self._adopt()
            return
        low = self.rank * self.shard_numel
        keeps_all = self.layout != "shard"
        held = torch.zeros(
            self.padded_numel if keeps_all else self.shard_numel, dtype=self.held_dtype, device=self.device
        )
        for entry in self.entries:
            entry.start = min(max(low - entry.offset, 0), entry.numel)
            entry.stop = min(max(low + self.shard_numel - entry.offset, 0), entry.numel)
            flat = entry.held.detach().reshape(-1)
            if keeps_all:
                held[entry.offset : entry.offset + entry.numel].copy_(flat)
            elif entry.stop > entry.start:
                at = entry.offset + entry.start - low
                held[at : at + entry.stop - entry.start].copy_(flat[entry.start : entry.stop])
        self.whole = held if keeps_all else None
        self.shard = self.own_part(held) if keeps_all else held
        self.gathered_version = self.shard._version

    def _adopt(self) -> None:
        """Parameters that stay as they are. A lone one needs no flat run; gradients get one for a single reduction."""
        for entry in self.entries:
            entry.start, entry.stop = 0, entry.numel

    def make_parameters(self, group: Any) -> None:
        """Puts the held parameters in place of the model's own (whose memory is let go)."""
        if self.in_place:
            return
        low = self.rank * self.shard_numel
        for entry in self.entries:
            original = entry.held
            values = self._held_values(entry, low, self.whole, self.shard)
            if self.layout == "whole":
                held = nn.Parameter(values.view(entry.shape), requires_grad=original.requires_grad)
            else:
                piece = FlatSlice(entry.path, entry.shape, entry.start, entry.stop, group)
                held = nn.Parameter(ShardedTensor(values, piece), requires_grad=original.requires_grad)
            entry.held = held

    def _held_values(self, entry: Entry, low: int, whole: torch.Tensor | None, shard: torch.Tensor) -> torch.Tensor:
        if self.layout == "whole" and whole is not None:
            return whole[entry.offset : entry.offset + entry.numel]
        at = entry.offset + entry.start - low if entry.stop > entry.start else 0
        return shard[at : at + entry.stop - entry.start]

    def make_views(self) -> None:
        """Parameters over the gathered weights. `.data` gives each a version counter of its own: collectives write
        the buffer between forward and backward, and saved weights are gathered again before they are read."""
        for entry in self.entries:
            if self.in_place:
                entry.used = entry.held
                continue
            view = self.gathered[entry.offset : entry.offset + entry.numel].view(entry.shape)
            entry.used = nn.Parameter(view.data, requires_grad=entry.held.requires_grad)

    def make_gradients(self, memory: torch.Tensor | None) -> None:
        """Sets up the reduced gradient and the views on both ends of the reduction.

        Args:
            memory: For the reduced gradient; None allocates it, unless it comes later.
        """
        if not self.trainable:
            return
        if self.brings_gradient:
            assert self.slot is not None  # only staged gradients come later
            self._stage_in(self.slot)
            return
        numel = self.shard_numel if self.stages_gradients else self.padded_numel
        if memory is None:
            memory = torch.zeros(numel, dtype=self.held_dtype, device=self.device)
        self._point_gradients_at(memory)
        self._stage_in(self.slot if self.slot is not None else memory)

    def _stage_in(self, memory: torch.Tensor) -> None:
        for entry in self.entries:
            entry.staging = memory[entry.offset : entry.offset + entry.numel].view(entry.shape)

    def move_slot_out(self) -> None:
        """Gives whole gradients that cannot be sent yet memory of their own until they are."""
        assert self.slot is not None  # only slots in the arena are ever in the way
        assert self.gradients is not None
        self._arena_slot = self.slot, self.gradients
        self.gradients.occupied, self.gradients = False, None
        self.slot = self.slot.clone()
        self._stage_in(self.slot)

    def leave_slot(self) -> None:
        """Whole gradients have been sent, or are dropped: their memory is free."""
        if self._arena_slot is not None:
            (self.slot, self.gradients), self._arena_slot = self._arena_slot, None
            self._stage_in(self.slot)
        elif self.gradients is not None:
            self.gradients.occupied = False

    def _point_gradients_at(self, memory: torch.Tensor) -> None:
        self.grad = memory
        low = self.rank * self.shard_numel
        mine = memory if self.stages_gradients else self.own_part(memory)
        for entry in self.entries:
            if self.layout == "whole":
                entry.grad_view = memory[entry.offset : entry.offset + entry.numel]
                entry.grad = entry.grad_view.view(entry.shape)
            else:
                entry.grad_view = self._held_values(entry, low, None, mine)
                entry.grad = ShardedTensor(entry.grad_view, entry.held.slice)  # type: ignore[attr-defined]

    def bring_gradient(self) -> None:
        """Allocates the reduced gradient where it comes with the reduction; its values are anything."""
        if self.brings_gradient and self.grad is None:
            self._point_gradients_at(torch.empty(self.shard_numel, dtype=self.held_dtype, device=self.device))

    def drop_gradient(self) -> None:
        """Lets the reduced gradient go, if nobody holds it: not the user, and not this backward pass."""
        if self.brings_gradient and not self.holds_gradient:
            self.grad = None
            for entry in self.entries:
                entry.grad = entry.grad_view = None

    @property
    def holds_gradient(self) -> bool:
        """Whether `grad` holds values that somebody will read: reduced in this backward pass, or kept by the user."""
        return self.sent or any(entry.held.grad is entry.grad is not None for entry in self.entries)

    def leave_held_gradients(self) -> None:
        """Gradients that are in no `.grad` any more and that somebody holds all the same (two losses' gradients to be
        combined, say) stay theirs, as in plain training: this rank's next ones lie elsewhere."""
        held = [entry for entry in self.entries if entry.grad is not None and sys.getrefcount(entry.grad) > _ALONE]
        held = [entry for entry in held if entry.held.grad is not entry.grad]
        if not held or self.grad is None:
            return
        memory = self.grad
        if self.reduced is None:
            memory = memory.clone()
        else:
            for entry in held:
                assert isinstance(entry.grad, ShardedTensor)  # what is reduced into the arena is sharded
                entry.grad.local = entry.grad.local.clone()
        self._take_gradients_to(memory)
        if self.slot is None:
            self._stage_in(memory)

    def _take_gradients_to(self, memory: torch.Tensor) -> None:
        """New gradients over other memory; those that the user has in `.grad` are exchanged."""
        kept = [entry for entry in self.entries if entry.held.grad is entry.grad is not None]
        self._point_gradients_at(memory)
        for entry in kept:
            entry.held.grad = entry.grad

    def move_gradient_out(self) -> None:
        """Gives the reduced gradient memory of its own for good, and takes along what it holds."""
        assert self.grad is not None  # sections with a place in the arena have one
        self._take_gradients_to(self.grad.clone())
        assert self.reduced is not None
        self.reduced.occupied = False
        self.reduced = None

    def swap(self, *, used: bool) -> None:
        """Lets the modules see the gathered parameters, or the held ones again."""
        if self.in_place:
            return
        for entry in self.entries:
            parameter = entry.used if used else entry.held
            if used and parameter.requires_grad is not entry.held.requires_grad:
                parameter.requires_grad_(entry.held.requires_grad)
            for site in entry.sites:
                site.module._parameters[site.name] = parameter

    def accumulates(self) -> bool:
        """Whether the user kept gradients (no `zero_grad` since); they are brought into the section's own memory.

        A parameter without one starts from zero and stays without until a rank has used it: an optimizer leaves
        parameters without gradient alone, and would let ones with a gradient of zero decay.
        """
        grads = [entry.held.grad for entry in self.entries]
        if all(grad is None for grad in grads):
            return False
        for entry, grad in zip(self.entries, grads, strict=True):
            if grad is entry.grad:
                continue
            assert entry.grad_view is not None  # trainable sections have views
            assert entry.staging is not None
            if grad is None:
                (entry.grad_view if self.stages_gradients else entry.staging).zero_()
            else:
                entry.grad_view.copy_(local_tensor(grad).reshape(-1))
                entry.held.grad = entry.grad
        return True

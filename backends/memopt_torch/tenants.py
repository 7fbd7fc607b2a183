"""The arena at run time: its memory, and who lives where in it."""

from __future__ import annotations

import torch

from .arena import ArenaPlan
from .lifetimes import BlockKind


class Tenant:
    """A block at run time: where it lies, which blocks share its memory, and whether it is in use.

    Attributes:
        kind: What lies in it.
        owner: The section whose data it holds.
        region: The memory it lies in.
        neighbours: Blocks that share memory with this one.
        occupied: Holds live data now.
    """

    __slots__ = ("kind", "nbytes", "neighbours", "occupied", "offset", "owner", "region")

    def __init__(self, kind: BlockKind, owner: object, region: Region, offset: int, nbytes: int) -> None:
        self.kind = kind
        self.owner = owner
        self.region = region
        self.offset = offset
        self.nbytes = nbytes
        self.neighbours: tuple[Tenant, ...] = ()
        self.occupied = False


class Region:
    """One allocation. Its memory may be given back while it is empty: views stay views of what comes in its place.

    Attributes:
        memory: uint8 [nbytes], the same object for the whole run.
        nbytes: Its size while it is there.
    """

    def __init__(self, nbytes: int, *, device: torch.device) -> None:
        self.memory = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self.nbytes = nbytes
        self.tenants: list[Tenant] = []
        self.is_there = True

    def bring(self) -> None:
        """Makes sure that the memory is there; its values are anything."""
        if not self.is_there:
            self.memory.untyped_storage().resize_(self.nbytes)
            self.is_there = True

    def give_back(self) -> None:
        """Frees the memory if nobody lives in it.

        On a GPU it goes to the allocator of the stream that computes. Collectives that used it on theirs have been
        waited for by then, or their blocks would be occupied.
        """
        if self.is_there and not any(tenant.occupied for tenant in self.tenants):
            self.memory.untyped_storage().resize_(0)
            self.is_there = False


class Arena:
    """The regions of a plan, and typed views of them."""

    def __init__(self, plan: ArenaPlan, *, device: torch.device) -> None:
        self.plan = plan
        self.regions = [Region(nbytes, device=device) for nbytes in plan.region_nbytes]

    @property
    def allocated_nbytes(self) -> int:
        """What is allocated now."""
        return sum(region.memory.untyped_storage().nbytes() for region in self.regions)

    def tenant(
        self, kind: BlockKind, owner: object, *, offset: int, numel: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, Tenant]:
        """A 1-D view of `numel` values at a byte offset, and the block they live in with its neighbours."""
        region, start = self._region(offset)
        view = region.memory[offset - start : offset - start + numel * dtype.itemsize].view(dtype)
        new = Tenant(kind, owner, region, offset, view.nbytes)
        shares = [t for t in region.tenants if t.offset < offset + new.nbytes and offset < t.offset + t.nbytes]
        new.neighbours = tuple(shares)
        for other in shares:
            other.neighbours = (*other.neighbours, new)
        region.tenants.append(new)
        return view, new

    def _region(self, offset: int) -> tuple[Region, int]:
        start = 0
        for region in self.regions:
            if offset < start + region.nbytes:
                return region, start
            start += region.nbytes
        return self.regions[0], offset  # a block of nothing, in an arena of nothing

    def give_back(self) -> None:
        """Frees every region that nobody lives in, where the plan wants that."""
        if self.plan.is_freed:
            for region in self.regions:
                region.give_back()

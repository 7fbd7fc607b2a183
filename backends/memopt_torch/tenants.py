"""The arena at run time: the one allocation, and who lives where in it."""

from __future__ import annotations

import torch

from .arena import ArenaPlan
from .lifetimes import BlockKind


class Tenant:
    """A block at run time: where it lies, which blocks share its memory, and whether it is in use.

    Attributes:
        kind: What lies in it.
        owner: The section whose data it holds.
        neighbours: Blocks that share memory with this one.
        occupied: Holds live data now.
    """

    __slots__ = ("kind", "nbytes", "neighbours", "occupied", "offset", "owner")

    def __init__(self, kind: BlockKind, owner: object, offset: int, nbytes: int) -> None:
        self.kind = kind
        self.owner = owner
        self.offset = offset
        self.nbytes = nbytes
        self.neighbours: tuple[Tenant, ...] = ()
        self.occupied = False


class Arena:
    """The one allocation, and typed views of it."""

    def __init__(self, plan: ArenaPlan, *, device: torch.device) -> None:
        self.plan = plan
        self.storage = torch.zeros(plan.nbytes, dtype=torch.uint8, device=device)
        self._tenants: list[Tenant] = []

    def view(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A 1-D view of `numel` values at a byte offset."""
        return self.storage[offset : offset + numel * dtype.itemsize].view(dtype)

    def tenant(self, kind: BlockKind, owner: object, *, offset: int, nbytes: int) -> Tenant:
        """Registers a block and finds the ones it shares memory with."""
        new = Tenant(kind, owner, offset, nbytes)
        shares = [t for t in self._tenants if t.offset < offset + nbytes and offset < t.offset + t.nbytes]
        new.neighbours = tuple(shares)
        for other in shares:
            other.neighbours = (*other.neighbours, new)
        self._tenants.append(new)
        return new

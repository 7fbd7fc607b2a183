"""Parameters whose optimizer state lives in host memory, in buckets that travel and are updated together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .measure import is_wrapper_type, register_host_storage
from .sharded import ShardedTensor, local_tensor
from .streams import Ticket

_BUCKET_BYTES = 64 * 2**20
_MIN_BUCKETS = 8


def on_host(like: torch.Tensor) -> torch.Tensor:
    """An empty host buffer of the same size and dtype, pinned where that matters."""
    buffer = torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=like.device.type == "cuda")
    register_host_storage(buffer)
    return buffer


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that holds a wrapper's bytes on this rank; a plain tensor itself."""
    if isinstance(tensor, ShardedTensor) or isinstance(getattr(tensor, "data", None), ShardedTensor):
        return local_tensor(tensor)
    if is_wrapper_type(type(tensor)):
        return getattr(tensor, "_local_tensor")  # noqa: B009  # DTensor: no public accessor without a gradient
    return tensor


def wrapped(local: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """`local` in the kind of wrapper that `like` is."""
    if isinstance(like, ShardedTensor):
        return ShardedTensor(local, like.slice)
    if is_wrapper_type(type(like)):
        from torch.distributed.tensor import DTensor

        assert isinstance(like, DTensor)
        return DTensor(local, like._spec, requires_grad=False)  # pyright: ignore[reportCallIssue]
    return local


@dataclass(eq=False)
class Member:
    """One parameter whose state lives on the host.

    Attributes:
        parameter: What the optimizer holds.
        group: Number of its parameter group.
        master: Its value on the host (`update_on: host` only).
        version: The parameter's version that `master` belongs to.
        returning: The copy that last read `master`.
    """

    parameter: nn.Parameter
    group: int
    master: nn.Parameter | None = None
    version: int = -1
    returning: Ticket | None = None

    @property
    def local(self) -> torch.Tensor:
        """Its values on this rank."""
        return plain(self.parameter)


def is_moved(value: Any) -> bool:
    """Step counters stay where the optimizer wants them."""
    return isinstance(value, torch.Tensor) and value.numel() > 1


@dataclass
class Bucket:
    """Parameters updated together, and their state on its way."""

    members: list[Member]
    arriving: list[tuple[Member, str, torch.Tensor, Ticket]] = field(default_factory=list)


def _state_bytes(member: Member) -> int:
    return 2 * member.local.numel() * member.local.element_size()


def buckets_of(members: Sequence[Member]) -> list[Bucket]:
    """Neighbours together, none larger than 64 MiB of Adam's state or an eighth of it all, unless one parameter is."""
    total = sum(_state_bytes(member) for member in members)
    limit = min(_BUCKET_BYTES, max(total // _MIN_BUCKETS, max(_state_bytes(member) for member in members)))
    buckets, filled = [Bucket([])], 0
    for member in members:
        if buckets[-1].members and filled + _state_bytes(member) > limit:
            buckets.append(Bucket([]))
            filled = 0
        buckets[-1].members.append(member)
        filled += _state_bytes(member)
    return buckets

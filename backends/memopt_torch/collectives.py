"""Process groups of the engine and the four collectives it issues, with errors that say where they happened."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from memopt.errors import MemoptError, Problem

from .interpreter_exit import keep_until_exit
from .journal import Ticket, note_wait, noted_collective
from .stalls import StallWatch


@dataclass(frozen=True, slots=True)
class Groups:
    """Who talks to whom.

    Gathers and reductions have groups of their own: a gather for the next layer must not queue behind the reduction of
    the last one, and their relative order may then differ between ranks without harm.

    Attributes:
        size: Ranks a parameter is split over.
        rank: This rank's place among them.
        replicas: Groups that hold the same shards.
        gather: For all-gathers of parameters.
        reduce: For reduce-scatters of gradients.
        replicate: For all-reduces between replicas.
        world: Every rank of the mesh; gradients of whole parameters.
        control: Every rank again, for agreements: never in line behind gradients.
        parts: For all-gathers of weights that are split over smaller groups between forward and backward, by size.
    """

    size: int = 1
    rank: int = 0
    replicas: int = 1
    gather: dist.ProcessGroup | None = None
    reduce: dist.ProcessGroup | None = None
    replicate: dist.ProcessGroup | None = None
    world: dist.ProcessGroup | None = None
    control: dist.ProcessGroup | None = None
    parts: Mapping[int, dist.ProcessGroup] = field(default_factory=dict)


def _axis_groups(mesh: np.ndarray, axis: int) -> list[list[int]]:
    """Rank lists along one axis of a mesh of ranks, in the order every rank creates them.

    numpy, because planning runs this under fake tensors, which have no values.
    """
    return np.moveaxis(mesh, axis, -1).reshape(-1, mesh.shape[axis]).tolist()


def _new_group(ranks: list[list[int]], timeout: timedelta | None) -> dist.ProcessGroup:
    """The group among `ranks` this process belongs to; collective over the world."""
    group, _ = dist.new_subgroups_by_enumeration(ranks, timeout=timeout or timeout_of_world())
    assert isinstance(group, dist.ProcessGroup)  # every rank is in one of them
    return group


def timeout_of_world() -> timedelta | None:
    """What the user gave `init_process_group`; torch gives new groups its own half hour instead."""
    world = dist.group.WORLD
    assert world is not None  # groups are made of an initialised world
    return timeout_of(world)


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """After which its collectives fail; None where its backend does not say."""
    backends = [group._get_backend(device) for device in group._device_types]
    timeouts = [getattr(getattr(backend, "options", None), "_timeout", None) for backend in backends]
    return next((timeout for timeout in timeouts if timeout is not None), None)


def make_groups(
    axes: tuple[tuple[str, int], ...], *, part_sizes: Iterable[int] = (), timeout_s: float | None = None
) -> Groups:
    """Groups for a mesh of `replicate` and `fsdp` axes (either may be absent). Collective over the world.

    Args:
        axes: (name, size), outer to inner; the product is the world size.
        part_sizes: Sizes of further groups, of neighbours on `fsdp`; those that are not smaller than it are left out.
        timeout_s: After which a collective of these groups fails; None: as the user's own process group.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Groups()
    sizes = dict(axes)
    world = dist.get_world_size()
    ranks = np.arange(world).reshape([size for _, size in axes])
    names = [name for name, _ in axes]
    shard = sizes.get("fsdp", 1)
    replicas = world // shard
    rank = 0
    gather = reduce = replicate = None
    parts: dict[int, dist.ProcessGroup] = {}
    new = partial(_new_group, timeout=None if timeout_s is None else timedelta(seconds=timeout_s))
    if shard > 1:
        lists = _axis_groups(ranks, names.index("fsdp"))
        gather, reduce = new(lists), new(lists)
        rank = dist.get_rank(gather)
        for size in sorted({size for size in part_sizes if size < shard}):
            parts[size] = new([line[i : i + size] for line in lists for i in range(0, shard, size)])
    if replicas > 1:
        lists = _axis_groups(ranks, names.index("replicate")) if "replicate" in names else ranks.reshape(1, -1).tolist()
        replicate = new(lists)
    everyone = [list(range(world))]
    everywhere, control = new(everyone), new(everyone)
    keep_until_exit((gather, reduce, replicate, everywhere, control, *parts.values()))
    return Groups(shard, rank, replicas, gather, reduce, replicate, everywhere, control, parts)


def device_mesh(axes: tuple[tuple[str, int], ...], device_type: str) -> DeviceMesh:
    """A torch DeviceMesh of the plan's axes, for the fsdp2 engine; real ranks even while planning on fake tensors.

    Groups of several axes are made here: the ones torch would make wait half an hour, whatever the user's own do.
    """
    names, sizes = tuple(name for name, _ in axes), tuple(size for _, size in axes)
    with unset_fake_temporarily():
        if len(axes) == 1:
            mesh = init_device_mesh(device_type, sizes, mesh_dim_names=names)
        else:
            ranks = np.arange(dist.get_world_size()).reshape(sizes)
            groups = [_new_group(_axis_groups(ranks, axis), None) for axis in range(len(axes))]
            mesh = DeviceMesh.from_group(groups, device_type, mesh=ranks.tolist(), mesh_dim_names=names)
        keep_until_exit(mesh.get_all_groups())
    return mesh


def stall_watch(model: nn.Module, groups: Groups) -> StallWatch | None:
    """A watch over collectives of GPUs, whose waits raise nothing."""
    if groups.world is None or not any(parameter.is_cuda for parameter in model.parameters()):
        return None
    timeout = timeout_of(groups.world)
    if timeout is None:
        return None
    watch = StallWatch(timeout.total_seconds())
    watch.start()
    return watch


class Collectives:
    """Issues collectives, counts them, and turns their failures into errors that name step, unit and rank."""

    def __init__(self, groups: Groups, *, blocking: bool = False, watch: StallWatch | None = None) -> None:
        self.groups = groups
        self.blocking = blocking
        self.watch = watch
        self.step = 0
        self.counts: Counter[str] = Counter()
        self.num_bytes: Counter[str] = Counter()

    def all_gather(
        self, out: torch.Tensor, shard: torch.Tensor, *, unit: str, group_size: int | None = None
    ) -> Pending:
        """Every rank's `shard` [n] into `out` [size * n]; with `group_size` among neighbours only."""
        group = self.groups.gather if group_size is None else self.groups.parts[group_size]
        return self._issue(
            "all_gather", unit, out, lambda: dist.all_gather_single(
                out, shard, group=group, async_op=not self.blocking
            ),
        )  # fmt: skip

    def reduce_scatter(self, out: torch.Tensor, whole: torch.Tensor, *, unit: str) -> Pending:
        """The mean over ranks of this rank's part of `whole` [size * n] into `out` [n]."""
        return self._issue(
            "reduce_scatter", unit, whole, lambda: dist.reduce_scatter_single(
                out, whole, op=dist.ReduceOp.AVG, group=self.groups.reduce, async_op=not self.blocking
            ),
        )  # fmt: skip

    def all_reduce_mean(self, tensor: torch.Tensor, *, unit: str, replicas_only: bool) -> Pending:
        """The mean over replicas, or over every rank, in place."""
        group = self.groups.replicate if replicas_only else self.groups.world
        return self._issue(
            "all_reduce", unit, tensor, lambda: dist.all_reduce(
                tensor, op=dist.ReduceOp.AVG, group=group, async_op=not self.blocking
            ),
        )  # fmt: skip

    def all_reduce_max(self, tensor: torch.Tensor, *, unit: str) -> None:
        """The maximum over every rank, in place; waits."""
        self._issue(
            "all_reduce", unit, tensor, lambda: dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.groups.control)
        ).wait()

    def _issue(self, name: str, unit: str, counted: torch.Tensor, call: Callable[[], Any]) -> Pending:
        self.counts[name] += 1
        self.num_bytes[name] += counted.numel() * counted.element_size()
        ranged = (
            torch.profiler.record_function(f"memopt::{name} {unit}")
            if torch.autograd._profiler_enabled()
            else nullcontext()
        )
        with ranged:
            try:
                work = call()
            except RuntimeError as error:
                raise self.failure(name, unit, error) from error
        return Pending(self, name, unit, work, noted_collective())

    def note_waited(self, name: str, unit: str) -> None:
        """The computation has waited for a collective; on a GPU its stream has been told to."""
        if self.watch is not None:
            self.watch.note(f"{name} of unit `{unit}` in step {self.step} on rank {dist.get_rank()}")

    def failure(self, name: str, unit: str, error: BaseException) -> MemoptError:
        """A killed rank, a stall past the timeout, a broken connection."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        return MemoptError(
            Problem(
                code="collective-failed",
                path=unit,
                message=f"{name} of unit `{unit}` failed in step {self.step} on rank {rank}: {error}",
                hint="another rank has died or stalled: its own log says why; restart from the last checkpoint",
            )
        )


class Pending:
    """A collective under way."""

    __slots__ = ("_collectives", "_name", "_ticket", "_unit", "_work")

    def __init__(self, collectives: Collectives, name: str, unit: str, work: Any, ticket: Ticket = None) -> None:
        self._collectives = collectives
        self._name = name
        self._unit = unit
        self._work = work
        self._ticket = ticket

    def wait(self) -> None:
        """Blocks (CPU) or orders the current stream behind the collective (GPU)."""
        work, self._work = self._work, None
        if work is None:
            return
        note_wait(self._ticket)
        try:
            work.wait()  # the group's own timeout holds; one given here would make a GPU's wait block the processor
        except RuntimeError as error:
            raise self._collectives.failure(self._name, self._unit, error) from error
        self._collectives.note_waited(self._name, self._unit)

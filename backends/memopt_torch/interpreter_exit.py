"""Lets gloo's threads finish before a process ends, so that a run that trained to its end also ends well.

`wait()` on a gloo work returns before the thread that ran it has let go of it. That thread then needs the interpreter's
lock (GIL) to drop the work's tensors. Where the process group is destructed meanwhile, by the interpreter's thread and
under its lock, both wait for ever; where the interpreter is shutting down, the process aborts (SIGABRT). Plain DDP
scripts that end right after an all-reduce are hit as well (torch 2.13: four of ten ended in the deadlock on two idle
cores; https://github.com/pytorch/pytorch/pull/179291 describes the abort). NCCL's groups run no such thread.
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Iterable

import torch.distributed as dist

# Microseconds are enough when a core is free; a busy machine may take a scheduler's slice per thread.
_REST_S = 0.1

_kept: list[dist.ProcessGroup] = []


def rest() -> None:
    """Waits with the interpreter's lock released, as long as threads that finished their work need to let go of it."""
    time.sleep(_REST_S)


def keep_until_exit(groups: Iterable[dist.ProcessGroup | None]) -> None:
    """Keeps gloo's process groups, the default one too, from being destructed before the interpreter ends.

    `destroy_process_group()` stays what it is: the groups can be used no more. Their threads end with the process, or
    when a later call keeps other groups, by which time their work is long done.
    """
    if not uses_gloo():
        return
    if not _kept:
        atexit.register(rest)
    _kept[:] = [group for group in (dist.group.WORLD, *groups) if group is not None]


def keep_also(group: dist.ProcessGroup) -> None:
    """Keeps one more group beside those kept already."""
    if uses_gloo():
        _kept.append(group)


def uses_gloo() -> bool:
    """Whether the default process group serves some device by gloo."""
    return dist.is_initialized() and "gloo" in str(dist.get_backend_config())

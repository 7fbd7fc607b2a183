"""Writes checkpoints: beside the target, then renamed, so that one is there whole or not at all; on the spot, or in the
background while training goes on."""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from memopt.errors import MemoptError, Problem

from .collectives import timeout_of_world
from .interpreter_exit import keep_also
from .sharded import ShardedTensor

if TYPE_CHECKING:
    from .checkpoint import Contents

ABOUT = "memopt.json"
log = logging.getLogger("memopt")


class Saver:
    """Saves of one model, one at a time."""

    def __init__(self) -> None:
        self._running: PendingSave | None = None
        self._group: dist.ProcessGroup | None = None

    def save(self, contents: Contents, directory: Any, *, in_background: bool) -> PendingSave | None:
        """See `memopt_torch.apply.Applied.save`."""
        self.settle()
        target = Path(directory).absolute()
        _refuse_occupied(target)
        if not in_background:
            with quiet():
                write(contents, target)
            return None
        group = self._background_group()
        staged = replace(contents, tensors=_staged(contents.tensors))
        self._running = PendingSave(target, lambda: write(staged, target, group))
        return self._running

    def settle(self) -> None:
        """Waits for a save under way.

        Raises:
            MemoptError: What went wrong in it, if that was not raised before.
        """
        running, self._running = self._running, None
        if running is not None and not running.told:
            running.wait()

    def _background_group(self) -> dist.ProcessGroup | None:
        """A group of its own: the order of its collectives against training's may differ between ranks."""
        if not dist.is_initialized():
            return None
        if self._group is None:
            if not dist.is_gloo_available():
                raise MemoptError.of(
                    "async-save-needs-gloo",
                    "ranks agree on a checkpoint in the background by gloo, which this build of torch does not have",
                    hint="leave `async_save` out, or install a build with gloo",
                )
            group = dist.new_group(backend="gloo", timeout=timeout_of_world())
            assert isinstance(group, dist.ProcessGroup)  # every rank is in it
            keep_also(group)
            self._group = group
        return self._group


class PendingSave:
    """A checkpoint that is being written.

    Attributes:
        target: Where it will be.
        told: Whether somebody has been told how it ended.
    """

    def __init__(self, target: Path, work: Callable[[], None]) -> None:
        self.target = target
        self.told = False
        self._work = work
        self._error: BaseException | None = None
        # No daemon: the interpreter's end waits for it.
        self._thread = threading.Thread(target=self._run, name=f"memopt-save {target.name}")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # noqa: BLE001  # raised in the thread that waits
            self._error = error
            log.error("checkpoint `%s` was not written: %s", self.target, error)
        finally:
            del self._work  # and with it the copies in host memory

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Returns when the checkpoint is in its place.

        Raises:
            MemoptError: `checkpoint-write-failed`; what was there before is untouched.
        """
        self._thread.join()
        self.told = True
        if self._error is not None:
            raise self._error


@contextmanager
def quiet() -> Iterator[None]:
    """Without torch's warning that there is one process: that is meant. Not for threads, which share the filters."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield


def _staged(tensors: dict[str, Any]) -> dict[str, Any]:
    """Copies that training does not write to, in host memory; tied tensors once. DTensors (fsdp2 engine) stay on their
    device: their mesh names it."""
    copies: dict[tuple, torch.Tensor] = {}
    return {key: _copied(value, copies) if isinstance(value, torch.Tensor) else value for key, value in tensors.items()}


def _copied(tensor: torch.Tensor, copies: dict[tuple, torch.Tensor]) -> torch.Tensor:
    if isinstance(tensor, ShardedTensor):
        return ShardedTensor(_copied(tensor.local, copies), tensor.slice)
    if hasattr(tensor, "device_mesh"):
        return tensor.detach().clone()
    storage = tensor.untyped_storage()._cdata
    key = (storage, tensor.storage_offset(), tensor.size(), tensor.stride(), tensor.dtype)
    if key not in copies:
        copies[key] = tensor.detach().to("cpu", copy=True)
    return copies[key]


def write(contents: Contents, target: Path, group: dist.ProcessGroup | None = None) -> None:
    """Writes beside the target, then renames.

    Raises:
        MemoptError: `checkpoint-write-failed`; what was there before is untouched.
    """
    partial = target.with_name(f"{target.name}.writing")
    try:
        _on_first_rank(lambda: _clear(partial), group)
        dcp.save(
            contents.tensors,  # type: ignore[arg-type]
            checkpoint_id=partial,
            process_group=group,
            no_dist=not dist.is_initialized(),
        )
        _on_first_rank(lambda: _publish(contents, partial, target), group)
    except (CheckpointException, OSError, RuntimeError) as error:
        if _rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise MemoptError.of(
            "checkpoint-write-failed",
            f"could not write `{target}`: {cause_of(error)}",
            path=str(target),
            hint="nothing was replaced: an earlier checkpoint there is as it was. Free space or choose another folder",
        ) from error


def _refuse_occupied(target: Path) -> None:
    """Only an earlier checkpoint is replaced: anything else at the places a save writes to is the user's own.

    Raises:
        MemoptError: `checkpoint-target-occupied`.
    """
    found = [_occupied(target)] if _rank() == 0 else [[]]
    if dist.is_initialized():
        dist.broadcast_object_list(found, src=0)
    if found[0]:
        raise MemoptError(
            Problem(
                "checkpoint-target-occupied",
                f"`{path}` exists and is not a checkpoint: saving would delete it",
                path=path,
                hint="pass a folder that does not exist yet, is empty, or holds an earlier checkpoint and nothing else",
            )
            for path in found[0]
        )


def _occupied(target: Path) -> list[str]:
    beside = (target.with_name(f"{target.name}.{suffix}") for suffix in ("writing", "previous"))
    return [str(path) for path in (target, *beside) if path.exists() and not (path.is_dir() and _is_ours(path))]


def _is_ours(folder: Path) -> bool:
    """Empty, a checkpoint, or what a killed save has left of one."""
    return all(
        entry.name == ABOUT or entry.name.startswith(".metadata") or ".distcp" in entry.name
        for entry in folder.iterdir()
    )


def cause_of(error: BaseException) -> str:
    if isinstance(error, CheckpointException):
        return "; ".join(f"rank {rank}: {cause_of(failure[0])}" for rank, failure in error.failures.items())
    return str(error) or type(error).__name__


def _clear(partial: Path) -> None:
    """Removes what a save that was killed has left."""
    shutil.rmtree(partial, ignore_errors=True)
    partial.parent.mkdir(parents=True, exist_ok=True)


def _publish(contents: Contents, partial: Path, target: Path) -> None:
    """The rename that makes it a checkpoint. An earlier one steps aside first and goes last."""
    about = partial / ABOUT
    about.write_text(json.dumps(contents.about), encoding="utf-8")
    for path in (*partial.iterdir(), partial):
        _flush(path)
    previous = target.with_name(f"{target.name}.previous")
    shutil.rmtree(previous, ignore_errors=True)
    if target.exists():
        target.rename(previous)
    partial.rename(target)
    _flush(target.parent)
    shutil.rmtree(previous, ignore_errors=True)


def _flush(path: Path) -> None:
    """To the disk, so that the rename never comes before what it names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _on_first_rank(call: Callable[[], None], group: dist.ProcessGroup | None) -> None:
    """Runs on rank 0; every rank returns after it, or raises what it raised."""
    failure: list[OSError | None] = [None]
    if _rank() == 0:
        try:
            call()
        except OSError as error:
            failure = [error]
    if dist.is_initialized():
        dist.broadcast_object_list(failure, src=0, group=group)
    if failure[0] is not None:
        raise failure[0]

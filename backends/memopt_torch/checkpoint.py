"""Sharded checkpoints: torch.distributed.checkpoint files of whole tensors, each rank writing the parts it holds.

Keys and shapes are the plain model's, so a checkpoint is read at another world size, under another policy, by FSDP2,
and by a model under no policy at all. Nothing is gathered. What is saved, and loading, are here; `saving` writes.
"""

from __future__ import annotations

import io
import json
import pickle
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from torch.optim import Optimizer

from memopt.errors import MemoptError, MemoptWarning, Problem

from .optimizer_states import (
    kind_of,
    named_state,
    optimizer_problems,
    parameter_names,
    plain_name,
    refuse_unnamed,
    restore_groups,
    set_state,
    state_key,
    state_targets,
)
from .optimizers import clear_waiting_state, note_waiting_state
from .saving import ABOUT, cause_of, quiet

if TYPE_CHECKING:
    from .apply import Applied

FORMAT = 1
# What reading a damaged file of pickled or JSON data raises.
_UNREADABLE = (
    OSError,
    EOFError,
    ValueError,
    pickle.UnpicklingError,
    LookupError,
    AttributeError,
    ImportError,
    TypeError,
)


@dataclass(frozen=True)
class Contents:
    """What a checkpoint holds.

    Attributes:
        tensors: Key -> tensor (sharded ones by part), written in place when loading; modules' extra state as bytes.
        about: Plain values, one JSON file.
    """

    tensors: dict[str, Any]
    about: dict[str, Any]


def model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """`model.NAME` -> parameter or persistent buffer; tied parameters under each of their names, as in `state_dict`."""
    found: dict[str, torch.Tensor] = {}
    for raw, parameter in model.named_parameters(remove_duplicate=False):
        found[f"model.{plain_name(raw)}"] = parameter.detach()
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                raw = f"{prefix}.{name}" if prefix else name
                found[f"model.{plain_name(raw)}"] = buffer
    return found


def _extra_states(model: nn.Module) -> dict[str, nn.Module]:
    """The key of each module's extra state (`get_extra_state`), as in `state_dict`, and the module."""
    return {
        f"model.{plain_name(f'{prefix}._extra_state' if prefix else '_extra_state')}": module
        for prefix, module in model.named_modules(remove_duplicate=False)
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def _packed(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value


def contents_of(model: nn.Module, optimizers: tuple[Optimizer, ...], extra: Mapping[str, Any]) -> Contents:
    """Everything to be saved."""
    names = parameter_names(model)
    refuse_unnamed(optimizers, names)
    tensors: dict[str, Any] = model_tensors(model)
    tensors |= {key: _packed(module.get_extra_state()) for key, module in _extra_states(model).items()}
    about: dict[str, Any] = {"format": FORMAT, "extra": dict(extra), "optimizers": []}
    for number, optimizer in enumerate(optimizers):
        values: dict[str, dict[str, Any]] = {}
        for name, key, value in named_state(optimizer, names):
            if isinstance(value, torch.Tensor):
                tensors[state_key(number, name, key)] = value
            else:
                values.setdefault(name, {})[key] = value
        groups = [
            {key: _plain(value) for key, value in group.items() if key != "params"}
            | {"params": [names[parameter] for parameter in group["params"]]}
            for group in optimizer.param_groups
        ]
        about["optimizers"].append({"kind": kind_of(optimizer), "groups": groups, "values": values})
    try:
        json.dumps(about)
    except TypeError as error:
        raise MemoptError.of(
            "checkpoint-extra",
            f"a checkpoint takes plain values (numbers, text, lists, mappings): {error}",
            hint="pass tensors' values with `.tolist()` or `.item()`",
        ) from error
    return Contents(tensors, about)


def load(applied: Applied, directory: Any) -> dict[str, Any]:
    """See `Applied.load`."""
    path = _existing(Path(directory))
    metadata, about = _read_metadata(path)
    refuse_unnamed(applied.optimizers, parameter_names(applied.model))
    tensors: dict[str, Any] = model_tensors(applied.model)
    extra_states = _extra_states(applied.model)
    problems = [*_mismatches(tensors, metadata), *_extra_mismatches(extra_states, metadata)]
    problems += optimizer_problems(applied.model, applied.optimizers, about)
    if problems:
        raise MemoptError(problems)
    saved = about.get("optimizers", [])
    states = [
        state_targets(applied.model, optimizer, number, metadata)
        for number, (optimizer, _) in enumerate(zip(applied.optimizers, saved, strict=False))
    ]
    for number, state in enumerate(states):
        tensors |= state.by_key(number)
    tensors |= dict.fromkeys(extra_states, b"")
    _read(tensors, path)
    for key, module in extra_states.items():
        module.set_extra_state(torch.load(io.BytesIO(tensors[key]), weights_only=False))
    for optimizer, state, one in zip(applied.optimizers, states, saved, strict=False):
        set_state(optimizer, state)
        restore_groups(applied.model, optimizer, one)
    _tell_of_stale_state(applied.optimizers[len(saved) :], path)
    applied.waiting_state = None
    if len(saved) > len(applied.optimizers):
        applied.waiting_state = WaitingState(path, _identity(path), metadata, about)
        note_waiting_state(applied.model.parameters(), str(path))
    applied.weights_changed()
    return about.get("extra", {})


def _read(tensors: dict[str, Any], path: Path) -> None:
    try:
        with quiet():
            dcp.load(tensors, checkpoint_id=path, no_dist=not dist.is_initialized())  # type: ignore[arg-type]
    except (CheckpointException, *_UNREADABLE, RuntimeError) as error:
        raise _unreadable(path, cause_of(error)) from error


def _read_metadata(path: Path) -> tuple[Metadata, dict[str, Any]]:
    """What a checkpoint says that it holds."""
    file = path / ABOUT
    try:
        metadata = dcp.FileSystemReader(path).read_metadata()
        about = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    except _UNREADABLE as error:
        raise _unreadable(path, f"{type(error).__name__}: {error}") from error
    return metadata, about


def _unreadable(path: Path, what: str) -> MemoptError:
    return MemoptError.of(
        "checkpoint-unreadable",
        f"`{path}` could not be read: {what}",
        path=str(path),
        hint="a file of it is missing, cut short or changed; load an earlier checkpoint. Weights may have been written "
        "in part: do not train on with them",
    )


def _tell_of_stale_state(optimizers: tuple[Optimizer, ...], path: Path) -> None:
    """An optimizer that the checkpoint knows nothing of goes on with what it has gathered on other weights."""
    stale = [type(optimizer).__name__ for optimizer in optimizers if any(optimizer.state.values())]
    if stale:
        warnings.warn(
            f"`{path}` was saved without the state of {', '.join(stale)}, which has state of its own from steps on "
            "other weights and keeps it; make a new optimizer to start without",
            MemoptWarning,
            stacklevel=4,
        )


@dataclass(frozen=True)
class WaitingState:
    """State of optimizers that were not made yet when their checkpoint was loaded; each is read when it is made.

    Attributes:
        path: The checkpoint.
        identity: Tells it from a later one in its place.
        metadata: What it holds.
        about: Its plain values.
    """

    path: Path
    identity: tuple[int, int]
    metadata: Metadata
    about: Mapping[str, Any]


def claim_state(applied: Applied, optimizer: Optimizer) -> None:
    """Gives an optimizer that has just been made the state that an earlier `load` found for it.

    Raises:
        MemoptError: `checkpoint-groups`, `checkpoint-changed`.
    """
    waiting: WaitingState | None = applied.waiting_state
    number = applied.optimizers.index(optimizer)
    if waiting is None or number >= len(waiting.about["optimizers"]):
        return
    problems = optimizer_problems(applied.model, applied.optimizers, waiting.about)
    if not (waiting.path / ".metadata").exists() or _identity(waiting.path) != waiting.identity:
        problems.append(
            Problem(
                "checkpoint-changed",
                f"`{waiting.path}` was loaded before this optimizer was made, and has been replaced or removed since: "
                "its optimizer state can no longer be read",
                path=str(waiting.path),
                hint="make optimizers with run.optimizer(...) before run.load(...), or load again afterwards",
            )
        )
    if problems:
        raise MemoptError(problems)
    state = state_targets(applied.model, optimizer, number, waiting.metadata)
    _read(state.by_key(number), waiting.path)
    set_state(optimizer, state)
    restore_groups(applied.model, optimizer, waiting.about["optimizers"][number])
    clear_waiting_state(optimizer)


def _identity(path: Path) -> tuple[int, int]:
    stat = (path / ".metadata").stat()
    return stat.st_ino, stat.st_mtime_ns


def _existing(path: Path) -> Path:
    """The checkpoint; one that a killed save had set aside counts."""
    previous = path.with_name(f"{path.name}.previous")
    for candidate in (path, previous):
        if (candidate / ".metadata").exists():
            return candidate
    raise MemoptError.of(
        "no-checkpoint",
        f"`{path}` is not a checkpoint",
        path=str(path),
        hint="pass the folder that run.save was given",
    )


def _mismatches(tensors: Mapping[str, torch.Tensor], metadata: Metadata) -> list[Problem]:
    saved = {
        key: tuple(entry.size)
        for key, entry in metadata.state_dict_metadata.items()
        if key.startswith("model.") and isinstance(entry, TensorStorageMetadata)
    }
    problems = []
    for key, tensor in tensors.items():
        if key not in saved:
            problems.append(Problem("checkpoint-mismatch", "the model has it, the checkpoint does not", path=key))
        elif saved[key] != tuple(tensor.shape):
            problems.append(
                Problem(
                    "checkpoint-mismatch",
                    f"the model's shape is {tuple(tensor.shape)}, the checkpoint's {saved[key]}",
                    path=key,
                )
            )
    for key in saved.keys() - tensors.keys():
        problems.append(Problem("checkpoint-mismatch", "the checkpoint has it, the model does not", path=key))
    return problems


def _extra_mismatches(extra_states: Mapping[str, nn.Module], metadata: Metadata) -> list[Problem]:
    saved = {
        key
        for key, entry in metadata.state_dict_metadata.items()
        if key.startswith("model.") and key.endswith("_extra_state") and isinstance(entry, BytesStorageMetadata)
    }
    return [
        Problem("checkpoint-mismatch", "extra state that the model has and the checkpoint does not", path=key)
        for key in extra_states.keys() - saved
    ] + [
        Problem("checkpoint-mismatch", "extra state that the checkpoint has and the model does not", path=key)
        for key in saved - extra_states.keys()
    ]

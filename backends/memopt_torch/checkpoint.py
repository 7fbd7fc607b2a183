"""Sharded checkpoints: torch.distributed.checkpoint files of whole tensors, each rank writing the parts it holds.

Keys and shapes are the plain model's, so a checkpoint is read at another world size, under another policy, by FSDP2,
and by a model under no policy at all. Nothing is gathered. What is saved, and loading, are here; `saving` writes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.optim import Optimizer

from memopt.errors import MemoptError, Problem
from memopt.matching import WRAPPERS

from .matrix_optimizers import OwnerOptimizer
from .optimizers import clear_waiting_state, note_waiting_state
from .saving import ABOUT, quiet

if TYPE_CHECKING:
    from .apply import Applied

FORMAT = 1


def plain_name(raw: str) -> str:
    """The name a parameter has in a model that nothing has wrapped."""
    return ".".join(part for part in raw.split(".") if part not in WRAPPERS)


@dataclass(frozen=True)
class Contents:
    """What a checkpoint holds.

    Attributes:
        tensors: Key -> tensor (sharded ones by part), written in place when loading.
        about: Plain values, one JSON file.
    """

    tensors: dict[str, torch.Tensor]
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


def parameter_names(model: nn.Module) -> dict[torch.Tensor, str]:
    """Parameter -> its plain name, the first one where it is tied."""
    return {parameter: plain_name(raw) for raw, parameter in model.named_parameters()}


def _state(optimizer: Optimizer, names: Mapping[torch.Tensor, str]) -> Iterator[tuple[str, str, Any]]:
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            yield names[parameter], key, value


def contents_of(model: nn.Module, optimizers: tuple[Optimizer, ...], extra: Mapping[str, Any]) -> Contents:
    """Everything to be saved."""
    names = parameter_names(model)
    tensors = model_tensors(model)
    about: dict[str, Any] = {"format": FORMAT, "extra": dict(extra), "optimizers": []}
    for number, optimizer in enumerate(optimizers):
        values: dict[str, dict[str, Any]] = {}
        for name, key, value in _state(optimizer, names):
            if isinstance(value, torch.Tensor):
                tensors[_state_key(number, name, key)] = value
            else:
                values.setdefault(name, {})[key] = value
        groups = [
            {key: _plain(value) for key, value in group.items() if key != "params"}
            | {"params": [names[parameter] for parameter in group["params"]]}
            for group in optimizer.param_groups
        ]
        about["optimizers"].append({"groups": groups, "values": values})
    try:
        json.dumps(about)
    except TypeError as error:
        raise MemoptError.of(
            "checkpoint-extra",
            f"a checkpoint takes plain values (numbers, text, lists, mappings): {error}",
            hint="pass tensors' values with `.tolist()` or `.item()`",
        ) from error
    return Contents(tensors, about)


def _state_key(number: int, name: str, key: str) -> str:
    prefix = "optimizer" if number == 0 else f"optimizer{number}"
    return f"{prefix}.state.{name}.{key}"


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value


# ---------------------------------------------------------------------- loading


def load(applied: Applied, directory: Any) -> dict[str, Any]:
    """See `Applied.load`."""
    path = _existing(Path(directory))
    metadata = dcp.FileSystemReader(path).read_metadata()
    about = _about(path)
    tensors = model_tensors(applied.model)
    problems = _mismatches(tensors, metadata)
    problems += _optimizer_problems(applied, about)
    if problems:
        raise MemoptError(problems)
    for number, optimizer in enumerate(applied.optimizers):
        tensors |= _state_targets(applied.model, optimizer, number, metadata)
    _read(tensors, path)
    saved = about.get("optimizers", [])
    for optimizer, one in zip(applied.optimizers, saved, strict=False):
        _restore_groups(applied.model, optimizer, one)
    applied.waiting_state = None
    if len(saved) > len(applied.optimizers):
        applied.waiting_state = WaitingState(path, _identity(path), metadata, about)
        note_waiting_state(applied.model.parameters(), str(path))
    applied.weights_changed()
    return about.get("extra", {})


def _read(tensors: dict[str, torch.Tensor], path: Path) -> None:
    with quiet():
        dcp.load(tensors, checkpoint_id=path, no_dist=not dist.is_initialized())  # type: ignore[arg-type]


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
    problems = _optimizer_problems(applied, waiting.about)
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
    targets = _state_targets(applied.model, optimizer, number, waiting.metadata)
    _read(targets, waiting.path)
    _restore_groups(applied.model, optimizer, waiting.about["optimizers"][number])
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


def _about(path: Path) -> dict[str, Any]:
    file = path / ABOUT
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


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


def _optimizer_problems(applied: Applied, about: Mapping[str, Any]) -> list[Problem]:
    names = parameter_names(applied.model)
    problems = []
    for number, (optimizer, saved) in enumerate(zip(applied.optimizers, about.get("optimizers", ()), strict=False)):
        mine = [[names[p] for p in group["params"]] for group in optimizer.param_groups]
        theirs = [group["params"] for group in saved["groups"]]
        if mine != theirs:
            problems.append(
                Problem(
                    "checkpoint-groups",
                    f"optimizer {number} has groups of {[len(group) for group in mine]} parameters, the checkpoint "
                    f"{[len(group) for group in theirs]} (or other parameters in them)",
                    hint="make the optimizer with the groups it was saved with, then load",
                )
            )
    return problems


def _state_targets(model: nn.Module, optimizer: Optimizer, number: int, metadata: Metadata) -> dict[str, torch.Tensor]:
    """Fresh state tensors as the checkpoint has them, in the layout of the parameters here."""
    prefix = _state_key(number, "", "").removesuffix(".")
    saved = {key: entry for key, entry in metadata.state_dict_metadata.items() if key.startswith(prefix)}
    targets: dict[str, torch.Tensor] = {}
    for parameter, name in parameter_names(model).items():
        if isinstance(optimizer, OwnerOptimizer) and not optimizer.owns(parameter):
            continue
        own = {key: entry for key, entry in saved.items() if key.rpartition(".")[0] == f"{prefix}{name}"}
        tensors = {
            key: _state_tensor(_kept_as(optimizer, parameter), entry)
            for key, entry in own.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        if tensors:
            state = {key.rpartition(".")[2]: tensor for key, tensor in tensors.items()}
            if isinstance(optimizer, OwnerOptimizer):
                optimizer.state_of(parameter).update(state)
            else:
                optimizer.state[parameter] = state
            targets |= tensors
    return targets


def _kept_as(optimizer: Optimizer, parameter: torch.Tensor) -> torch.Tensor:
    """What the state of a parameter is laid out like: the parameter, or a whole tensor at its owner."""
    if isinstance(optimizer, OwnerOptimizer):
        return torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
    return parameter


def _state_tensor(parameter: torch.Tensor, entry: TensorStorageMetadata) -> torch.Tensor:
    if tuple(entry.size) == tuple(parameter.shape) and parameter.dim() > 0:
        return torch.zeros_like(parameter, dtype=entry.properties.dtype).detach()
    return torch.zeros(entry.size, dtype=entry.properties.dtype)


def _restore_groups(model: nn.Module, optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    for group, options in zip(optimizer.param_groups, saved["groups"], strict=True):
        for key, value in options.items():
            if key == "params":
                continue
            before = group.get(key)
            if isinstance(before, torch.Tensor):
                before.fill_(float(value))
            else:
                group[key] = tuple(value) if isinstance(before, tuple) else value
    by_name = {name: parameter for parameter, name in parameter_names(model).items()}
    for name, values in saved["values"].items():
        optimizer.state[by_name[name]].update(values)

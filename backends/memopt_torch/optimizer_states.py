"""Optimizer state in checkpoints: by the plain names of parameters, in the layout of the parameters that there are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.optim import Optimizer

from memopt.errors import MemoptError, Problem
from memopt.matching import WRAPPERS

from .matrix_optimizers import OwnerOptimizer

_KERNEL_OPTIONS = frozenset({"foreach", "fused", "capturable", "differentiable"})
# Options that every optimizer of torch's has, and those that schedulers add: they tell no kinds apart.
_COMMON_OPTIONS = _KERNEL_OPTIONS | {"params", "lr", "initial_lr", "weight_decay", "maximize"}


def plain_name(raw: str) -> str:
    """The name a parameter has in a model that nothing has wrapped."""
    return ".".join(part for part in raw.split(".") if part not in WRAPPERS)


def parameter_names(model: nn.Module) -> dict[torch.Tensor, str]:
    """Parameter -> its plain name, the first one where it is tied."""
    return {parameter: plain_name(raw) for raw, parameter in model.named_parameters()}


def refuse_unnamed(optimizers: tuple[Optimizer, ...], names: Mapping[torch.Tensor, str]) -> None:
    """Refuses optimizers that hold parameters which are not the model's: a checkpoint has no name for them.

    Raises:
        MemoptError: `checkpoint-parameter-unnamed`.
    """
    problems = []
    for number, optimizer in enumerate(optimizers):
        unknown = [p for group in optimizer.param_groups for p in group["params"] if p not in names]
        if unknown:
            shapes = ", ".join(str(tuple(parameter.shape)) for parameter in unknown[:3])
            more = ", ..." if len(unknown) > 3 else ""
            problems.append(
                Problem(
                    "checkpoint-parameter-unnamed",
                    f"optimizer {number} ({type(optimizer).__name__}) holds {len(unknown)} parameters that are not the "
                    f"model's (shapes {shapes}{more}): a checkpoint has no name for them",
                    hint="make them part of the model that is passed to apply_policy, or give them an optimizer of "
                    "their own that run does not know",
                )
            )
    if problems:
        raise MemoptError(problems)


def kind_of(optimizer: Optimizer) -> str:
    """The class name of the optimizer that makes the updates."""
    inner = optimizer.inner if isinstance(optimizer, OwnerOptimizer) else optimizer
    return type(inner).__name__


def state_key(number: int, name: str, key: str) -> str:
    """The key of one state tensor in a checkpoint; `number` is the optimizer's."""
    prefix = "optimizer" if number == 0 else f"optimizer{number}"
    return f"{prefix}.state.{name}.{key}"


def named_state(optimizer: Optimizer, names: Mapping[torch.Tensor, str]) -> Iterator[tuple[str, str, Any]]:
    """Parameter name, key, value of all state."""
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            yield names[parameter], key, value


def optimizer_problems(model: nn.Module, optimizers: tuple[Optimizer, ...], about: Mapping[str, Any]) -> list[Problem]:
    """Differences between the optimizers there are and those that were saved."""
    names = parameter_names(model)
    problems = []
    for number, (optimizer, saved) in enumerate(zip(optimizers, about.get("optimizers", ()), strict=False)):
        mine = [[names[p] for p in group["params"]] for group in optimizer.param_groups]
        theirs = [group["params"] for group in saved["groups"]]
        problems += _kind_problems(number, optimizer, saved)
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


def _kind_problems(number: int, optimizer: Optimizer, saved: Mapping[str, Any]) -> list[Problem]:
    """State of one kind of optimizer means nothing to another; kinds that have the same options share it."""
    kind = saved.get("kind")
    mine, theirs = ({key for group in groups for key in group} - _COMMON_OPTIONS for groups in
                    (optimizer.param_groups, saved["groups"]))  # fmt: skip
    if kind in (None, kind_of(optimizer)) or mine == theirs:
        return []
    return [
        Problem(
            "checkpoint-groups",
            f"optimizer {number} is of the kind {kind_of(optimizer)}, the checkpoint's is {kind}",
            hint=f"resume with {kind}; to start another optimizer on these weights, make it after run.load(dir), "
            "without run.optimizer",
        )
    ]


@dataclass(frozen=True)
class SavedState:
    """State of an optimizer as a checkpoint has it, in the layout of the parameters here.

    Attributes:
        values: Parameter -> key -> tensor, to be read into.
        names: Parameter -> its plain name.
    """

    values: Mapping[torch.Tensor, dict[str, torch.Tensor]]
    names: Mapping[torch.Tensor, str]

    def by_key(self, number: int) -> dict[str, torch.Tensor]:
        """The same by the checkpoint's keys."""
        return {
            state_key(number, self.names[parameter], key): tensor
            for parameter, state in self.values.items()
            for key, tensor in state.items()
        }


def state_targets(model: nn.Module, optimizer: Optimizer, number: int, metadata: Metadata) -> SavedState:
    """Fresh state tensors as the checkpoint has them, in the layout of the parameters here."""
    prefix = state_key(number, "", "").removesuffix(".")
    saved: dict[str, dict[str, TensorStorageMetadata]] = {}
    for key, entry in metadata.state_dict_metadata.items():
        if key.startswith(prefix) and isinstance(entry, TensorStorageMetadata):
            name, _, last = key.removeprefix(prefix).rpartition(".")
            saved.setdefault(name, {})[last] = entry
    names = parameter_names(model)
    values = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if isinstance(optimizer, OwnerOptimizer) and not optimizer.owns(parameter):
                continue
            kept_as = _kept_as(optimizer, parameter)
            on_device = bool(group.get("fused") or group.get("capturable"))
            values[parameter] = {
                key: _state_tensor(kept_as, entry, is_counter=key == "step", on_device=on_device)
                for key, entry in saved.get(names[parameter], {}).items()
            }
    return SavedState(values, names)


def set_state(optimizer: Optimizer, state: SavedState) -> None:
    """Replaces all state; what the checkpoint has none for has none."""
    for parameter, tensors in state.values.items():
        if isinstance(optimizer, OwnerOptimizer):
            own = optimizer.state_of(parameter)
            own.clear()
            own.update(tensors)
        elif tensors:
            optimizer.state[parameter] = tensors
        else:
            optimizer.state.pop(parameter, None)


def _kept_as(optimizer: Optimizer, parameter: torch.Tensor) -> torch.Tensor:
    """What the state of a parameter is laid out like: the parameter, or a whole tensor at its owner."""
    if isinstance(optimizer, OwnerOptimizer):
        return torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
    return parameter


def _state_tensor(
    parameter: torch.Tensor, entry: TensorStorageMetadata, *, is_counter: bool, on_device: bool
) -> torch.Tensor:
    """Memory for a state tensor, laid out like its parameter where it has its shape.

    Step counters lie with the parameter only if a fused or capturable kernel reads them there (`on_device`).
    """
    if tuple(entry.size) == tuple(parameter.shape) and not is_counter:
        return torch.zeros_like(parameter, dtype=entry.properties.dtype).detach()
    device = parameter.device if on_device or not is_counter else None
    return torch.zeros(entry.size, dtype=entry.properties.dtype, device=device)


def restore_groups(model: nn.Module, optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Options and plain state values as they were saved; which kernels compute the update stays as it is here."""
    for group, options in zip(optimizer.param_groups, saved["groups"], strict=True):
        for key, value in options.items():
            if key == "params" or key in _KERNEL_OPTIONS:
                continue
            before = group.get(key)
            if isinstance(before, torch.Tensor):
                before.fill_(float(value))
            else:
                group[key] = tuple(value) if isinstance(before, tuple) else value
    by_name = {name: parameter for parameter, name in parameter_names(model).items()}
    for name, values in saved["values"].items():
        optimizer.state[by_name[name]].update(values)

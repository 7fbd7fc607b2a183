"""Optimizers and the parameters they hold: re-pointing ones made before the policy, refusing forgotten ones, telling
the engine of every step."""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from memopt.errors import MemoptError, MemoptWarning

from .matrix_optimizers import OwnerOptimizer, needs_matrices
from .sharded import ShardedTensor


class Stepped(Protocol):
    """What wants to know of optimizer steps."""

    def before_step(self) -> None:
        """An optimizer is about to write the parameters."""
        ...

    def parameters_stepped(self) -> None:
        """An optimizer has written the parameters."""
        ...


_REPLACEMENT = "_memopt_replacement"
_OWNER = "_memopt_owner"
_STATE_RULE = "_memopt_state_rule"
_WAITING_STATE = "_memopt_waiting_state"


def note_replacement(old: nn.Parameter, new: nn.Parameter) -> None:
    """Remembers on a parameter that is no longer the model's which one is."""
    setattr(old, _REPLACEMENT, new)


def replacement_of(parameter: torch.Tensor) -> nn.Parameter | None:
    """The parameter that `apply_policy` put in this one's place, or None."""
    return getattr(parameter, _REPLACEMENT, None)


def current(parameter: Any) -> Any:
    """The parameter the model has now in this one's place: itself, where it was not replaced."""
    new = replacement_of(parameter)
    return parameter if new is None else new


def note_owner(parameter: nn.Parameter, owner: Stepped) -> None:
    """Remembers which engine wants to know of steps on a parameter."""
    setattr(parameter, _OWNER, weakref.ref(owner))


def note_state_rule(parameter: nn.Parameter, rule: str) -> None:
    """Remembers the rule that offloads a parameter's optimizer state: an optimizer that cannot honour it is refused."""
    setattr(parameter, _STATE_RULE, rule)


def note_waiting_state(parameters: Iterable[nn.Parameter], directory: str) -> None:
    """Remembers on parameters that a loaded checkpoint holds state of an optimizer that is still to be made."""
    for parameter in parameters:
        setattr(parameter, _WAITING_STATE, directory)


def clear_waiting_state(optimizer: Optimizer) -> None:
    """The optimizer has its state, or is used without."""
    for parameter in _parameters(optimizer):
        if hasattr(parameter, _WAITING_STATE):
            delattr(parameter, _WAITING_STATE)


def _parameters(optimizer: Optimizer) -> Iterable[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _owners(optimizer: Optimizer) -> set[Stepped]:
    references = {getattr(parameter, _OWNER, None) for parameter in _parameters(optimizer)}
    return {owner for reference in references if reference is not None and (owner := reference()) is not None}


def _before_any_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if any(replacement_of(parameter) is not None for parameter in _parameters(optimizer)):
        raise MemoptError.of(
            "optimizer-made-before",
            f"this {type(optimizer).__name__} was made before apply_policy and holds parameters that are no longer the "
            "model's: its steps would change nothing",
            hint="pass it, `memopt.apply_policy(model, policy, optimizer=optimizer)`, or make it afterwards with "
            "`run.optimizer(torch.optim.AdamW, lr=...)`",
        )
    if not hasattr(optimizer, "_memopt_offload"):
        _refuse_unplaced(optimizer)
    _warn_of_waiting_state(optimizer)
    for owner in _owners(optimizer):
        owner.before_step()


def _warn_of_waiting_state(optimizer: Optimizer) -> None:
    directory = next((d for p in _parameters(optimizer) if (d := getattr(p, _WAITING_STATE, None)) is not None), None)
    if directory is not None:
        clear_waiting_state(optimizer)
        warnings.warn(
            f"`{directory}` holds the state of an optimizer, and this {type(optimizer).__name__} starts without it: it "
            "was not made by run.optimizer(...)",
            MemoptWarning,
            stacklevel=4,
        )


def _refuse_unplaced(optimizer: Optimizer) -> None:
    rule = next((rule for p in _parameters(optimizer) if (rule := getattr(p, _STATE_RULE, None)) is not None), None)
    if rule is not None:
        raise MemoptError.of(
            "optimizer-not-placed",
            f"rule `{rule}` offloads optimizer state, and this {type(optimizer).__name__} keeps its own on the device: "
            "it was made without the policy",
            hint="make it with `run.optimizer(torch.optim.AdamW, lr=...)`, or pass it: "
            "`memopt.apply_policy(model, policy, optimizer=optimizer)`",
        )


def _after_any_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for owner in _owners(optimizer):
        owner.parameters_stepped()


register_optimizer_step_pre_hook(_before_any_step)
register_optimizer_step_post_hook(_after_any_step)


def refuse_foreign_optimizer(optimizer: Optimizer, model: nn.Module) -> None:
    """Refuses an optimizer none of whose parameters is the model's: its steps would train nothing of it.

    Raises:
        MemoptError: `optimizer-of-another-model`, `not-an-optimizer`.
    """
    if not isinstance(optimizer, Optimizer):
        raise MemoptError.of(
            "not-an-optimizer",
            f"optimizer= takes a torch.optim.Optimizer, not a {type(optimizer).__qualname__}",
            hint="make it after apply_policy with run.optimizer(torch.optim.AdamW, lr=1e-3)",
        )
    own = {id(parameter) for parameter in model.parameters()}
    held = list(_parameters(optimizer))
    if any(id(parameter) in own for parameter in held):
        return
    shapes = ", ".join(str(tuple(parameter.shape)) for parameter in held[:3])
    raise MemoptError.of(
        "optimizer-of-another-model",
        f"this {type(optimizer).__name__} holds {len(held)} parameters (shapes {shapes}, ...), none of which is the "
        "model's: it was made for another model, or for this one before it was copied",
        hint="make it over `model.parameters()` of the model that is passed to apply_policy",
    )


def repoint(optimizer: Optimizer) -> Optimizer:
    """Makes an optimizer from before the policy step what is really trained; groups, options and state are kept.

    State of a parameter's own shape is cut to this rank's slice, like the parameter.
    """
    for group in optimizer.param_groups:
        replaced = ((parameter, replacement_of(parameter)) for parameter in group["params"])
        group["params"] = [parameter if new is None else new for parameter, new in replaced]
    for parameter in list(optimizer.state):
        new = replacement_of(parameter)
        if new is not None:
            state = optimizer.state.pop(parameter)
            shape = new.shape
            optimizer.state[new] = {
                name: _cut(value, new) if isinstance(value, torch.Tensor) and value.shape == shape else value
                for name, value in state.items()
            }
    return optimizer


def _cut(value: torch.Tensor, like: nn.Parameter) -> torch.Tensor:
    if not isinstance(like, ShardedTensor):
        if value.shape == like.shape and type(like.data) is not torch.Tensor:
            from torch.distributed.tensor import DTensor, distribute_tensor

            if isinstance(like.data, DTensor):
                return distribute_tensor(value, like.data.device_mesh, like.data.placements)
        return value
    held = like.slice
    return ShardedTensor(value.reshape(-1)[held.start : held.stop].clone(), held)


def make_optimizer(
    factory: Callable[..., Optimizer], model: nn.Module, params: Any, options: Mapping[str, Any]
) -> Optimizer:
    """Calls an optimizer class or factory on the model's real parameters.

    Args:
        factory: An optimizer class (one that needs whole matrices runs at each parameter's owner), or any callable from
            parameters (from `named_parameters`, when it has an argument of that name) to an optimizer.
        model: Its trainable parameters are the default.
        params: Parameters, groups, or (name, parameter) pairs; ones taken before the policy are replaced.
        options: Passed on.

    Raises:
        MemoptError: `not-an-optimizer`.
    """
    if not callable(factory):
        raise MemoptError.of(
            "not-an-optimizer",
            f"run.optimizer takes an optimizer's class or what makes one from parameters, not a "
            f"{type(factory).__qualname__}",
            hint="run.optimizer(torch.optim.AdamW, lr=1e-3); one that is made already goes to apply_policy(optimizer=)",
        )
    if needs_matrices(factory) and any(isinstance(p, ShardedTensor) for p in model.parameters()):
        wanted = [p for p in model.parameters() if p.requires_grad] if params is None else _replaced(params)
        return OwnerOptimizer(factory, wanted, dict(options))
    if params is None:
        try:
            wants_names = "named_parameters" in inspect.signature(factory).parameters
        except (TypeError, ValueError):  # builtins and C callables have no signature
            wants_names = False
        if wants_names:
            return factory(named_parameters=list(model.named_parameters()), **options)
        return factory([p for p in model.parameters() if p.requires_grad], **options)
    return factory(_replaced(params), **options)


def _replaced(params: Any) -> Any:
    """The same structure with replaced parameters exchanged."""
    if isinstance(params, torch.Tensor):
        return current(params)
    if isinstance(params, Mapping):
        return {key: _replaced(value) if key == "params" else value for key, value in params.items()}
    if isinstance(params, tuple) and len(params) == 2 and isinstance(params[0], str):
        return (params[0], _replaced(params[1]))
    if isinstance(params, Iterable) and not isinstance(params, str):
        return [_replaced(item) for item in params]
    return params

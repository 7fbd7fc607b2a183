"""Other methods than `forward` on a sharded module."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from memopt.errors import MemoptError

from .engine import Engine
from .units import Unit


def _unit_of(engine: Engine, module: nn.Module) -> Unit | None:
    """The unit the module is or lies in."""
    for unit in engine.units:
        if any(inner is module for member in unit.modules for inner in member.modules()):
            return unit
    return None


def register_method(engine: Any, module: nn.Module, name: str) -> None:
    """Wraps `module.name` so that the weights of the module's unit are gathered around each call, as for `forward`.

    Raises:
        MemoptError: `no-such-method`.
    """
    original = getattr(module, name, None)
    if not callable(original):
        raise MemoptError.of("no-such-method", f"`{type(module).__qualname__}` has no method `{name}`", path=name)
    if not isinstance(engine, Engine):
        from torch.distributed.fsdp import register_fsdp_forward_method

        register_fsdp_forward_method(module, name)
        return
    if module is engine.model:
        setattr(module, name, _around_model(engine, original))
        return
    unit = _unit_of(engine, module)
    if unit is not None and unit.moves:
        setattr(module, name, _around_unit(engine, unit, original))


def _around_unit(engine: Engine, unit: Unit, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def gathered(*args: Any, **kwargs: Any) -> Any:
        changed = engine.before_forward(unit, args, kwargs)
        if changed is not None:
            args, kwargs = changed
        output = None
        try:
            output = original(*args, **kwargs)
        finally:
            engine.after_forward(unit, unit.modules[-1], output)
        return output

    return gathered


def _around_model(engine: Engine, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def gathered(*args: Any, **kwargs: Any) -> Any:
        engine.before_model()
        output = None
        try:
            output = original(*args, **kwargs)
        finally:
            engine.after_model(output)
        return output

    return gathered

"""How a user's step and loss are called: what is the batch, and what is no step at all."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from memopt.errors import MemoptError

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def require_step(fn: Callable[..., Any], form: str) -> None:
    """Refuse what cannot be called as a step.

    Args:
        fn: What the user gave.
        form: How a step is called, such as `fn(model, optimizer, batch)`.

    Raises:
        MemoptError: `step-arguments`.
    """
    parameters = _parameters(fn)
    if parameters is None:
        return
    takes = [parameter for parameter in parameters if parameter.kind in _POSITIONAL]
    takes_any = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters)
    if len(takes) < 3 and not takes_any:
        raise MemoptError.of(
            "step-arguments",
            f"`{_name(fn)}` takes {len(takes)} arguments, and a step is called as {form}",
            hint=f"write it as {form}; further arguments are further parts of the batch",
        )


def batch_of(fn: Callable[..., Any], first: Any, second: Any, batch: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
    """The arguments of one call after the first two, in the order that `fn` takes them.

    Raises:
        MemoptError: `step-arguments`, in Python's words of what is missing or too many.
    """
    if _parameters(fn) is None:
        return batch
    try:
        bound = inspect.signature(fn).bind(first, second, *batch, **named)
    except TypeError as error:
        raise MemoptError.of(
            "step-arguments",
            f"`{_name(fn)}` cannot be called so: {error}",
            hint="call the step as you call the function",
        ) from None
    if bound.kwargs:
        raise MemoptError.of(
            "step-arguments",
            f"`{_name(fn)}` takes {', '.join(f'`{name}`' for name in bound.kwargs)} by keyword alone",
            hint="take the parts of the batch as ordinary parameters",
        )
    return bound.args[2:]


def _parameters(fn: Callable[..., Any]) -> list[inspect.Parameter] | None:
    """None for what Python cannot tell, such as some built-in functions."""
    try:
        return list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        return None


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__name__", type(fn).__name__)

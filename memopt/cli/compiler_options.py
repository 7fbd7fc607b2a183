"""`--compiler-option NAME=VALUE`: one entry of a policy's `backend_options.jax.compiler_options`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import typer


def parse_options(given: Sequence[str]) -> dict[str, Any]:
    """Options by name; a value is a JSON scalar (`true`, `8`, `"text"`), and anything else is text.

    Raises:
        typer.BadParameter: No name or no `=`.

    >>> parse_options(["xla_a=true", "xla_b=8", "xla_c=text"])
    {'xla_a': True, 'xla_b': 8, 'xla_c': 'text'}
    """
    options = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise typer.BadParameter(
                f"--compiler-option {text}: give NAME=VALUE, as in xla_allow_excess_precision=false"
            )
        options[name] = _value(value)
    return options


def _value(text: str) -> Any:
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, (bool, int, float, str)) else text

"""`memopt doctor`: versions, devices, what can be planned here and what is missing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from ..errors import Problem
from ..quantities import format_bytes


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="The same as JSON on stdout.")] = False,
) -> None:
    """Say what is installed, which devices there are, what can be planned here and what is missing."""
    from ..doctor import examine

    found = examine()
    if as_json:
        print(json.dumps(found, indent=2, default=str))
        return
    print("\n".join(_lines(found, 0)))


def _lines(value: Any, depth: int) -> Iterator[str]:
    """Nested data as indented `key: value` lines."""
    indent = "  " * depth
    for key, entry in value.items():
        if entry in ([], {}, (), "") or (key == "ok" and value.get("problems")):
            continue
        if isinstance(entry, dict) and entry.get("ok") is True and not any(v for k, v in entry.items() if k != "ok"):
            yield f"{indent}{key}: ok"
        elif key.endswith("_bytes") and isinstance(entry, int):
            yield f"{indent}{key.removesuffix('_bytes')}: {format_bytes(entry)}"
        elif isinstance(entry, dict) and entry:
            yield f"{indent}{key}:"
            yield from _lines(entry, depth + 1)
        elif key == "problems" and isinstance(entry, list):
            for problem in entry:
                yield from (indent + line for line in Problem(**problem).render().splitlines())
        elif isinstance(entry, list | tuple) and entry and isinstance(entry[0], dict):
            yield f"{indent}{key}:"
            for one in entry:
                yield from _lines(one, depth + 1)
        else:
            yield f"{indent}{key}: {_shown(entry)}"


def _shown(entry: Any) -> str:
    if entry is None:
        return "not installed"
    if isinstance(entry, bool):
        return "yes" if entry else "no"
    return ", ".join(map(str, entry)) if isinstance(entry, list | tuple) else str(entry)

"""What pydantic found, as problems: place, what was got, what is allowed, the nearest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from .errors import Problem
from .explanations import BOUNDS, EXPLANATIONS, TYPES, Fault
from .model_keys import Path
from .source import Source

_CODES: Mapping[str, str] = {
    "extra_forbidden": "unknown-key",
    "missing": "missing-key",
    "literal_error": "wrong-value",
    "union_tag_invalid": "wrong-value",
    "union_tag_not_found": "missing-key",
    "byte_size": "wrong-size",
    "byte_size_unit": "wrong-size",
}


def problems_of(
    error: ValidationError, model: type[BaseModel], data: Any, place: Source, *, prefix: Path = ()
) -> list[Problem]:
    """One problem per fault; the several complaints of a union's members about one value are one problem.

    Args:
        error: From `model_validate_json`.
        model: The model that was asked for.
        data: What it was given.
        place: Where the data came from.
        prefix: Where the data is in its file.
    """
    faults = [
        (_data_path(fault["loc"], data, is_absent=fault["type"] == "missing"), fault)
        for fault in error.errors(include_url=False)
    ]
    paths = [path for path, _ in faults]
    problems: dict[tuple[Path, str], Problem] = {}
    for path, fault in faults:
        is_counted_after_faults = fault["type"] == "too_short" and any(
            len(other) > len(path) and other[: len(path)] == path for other in paths
        )
        if is_counted_after_faults:
            continue
        problem = _problem(path, fault, model, data, place, prefix)
        if not any(known == path and _is_type_fault(code) for known, code in problems):
            problems.setdefault((path, fault["type"]), problem)
    return sorted(problems.values(), key=lambda problem: (problem.line or 0, problem.column or 0))


def _is_type_fault(kind: str) -> bool:
    return kind in TYPES or kind in BOUNDS


def _data_path(loc: tuple[int | str, ...], data: Any, *, is_absent: bool) -> Path:
    """The place in the data: pydantic's location without the names of union members."""
    path: list[str | int] = []
    here: Any = data
    for i, part in enumerate(loc):
        is_last = i == len(loc) - 1
        if isinstance(here, Mapping):
            if part in here:
                here = here[part]
                path.append(part)
            elif is_last and is_absent:
                path.append(part)
        elif isinstance(here, list) and isinstance(part, int) and part < len(here):
            here = here[part]
            path.append(part)
    return tuple(path)


def _problem(path: Path, fault: Any, model: type[BaseModel], data: Any, place: Source, prefix: Path) -> Problem:
    kind, context = fault["type"], fault.get("ctx", {})
    if kind.startswith("union_tag"):
        path = (*path, context["discriminator"].strip("'"))
    one = Fault(kind, path, fault["msg"], context, model, data)
    explain = EXPLANATIONS.get(kind)
    if explain is not None:
        code = _CODES.get(kind) or ("wrong-type" if kind in TYPES else "wrong-value")
        message, hint = explain(one)
    else:  # our own checks carry code, message, hint and, where it is inside, the key
        code, message, hint = kind, one.text, context.get("hint")
        path = (*path, *context["key"].split(".")) if "key" in context else path
    return Problem(code, message, hint=hint, **place.at((*prefix, *path)))

"""What pydantic found, as faults with their place in the data, and as problems: what was got, what is allowed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
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


@dataclass(frozen=True)
class Found:
    """One complaint of pydantic's, placed in the data.

    Attributes:
        path: The key or value it is about.
        kind: pydantic's type of error, or the code of a check of ours.
        text: pydantic's words.
        context: What goes with them.
    """

    path: Path
    kind: str
    text: str
    context: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def is_ours(self) -> bool:
        """Whether it comes from a check of ours, which carries code, message and hint."""
        return self.kind not in EXPLANATIONS


def faults_of(error: ValidationError, data: Any) -> list[Found]:
    """One fault for each thing that is wrong; the complaints of a union's members about one value are one."""
    every = [_found(fault, data) for fault in error.errors(include_url=False)]
    paths = [fault.path for fault in every]
    kept: dict[tuple[Path, str], Found] = {}
    for fault in every:
        is_counted_after_faults = fault.kind == "too_short" and any(
            len(other) > len(fault.path) and other[: len(fault.path)] == fault.path for other in paths
        )
        if is_counted_after_faults or any(known == fault.path and _is_type_fault(kind) for known, kind in kept):
            continue
        kept.setdefault((fault.path, fault.kind), fault)
    return list(kept.values())


def _is_type_fault(kind: str) -> bool:
    return kind in TYPES or kind in BOUNDS


def _found(fault: Any, data: Any) -> Found:
    kind, context = fault["type"], fault.get("ctx", {})
    path = _data_path(fault["loc"], data, is_absent=kind == "missing")
    if kind.startswith("union_tag"):
        path = (*path, context["discriminator"].strip("'"))
    if kind not in EXPLANATIONS and "key" in context:  # a check of ours says where it is inside
        path = (*path, *context["key"].split("."))
    return Found(path, kind, fault["msg"], context)


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


def problem_of(found: Found, model: type[BaseModel], data: Any, place: Source, *, prefix: Path = ()) -> Problem:
    """The fault in words.

    Args:
        found: From `faults_of`.
        model: The model that was asked for.
        data: What it was given.
        place: Where the data came from.
        prefix: Where the data is in its file.
    """
    if found.is_ours:
        code, message, hint = found.kind, found.text, found.context.get("hint")
    else:
        code = _CODES.get(found.kind) or ("wrong-type" if found.kind in TYPES else "wrong-value")
        message, hint = EXPLANATIONS[found.kind](Fault(found.kind, found.path, found.text, found.context, model, data))
    return Problem(code, message, hint=hint, **place.at((*prefix, *found.path)))

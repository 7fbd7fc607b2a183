"""What can be judged of a policy's data before it is valid: names given twice, mesh sizes, backends' options."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from .backend import Backend, backend_names, load_backend
from .errors import MemoptError, Problem, did_you_mean
from .source import Source
from .validation import problems_of


def check_data(data: Any, place: Source) -> list[Problem]:
    """Every such problem; what is of the wrong type is left to the policy's models."""
    if not isinstance(data, Mapping):
        return []
    return [*_names(data.get("rules"), place), *_mesh(data.get("mesh"), place), *_options(data, place)]


def _names(rules: Any, place: Source) -> list[Problem]:
    if not isinstance(rules, list):
        return []
    names = [rule.get("name") if isinstance(rule, Mapping) else None for rule in rules]
    counts = Counter(name for name in names if isinstance(name, str))
    return [
        Problem(
            "rule-name-twice",
            f"rule {names.index(name)} is called `{name}` already",
            hint="names are how the plan and every message point at a rule: make each unique",
            **place.at(("rules", i, "name")),
        )
        for i, name in enumerate(names)
        if isinstance(name, str) and counts[name] > 1 and names.index(name) != i
    ]


def _mesh(mesh: Any, place: Source) -> list[Problem]:
    if not isinstance(mesh, Mapping):
        return []
    sizes = {axis: size for axis, size in mesh.items() if isinstance(size, int) and not isinstance(size, bool)}
    problems = [
        Problem(
            "mesh-size",
            f"axis `{axis}` has size {size}; sizes are 1 and more, or -1 for what is left",
            hint=f"write `{axis}: -1`, or take the axis out",
            **place.at(("mesh", axis)),
        )
        for axis, size in sizes.items()
        if size < 1 and size != -1
    ]
    free = [axis for axis, size in sizes.items() if size == -1]
    if len(free) > 1:
        problems.append(
            Problem(
                "mesh-size",
                f"{' and '.join(f'`{axis}`' for axis in free)} are both -1; one axis at most takes what is left",
                hint="give all but one a size",
                **place.at(("mesh", free[1])),
            )
        )
    return problems


def _options(data: Mapping[str, Any], place: Source) -> list[Problem]:
    """Each backend's options by that backend's own model."""
    written = data.get("backend_options")
    if not isinstance(written, Mapping) or not written:
        return []
    problems: list[Problem] = []
    known = backend_names()
    for name, options in written.items():
        if name not in known:
            message = f"no backend is called `{name}`; there are {', '.join(known) or 'none'}"
            at = place.at(("backend_options", name))
            problems.append(Problem("unknown-backend", message, hint=did_you_mean(name, known), **at))
        elif isinstance(options, Mapping):
            try:
                complete_options(load_backend(name), options, place)
            except MemoptError as error:
                problems.extend(error.problems)
    return problems


def complete_options(backend: Backend, written: Mapping[str, Any], place: Source) -> dict[str, Any]:
    """A backend's options, checked by its own model, defaults filled in.

    Raises:
        MemoptError: With every problem found.
    """
    model = backend.options()
    try:
        return model.model_validate_json(json.dumps(written), strict=True).model_dump(mode="json")
    except ValidationError as error:
        prefix = ("backend_options", backend.name)
        raise MemoptError(problems_of(error, model, written, place, prefix=prefix)) from None

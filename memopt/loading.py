"""YAML to frozen models: every problem at once, each with its place and the next step."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from .backend import Backend, backend_names, load_backend
from .errors import MemoptError, Problem, did_you_mean
from .policy import Policy
from .source import Source
from .validation import problems_of
from .yaml_nodes import parse

Model = TypeVar("Model", bound=BaseModel)
DocumentSource = str | Path | Mapping[str, Any]


def load_policy(source: DocumentSource | Policy) -> Policy:
    """A policy from a path (a `str` is always a path), a mapping, or a `Policy`.

    Raises:
        MemoptError: With every problem found, each with file, line, column, path and hint.
    """
    if isinstance(source, Policy):
        return source
    data, place = read_document(source)
    try:
        policy = _validated(data, Policy, place).with_source(place)
    except MemoptError as error:
        raise MemoptError([*error.problems, *_checks_of_data(data, place)]) from None
    problems = [*_checks_of_data(data, place), *_mesh_problems(policy), *_option_problems(policy)]
    if problems:
        raise MemoptError(problems)
    return policy


def load_document(source: DocumentSource, model: type[Model]) -> Model:
    """Any of the project's YAML files as its frozen model: same strictness, places and hints as a policy.

    Raises:
        MemoptError: With every problem found.
    """
    data, place = read_document(source)
    return _validated(data, model, place)


def read_document(source: DocumentSource) -> tuple[Any, Source]:
    """Plain data and where each value is.

    Raises:
        MemoptError: `not-a-source`, `file-not-found`, `file-unreadable`, and what `yaml_nodes.parse` raises.
    """
    if isinstance(source, Mapping):
        return _plain(source), Source()
    if not isinstance(source, str | Path):
        kind = type(source).__qualname__
        raise MemoptError.of("not-a-source", f"got a `{kind}`; a path, a mapping or the model itself is read")
    file = str(source)
    if "\n" in file:
        hint = "a string is always a path; give a mapping, or write the text to a file"
        raise MemoptError.of("not-a-source", "got a text of several lines", hint=hint)
    try:
        text = Path(source).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise MemoptError(_missing(Path(source))) from None
    except (OSError, UnicodeDecodeError) as error:
        reason = "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else (error.strerror or str(error))
        raise MemoptError(Problem("file-unreadable", f"cannot be read: {reason}", file=file)) from None
    parsed = parse(text, file=file)
    return parsed.data, Source(file, parsed.places)


def _missing(path: Path) -> Problem:
    folder = path.parent
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_file()) if folder.is_dir() else []
    hint = did_you_mean(path.name, names) if folder.is_dir() else f"there is no folder `{folder}`"
    return Problem("file-not-found", "no such file", hint=hint, file=str(path))


def _plain(value: Any) -> Any:
    """The mapping as JSON data; tuples are lists, other objects are refused by validation."""
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, list | tuple) else value


def _validated(data: Any, model: type[Model], place: Source) -> Model:
    try:
        text = json.dumps(data, allow_nan=False)
    except (TypeError, ValueError) as error:
        message = f"the mapping holds something that YAML cannot: {error}"
        raise MemoptError(Problem("not-plain-data", message, file=place.file)) from None
    try:
        return model.model_validate_json(text, strict=True)  # python mode would take "yes" for true
    except ValidationError as error:
        raise MemoptError(problems_of(error, model, data, place)) from None


def _checks_of_data(data: Any, place: Source) -> list[Problem]:
    """What can be judged before the rules are valid: names given twice."""
    rules = data.get("rules") if isinstance(data, Mapping) else None
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


def _mesh_problems(policy: Policy) -> list[Problem]:
    mesh = policy.mesh or {}
    problems = [
        Problem(
            "mesh-size",
            f"axis `{axis}` has size {size}; sizes are 1 and more, or -1 for what is left",
            hint=f"write `{axis}: -1`, or take the axis out",
            **policy.source.at(("mesh", axis)),
        )
        for axis, size in mesh.items()
        if size < 1 and size != -1
    ]
    free = [axis for axis, size in mesh.items() if size == -1]
    if len(free) > 1:
        problems.append(
            Problem(
                "mesh-size",
                f"{' and '.join(f'`{axis}`' for axis in free)} are both -1; one axis at most takes what is left",
                hint="give all but one a size",
                **policy.source.at(("mesh", free[1])),
            )
        )
    return problems


def _option_problems(policy: Policy) -> list[Problem]:
    """Each backend's options by that backend's own model."""
    problems: list[Problem] = []
    known = backend_names() if policy.backend_options else ()
    for name in policy.backend_options:
        if name not in known:
            message = f"no backend is called `{name}`; there are {', '.join(known) or 'none'}"
            hint = did_you_mean(name, known)
            problems.append(
                Problem("unknown-backend", message, hint=hint, **policy.source.at(("backend_options", name)))
            )
            continue
        try:
            validate_options(policy, load_backend(name))
        except MemoptError as error:
            problems.extend(error.problems)
    return problems


def validate_options(policy: Policy, backend: Backend) -> dict[str, Any]:
    """This backend's options, checked by its own model, defaults filled in.

    Raises:
        MemoptError: With every problem found.
    """
    model = backend.options()
    written = policy.backend_options.get(backend.name, {})
    prefix = ("backend_options", backend.name)
    try:
        return model.model_validate_json(json.dumps(written), strict=True).model_dump(mode="json")
    except ValidationError as error:
        raise MemoptError(problems_of(error, model, written, policy.source, prefix=prefix)) from None

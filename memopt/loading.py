"""YAML to frozen models: every problem at once, each with its place and the next step."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from .backend import Backend
from .errors import MemoptError, Problem, did_you_mean
from .policy import Policy
from .policy_checks import check_data, complete_options
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
    problems = check_data(data, place)
    try:
        policy = _validated(data, Policy, place).with_source(place)
    except MemoptError as error:
        together = sorted([*error.problems, *problems], key=lambda problem: (problem.line or 0, problem.column or 0))
        raise MemoptError(together) from None
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


def validate_options(policy: Policy, backend: Backend) -> dict[str, Any]:
    """This backend's options, checked by its own model, defaults filled in.

    Raises:
        MemoptError: With every problem found.
    """
    return complete_options(backend, policy.backend_options.get(backend.name, {}), policy.source)

"""YAML to frozen models: every problem at once, each with its place and the next step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import BaseModel

from .backend import Backend
from .errors import MemoptError, Problem, did_you_mean
from .mending import Judged, judge
from .model_keys import Path as Place
from .policy import Policy
from .policy_checks import check_data, complete_options
from .source import Source
from .yaml_nodes import parse

Model = TypeVar("Model", bound=BaseModel)
DocumentSource = str | Path | Mapping[str, Any]


@dataclass(frozen=True)
class Document:
    """What was read, before it is judged.

    Attributes:
        data: Plain data.
        place: Where each value is.
        problems: What could not be read as data.
        faulty: Values that could not be read, and are None in `data`.
        incomplete: Mappings of which a key could not be read.
    """

    data: Any
    place: Source
    problems: tuple[Problem, ...] = ()
    faulty: frozenset[Place] = frozenset()
    incomplete: frozenset[Place] = frozenset()


@dataclass(frozen=True)
class Draft(Generic[Model]):
    """A document with its faults.

    Attributes:
        value: The model; with problems, of what is left, so that the rest can be judged; None where nothing is.
        problems: Every fault, in the order of the file.
        mended: Places where `value` holds something else than what was written.
    """

    value: Model | None
    problems: tuple[Problem, ...]
    mended: frozenset[Place]

    def sound(self) -> Model:
        """The model.

        Raises:
            MemoptError: With every problem, where there are any.
        """
        if self.problems or self.value is None:
            raise MemoptError(self.problems)
        return self.value


def load_policy(source: DocumentSource | Policy) -> Policy:
    """A policy from a path (a `str` is always a path), a mapping, or a `Policy`.

    Raises:
        MemoptError: With every problem found, each with file, line, column, path and hint.
    """
    if isinstance(source, Policy):
        return source
    return draft_policy(source).sound()


def draft_policy(source: DocumentSource) -> Draft[Policy]:
    """A policy and everything that is wrong with it by itself.

    Raises:
        MemoptError: Where there is no document to judge: see `read_document`.
    """
    document = read_document(source)
    judged = _judged(document, Policy)
    problems = [*document.problems, *judged.problems, *check_data(judged.data, judged.place, reported=judged.mended)]
    policy = None if judged.value is None else judged.value.with_source(judged.place)
    return Draft(policy, _in_order(problems), judged.mended)


def load_document(source: DocumentSource, model: type[Model]) -> Model:
    """Any of the project's YAML files as its frozen model: same strictness, places and hints as a policy.

    Raises:
        MemoptError: With every problem found.
    """
    return draft_document(source, model).sound()


def draft_document(source: DocumentSource, model: type[Model]) -> Draft[Model]:
    """The model and everything that is wrong with it by itself.

    Raises:
        MemoptError: Where there is no document to judge: see `read_document`.
    """
    document = read_document(source)
    judged = _judged(document, model)
    return Draft(judged.value, _in_order([*document.problems, *judged.problems]), judged.mended)


def _judged(document: Document, model: type[Model]) -> Judged[Model]:
    return judge(document.data, model, document.place, reported=document.faulty, incomplete=document.incomplete)


def _in_order(problems: Iterable[Problem]) -> tuple[Problem, ...]:
    return tuple(sorted(problems, key=lambda problem: (problem.line or 0, problem.column or 0)))


def read_document(source: DocumentSource) -> Document:
    """Plain data and where each value is.

    Raises:
        MemoptError: `not-a-source`, `file-not-found`, `file-unreadable`, and what `yaml_nodes.parse` raises.
    """
    if isinstance(source, Mapping):
        return Document(_plain(source), Source())
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
    return Document(parsed.data, Source(file, parsed.places), parsed.problems, parsed.faulty, parsed.incomplete)


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


def validate_options(policy: Policy, backend: Backend) -> dict[str, Any]:
    """This backend's options, checked by its own model, defaults filled in.

    Raises:
        MemoptError: With every problem found.
    """
    return complete_options(backend, policy.backend_options.get(backend.name, {}), policy.source)

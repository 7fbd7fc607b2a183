"""Every fault of a document at once: what was found is mended, and the rest judged again until nothing more is found.

pydantic stops at a mapping whose `action` it does not know, and runs no check of a whole model while a key of it is
wrong: one fault would hide others. So each is put right as its author is likely to have meant it (the nearest
spelling), or with a value of which nothing is said, and what follows from the mending alone is not reported.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError

from .errors import MemoptError, Problem
from .explanations import literals
from .model_keys import Path, keys_at, tags_at, value_at
from .source import Source
from .spelling import meant_key, meant_value
from .validation import Found, faults_of, problem_of

Model = TypeVar("Model", bound=BaseModel)

_MAX_PASSES = 50
_MAX_FAULTS = 200  # of one pass: beyond, what was found is enough, and mending would cost seconds
_GONE = object()
_COUNTS = frozenset({"too_short", "empty-list", "said-twice"})
_DEPENDS_ON_ACTION = frozenset({"role-for-action", "update-on-without-state"})


@dataclass(frozen=True)
class Judged(Generic[Model]):
    """A document and what is wrong with it.

    Attributes:
        value: The model; with problems, that of the mended data, or None where it cannot be mended.
        data: The data, mended.
        place: Where each value came from, under the keys that were meant.
        problems: Every fault, in the order of the file.
        mended: Places that hold something else than what was written.
    """

    value: Model | None
    data: Any
    place: Source
    problems: tuple[Problem, ...]
    mended: frozenset[Path]


def judge(
    data: Any,
    model: type[Model],
    place: Source,
    *,
    prefix: Path = (),
    reported: Iterable[Path] = (),
    incomplete: Iterable[Path] = (),
) -> Judged[Model]:
    """The document as its model, or with every fault of it.

    Args:
        data: Plain data.
        model: What it should be.
        place: Where it came from.
        prefix: Where the data is in its file.
        reported: Places that a problem was reported of before, and that hold nothing.
        incomplete: Mappings of which a key could not be read: what is missing there is not reported.

    Raises:
        MemoptError: `not-plain-data`.
    """
    try:
        json.dumps(data, allow_nan=False)
    except (TypeError, ValueError) as error:
        message = f"the mapping holds something that YAML cannot: {error}"
        raise MemoptError(Problem("not-plain-data", message, file=place.file)) from None
    mending = _Mending(data, model, place, prefix, reported, incomplete)
    mending.run()
    problems = tuple(sorted(mending.problems, key=lambda problem: (problem.line or 0, problem.column or 0)))
    return Judged(mending.value, mending.data, mending.place, problems, frozenset(mending.mended))


class _Mending(Generic[Model]):
    """The document between passes."""

    def __init__(
        self,
        data: Any,
        model: type[Model],
        place: Source,
        prefix: Path,
        reported: Iterable[Path],
        incomplete: Iterable[Path],
    ) -> None:
        self.data = data
        self.place = place
        self.problems: list[Problem] = []
        self.mended: set[Path] = set(reported)
        self.value: Model | None = None
        self._model = model
        self._prefix = prefix
        self._incomplete = frozenset(incomplete)
        self._renamed: set[Path] = set()  # keys read as others: of their values nothing more is said
        self._guessed: set[Path] = set()  # rules whose action nobody can tell
        self._seen: set[tuple[Path, str, str]] = set()

    def run(self) -> None:
        for _ in range(_MAX_PASSES):
            self.value, faults = self._judged(self.data)
            for fault in faults:
                self._report(fault)
            if not faults or len(faults) > _MAX_FAULTS or not self._mend(faults):
                return

    def _judged(self, data: Any) -> tuple[Model | None, list[Found]]:
        try:  # python mode would take "yes" for true
            return self._model.model_validate_json(json.dumps(data), strict=True), []
        except ValidationError as error:
            return None, faults_of(error, data)

    def _report(self, fault: Found) -> None:
        key = (fault.path, fault.kind, fault.text)
        if key not in self._seen and not self._is_echo(fault):
            self.problems.append(problem_of(fault, self._model, self.data, self.place, prefix=self._prefix))
        self._seen.add(key)

    def _is_echo(self, fault: Found) -> bool:
        """Whether it may come from what was mended, not from what was written."""
        if fault.kind in ("missing", "union_tag_not_found") and fault.path[:-1] in self._incomplete:
            return True
        if fault.path in self._renamed or any(fault.path[: len(path)] == path for path in self.mended):
            return True
        if fault.kind in _DEPENDS_ON_ACTION and any(fault.path[: len(rule)] == rule for rule in self._guessed):
            return True
        has_mended = any(path[: len(fault.path)] == fault.path for path in self.mended)
        says_none = fault.kind in (*_COUNTS, "value_error") or fault.context.get("got") == "none of them"
        return has_mended and says_none

    def _mend(self, faults: Sequence[Found]) -> bool:
        """Puts right what can be; whether anything was."""
        changed = False
        for fault in sorted(faults, key=_order):
            if not fault.path or not _is_there(fault.path[:-1], self.data):
                continue  # the whole document, or what an earlier step took out
            if fault.kind == "missing" and fault.path in self._renamed:
                continue
            if fault.kind == "extra_forbidden":
                changed |= self._without(fault)
            elif fault.kind.startswith("union_tag"):
                changed |= self._with_action(fault)
            elif fault.is_ours:
                changed |= self._without_contradiction(fault)
            elif fault.kind != "value_error":
                changed |= self._with_some_value(fault)
        return changed

    def _set(self, path: Path, value: Any) -> bool:
        self.data = _with(self.data, path, value)
        self.mended.add(path)
        return True

    def _without(self, fault: Found) -> bool:
        """An unknown key is read as the one it is near to, where that is free; else it is left out."""
        outer, name = fault.path[:-1], str(fault.path[-1])
        here = value_at(outer, self.data)
        free = [key for key in keys_at(self._model, outer, self.data) if key not in here]
        meant = meant_key(name, free)
        if meant is None:
            return self._set(fault.path, _GONE)
        self._renamed.add((*outer, meant))
        return self._rename(fault.path, meant)

    def _rename(self, path: Path, key: str) -> bool:
        value, new = value_at(path, self.data), (*path[:-1], key)
        self.data = _with(_with(self.data, path, _GONE), new, value)
        self.place = self.place.renamed((*self._prefix, *path), (*self._prefix, *new))
        return True

    def _with_action(self, fault: Found) -> bool:
        """The action that was meant: by its spelling, by a misspelt key, else the one that takes the rule's keys."""
        *outer, key = fault.path
        rule, name = tuple(outer), str(key)
        here = value_at(rule, self.data)
        known = keys_at(self._model, rule, self.data)
        for other in here if fault.kind == "union_tag_not_found" else ():
            if other not in known and meant_key(other, known) == name:
                return self._rename((*rule, other), name)
        tags = tags_at(self._model, rule, self.data)
        faults = {tag: self._faults_inside(rule, _with(self.data, fault.path, tag)) for tag in tags}
        unknown = {tag: {one.path for one in inside if _is_key_of(one, rule)} for tag, inside in faults.items()}
        best = min(tags, key=lambda tag: (len(unknown[tag]), len(faults[tag])))
        meant = meant_value(here.get(name), tags)
        if meant is not None and len(unknown[meant]) <= len(unknown[best]):
            return self._set(fault.path, meant)
        self._guessed.add(rule)
        for path in unknown[best] - set.intersection(*unknown.values()):  # another action would take that key
            self._set(path, _GONE)
        return self._set(fault.path, best)

    def _faults_inside(self, path: Path, data: Any) -> list[Found]:
        return [fault for fault in self._judged(data)[1] if fault.path[: len(path)] == path]

    def _without_contradiction(self, fault: Found) -> bool:
        """What a check of ours refuses, without the key or the entry of a list that it names."""
        here = value_at(fault.path, self.data)
        if "repeated" in fault.context and isinstance(here, list):
            last = len(here) - 1 - here[::-1].index(fault.context["repeated"])
            return self._set((*fault.path, last), _GONE)
        drop = fault.context.get("drop")
        return self._set(fault.path if drop is None else (*fault.path, drop), _GONE)

    def _with_some_value(self, fault: Found) -> bool:
        """The first value that the model takes there; else the least block around it is left out."""
        before = {(one.path, one.kind) for one in self._judged(self.data)[1]}
        changes = [
            (fault.path, value) for value in _candidates(fault, value_at(fault.path, self.data), len(self.mended))
        ]
        changes += [(fault.path[:end], _GONE) for end in range(len(fault.path) - 1, 0, -1)]
        for path, value in changes:
            changed = _with(self.data, path, value)
            if not any(_is_about(one, path, before) for one in self._judged(changed)[1]):
                return self._set(path, value)
        return False


def _order(fault: Found) -> tuple[int, tuple[int, ...]]:
    """Keys first, as one may be what another place lacks; entries of a list from its end, as taking one out moves the
    rest."""
    is_key = fault.kind == "extra_forbidden" or fault.kind.startswith("union_tag")
    return (0 if is_key else 1, tuple(-part for part in fault.path if isinstance(part, int)))


def _is_there(path: Path, data: Any) -> bool:
    """Whether there is a mapping or a list at that path."""
    for end, part in enumerate(path):
        here = value_at(path[:end], data)
        if not (part in here if isinstance(here, dict) else isinstance(here, list) and int(part) < len(here)):
            return False
    return isinstance(value_at(path, data), dict | list)


def _is_key_of(fault: Found, rule: Path) -> bool:
    return fault.kind == "extra_forbidden" and fault.path[:-1] == rule


def _is_about(fault: Found, path: Path, before: set[tuple[Path, str]]) -> bool:
    """Whether a fault is at that place or in it, or counts what is there and is new."""
    is_here = fault.path[: len(path)] == path
    is_count = path[: len(fault.path)] == fault.path and fault.kind in _COUNTS
    return is_here or (is_count and (fault.path, fault.kind) not in before)


def _candidates(fault: Found, got: Any, number: int) -> Iterator[Any]:
    if fault.kind == "literal_error":
        meant = meant_value(got, literals(fault.context["expected"]))
        if meant is not None:
            yield meant
    if isinstance(fault.path[-1], int):
        yield {"name": f"mended-{number}", "action": "keep", "match": {}}  # a rule keeps its place in the list
        yield f"mended-{number}"
    else:
        yield from (1, True, f"mended-{number}", {}, [])
    yield _GONE


def _with(data: Any, path: Path, value: Any) -> Any:
    """A copy with another value, or none, at a path; what is not on the path is shared."""
    head: Any = path[0]
    rest = path[1:]
    copy: Any = list(data) if isinstance(data, list) else dict(data)
    if rest:
        copy[head] = _with(copy[head], rest, value)
    elif value is not _GONE:
        copy[head] = value
    elif isinstance(copy, list) or head in copy:
        del copy[head]
    return copy

"""YAML 1.2 to plain data with the place of every key and value; hostile files are refused before they cost anything.

Only mappings with string keys, lists and plain scalars are let through: no tags, no merge keys, no second document.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from .errors import MemoptError, Problem

MAX_TEXT_BYTES = 1 << 18
"""A policy of forty rules has some 4 kB."""
MAX_NODES = 50_000
"""Values after aliases are followed: nine levels of nine aliases ("billion laughs") would be 4e8."""
MAX_DEPTH = 60

Path = tuple[str | int, ...]
Places = dict[Path, tuple[int, int]]

_COLLECTIONS = frozenset({"tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"})
_TAGS = {f"tag:yaml.org,2002:{kind}": kind for kind in ("null", "bool", "int", "float", "str")}


@dataclass(frozen=True)
class Parsed:
    """Plain data, where each value is, and what of the text could not be read as data.

    Attributes:
        data: Plain data; None where a value could not be read.
        places: Path -> line and column, from 1 (a mapping's value: its key).
        problems: `yaml-duplicate-key`, `yaml-tag`, `yaml-merge-key`, `yaml-key`.
        faulty: Values that could not be read.
        incomplete: Mappings of which a key could not be read.
    """

    data: Any
    places: Places
    problems: tuple[Problem, ...] = ()
    faulty: frozenset[Path] = frozenset()
    incomplete: frozenset[Path] = frozenset()


def parse(text: str, *, file: str | None) -> Parsed:
    """Plain data of one YAML document.

    Raises:
        MemoptError: `file-too-large`, `yaml-syntax`, `yaml-documents`, `yaml-empty`, `yaml-aliases`, `yaml-too-deep`:
            what leaves nothing to read. The rest is in the result's `problems`.
    """
    if len(text.encode()) > MAX_TEXT_BYTES:
        raise MemoptError(Problem("file-too-large", f"more than {MAX_TEXT_BYTES} bytes of YAML", file=file))
    if _bracket_depth(text) > 4 * MAX_DEPTH:  # the scanner takes seconds to find that out by itself
        raise MemoptError(Problem("yaml-too-deep", f"nested deeper than {MAX_DEPTH} levels", file=file))
    yaml = YAML(typ="safe", pure=True)
    root = _compose(yaml, text, file)
    builder = _Builder(file, yaml.constructor)
    data = builder.build(root, (), 0)
    return Parsed(
        data, builder.places, tuple(builder.problems), frozenset(builder.faulty), frozenset(builder.incomplete)
    )


def _compose(yaml: YAML, text: str, file: str | None) -> Node:
    yaml.allow_duplicate_keys = True  # reported by the builder, with all the others
    try:
        documents = _compose_all(yaml, text)
        root = next(documents, None)
        second = next(documents, None)
    except RecursionError:
        raise MemoptError(Problem("yaml-too-deep", f"nested deeper than {MAX_DEPTH} levels", file=file)) from None
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, column = (None, None) if mark is None else (mark.line + 1, mark.column + 1)
        text = " ".join(str(part) for part in (error.context, error.problem) if part)
        hint = _syntax_hint(str(error.problem))
        raise MemoptError(
            Problem("yaml-syntax", text or "not YAML", hint=hint, file=file, line=line, column=column)
        ) from None
    except YAMLError as error:
        raise MemoptError(Problem("yaml-syntax", str(error).splitlines()[0], file=file)) from None
    if root is None:
        raise MemoptError(
            Problem("yaml-empty", "the file is empty", hint="the least policy is `version: 1`", file=file)
        )
    if second is not None:
        message = "a second document starts here; a file holds one"
        line, column = _mark(second)
        raise MemoptError(Problem("yaml-documents", message, file=file, line=line, column=column))
    return root


def _compose_all(yaml: YAML, text: str) -> Iterator[Node]:
    constructor, parser = yaml.get_constructor_parser(text)
    try:
        while constructor.composer.check_node():
            yield constructor.composer.get_node()
    finally:
        parser.dispose()
        yaml._reader = yaml._scanner = None  # as ruamel's own compose_all does when it ends


def _bracket_depth(text: str) -> int:
    """Deepest nesting of brackets, those in strings and comments counted too."""
    steps = [1 if character in "[{" else -1 for character in text if character in "[]{}"]
    return max(accumulate(steps), default=0)


def _syntax_hint(problem: str) -> str | None:
    if "cannot start any token" in problem and "\\t" in problem:
        return "indent with spaces: YAML does not allow tabs"
    if "mapping values are not allowed" in problem:
        return "a `:` followed by a space inside a value needs quotes around the value"
    if "undefined alias" in problem or "alphabetic or numeric" in problem:
        return "`*` starts an alias in YAML: put quotes around a pattern that begins with it"
    return None


def _mark(node: Node) -> tuple[int, int]:
    """Line and column, from 1."""
    return node.start_mark.line + 1, node.start_mark.column + 1


class _Builder:
    """Plain data from nodes, with a budget for what aliases expand to."""

    def __init__(self, file: str | None, scalars: SafeConstructor) -> None:
        self._file = file
        self._scalars = scalars
        self._num_nodes = 0
        self.places: Places = {}
        self.problems: list[Problem] = []
        self.faulty: set[Path] = set()
        self.incomplete: set[Path] = set()

    def build(self, node: Node, path: Path, depth: int) -> Any:
        self._num_nodes += 1
        if self._num_nodes > MAX_NODES:
            message = f"aliases expand to more than {MAX_NODES} values"
            raise MemoptError(self._problem("yaml-aliases", message, node, path, hint="write the values out"))
        if depth > MAX_DEPTH:
            message = f"nested deeper than {MAX_DEPTH} levels (an alias may contain itself)"
            raise MemoptError(self._problem("yaml-too-deep", message, node, path))
        self.places.setdefault(path, _mark(node))
        if not isinstance(node, ScalarNode) and str(node.tag) not in _COLLECTIONS:
            return self._refuse_tag(node, path)
        if isinstance(node, MappingNode):
            return self._mapping(node, path, depth)
        if isinstance(node, SequenceNode):
            return [self.build(child, (*path, i), depth + 1) for i, child in enumerate(node.value)]
        return self._scalar(node, path)

    def _mapping(self, node: MappingNode, path: Path, depth: int) -> dict[str, Any]:
        data: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = key_node.value
            if not isinstance(key_node, ScalarNode) or not isinstance(key, str):
                self.problems.append(self._problem("yaml-key", "a key must be a plain word", key_node, path))
                self.incomplete.add(path)
                continue
            here = (*path, key)
            if key_node.tag == "tag:yaml.org,2002:merge":
                hint = "write the keys out; an alias may stand for a whole value"
                message = "merge keys (`<<`) are not part of YAML 1.2"
                self.problems.append(self._problem("yaml-merge-key", message, key_node, here, hint=hint))
                self.incomplete.add(path)
                continue
            if key in data:
                first = self.places[here][0]
                message = f"`{key}` is given twice, first on line {first}"
                hint = "remove one of the two"
                self.problems.append(self._problem("yaml-duplicate-key", message, key_node, here, hint=hint))
                continue
            self.places[here] = _mark(key_node)
            data[key] = self.build(value_node, here, depth + 1)
        return data

    def _scalar(self, node: Node, path: Path) -> Any:
        kind = _TAGS.get(str(node.tag))
        if kind is None:
            return self._refuse_tag(node, path)
        if kind == "str":
            return node.value
        try:
            value = getattr(self._scalars, f"construct_yaml_{kind}")(node)
        except (ValueError, KeyError, IndexError):
            message = f"`{node.value}` cannot be read as {kind}"
            self._refuse_value(message, node, path, hint="put quotes around a string")
            return None
        if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
            self._refuse_value(f"`{node.value}` is not a finite number", node, path)
            return None
        return value

    def _refuse_tag(self, node: Node, path: Path) -> None:
        name = str(node.tag).removeprefix("tag:yaml.org,2002:")[:80]
        message = f"a value of type `{name}`; there are strings, numbers, true, false, null, lists and mappings"
        hint = "put quotes around a string" if isinstance(node, ScalarNode) else "write it without a tag"
        self._refuse_value(message, node, path, hint=hint)

    def _refuse_value(self, message: str, node: Node, path: Path, *, hint: str | None = None) -> None:
        self.problems.append(self._problem("yaml-tag", message, node, path, hint=hint))
        self.faulty.add(path)

    def _problem(self, code: str, message: str, node: Node, path: Path, *, hint: str | None = None) -> Problem:
        dotted = ".".join(str(part) for part in path[:12]) or None
        line, column = _mark(node)
        return Problem(code, message, hint=hint, path=dotted, file=self._file, line=line, column=column)

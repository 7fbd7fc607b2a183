"""Every error code has an entry in docs/errors, and every entry is of a code that exists."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = [*(ROOT / "memopt").rglob("*.py"), *(ROOT / "backends").rglob("*.py")]
PAGES = sorted((ROOT / "docs" / "errors").glob("*.md"))
_KEBAB = re.compile(r"[a-z0-9]+(-[a-z0-9]+)+")


LAYER = ("validation", "yaml_nodes", "rules", "fields", "policy", "stacks")
"""Modules that keep codes in tables: every word of that form in them is one."""


def _codes(tree: ast.Module, stem: str) -> Iterator[str]:
    """First arguments, and `code=`, of what makes a problem; and the codes that tables hold."""
    if stem in LAYER:
        yield from _constants(list(ast.iter_child_nodes(tree)))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name.rpartition(".")[2] in ("Problem", "PydanticCustomError") or name.endswith("MemoptError.of"):
                given = [*node.args[:1], *(keyword.value for keyword in node.keywords if keyword.arg == "code")]
                yield from _constants(given)


def _constants(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        for part in ast.walk(node):
            if isinstance(part, ast.Constant) and isinstance(part.value, str) and _KEBAB.fullmatch(part.value):
                yield part.value


def codes_in_sources() -> dict[str, str]:
    """Code -> the file that uses it."""
    found: dict[str, str] = {}
    for source in SOURCES:
        for code in _codes(ast.parse(source.read_text(encoding="utf-8")), source.stem):
            found.setdefault(code, str(source.relative_to(ROOT)))
    return found


def documented() -> dict[str, str]:
    """Code -> the page that explains it."""
    return {
        heading: page.name
        for page in PAGES
        for heading in re.findall(r"^## `?([a-z0-9-]+)`?\s*$", page.read_text(encoding="utf-8"), re.MULTILINE)
    }


def test_every_code_is_explained() -> None:
    missing = {code: place for code, place in codes_in_sources().items() if code not in documented()}
    assert not missing


def test_every_explanation_is_of_a_code_that_exists() -> None:
    text = "\n".join(source.read_text(encoding="utf-8") for source in SOURCES)
    # A problem's code is an argument; a warning's stands in brackets at the head of its text.
    stale = {code: page for code, page in documented().items() if f'"{code}"' not in text and f"[{code}]" not in text}
    assert not stale


def test_no_code_is_explained_twice() -> None:
    """Both backends may raise a code, each for reasons of its own; one of them explains it once."""
    headings = [
        (heading, page.stem.partition("-")[0])
        for page in PAGES
        for heading in re.findall(r"^## `?([a-z0-9-]+)`?\s*$", page.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    twice = {code for code, group in headings if headings.count((code, group)) > 1}
    shared = {code for code, _ in headings if len({group for other, group in headings if other == code}) > 1}
    assert not twice
    assert all({group for other, group in headings if other == code} == {"jax", "torch"} for code in shared)

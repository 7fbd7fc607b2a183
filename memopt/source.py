"""Where a document came from: its file, and the line and column of each value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Source:
    """Where a document came from; all sources compare equal, so that a policy equals its twin from another file.

    Attributes:
        file: The file, or None for a mapping.
        places: Path in the document, as (`rules`, 2, `match`) -> line and column, from 1.
    """

    file: str | None = None
    places: Mapping[tuple[str | int, ...], tuple[int, int]] = field(default_factory=dict)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Source)

    def __hash__(self) -> int:
        return 0

    def renamed(self, old: tuple[str | int, ...], new: tuple[str | int, ...]) -> Source:
        """The places of `old` and of what is in it, under `new` too: a key read as another one."""
        moved = {(*new, *path[len(old) :]): at for path, at in self.places.items() if path[: len(old)] == old}
        return Source(self.file, {**self.places, **moved})

    def at(self, path: tuple[str | int, ...]) -> dict[str, Any]:
        """The `path`, `file`, `line` and `column` of a `Problem`; the nearest enclosing place where there is none."""
        known = path
        while known and known not in self.places:
            known = known[:-1]
        line, column = self.places.get(known, (None, None))
        dotted = ".".join(str(part) for part in path) or None
        return {"path": dotted, "file": self.file, "line": line, "column": column}

"""Errors as data: a `Problem` says where, what was got, what is allowed and the next step; one place renders it.

Every problem found is reported at once: functions that check collect `Problem`s and raise a single `MemoptError`.
Each code has an entry in `docs/errors/`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        code: Stable kebab-case identifier, documented in `docs/errors/`.
        message: What was got and what is allowed, in one or two sentences.
        hint: The next step, or None where the message says it already.
        path: Where in the policy or model, e.g. `rules.2.match.tensor` or `layers.3.self_attn.q_proj`.
        file: The file the problem is in.
        line: Line in `file`, from 1.
        column: Column in `file`, from 1.
    """

    code: str
    message: str
    hint: str | None = None
    path: str | None = None
    file: str | None = None
    line: int | None = None
    column: int | None = None

    def to_json(self) -> dict[str, Any]:
        """The contract's `{code, file, line, column, path, message, hint}`."""
        return asdict(self)

    def render(self) -> str:
        """`FILE:LINE:COL: [code] path: message` with the hint on a line of its own."""
        where = ":".join(str(part) for part in (self.file, self.line, self.column) if part is not None)
        head = f"{where}: " if where else ""
        at = f"{self.path}: " if self.path else ""
        hint = f"\n  next: {self.hint}" if self.hint else ""
        return f"{head}[{self.code}] {at}{self.message}{hint}"


class MemoptError(Exception):
    """The one exception of the public API; carries every problem found.

    Attributes:
        problems: At least one `Problem`, in the order found.
    """

    def __init__(self, problems: Problem | Iterable[Problem]) -> None:
        self.problems: tuple[Problem, ...] = (problems,) if isinstance(problems, Problem) else tuple(problems)
        if not self.problems:
            raise ValueError("MemoptError needs at least one problem")
        super().__init__("\n".join(problem.render() for problem in self.problems))

    def __reduce__(self) -> tuple[type[MemoptError], tuple[tuple[Problem, ...]]]:
        return type(self), (self.problems,)  # exceptions cross process borders in compare and aot

    @classmethod
    def of(cls, code: str, message: str, *, hint: str | None = None, path: str | None = None) -> MemoptError:
        """A `MemoptError` with a single problem."""
        return cls(Problem(code=code, message=message, hint=hint, path=path))


def all_of(*calls: Callable[[], Any]) -> tuple[Any, ...]:
    """What each call gives; where some fail, the problems of all of them together.

    Raises:
        MemoptError: With every problem of every call.
    """
    results: list[Any] = []
    problems: list[Problem] = []
    for call in calls:
        try:
            results.append(call())
        except MemoptError as error:
            problems.extend(error.problems)
    if problems:
        raise MemoptError(problems)
    return tuple(results)


class MemoptWarning(UserWarning):
    """Something works but costs more, or does less, than the policy's author is likely to expect."""


_CLOSE = 0.1


def did_you_mean(got: str, allowed: Sequence[str], *, limit: int = 3) -> str | None:
    """A hint that names the nearest allowed spellings, or None where nothing is near.

    Case is ignored: a wrong capital is the commonest slip.

    >>> did_you_mean("Decoderblock", ["DecoderBlock", "Linear"])
    'did you mean `DecoderBlock`?'
    """
    near = close_spellings(got, allowed, limit=limit)
    return "did you mean " + " or ".join(f"`{name}`" for name in near) + "?" if near else None


def close_spellings(got: str, allowed: Sequence[str], *, limit: int = 3) -> list[str]:
    """The allowed spellings nearest to what was got, best first; case is ignored.

    >>> close_spellings("shrad", ["shard", "keep"])
    ['shard']
    """
    by_folded = {name.casefold(): name for name in allowed}
    folded = got.casefold()
    near = difflib.get_close_matches(folded, list(by_folded), n=limit, cutoff=0.6)
    ratios = {name: difflib.SequenceMatcher(None, name, folded).ratio() for name in near}
    near = [name for name in near if ratios[name] >= ratios[near[0]] - _CLOSE]  # the far ones would only distract
    return [by_folded[name] for name in near]

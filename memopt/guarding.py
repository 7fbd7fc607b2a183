"""What a user's model, a framework or a compiler raises becomes one problem that names the place."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from .backend import FRAMEWORKS, Backend
from .errors import MemoptError, Problem

if TYPE_CHECKING:
    from .spec import ModelSpec

Result = TypeVar("Result")

Place = tuple[str, int | None]
CRASHED = "workload-crashed"
_OURS = frozenset({"memopt", "memopt_jax", "memopt_torch"})
_STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"]


def guarded(what: str, call: Callable[[], Result], *, code: str = "plan-crashed") -> Result:
    """Run framework and user code; whatever it raises becomes one error that names the place.

    Args:
        what: Subject of the message, such as "inspecting the model of `mine`".
        call: What is run.
        code: Of the problem.

    Raises:
        MemoptError: The call's own, or one with `code`.
    """
    try:
        return call()
    except MemoptError:
        raise
    except Exception as error:  # a user's model, a framework or a compiler may raise anything; the cause is kept
        if _is_missing_framework(error):  # the command line names what to install
            raise
        hint = "the place is the innermost line outside the frameworks; `memopt doctor` prints the versions"
        raise MemoptError(raised(f"{what} raised ", error, code=code, hint=hint, or_ours=True)) from error


def raised(what: str, error: Exception, *, code: str, hint: str | None = None, or_ours: bool = False) -> Problem:
    """An exception of code that is not ours as a problem: `WHATTypeError: words`, at the innermost line of that code.

    Args:
        what: How the message begins, up to the exception's type.
        error: Was raised and caught, with its traceback.
        code: Of the problem.
        hint: The next step.
        or_ours: Where no line is the user's, name the innermost of ours.
    """
    users, ours = _places_of(error)
    file, line = users or (ours if or_ours else None) or (None, None)
    words = str(error).strip() or "without a message"
    return Problem(code, f"{what}{type(error).__name__}: {words}", hint=hint, file=file, line=line)


def inspected(backend: Backend, workload: Any) -> ModelSpec:
    """The inventory of a workload's model.

    Raises:
        MemoptError: The backend's own, or `workload-crashed` for what the workload's code raised.
    """
    what = f"inspecting the model of `{getattr(workload, 'name', workload)}`"
    return guarded(what, lambda: backend.inspect_workload(workload), code=CRASHED)


def _is_missing_framework(error: Exception) -> bool:
    missing = (getattr(error, "name", None) or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    return any(missing in packages for packages in FRAMEWORKS.values())


def _places_of(error: Exception) -> tuple[Place | None, Place | None]:
    """The innermost line of the user's code, and of ours; for text that is no Python, where it is wrong."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        return (error.filename, error.lineno), None
    users, ours = None, None
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if "site-packages" in file or file.startswith(("<", _STANDARD_LIBRARY)):
            continue
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] in _OURS:
            ours = file, line
        else:
            users = file, line
    return users, ours

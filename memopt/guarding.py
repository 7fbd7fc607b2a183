"""What a user's model, a framework or a compiler raises becomes one problem that names the place."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from .backend import FRAMEWORKS, Backend
from .errors import MemoptError, Problem

if TYPE_CHECKING:
    from .spec import ModelSpec

Result = TypeVar("Result")

_OURS = frozenset({"memopt", "memopt_jax", "memopt_torch"})


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
        frame = _frame_of(error)
        raise MemoptError(
            Problem(
                code,
                f"{what} raised {type(error).__name__}: {str(error).strip() or 'without a message'}",
                hint="the place is the innermost line outside the frameworks; `memopt doctor` prints the versions",
                file=frame.filename if frame else None,
                line=frame.lineno if frame else None,
            )
        ) from error


def inspected(backend: Backend, workload: Any) -> ModelSpec:
    """The inventory of a workload's model.

    Raises:
        MemoptError: The backend's own, or `workload-crashed` for what the workload's code raised.
    """
    what = f"inspecting the model of `{getattr(workload, 'name', workload)}`"
    return guarded(what, lambda: backend.inspect_workload(workload), code="workload-crashed")


def _is_missing_framework(error: Exception) -> bool:
    missing = (getattr(error, "name", None) or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    return any(missing in packages for packages in FRAMEWORKS.values())


def _frame_of(error: Exception) -> traceback.FrameSummary | None:
    """The innermost frame outside the frameworks: the user's line where there is one, else ours."""
    outside, own = None, None
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if "site-packages" in file or file.startswith("<"):
            continue
        own = traceback.FrameSummary(file, line, frame.f_code.co_name, lookup_line=False)
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] not in _OURS:
            outside = own
    return outside or own

"""Where a command is asked to write: found out before the work, not after it."""

from __future__ import annotations

import os
from pathlib import Path

from .errors import MemoptError, Problem


def require_folder(path: str | Path, *, option: str) -> None:
    """A folder that is there or can be made, to write files in.

    Args:
        path: The folder.
        option: How it was asked for.

    Raises:
        MemoptError: `bad-output`.
    """
    folder = Path(path)
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not there.is_dir():
        raise _bad(f"`{option} {path}`: `{there}` is a file, not a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise _bad(f"`{option} {path}`: `{there}` cannot be written to")


def require_file(path: str | Path, *, option: str) -> None:
    """A file that can be written, with the folders above it.

    Raises:
        MemoptError: `bad-output`.
    """
    if Path(path).is_dir():
        raise _bad(f"`{option} {path}` is a folder; name the file in it")
    require_folder(Path(path).parent, option=option)


def _bad(message: str) -> MemoptError:
    return MemoptError(Problem("bad-output", message, hint="name a place that can be written to"))

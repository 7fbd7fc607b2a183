"""Byte-level batches from text files: real text that needs no tokenizer and no network.

A token is a byte. Both backends read the same batches, made here once.
"""

from __future__ import annotations

import glob
import sysconfig
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from .errors import MemoptError, Problem

BYTE_VOCABULARY = 256
_TEXT_LIMIT_BYTES = 64 * 2**20  # enough for any comparison; a glob over a home directory must not fill memory


def default_text() -> list[str]:
    """The Python standard library's own modules (top level), which every machine has."""
    folder = Path(sysconfig.get_path("stdlib"))
    return sorted(str(path) for path in folder.glob("*.py"))


def text_files(patterns: Iterable[str], *, base: Path | None = None) -> list[str]:
    """The files that paths and globs name, sorted within each pattern, each once.

    Args:
        patterns: Paths or globs; `**` matches any number of folders.
        base: Where relative ones start; the working directory when left out.

    Raises:
        MemoptError: `data-no-files` for every pattern that names no file.
    """
    found: dict[str, None] = {}
    problems = []
    for pattern in patterns:
        anchored = pattern if base is None else str(base / pattern)
        files = sorted(path for path in glob.glob(anchored, recursive=True) if Path(path).is_file())
        if not files:
            problems.append(
                Problem(
                    code="data-no-files",
                    message=f"no file matches `{anchored}`",
                    hint="give a path or a glob of text files; leave `data` out for the Python standard library's",
                    path="data.text",
                )
            )
        found.update(dict.fromkeys(files))
    if problems:
        raise MemoptError(problems)
    return list(found)


def byte_batches(paths: Iterable[str] | None = None, *, batch: int, sequence: int, steps: int, seed: int) -> np.ndarray:
    """Batches of consecutive bytes cut at random places of the files' joined text.

    Args:
        paths: Files; `default_text()` when left out. At most 64 MiB of them are read.
        batch: Sequences per step.
        sequence: Tokens predicted per sequence; one more is cut, to predict from.
        steps: Number of batches.
        seed: The same seed and files give the same batches.

    Returns:
        int32 `[steps, batch, sequence + 1]`, values below 256.

    Raises:
        MemoptError: `data-unreadable` for every file that cannot be read; `data-too-small` when the text is shorter
            than one sequence.
    """
    text = _joined(default_text() if paths is None else list(paths))
    if len(text) < sequence + 1:
        raise MemoptError.of(
            "data-too-small",
            f"the text has {len(text)} bytes, and one sequence takes {sequence + 1}",
            hint="name more files, or use a shorter sequence",
            path="data.text",
        )
    starts = np.random.default_rng(seed).integers(0, len(text) - sequence, size=(steps, batch))
    return text[starts[..., None] + np.arange(sequence + 1)].astype(np.int32)


def _joined(paths: list[str]) -> np.ndarray:
    """The files' bytes one after the other, uint8, up to the limit."""
    pieces, size, problems = [], 0, []
    for path in paths:
        try:
            with open(path, "rb") as file:
                piece = file.read(_TEXT_LIMIT_BYTES - size)
        except OSError as error:
            problems.append(Problem(code="data-unreadable", message=f"cannot read it: {error.strerror}", file=path))
            continue
        pieces.append(piece)
        size += len(piece)
        if size >= _TEXT_LIMIT_BYTES:
            break
    if problems:
        raise MemoptError(problems)
    return np.frombuffer(b"".join(pieces), np.uint8)

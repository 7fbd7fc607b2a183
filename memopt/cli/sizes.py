"""Sizes on the command line, spelt as in a policy."""

from __future__ import annotations

from pydantic import ByteSize, TypeAdapter, ValidationError

from ..errors import MemoptError


def parse_bytes(text: str, *, option: str) -> int:
    """Bytes of `70GiB`, `400 GB` or a plain number.

    Raises:
        MemoptError: `bad-size`.

    >>> parse_bytes("70GiB", option="--budget") == 70 * 2**30
    True
    """
    try:
        nbytes = int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        nbytes = 0
    if nbytes <= 0:
        raise MemoptError.of(
            "bad-size", f"`{option} {text}` is no size", hint="write 70GiB, 400GB or a number of bytes"
        )
    return nbytes


def parse_budget(*, device: str | None, host: str | None) -> dict[str, int]:
    """`--budget` and `--host-budget` as `prepare` takes them."""
    given = {"device": ("--budget", device), "host": ("--host-budget", host)}
    return {key: parse_bytes(text, option=option) for key, (option, text) in given.items() if text is not None}

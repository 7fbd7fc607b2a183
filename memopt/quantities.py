"""Bytes, seconds and counts as a person reads them; one spelling for tables, pages and errors."""

from __future__ import annotations

_BYTE_UNITS = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
_COUNT_UNITS = (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))


def format_bytes(nbytes: float | None) -> str:
    """Three significant digits in binary units; `-` for an unknown amount.

    >>> format_bytes(129.9 * 2**30), format_bytes(512), format_bytes(None)
    ('130 GiB', '512 B', '-')
    """
    if nbytes is None:
        return "-"
    for unit, size in _BYTE_UNITS:
        if abs(nbytes) >= size:
            return f"{_three_digits(nbytes / size)} {unit}"
    return f"{nbytes:.0f} B"


def format_seconds(seconds: float | None) -> str:
    """Three significant digits in s, ms or µs; `-` for an unknown time.

    >>> format_seconds(0.1234), format_seconds(12.0)
    ('123 ms', '12.0 s')
    """
    if seconds is None:
        return "-"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if abs(seconds) >= size:
            return f"{_three_digits(seconds / size)} {unit}"
    return f"{_three_digits(seconds / 1e-6)} µs"


def format_count(count: float | None, unit: str = "") -> str:
    """Three significant digits with a decimal prefix; `-` for an unknown count.

    >>> format_count(2.95e16, "FLOP")
    '29.5 PFLOP'
    """
    if count is None:
        return "-"
    for prefix, size in _COUNT_UNITS:
        if abs(count) >= size:
            return f"{_three_digits(count / size)} {prefix}{unit}"
    return f"{count:.0f} {unit}".rstrip()


def _three_digits(value: float) -> str:
    digits = 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{value:.{digits}f}"

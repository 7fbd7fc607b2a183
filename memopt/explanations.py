"""What pydantic found, in words: what was got, what is allowed, the next step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from .model_keys import Path, keys_at, tags_at, value_at
from .spelling import key_hint, meant_key, value_hint

TYPES: Mapping[str, str] = {
    "string_type": "a string",
    "bool_type": "true or false",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "mapping_type": "a mapping",
}
BOUNDS: Mapping[str, tuple[str, str]] = {
    "greater_than": ("more than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}


@dataclass(frozen=True)
class Fault:
    """One complaint of pydantic's, with what it is about."""

    kind: str
    path: Path
    text: str
    context: Mapping[str, Any]
    model: type[BaseModel]
    data: Any

    @property
    def value(self) -> Any:
        return value_at(self.path, self.data)

    @property
    def name(self) -> str:
        return str(self.path[-1]) if self.path else ""

    @property
    def siblings(self) -> list[str]:
        """The keys that may stand where it is."""
        return keys_at(self.model, self.path[:-1], self.data)


Words = tuple[str, str | None]
"""Message and hint."""


def _unknown_key(fault: Fault) -> Words:
    return f"`{fault.name}` is not a key here", key_hint(fault.name, fault.siblings)


def _missing_key(fault: Fault) -> Words:
    hint = _similar_present(fault.name, fault.path[:-1], fault.data, fault.siblings)
    return f"`{fault.name}` is missing", hint


def _missing_tag(fault: Fault) -> Words:
    tags = _quoted(tags_at(fault.model, fault.path[:-1], fault.data))
    hint = _similar_present(fault.name, fault.path[:-1], fault.data, fault.siblings)
    return f"`{fault.name}` is missing; it is one of {tags}", hint


def _wrong_tag(fault: Fault) -> Words:
    allowed = [entry.strip(" '") for entry in fault.context["expected_tags"].split(",")]
    got = fault.context["tag"]
    return f"`{got}` is not one of {_quoted(allowed)}", value_hint(got, allowed)


def _wrong_literal(fault: Fault) -> Words:
    allowed = literals(fault.context["expected"])
    hint = value_hint(fault.value, allowed) or (f"write `{allowed[0]}`" if len(allowed) == 1 else None)
    return f"got {_shown(fault.value)}; allowed: {_quoted(allowed)}", hint


def _wrong_type(fault: Fault) -> Words:
    hint = _type_hint(fault.kind, fault.value, fault.path)
    return f"got {_shown(fault.value)}, which is not {TYPES[fault.kind]}", hint or _keys_hint(fault)


def _out_of_bounds(fault: Fault) -> Words:
    words, key = BOUNDS[fault.kind]
    hint = "it is a share between 0 and 1: half is 0.5" if fault.name == "fraction" else None
    return f"got {_shown(fault.value)}; must be {words} {fault.context[key]:g}", hint


def _no_size(fault: Fault) -> Words:
    hint = "write a number of bytes, or one with a unit: `70GiB` (2^30), `70GB` (10^9), `512MiB`"
    return f"got {_shown(fault.value)}, which is no size", hint


def _empty(fault: Fault) -> Words:
    return "must not be empty", "write something" if fault.name == "name" else "leave the key out"


def _own_words(fault: Fault) -> Words:
    return str(fault.context["error"]), None


def _pydantics_words(fault: Fault) -> Words:
    return f"got {_shown(fault.value)}: {fault.text}", None


def _shown(value: Any) -> str:
    if value is None:
        return "nothing (the key has no value)"
    text = {True: "true", False: "false"}.get(value) if isinstance(value, bool) else None
    shown = text or (value if isinstance(value, str) else repr(value))
    return f"`{shown if len(shown) <= 60 else shown[:57] + '...'}`"


def _quoted(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def literals(expected: str) -> list[str]:
    """`'a', 'b' or 'c'` as pydantic words it."""
    return [part.strip(" '") for part in expected.replace(" or ", ",").split(",")]


def _keys_hint(fault: Fault) -> str | None:
    """Where a mapping belongs: its keys."""
    keys = keys_at(fault.model, fault.path, fault.data) if TYPES[fault.kind] == "a mapping" else []
    return f"its keys are {', '.join(keys)}" if keys else None


def _type_hint(kind: str, value: Any, path: Path) -> str | None:
    if path[-1:] == ("fraction",):
        return "it is a share between 0 and 1: half is 0.5"
    if kind == "int_type" and path[:1] == ("mesh",):
        return "write a number of devices, or -1 for what is left"
    if kind in ("list_type", "tuple_type") and isinstance(value, str):
        return f'put it in a list: ["{value}"]'
    if kind == "bool_type" and isinstance(value, str):
        word = value.casefold()
        if word in ("yes", "on", "y", "no", "off", "n", "true", "false"):
            return f"write `{'true' if word in ('yes', 'on', 'y', 'true') else 'false'}`, without quotes"
    if kind == "string_type" and isinstance(value, int | float):
        return f'put quotes around it: "{value}"'
    if kind in ("int_type", "float_type") and isinstance(value, str):
        return "write the number without quotes"
    if value is None:
        return "remove the key, or give it a value"
    return None


def _similar_present(key: str, path: Path, data: Any, allowed: list[str]) -> str | None:
    """A key that is there and is no key, near the one that is missing."""
    present = value_at(path, data)
    if not isinstance(present, Mapping):
        return None
    for name in present:
        if name not in allowed and meant_key(str(name), allowed) == key:
            return f"`{name}` is there: is it meant to be `{key}`?"
    return f"add `{key}: {'1' if key == 'version' else '...'}`"


EXPLANATIONS: Mapping[str, Callable[[Fault], Words]] = {
    "extra_forbidden": _unknown_key,
    "missing": _missing_key,
    "union_tag_not_found": _missing_tag,
    "union_tag_invalid": _wrong_tag,
    "literal_error": _wrong_literal,
    **dict.fromkeys(TYPES, _wrong_type),
    **dict.fromkeys(BOUNDS, _out_of_bounds),
    **dict.fromkeys(("byte_size", "byte_size_unit"), _no_size),
    **dict.fromkeys(("too_short", "string_too_short"), _empty),
    "value_error": _own_words,
    **dict.fromkeys(("finite_number", "json_invalid", "string_pattern_mismatch"), _pydantics_words),
}
"""pydantic's kind of fault -> how to say it; kinds that are not here are our own checks."""

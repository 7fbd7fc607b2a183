"""What pydantic found, as problems: place, what was got, what is allowed, the nearest."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from .errors import Problem
from .source import Source
from .spelling import key_hint, value_hint

Path = tuple[str | int, ...]

_CODES: Mapping[str, str] = {
    "extra_forbidden": "unknown-key",
    "missing": "missing-key",
    "literal_error": "wrong-value",
    "union_tag_invalid": "wrong-value",
    "union_tag_not_found": "missing-key",
    "byte_size": "wrong-size",
    "byte_size_unit": "wrong-size",
}
_TYPES: Mapping[str, str] = {
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
_BOUNDS: Mapping[str, tuple[str, str]] = {
    "greater_than": ("more than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}


def problems_of(
    error: ValidationError, model: type[BaseModel], data: Any, place: Source, *, prefix: Path = ()
) -> list[Problem]:
    """One problem per fault; the several complaints of a union's members about one value are one problem.

    Args:
        error: From `model_validate_json`.
        model: The model that was asked for.
        data: What it was given.
        place: Where the data came from.
        prefix: Where the data is in its file.
    """
    faults = [
        (_data_path(fault["loc"], data, is_absent=fault["type"] == "missing"), fault)
        for fault in error.errors(include_url=False)
    ]
    paths = [path for path, _ in faults]
    problems: dict[tuple[Path, str], Problem] = {}
    for path, fault in faults:
        is_counted_after_faults = fault["type"] == "too_short" and any(
            len(other) > len(path) and other[: len(path)] == path for other in paths
        )
        if is_counted_after_faults:
            continue
        problem = _problem(path, fault, model, data, place, prefix)
        if not any(known == path and _is_type_fault(code) for known, code in problems):
            problems.setdefault((path, fault["type"]), problem)
    return sorted(problems.values(), key=lambda problem: (problem.line or 0, problem.column or 0))


def _is_type_fault(kind: str) -> bool:
    return kind in _TYPES or kind in _BOUNDS


def _data_path(loc: tuple[int | str, ...], data: Any, *, is_absent: bool) -> Path:
    """The place in the data: pydantic's location without the names of union members."""
    path: list[str | int] = []
    here: Any = data
    for i, part in enumerate(loc):
        is_last = i == len(loc) - 1
        if isinstance(here, Mapping):
            if part in here:
                here = here[part]
                path.append(part)
            elif is_last and is_absent:
                path.append(part)
        elif isinstance(here, list) and isinstance(part, int) and part < len(here):
            here = here[part]
            path.append(part)
    return tuple(path)


def _problem(path: Path, fault: Any, model: type[BaseModel], data: Any, place: Source, prefix: Path) -> Problem:
    kind, context = fault["type"], fault.get("ctx", {})
    value = _value_at(path, data)
    code = _CODES.get(kind) or ("wrong-type" if kind in _TYPES else "wrong-value")
    hint: str | None = context.get("hint")
    if kind == "extra_forbidden":
        allowed = _keys_at(model, path[:-1], data)
        message = f"`{path[-1]}` is not a key here"
        hint = key_hint(str(path[-1]), allowed)
    elif kind == "missing":
        message = f"`{path[-1]}` is missing"
        hint = _similar_present(str(path[-1]), path[:-1], data, _keys_at(model, path[:-1], data))
    elif kind == "union_tag_not_found":
        tag = context["discriminator"].strip("'")
        path = (*path, tag)
        message = f"`{tag}` is missing; it is one of {_quoted(_tags(model, path[:-1], data))}"
        hint = _similar_present(tag, path[:-1], data, [tag])
    elif kind == "union_tag_invalid":
        tag = context["discriminator"].strip("'")
        path = (*path, tag)
        allowed = [entry.strip(" '") for entry in context["expected_tags"].split(",")]
        message = f"`{context['tag']}` is not one of {_quoted(allowed)}"
        hint = value_hint(context["tag"], allowed)
    elif kind == "literal_error":
        allowed = _literals(context["expected"])
        message = f"got {_shown(value)}; allowed: {_quoted(allowed)}"
        hint = value_hint(value, allowed) or (f"write `{allowed[0]}`" if len(allowed) == 1 else None)
    elif kind in _TYPES:
        message = f"got {_shown(value)}, which is not {_TYPES[kind]}"
        hint = hint or _type_hint(kind, value, path) or _keys_hint(kind, model, path, data)
    elif kind in _BOUNDS:
        words, key = _BOUNDS[kind]
        message = f"got {_shown(value)}; must be {words} {context[key]:g}"
        hint = "it is a share between 0 and 1: half is 0.5" if path[-1:] == ("fraction",) else hint
    elif kind in ("byte_size", "byte_size_unit"):
        message = f"got {_shown(value)}, which is no size"
        hint = "write a number of bytes, or one with a unit: `70GiB` (2^30), `70GB` (10^9), `512MiB`"
    elif kind in ("too_short", "string_too_short"):
        message = "must not be empty"
        hint = "write something" if path[-1:] == ("name",) else "leave the key out"
    elif kind == "value_error":
        message = str(context["error"])
    elif kind in _PYDANTIC_ONLY:
        message = f"got {_shown(value)}: {fault['msg']}"
    else:  # our own checks carry code, message and hint
        code, message = kind, fault["msg"]
        path = (*path, *context["key"].split(".")) if "key" in context else path
    return Problem(code, message, hint=hint, **place.at((*prefix, *path)))


_PYDANTIC_ONLY = frozenset({"finite_number", "json_invalid", "assertion_error", "string_pattern_mismatch"})


def _value_at(path: Path, data: Any) -> Any:
    for part in path:
        if isinstance(data, Mapping):
            data = data.get(part)
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):
            data = data[part]
    return data


def _shown(value: Any) -> str:
    if value is None:
        return "nothing (the key has no value)"
    text = {True: "true", False: "false"}.get(value) if isinstance(value, bool) else None
    shown = text or (value if isinstance(value, str) else repr(value))
    return f"`{shown if len(shown) <= 60 else shown[:57] + '...'}`"


def _quoted(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _literals(expected: str) -> list[str]:
    """`'a', 'b' or 'c'` as pydantic words it."""
    return [part.strip(" '") for part in expected.replace(" or ", ",").split(",")]


def _keys_hint(kind: str, model: type[BaseModel], path: Path, data: Any) -> str | None:
    """Where a mapping belongs: its keys."""
    keys = _keys_at(model, path, data) if _TYPES[kind] == "a mapping" else []
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
    present = _value_at(path, data)
    if not isinstance(present, Mapping):
        return None
    for name in present:
        if name not in allowed and f"`{key}`" in key_hint(str(name), [key]):
            return f"`{name}` is there: is it meant to be `{key}`?"
    return f"add `{key}: {'1' if key == 'version' else '...'}`"


def _keys_at(model: type[BaseModel], path: Path, data: Any) -> list[str]:
    """The keys a mapping at that place may have."""
    found = list(_models_at(model, path, data))
    return list(dict.fromkeys(key for one in found for key in one.model_fields))


def _tags(model: type[BaseModel], path: Path, data: Any) -> list[str]:
    tags = [get_args(one.model_fields["action"].annotation) for one in _models_at(model, path, data)]
    return [str(tag) for group in tags for tag in group]


def _models_at(model: type[BaseModel], path: Path, data: Any) -> Iterator[type[BaseModel]]:
    """The models that may stand at that place; of a tagged union the one that the data's tag names."""
    current = [model]
    here = data
    for part in path:
        here = _value_at((part,), here)
        if isinstance(part, int):
            continue
        annotations = [one.model_fields[part].annotation for one in current if part in one.model_fields]
        current = [found for annotation in annotations for found in _models_in(annotation)]
    tagged = [one for one in current if isinstance(here, Mapping) and _has_tag(one, here)]
    yield from tagged or current


def _has_tag(model: type[BaseModel], data: Mapping[str, Any]) -> bool:
    field = model.model_fields.get("action")
    return field is not None and data.get("action") in get_args(field.annotation)


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
        return
    origin = get_origin(annotation)
    if origin in (Annotated, Union, types.UnionType, tuple, list, dict):
        for argument in get_args(annotation)[: 1 if origin is Annotated else None]:
            if argument is not Ellipsis and get_origin(argument) is not Literal:
                yield from _models_in(argument)

"""Which keys a pydantic model takes at a place in its document; of a tagged union, those of the member meant."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

Path = tuple[str | int, ...]


def value_at(path: Path, data: Any) -> Any:
    for part in path:
        if isinstance(data, Mapping):
            data = data.get(part)
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):
            data = data[part]
    return data


def keys_at(model: type[BaseModel], path: Path, data: Any) -> list[str]:
    """The keys a mapping at that place may have."""
    found = list(_models_at(model, path, data))
    return list(dict.fromkeys(key for one in found for key in one.model_fields))


def tags_at(model: type[BaseModel], path: Path, data: Any) -> list[str]:
    tags = [get_args(one.model_fields["action"].annotation) for one in _models_at(model, path, data)]
    return [str(tag) for group in tags for tag in group]


def _models_at(model: type[BaseModel], path: Path, data: Any) -> Iterator[type[BaseModel]]:
    """The models that may stand at that place; of a tagged union the one that the data's tag names."""
    current = [model]
    here = data
    for part in path:
        here = value_at((part,), here)
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

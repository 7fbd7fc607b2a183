"""What the reports' tests share."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Annotated, Any, Union, get_args, get_origin

import pytest
from pydantic import BaseModel

from memopt import Policy


@pytest.fixture(scope="session")
def policy_keys() -> frozenset[str]:
    """Every key that a policy file may have, dotted, besides `version`."""
    return frozenset(_leaves(Policy)) - {"version"}


def _leaves(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        inner = list(_models(field.annotation))
        if inner:
            for one in inner:
                yield from _leaves(one, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif get_origin(annotation) in (Annotated, Union, types.UnionType, tuple):
        for argument in get_args(annotation):
            yield from _models(argument)

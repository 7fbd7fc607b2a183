"""Kinds of values that policies are made of: a value or a list, globs, sizes, fractions; and the strict model."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ByteSize, ConfigDict, Field, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError

T = TypeVar("T")


def as_tuple(value: Any) -> Any:
    """Every selector takes a value or a list; a list that says one thing twice, or nothing, is refused."""
    if value is None or isinstance(value, tuple):
        return value
    if not isinstance(value, list):
        return (value,)
    if not value:
        text = "an empty list selects nothing"
        raise PydanticCustomError("empty-list", text, {"hint": "leave the key out to select everything"})
    repeated = next((entry for i, entry in enumerate(value) if entry in value[:i]), None)
    if repeated is not None:
        context = {"value": repeated, "repeated": repeated, "hint": "remove one"}
        raise PydanticCustomError("said-twice", "`{value}` is listed twice", context)
    return tuple(value)


class _ValueOrList:
    """In the JSON Schema: a value, or a list of such values that says nothing twice."""

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        items = handler(schema)["items"]
        return {"anyOf": [items, {"type": "array", "items": items, "minItems": 1, "uniqueItems": True}]}


Many = Annotated[tuple[T, ...], BeforeValidator(as_tuple), _ValueOrList()]
Glob = Annotated[str, Field(min_length=1)]
Index = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(gt=0, le=1)]
Bytes = Annotated[ByteSize, Field(ge=0, json_schema_extra={"examples": ["70GiB", "512MiB"]})]


class StrictModel(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", validate_default=True)

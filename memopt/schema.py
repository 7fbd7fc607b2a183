"""The policy's JSON Schema (draft 2020-12), as YAML editors want it."""

from __future__ import annotations

import re
from typing import Any

from .policy import Policy

DRAFT = "https://json-schema.org/draft/2020-12/schema"


def policy_schema() -> dict[str, Any]:
    """The schema that `memopt schema` prints; what it accepts, `load_policy` accepts, model-dependent checks aside."""
    schema = Policy.model_json_schema(mode="validation")
    _tidy(schema)
    return {"$schema": DRAFT, "title": "memopt policy", **{k: v for k, v in schema.items() if k != "title"}}


def _tidy(node: Any) -> None:
    """Drop generated titles, `null` (which the loader refuses) and keywords that are not JSON Schema's."""
    if isinstance(node, list):
        for entry in node:
            _tidy(entry)
        return
    if not isinstance(node, dict):
        return
    if isinstance(node.get("title"), str) and ("type" in node or "anyOf" in node or "$ref" in node or "oneOf" in node):
        del node["title"]
    members = node.get("anyOf")
    if isinstance(members, list):
        kept = [member for member in members if member != {"type": "null"}]
        if len(kept) < len(members):
            node.pop("default", None) if node.get("default", 0) is None else None
            del node["anyOf"]
            node |= kept[0] if len(kept) == 1 else {"anyOf": kept}
    node.pop("ge", None)
    if isinstance(node.get("description"), str):
        node["description"], _, attributes = (part.strip() for part in node["description"].partition("\n\nAttributes:"))
        _describe(node.get("properties", {}), attributes)
    for entry in node.values():
        _tidy(entry)


def _describe(properties: dict[str, Any], attributes: str) -> None:
    """What a class says of its attributes, at each property."""
    for name, text in re.findall(r"^ *(\w+): (.*?)(?=^ *\w+: |\Z)", attributes, re.MULTILINE | re.DOTALL):
        if name in properties:
            properties[name] = {"description": " ".join(text.split()), **properties[name]}

"""The JSON Schema an editor gets: valid itself, and of one mind with the loader about shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import pytest
from ruamel.yaml import YAML

from memopt import MemoptError, load_policy
from memopt.schema import policy_schema

POLICIES = sorted((Path(__file__).parents[2] / "configs" / "policies").rglob("*.yaml"))


@pytest.fixture(scope="module")
def validator() -> Any:
    schema = policy_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


@pytest.mark.parametrize("file", POLICIES, ids=[file.stem for file in POLICIES])
def test_shipped_policies_fit_the_schema(file: Path, validator) -> None:
    validator.validate(YAML(typ="safe", pure=True).load(file.read_text()))


RULE = {"name": "a", "action": "keep", "match": {}}


@pytest.mark.parametrize(
    "document",
    [
        {"version": 1, "rules": [{**RULE, "match": {"role": "param", "path": "x"}}]},
        {"version": 1, "rules": [{**RULE, "match": {"role": ["param", "grad"], "layers": [0, 1]}}]},
        {"version": 1, "rules": [{**RULE, "match": {"layers": 3, "min_bytes": "1MiB"}}]},
        {"version": 1, "rules": [{**RULE, "action": "shard", "axis": {"expert": 0, "fsdp": "auto"}}]},
        {"version": 1, "units": ["a", {"match": ["b", "c"], "group": True, "reshard_after_forward": 4}]},
        {"version": 1, "budget": {"device": "70GiB", "host": 12}},
    ],
)
def test_what_the_loader_takes_the_schema_takes(document, validator) -> None:
    load_policy(document)
    validator.validate(document)


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"version": 2},
        {"version": 1, "rule": []},
        {"version": 1, "rules": None},
        {"version": 1, "rules": [{**RULE, "action": "remat"}]},
        {"version": 1, "rules": [{**RULE, "axis": "fsdp"}]},
        {"version": 1, "rules": [{**RULE, "match": {"role": "params"}}]},
        {"version": 1, "rules": [{**RULE, "match": {"rol": "param"}}]},
        {"version": 1, "rules": [{**RULE, "optional": "yes"}]},
        {"version": 1, "rules": [{"name": "a", "action": "offload", "match": {}, "fraction": 0}]},
        {"version": 1, "units": [3]},
    ],
)
def test_what_the_schema_refuses_the_loader_refuses(document, validator) -> None:
    assert not validator.is_valid(document)
    with pytest.raises(MemoptError):
        load_policy(document)


def test_every_key_of_the_top_is_described() -> None:
    schema = policy_schema()
    assert schema["$schema"].endswith("2020-12/schema")
    assert {"version", "mesh", "units", "rules", "backend_options"} <= set(schema["properties"])
    assert "title" not in schema["properties"]["mesh"]
    assert all("description" in entry for entry in schema["properties"].values())
    match = schema["$defs"]["Match"]["properties"]
    assert match["path"]["description"].startswith("Globs over canonical and raw paths")

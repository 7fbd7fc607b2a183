"""`memopt schema`: the policy's JSON Schema, for editors."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def schema(
    as_json: Annotated[bool, typer.Option("--json", help="The same; the schema is JSON anyway.")] = False,
) -> None:
    """Print the JSON Schema of a policy file.

    With the YAML language server, put `# yaml-language-server: $schema=policy.schema.json` at the top of a policy.
    """
    from ..schema import policy_schema

    print(json.dumps(policy_schema(), indent=2))

"""`memopt targets`: every accelerator that can be planned for, its constants and their sources."""

from __future__ import annotations

import json
from typing import Annotated

import typer

_FIGURES = ("memory", "host per node")


def targets(
    as_json: Annotated[bool, typer.Option("--json", help="Every constant with its source as JSON on stdout.")] = False,
) -> None:
    """List the targets of `--target`, with constants and sources."""
    from ..targets import load_target, target_names

    every = [load_target(name) for name in target_names()]
    if as_json:
        print(json.dumps({"targets": [target.to_json() for target in every]}, indent=2))
        return
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    from ..quantities import format_bytes

    table = Table(title="targets", title_justify="left", header_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("target", "what it is", "memory", "host per node", "assumed"):
        table.add_column(heading, overflow="fold", justify="right" if heading in _FIGURES else "left")
    for target in every:
        memory = "the machine's" if target.capacity_bytes is None else format_bytes(target.capacity_bytes)
        host = "" if target.host_bytes_per_node is None else format_bytes(target.host_bytes_per_node)
        assumed = ", ".join(_words(name) for name, fact in target.facts.items() if fact.is_assumed)
        table.add_row(target.name, target.description, memory, host, assumed)
    Console().print(table)
    print("sources of every constant: memopt targets --json")


def _words(name: str) -> str:
    """`host_link_bytes_per_s` as `host link`, `host_bytes_per_node` as `host memory`."""
    words = name.partition("_bytes")[0].replace("_", " ")
    return f"{words} memory" if name.endswith("_per_node") else words

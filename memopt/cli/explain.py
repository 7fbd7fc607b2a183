"""`memopt explain`: what a policy does to each tensor of a model, and by which rule."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from ..checking import plan_for
from ..explain import Line, compress, compress_units, row_to_json, select_rows, unit_to_json
from ..plan import Plan, PlanRow, PlanUnit
from ..quantities import format_bytes

_PIPE_WIDTH = 140
_SHORT = {"optimizer_state": "state"}


def explain(
    policy: Annotated[Path, typer.Argument(help="The policy file.", metavar="POLICY")],
    workload: Annotated[str, typer.Option(help="FILE.yaml, hf:PATH, FILE.py:FUNCTION or package.module:FUNCTION.")],
    backend: Annotated[str, typer.Option(help="jax, torch, or another registered backend.")],
    tensor: Annotated[str | None, typer.Option(help="Only tensors whose path this glob selects.")] = None,
    world_size: Annotated[
        int | None, typer.Option(min=1, help="Devices in all; left out: the least the mesh takes.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="`units` and `tensors` as JSON, a row per tensor.")] = False,
) -> None:
    """Show what the policy does to each tensor, and which rule decided it."""
    plan = plan_for(policy, workload, backend, world_size=world_size)
    rows = select_rows(plan, tensor)
    if as_json:
        print(json.dumps(_document(plan, rows), indent=2))
        return
    from rich.console import Console

    console = Console()
    if not console.is_terminal:  # a pipe has no width of its own
        console = Console(width=_PIPE_WIDTH)
    lines = compress(plan, rows)
    console.print(_units_table(plan))
    console.print(_state_table([line for line in lines if line.row.role != "activation"]), end="\n\n")
    console.print(_values_table([line for line in lines if line.row.role == "activation"]))
    for warning in plan.warnings:
        print(f"note: {warning}", file=sys.stderr)


def _document(plan: Plan, rows: Any) -> dict[str, Any]:
    return {
        "backend": plan.backend,
        "world_size": plan.world_size,
        "mesh": dict(plan.mesh),
        "family": plan.family,
        "units": [unit_to_json(unit) for unit in plan.units],
        "tensors": [row_to_json(row) for row in rows],
        "warnings": list(plan.warnings),
    }


def _table(title: str, headings: tuple[str, ...], *, right: str) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, title_justify="left", caption_justify="left", header_style="bold", box=SIMPLE_HEAD)
    for heading in headings:
        table.add_column(heading, overflow="fold", justify="right" if heading == right else "left")
    return table


def _units_table(plan: Plan) -> Any:
    inferred = any(unit.inferred for unit in plan.units)
    mesh = " × ".join(f"{axis} {size}" for axis, size in plan.mesh)
    title = f"units ({'found: the policy names none' if inferred else 'as the policy names them'}), mesh {mesh}"
    table = _table(title, ("unit", "count", "after forward", "region", "values without a name"), right="count")
    for name, count, unit in compress_units(plan.units):
        region, unnamed = ("yes", unit.unnamed_residual) if unit.region else ("no", "")
        table.add_row(name, str(count), _after_forward(unit), region, unnamed)
    return table


def _after_forward(unit: PlanUnit) -> str:
    if isinstance(unit.reshard_after_forward, bool):
        return "resharded" if unit.reshard_after_forward else "stays gathered"
    return f"over {unit.reshard_after_forward} ranks"


def _state_table(lines: list[Line]) -> Any:
    """Parameters, gradients and state; the roles of a parameter that fare alike share a line."""
    headings = ("path", "roles", "split", "memory", "rule", "bytes")
    table = _table("held between steps, bytes per device", headings, right="bytes")
    alike: dict[tuple[str, ...], list[Line]] = {}
    for line in lines:
        row = line.row
        split = ", ".join(f"{axis}:{'flat' if d == -1 else d}" for axis, d in row.layout.items())
        alike.setdefault((row.path, split or "whole", row.memory_kind, row.rule or ""), []).append(line)
    for (path, split, memory, rule), members in alike.items():
        roles = " ".join(_SHORT.get(line.row.role, line.row.role) for line in members)
        table.add_row(path, roles, split, memory, rule, _bytes([line.nbytes for line in members]))
    table.caption = _totals(lines, lambda row: f"{_SHORT.get(row.role, row.role)} on {row.memory_kind}")
    return table


def _values_table(lines: list[Line]) -> Any:
    headings = ("path", "residual", "rule", "bytes")
    table = _table("between forward and backward, bytes per device", headings, right="bytes")
    for line in lines:
        table.add_row(line.row.path, line.row.residual or "", line.row.rule or "", _bytes([line.nbytes]))
    table.caption = _totals(lines, lambda row: row.residual or "")
    return table


def _totals(lines: list[Line], kind_of: Callable[[PlanRow], str]) -> str:
    """`param on device 3.7 GiB, ...`; what is unknown is counted beside, as values without a name are."""
    sizes: dict[str, int] = {}
    unknown = 0
    for line in lines:
        sizes[kind_of(line.row)] = sizes.get(kind_of(line.row), 0) + (line.nbytes or 0)
        unknown += line.num_rows if line.nbytes is None else 0
    known = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in sizes.items())
    return f"in all: {known}" + (f"; {unknown} of unknown size" if unknown else "")


def _bytes(sizes: list[int | None]) -> str:
    known = [size for size in sizes if size is not None]
    return format_bytes(sum(known)) if len(known) == len(sizes) else "?"

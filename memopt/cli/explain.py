"""`memopt explain`: what a policy does to each tensor of a model, and by which rule."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ..checking import plan_for
from ..explain import Line, compress, compress_units, row_to_json, select_rows, unit_to_json
from ..plan import Plan, PlanUnit
from ..quantities import format_bytes


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
    console.print(_units_table(plan))
    console.print(_tensors_table(compress(plan, rows)))
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


def _units_table(plan: Plan) -> Any:
    from rich.table import Table

    inferred = any(unit.inferred for unit in plan.units)
    mesh = " × ".join(f"{axis} {size}" for axis, size in plan.mesh)
    title = f"units ({'found: the policy names none' if inferred else 'as the policy names them'}), mesh {mesh}"
    table = Table(title=title, title_justify="left", header_style="bold")
    for heading in ("unit", "count", "after forward", "region", "values without a name"):
        table.add_column(heading)
    for name, count, unit in compress_units(plan.units):
        region, unnamed = ("yes", unit.unnamed_residual) if unit.region else ("no", "")
        table.add_row(name, str(count), _after_forward(unit), region, unnamed)
    return table


def _after_forward(unit: PlanUnit) -> str:
    if isinstance(unit.reshard_after_forward, bool):
        return "resharded" if unit.reshard_after_forward else "stays gathered"
    return f"over {unit.reshard_after_forward} ranks"


def _tensors_table(lines: list[Line]) -> Any:
    from rich.table import Table

    table = Table(title="tensors, bytes per device", title_justify="left", header_style="bold")
    for heading in ("path", "role", "shape", "dtype", "split", "memory", "residual", "rule"):
        table.add_column(heading, overflow="fold")
    table.add_column("bytes", justify="right")
    for line in lines:
        row = line.row
        split = ", ".join(f"{axis}:{'flat' if d == -1 else d}" for axis, d in row.layout.items())
        table.add_row(
            row.path,
            row.role,
            "" if row.shape is None else "×".join(map(str, row.shape)) or "scalar",
            row.dtype or "",
            split,
            row.memory_kind,
            row.residual or "",
            row.rule or "",
            "?" if line.nbytes is None else format_bytes(line.nbytes),
        )
    return table

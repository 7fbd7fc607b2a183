"""`memopt tune`: the fastest policy within a budget, as a file a person can read and edit."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from ..loading import load_policy
from ..outputs import require_file, require_folder
from ..plan_table import make_console, render_result
from ..quantities import format_bytes, format_seconds
from ..tune import Tuned
from ..tune import tune as run_tune
from ..tuning.search import Wishes
from .sizes import parse_bytes


def tune(
    workload: Annotated[str, typer.Option(help="YAML, hf:PATH, FILE.py:FUNCTION or package.module:FUNCTION.")],
    backend: Annotated[str, typer.Option(help="jax or torch.")],
    target: Annotated[str, typer.Option(help="gpu:h100:8, gpu:gb200:64 ...; see `memopt targets`.")],
    budget: Annotated[str, typer.Option(help="Device bytes the policy must stay within, such as 70GiB.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The policy file to write.")],
    host_budget: Annotated[
        str | None, typer.Option(help="Host bytes per node; left out: nine tenths of the target's node.")
    ] = None,
    base: Annotated[
        Path | None, typer.Option(help="A policy whose mesh, units, precision and rules about weights are kept.")
    ] = None,
    fsdp: Annotated[list[int] | None, typer.Option(help="A size of the fsdp axis to try; may be repeated.")] = None,
    accumulate: Annotated[
        list[int] | None, typer.Option(help="A number of micro-batches to try; may be repeated.")
    ] = None,
    max_cuts: Annotated[
        int, typer.Option(min=0, help="Tensors that may be treated unlike in layers of one stack.")
    ] = 2,
    points: Annotated[int, typer.Option(min=1, help="Points of the frontier.")] = 8,
    explain: Annotated[bool, typer.Option("--explain", help="Say what binds, and what one more GiB buys.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for frontier.json and a page, index.html.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Choose keep, recompute or offload per tensor and layer, and write the policy, planned again before it counts.

    Exit code 0 with a policy written, 1 when nothing fits: the nearest budget that would is named.
    """
    require_file(output, option="-o")
    if out is not None:
        require_folder(out, option="--out")
    console = Console(stderr=True)
    wishes = Wishes(
        device_bytes=parse_bytes(budget, option="--budget"),
        host_bytes_per_node=None if host_budget is None else parse_bytes(host_budget, option="--host-budget"),
        base=None if base is None else load_policy(base),
        fsdp=tuple(fsdp or ()),
        accumulate=tuple(accumulate or ()),
        max_cuts=max_cuts,
        num_points=points,
    )
    tuned = run_tune(
        workload=workload,
        backend=backend,
        target=target,
        wishes=wishes,
        progress=lambda text: console.print(text, style="dim", highlight=False, markup=False, soft_wrap=True),
    )
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(tuned.text, encoding="utf-8")
    document = json.dumps({"file": str(output), **tuned.to_json()}, indent=2)
    if as_json:
        print(document)
    else:
        _print(tuned, explained=explain)
    if out is not None:
        _write(tuned, document, out, console)
    console.print(f"policy: {output}", highlight=False, markup=False, soft_wrap=True)
    sys.exit(0)


def _print(tuned: Tuned, *, explained: bool) -> None:
    console = make_console()
    console.print(tuned.text, highlight=False, markup=False)
    console.print(render_result(tuned.result))
    console.print(frontier_table(tuned))
    if explained:
        for sentence in tuned.explanation.sentences():
            console.print(f"  {sentence}", highlight=False, markup=False)


def frontier_table(tuned: Tuned) -> Table:
    """The frontier and the policies people write by hand, by the model of the step."""
    table = Table(title="frontier, by the model of the step", title_justify="left", header_style="bold")
    table.add_column("policy")
    for heading in ("peak", "host", "computed again", "exposed", "step"):
        table.add_column(heading, justify="right")
    rows = [("chosen ←" if point.planned_peak_bytes else "", point.outcome) for point in tuned.frontier]
    for name, outcome in tuned.presets.items():
        rows.append((name if outcome.host_bytes <= tuned.host_bytes else f"{name} (no such host)", outcome))
    for name, outcome in rows:
        table.add_row(
            name,
            format_bytes(outcome.peak_bytes),
            format_bytes(outcome.host_bytes),
            format_seconds(outcome.recompute_s),
            format_seconds(outcome.exposed_s),
            format_seconds(outcome.step_s),
        )
    return table


def _write(tuned: Tuned, document: str, out: Path, console: Console) -> None:
    from ..plan_page import tune_page

    out.mkdir(parents=True, exist_ok=True)
    (out / "frontier.json").write_text(document + "\n", encoding="utf-8")
    (out / "index.html").write_text(tune_page(tuned), encoding="utf-8")
    console.print(f"page: {out / 'index.html'}", highlight=False, markup=False, soft_wrap=True)

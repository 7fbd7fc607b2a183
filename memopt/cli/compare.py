"""`memopt compare`: the progress, the table, the exit code."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..comparing.rows import PLAIN, Row
from ..comparing.run import load_run
from ..comparison import Comparison
from ..comparison import compare as run_comparison
from ..quantities import format_bytes, format_seconds

_PIPED_WIDTH = 100  # of the table where stdout is no terminal


def compare(
    run: Annotated[
        Path, typer.Argument(help="RUN.yaml: workload, policies, backends, steps, data.", metavar="RUN.yaml")
    ],
    steps: Annotated[int | None, typer.Option(help="Steps of each row, instead of the file's.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for results.json and index.html.")] = Path("memopt-compare"),
    plan: Annotated[
        bool, typer.Option("--plan", help="Plan every row too: the planned peak beside the measured.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The results as JSON on stdout.")] = False,
) -> None:
    """Train the same model under several policies and backends, and compare losses, memory and time.

    Exit code 0 when every row is ok, 1 when one is not or the comparison was interrupted.
    """
    console = Console(stderr=True)
    config = load_run(run, steps=steps)
    rows = len(config.backends) * len(config.policies)
    with _Bars(console, num_rows=rows, num_steps=config.steps) as bars:
        comparison = run_comparison(run, out=out, steps=steps, plan=plan, progress=bars)
    if as_json:
        print(comparison.to_json())
    else:
        screen = Console(width=None if sys.stdout.isatty() else _PIPED_WIDTH)
        screen.print(results_table(comparison.rows))
    _say_what_is_left(console, comparison, out)
    sys.exit(0 if comparison.ok else 1)


def results_table(rows: tuple[Row, ...]) -> Table:
    """The rows as a table for the terminal."""
    table = Table(box=SIMPLE_HEAD, header_style="bold", padding=(0, 0, 0, 1), pad_edge=False)
    for heading in ("backend", "policy"):
        table.add_column(heading, no_wrap=True)
    is_planned = any(row.peak_planned_bytes is not None for row in rows)
    for heading in ("loss", "Δ plain", "Δ other", "peak", *(("planned",) if is_planned else ()), "on host", "step", ""):
        table.add_column(heading, justify="right", no_wrap=True)
    for index, row in enumerate(rows):
        if index and row.backend != rows[index - 1].backend:
            table.add_section()
        table.add_row(
            row.backend,
            row.policy,
            "-" if row.final_loss is None else f"{row.final_loss:.4f}",
            "-" if row.policy == PLAIN else _difference(row.max_abs_diff_vs_plain),
            _difference(row.max_abs_diff_vs_other_backend),
            format_bytes(row.peak_measured_bytes),
            *((format_bytes(row.peak_planned_bytes),) if is_planned else ()),
            format_bytes(row.host_bytes),
            format_seconds(row.step_time_s),
            "[green]ok[/]" if row.ok else "[red]not ok[/]",
        )
    return table


def _difference(value: float | None) -> str:
    return "-" if value is None else "0" if value == 0 else f"{value:.1e}"


def _say_what_is_left(console: Console, comparison: Comparison, out: Path) -> None:
    for row in comparison.rows:
        if not row.ok:
            console.print(
                f"[red]{row.backend} {row.policy}[/]: {escape(row.reason or '')}", highlight=False, soft_wrap=True
            )
    if not comparison.complete:
        console.print("[yellow]interrupted: the finished rows are kept[/]")
    if comparison.page is None:
        console.print("no page: plotly is not installed; pip install 'memopt\\[report]'")
    else:
        console.print(f"page: {comparison.page}", highlight=False, soft_wrap=True)
    if comparison.rows:
        console.print(f"results: {out / 'results.json'}", highlight=False, soft_wrap=True)


class _Bars:
    """Two bars on stderr: rows done, and the steps of the row that runs; plain lines where stderr is no terminal."""

    def __init__(self, console: Console, *, num_rows: int, num_steps: int) -> None:
        self._console = console
        self._num_steps = num_steps
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._rows = self._progress.add_task("rows", total=num_rows, note="")
        self._steps = self._progress.add_task("", total=num_steps, note="", visible=False)

    def __enter__(self) -> _Bars:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def row_started(self, backend: str, policy: str) -> None:
        """A row's processes are starting."""
        self._progress.reset(self._steps, description=f"{backend} {policy}", note="starting", visible=True)

    def event(self, event: Mapping[str, Any]) -> None:
        """A worker said something."""
        if event["event"] == "step":
            self._progress.update(self._steps, completed=event["step"] + 1, note=f"loss {event['loss']:.3f}")
        elif event["event"] == "stage":
            self._progress.update(self._steps, note=event["text"])

    def row_finished(self, row: Row) -> None:
        """A row is done, or could not be."""
        self._progress.advance(self._rows)
        verdict = f"loss {row.final_loss:.4f}" if row.ok and row.final_loss is not None else "not ok"
        memory = format_bytes(row.peak_measured_bytes)
        self._console.print(
            f"{row.backend} {row.policy}: {verdict}, peak {memory}, {format_seconds(row.elapsed_s)} in all",
            highlight=False,
        )

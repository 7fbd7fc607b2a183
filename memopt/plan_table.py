"""A plan for the terminal: a bar per role against the capacity, the verdicts, the step, what to change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from .estimate import ROLES
from .planning import PlanResult, Refused
from .quantities import format_bytes, format_count, format_seconds
from .step_time import StepTime

BAR_WIDTH = 40
_SMALL = 8
PIPE_WIDTH = 140  # a pipe has no width of its own
ROLE_STYLES = {
    "param": "blue",
    "grad": "cyan",
    "optimizer_state": "green",
    "activation": "yellow",
    "gathered": "magenta",
    "temp": "bright_black",
}


def make_console() -> Console:
    """Standard output, wide enough for a table where it is no terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=PIPE_WIDTH)


def render_result(result: PlanResult) -> RenderableType:
    """One policy, readable at a glance."""
    return Group(*_parts(result))


def _parts(result: PlanResult) -> Iterator[RenderableType]:
    setting = result.setting
    title = f"{result.policy} · {setting.workload.name} · {setting.backend.name} · {setting.target.name}"
    yield Text(title, style="bold")
    yield _memory_table(result)
    for verdict in result.verdicts:
        style = {True: "green", False: "red", None: "yellow"}[verdict.fits]
        yield Text(f"  {verdict.render()}", style=style)
    yield Text(f"  step: {describe_time(result.time)}")
    traffic = result.measured
    if traffic.to_host_bytes or traffic.to_device_bytes:
        moved = f"{format_bytes(traffic.to_host_bytes)} to the host, {format_bytes(traffic.to_device_bytes)} back"
        least = (
            "" if result.time.least_transfer_s is None else f"; at least {format_seconds(result.time.least_transfer_s)}"
        )
        yield Text(f"  host link: {moved} a step{least}")
    data = result.to_json()
    waits = describe_waits(data["overlap"])
    if waits:
        yield Text(f"  waits: {waits}")
    fraction = data["recompute"]["fraction"]
    if traffic.recompute_flops:
        share = "" if fraction is None else f", {fraction:.1%} of the step"
        yield Text(f"  recompute: {format_count(traffic.recompute_flops, 'FLOP')}{share}")
    if traffic.peak_event:
        yield Text(f"  peak during: {traffic.peak_event}")
    if traffic.reserved_bytes:
        held = [f"{format_bytes(size)} ({name.replace('_', ' ')})" for name, size in traffic.reserved_bytes.items()]
        yield Text(f"  torch's allocator would reserve: {', '.join(held)}")
    for sentence in result.advice:
        yield Text(f"  → {sentence}", style="bold" if result.fits is False else "")
    for sentence in traffic.notes:
        yield Text(f"  note: {sentence}", style="dim")
    if result.left_out:
        yield Text(f"  left out: {'; '.join(result.left_out)}", style="dim")
    yield Text(f"  {traffic.method}, {format_seconds(result.elapsed_s)}", style="dim")


def _memory_table(result: PlanResult) -> Table:
    """A bar per role; full width is the capacity, or the peak where that is more or no bar would show."""
    peak, capacity = result.measured.peak_bytes, result.capacity.capacity_bytes or 0
    is_small = peak * _SMALL < capacity  # a bar of nothing says nothing: full width is then the peak
    full = peak if is_small else max(peak, capacity)
    table = Table.grid(padding=(0, 1))
    table.add_column(width=17)
    table.add_column(width=BAR_WIDTH)
    table.add_column(justify="right")
    start = 0.0
    for role in ROLES:
        nbytes = result.measured.by_role.get(role, 0)
        if nbytes:
            table.add_row(f"  {role}", _bar(start, nbytes, full, ROLE_STYLES[role]), format_bytes(nbytes))
            start += nbytes
    table.add_row("  peak", _bar(0, peak, full, "red" if result.fits is False else "white"), format_bytes(peak))
    for what, nbytes, source in () if is_small else result.capacity.reserve:
        assumed = ", assumed" if source.startswith("assumed") else ""
        table.add_row("  reserve", _bar(full - nbytes, nbytes, full, "dim"), f"{format_bytes(nbytes)}  {what}{assumed}")
    if result.measured.host_bytes:
        host, limit = result.measured.host_bytes * result.capacity.devices_per_node, result.capacity.host_bytes_per_node
        counted = "  counted: one memory" if result.measured.counted else "  per node"
        table.add_row("  host", _bar(0, host, max(host, limit or 0), "blue"), f"{format_bytes(host)}{counted}")
    return table


def _bar(start: float, size: float, full: float, style: str) -> Text:
    """A block from `start`, `size` long, in a track of `full`; what is not zero shows at least one cell."""
    left = min(BAR_WIDTH - 1, round(start / full * BAR_WIDTH))
    width = max(1, min(BAR_WIDTH - left, round(size / full * BAR_WIDTH)))
    return Text.assemble((" " * left, ""), ("█" * width, style), ("·" * (BAR_WIDTH - left - width), "dim"))


def describe_time(time: StepTime) -> str:
    """`0.81 s (0.60 to 1.21 s), bound by compute; calibrated ...` or why there is none."""
    if time.estimate_s is None:
        return f"not estimated: {time.from_what}"
    interval = f"{format_seconds(time.low_s)} to {format_seconds(time.high_s)}"
    return f"{interval}, about {format_seconds(time.estimate_s)}; bound by {time.bound_by}; {time.from_what}"


def describe_waits(overlap: Mapping[str, Any]) -> str:
    """`31 ms for host copies (91.4% of them hidden), 12 ms for collectives`; empty where nothing is waited for."""
    found = []
    hidden = overlap["hidden_fraction"]
    if hidden is not None:
        found.append(f"{format_seconds(overlap['exposed_s'])} for host copies ({hidden:.1%} of them hidden)")
    if overlap.get("collectives_exposed_s"):
        found.append(f"{format_seconds(overlap['collectives_exposed_s'])} for collectives")
    return ", ".join(found)


def side_by_side(results: Sequence[PlanResult | Refused]) -> Table:
    """Several policies as columns of figures, one line each; the fastest that fits is marked."""
    table = Table(title="memopt plan", title_justify="left", header_style="bold")
    table.add_column("policy")
    for heading in ("peak", "fits", "host per device", "recompute", "exposed", "step, from", "to", "bound by"):
        table.add_column(heading, justify="right")
    best = fastest(results)
    for result in results:
        if isinstance(result, Refused):
            reason = escape(result.problems[0].message)
            table.add_row(result.policy, f"[red]refused[/]: {reason}", *[""] * 7)
            continue
        table.add_row(*_cells(result, is_best=result is best))
    return table


def _cells(result: PlanResult, *, is_best: bool) -> list[str]:
    data = result.to_json()
    fraction, exposed_s = data["recompute"]["fraction"], data["overlap"]["exposed_s"]
    fits = {True: "[green]yes[/]", False: "[red]no[/]", None: "unknown"}[result.fits]
    return [
        f"[bold]{result.policy} ←[/]" if is_best else result.policy,
        format_bytes(result.measured.peak_bytes),
        fits,
        format_bytes(result.measured.host_bytes),
        "-" if fraction is None else f"{fraction:.1%}",
        format_seconds(exposed_s),
        format_seconds(result.time.low_s),
        format_seconds(result.time.high_s),
        result.time.bound_by or "-",
    ]


def fastest(results: Sequence[PlanResult | Refused]) -> PlanResult | None:
    """The shortest estimate among those that fit; None where none does or nothing is estimated."""
    fitting = [r for r in results if isinstance(r, PlanResult) and r.fits and r.time.estimate_s is not None]
    return min(fitting, key=lambda result: result.time.estimate_s or 0.0, default=None)

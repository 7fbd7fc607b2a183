"""The pages of `memopt plan --out` and `memopt tune --out`: self-contained, no network needed to open them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .estimate import ROLES
from .pages import MUTED, ROLE_COLOURS, SERIES_COLOURS, figure_block, new_figure, render_page
from .plan_table import describe_time, fastest
from .planning import PlanResult, Refused

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from .tune import Tuned
    from .tuning.problem import Outcome

_GIB = 2**30
_FAR = 20  # times the longest bar: a line further off would leave nothing of the bars to see
_ROW = 40


@dataclass(frozen=True, slots=True)
class Section:
    """One policy's part of the page."""

    result: PlanResult
    data: dict[str, Any]
    time: str
    units: str | None
    timeline: str | None


def plan_page(results: Sequence[PlanResult | Refused]) -> str:
    """The page of one or several plans.

    Raises:
        MemoptError: `extra-missing` without plotly.
    """
    done = [result for result in results if isinstance(result, PlanResult)]
    return render_page(
        "plan.html.j2",
        results=done,
        refused=[result for result in results if isinstance(result, Refused)],
        best=fastest(results),
        sections=[_section(result) for result in done],
        memory=figure_block(memory_figure(done), height=130 + _ROW * _num_bars(done)) if done else "",
        times=figure_block(time_figure(done), height=110 + _ROW * len(done)) if _are_timed(done) else None,
    )


def tune_page(tuned: Tuned) -> str:
    """The page of a tuning: the policy, why, the frontier, and its plan.

    Raises:
        MemoptError: `extra-missing` without plotly.
    """
    return render_page(
        "tune.html.j2",
        tuned=tuned,
        section=_section(tuned.result),
        frontier=figure_block(frontier_figure(tuned), height=420),
        memory=figure_block(memory_figure([tuned.result]), height=130 + _ROW * _num_bars([tuned.result])),
    )


def _section(result: PlanResult) -> Section:
    by_unit, timeline = result.measured.by_unit, result.measured.memory_timeline
    return Section(
        result=result,
        data=result.to_json(),
        time=describe_time(result.time),
        units=figure_block(unit_figure(by_unit), height=300) if by_unit else None,
        timeline=figure_block(timeline_figure(timeline), height=320) if timeline else None,
    )


def _num_bars(results: Sequence[PlanResult]) -> int:
    return sum(2 if result.measured.host_bytes else 1 for result in results)


def _are_timed(results: Sequence[PlanResult]) -> bool:
    return any(result.time.estimate_s is not None for result in results)


def memory_figure(results: Sequence[PlanResult]) -> Figure:
    """Device bytes by role, stacked, with host bytes beside; lines at what is usable and at the budget."""
    figure = new_figure()
    names = [f"{result.policy} " for result in results]  # a trailing space keeps numeric names from becoming numbers
    for role in ROLES:
        sizes = [result.measured.by_role.get(role, 0) / _GIB for result in results]
        if any(sizes):
            figure.add_bar(
                y=names,
                x=sizes,
                name=role.replace("_", " "),
                orientation="h",
                marker={"color": ROLE_COLOURS[role]},
                hovertemplate="%{y}: %{x:.2f} GiB",
            )
    host = [result.measured.host_bytes / _GIB for result in results if result.measured.host_bytes]
    if host:
        hosted = [f"{result.policy}, host " for result in results if result.measured.host_bytes]
        hatch = {"color": "#ffffff", "line": {"color": MUTED, "width": 1}, "pattern": {"shape": "/", "fgcolor": MUTED}}
        figure.add_bar(
            y=hosted, x=host, name="on the host", orientation="h", marker=hatch, hovertemplate="%{y}: %{x:.2f} GiB"
        )
    shown = max(max(result.measured.peak_bytes, result.measured.host_bytes) for result in results)
    for nbytes, text, colour in _limits(results[0], shown):
        figure.add_vline(x=nbytes / _GIB, line={"color": colour, "width": 1.5, "dash": "dash"}, annotation_text=text)
    figure.update_layout(barmode="stack", xaxis_title="GiB per device", bargap=0.35)
    order = [y for name in names for y in (name, f"{name.rstrip()}, host ")]
    figure.update_yaxes(autorange="reversed", categoryorder="array", categoryarray=order)
    return figure


def _limits(result: PlanResult, shown: float) -> list[tuple[int, str, str]]:
    """Lines to draw; one so far off that the bars (`shown` bytes) would be invisible is left to the verdicts' words."""
    found = []
    if result.capacity.usable_bytes is not None:
        found.append((result.capacity.usable_bytes, "usable", "#61707f"))
    if "device" in result.budget:
        found.append((result.budget["device"], "budget", "#b3261e"))
    return [line for line in found if line[0] <= _FAR * shown]


def time_figure(results: Sequence[PlanResult]) -> Figure:
    """The interval of each policy's step."""
    shown = [result for result in results if result.time.estimate_s is not None]
    middle = [result.time.estimate_s or 0.0 for result in shown]
    error = {
        "type": "data",
        "symmetric": False,
        "array": [(result.time.high_s or 0.0) - value for result, value in zip(shown, middle, strict=True)],
        "arrayminus": [value - (result.time.low_s or 0.0) for result, value in zip(shown, middle, strict=True)],
        "color": SERIES_COLOURS[0],
        "thickness": 2,
    }
    figure = new_figure()
    figure.add_scatter(
        y=[f"{result.policy} " for result in shown],
        x=middle,
        error_x=error,
        mode="markers",
        marker={"size": 9, "color": SERIES_COLOURS[0]},
        hovertemplate="%{y}: %{x:.3g} s<extra></extra>",
        showlegend=False,
    )
    figure.update_xaxes(title="seconds per step", rangemode="tozero")
    figure.update_yaxes(autorange="reversed", type="category")
    return figure


def unit_figure(by_unit: Any) -> Figure:
    """Device bytes at the peak, unit by unit."""
    figure = new_figure()
    figure.add_bar(x=list(by_unit), y=[nbytes / _GIB for nbytes in by_unit.values()], marker_color=SERIES_COLOURS[0])
    figure.update_layout(yaxis_title="GiB at the peak", bargap=0.2)
    return figure


def timeline_figure(timeline: Sequence[tuple[str, int]]) -> Figure:
    """Live bytes along the traced step, in the order of its events."""
    figure = new_figure()
    figure.add_scatter(
        x=list(range(len(timeline))),
        y=[nbytes / _GIB for _, nbytes in timeline],
        text=[event for event, _ in timeline],
        mode="lines",
        line={"color": SERIES_COLOURS[0], "shape": "hv", "width": 1.5},
        fill="tozeroy",
        hovertemplate="%{text}: %{y:.3f} GiB<extra></extra>",
    )
    figure.update_layout(xaxis_title="events of the step", yaxis_title="GiB live")
    return figure


def _has_host_room(tuned: Tuned, outcome: Outcome) -> bool:
    return outcome.host_bytes <= tuned.host_bytes


def frontier_figure(tuned: Tuned) -> Figure:
    """Step time over peak bytes: the frontier, the chosen policy, and policies people write by hand."""
    figure = new_figure()
    points = tuned.frontier
    figure.add_scatter(
        x=[point.outcome.peak_bytes / _GIB for point in points],
        y=[point.outcome.step_s for point in points],
        customdata=[point.outcome.host_bytes / _GIB for point in points],
        name="frontier",
        mode="lines+markers",
        line={"color": SERIES_COLOURS[0], "width": 2},
        hovertemplate="%{x:.1f} GiB, %{y:.3g} s, %{customdata:.1f} GiB on the host",
    )
    presets = tuned.presets
    figure.add_scatter(
        x=[outcome.peak_bytes / _GIB for outcome in presets.values()],
        y=[outcome.step_s for outcome in presets.values()],
        text=[
            name if _has_host_room(tuned, outcome) else f"{name} (no such host)" for name, outcome in presets.items()
        ],
        name="by hand",
        mode="markers+text",
        textposition="bottom center",
        marker={
            "color": SERIES_COLOURS[1],
            "symbol": ["diamond" if _has_host_room(tuned, o) else "diamond-open" for o in presets.values()],
            "size": 9,
        },
        hovertemplate="%{text}: %{x:.1f} GiB, %{y:.3g} s",
    )
    chosen = tuned.solution.outcome
    figure.add_scatter(
        x=[chosen.peak_bytes / _GIB],
        y=[chosen.step_s],
        name="chosen",
        mode="markers",
        marker={"color": SERIES_COLOURS[2], "symbol": "star", "size": 16},
        hovertemplate="chosen: %{x:.1f} GiB, %{y:.3g} s",
    )
    budget = tuned.result.budget.get("device")
    if budget:
        line = {"color": "#b3261e", "width": 1.5, "dash": "dash"}
        figure.add_vline(x=budget / _GIB, line=line, annotation_text="budget")
    figure.update_xaxes(title="peak GiB per device", rangemode="tozero")
    figure.update_yaxes(title="seconds per step, by the model of the step", rangemode="tozero")
    return figure

"""Self-contained HTML pages: templates of ours, plots of plotly's, everything inlined; no network to open one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from .errors import MemoptError
from .quantities import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from jinja2 import Environment
    from plotly.graph_objects import Figure

    from .report import Report

INK, MUTED, GRID = "#1f2933", "#61707f", "#e3e8ee"
# Okabe and Ito's colours: told apart with any colour vision.
ROLE_COLOURS = {
    "param": "#0072b2",
    "grad": "#56b4e9",
    "optimizer_state": "#009e73",
    "activation": "#e69f00",
    "gathered": "#cc79a7",
    "temp": "#b8c2cc",
    "host": "#ffffff",
}
SERIES_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f6a00", "#5b4b8a")


def render_page(template: str, *, filters: Mapping[str, Callable[..., str]] | None = None, **values: Any) -> str:
    """A whole page from `memopt/templates/`; values are escaped, figures come through `figure_block`.

    Args:
        template: File name; it extends `base.html.j2`, which inlines plotly and the style.
        filters: Filters beside `bytes`, `seconds` and `count`.
        **values: What the template shows.
    """
    environment = _environment().overlay()
    environment.filters = {**environment.filters, **(filters or {})}
    return environment.get_template(template).render(plotly_script=_plotly_script(), **values)


def new_figure() -> Figure:
    """An empty plot.

    Raises:
        MemoptError: `extra-missing` without plotly.
    """
    return _plotly("graph_objects").Figure()


def figure_block(figure: Figure, *, height: int) -> str:
    """The figure as a `<div>` with our fonts and margins; goes into a template with `| safe`."""
    figure.update_layout(
        template="plotly_white",
        height=height,
        margin={"l": 64, "r": 24, "t": 16, "b": 48},
        font={"family": "system-ui, -apple-system, 'Segoe UI', sans-serif", "size": 13, "color": INK},
        legend={"orientation": "h", "yanchor": "bottom", "y": 1.02, "x": 0, "traceorder": "normal"},
        hoverlabel={"font": {"size": 12}},
    )
    figure.update_xaxes(gridcolor=GRID, zerolinecolor=GRID)
    figure.update_yaxes(gridcolor=GRID, zerolinecolor=GRID)
    options = {"displayModeBar": False, "responsive": True}
    return figure.to_html(full_html=False, include_plotlyjs=False, config=options)


def report_page(report: Report) -> str:
    """The page of one applied policy."""
    figure = new_figure()
    for role, nbytes in report.measured_by_role.items():
        figure.add_bar(y=["device"], x=[nbytes / 2**20], name=role, orientation="h", marker_color=ROLE_COLOURS[role])
    if report.host_bytes:
        figure.add_bar(y=["host"], x=[report.host_bytes / 2**20], name="host", orientation="h", marker_color=MUTED)
    figure.update_layout(barmode="stack", xaxis_title="MiB per device")
    return render_page("report.html.j2", report=report, memory=figure_block(figure, height=220))


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(loader=PackageLoader("memopt"), autoescape=True, undefined=StrictUndefined)
    environment.filters.update(bytes=format_bytes, seconds=format_seconds, count=format_count)
    return environment


@cache
def _plotly_script() -> str:
    return _plotly("offline").get_plotlyjs()


def _plotly(module: str) -> Any:
    try:
        return import_module(f"plotly.{module}")
    except ModuleNotFoundError as error:
        raise MemoptError.of(
            "extra-missing", "plotly is not installed, and pages need it", hint="pip install 'memopt[report]'"
        ) from error

"""The plots of a comparison's page."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from ..pages import MUTED, ROLE_COLOURS, SERIES_COLOURS
from .rows import Row

MIB = 2**20
_DASHES = ("solid", "dot", "dash", "dashdot")
_ROLE_NAMES = {
    "param": "parameters",
    "grad": "gradients",
    "optimizer_state": "optimizer state",
    "activation": "activations",
    "gathered": "gathered",
    "temp": "temporary",
}


def label(row: Row) -> str:
    """`jax · recompute`: how a row is called on the page."""
    return f"{row.backend} · {row.policy}"


def loss_figure(rows: Sequence[Row]) -> go.Figure:
    """Loss over steps; colour says the policy, dash the backend."""
    figure = go.Figure()
    policies = list(dict.fromkeys(row.policy for row in rows))
    backends = list(dict.fromkeys(row.backend for row in rows))
    for row in rows:
        if row.losses:
            figure.add_scatter(
                x=list(range(1, len(row.losses) + 1)),
                y=row.losses,
                name=label(row),
                mode="lines",
                line={
                    "color": SERIES_COLOURS[policies.index(row.policy) % len(SERIES_COLOURS)],
                    "dash": _DASHES[backends.index(row.backend) % len(_DASHES)],
                    "width": 2,
                },
                hovertemplate="step %{x}: %{y:.5f}",
            )
    figure.update_layout(xaxis_title="step", yaxis_title="loss, nats per byte", hovermode="x unified")
    return figure


def agreement_figure(rows: Sequence[Row], *, floor: float) -> go.Figure:
    """Largest difference of each row's losses from its own plain run and from the other backend, on a log axis.

    Args:
        rows: The rows.
        floor: Where a difference of exactly zero is drawn.
    """
    figure = go.Figure()
    kinds = (
        ("from its own plain run", "max_abs_diff_vs_plain", SERIES_COLOURS[0], "circle"),
        ("from the other backend", "max_abs_diff_vs_other_backend", SERIES_COLOURS[1], "diamond"),
    )
    for name, attribute, colour, symbol in kinds:
        found = [(label(row), getattr(row, attribute)) for row in rows if getattr(row, attribute) is not None]
        if attribute == "max_abs_diff_vs_plain":
            found = [(text, value) for (text, value) in found if not text.endswith("· none")]
        figure.add_scatter(
            x=[max(value, floor) for _, value in found],
            y=[text for text, _ in found],
            customdata=[value for _, value in found],
            name=name,
            mode="markers+text",
            text=["equal to the bit" if value == 0 else "" for _, value in found],
            textposition="middle right",
            textfont={"size": 11, "color": MUTED},
            marker={"color": colour, "symbol": symbol, "size": 10},
            hovertemplate="%{y}: %{customdata:.3g}<extra></extra>",
        )
    figure.update_xaxes(
        type="log", title="largest difference of the loss over all steps", exponentformat="power", dtick=1
    )
    figure.update_yaxes(autorange="reversed")
    return figure


def memory_figure(rows: Sequence[Row]) -> go.Figure:
    """Peak bytes per device by role, stacked; bytes on the host beside them, hatched."""
    figure = go.Figure()
    shown = [row for row in rows if row.peak_measured_bytes is not None]
    names = [label(row) for row in shown]
    for role, colour in ROLE_COLOURS.items():
        sizes = [row.measured_by_role.get(role, 0) / MIB for row in shown]
        if any(sizes):
            figure.add_bar(
                y=names,
                x=sizes,
                name=_ROLE_NAMES.get(role, role),
                orientation="h",
                marker={"color": colour},
                hovertemplate="%{y}: %{x:.2f} MiB",
            )
    host = [(row.host_bytes or 0) / MIB for row in shown]
    if any(host):
        figure.add_bar(
            y=names,
            x=host,
            name="on the host",
            orientation="h",
            marker={
                "color": "#ffffff",
                "line": {"color": MUTED, "width": 1},
                "pattern": {"shape": "/", "fgcolor": MUTED},
            },
            hovertemplate="%{y}: %{x:.2f} MiB on the host",
        )
    figure.update_layout(barmode="stack", xaxis_title="MiB per device", bargap=0.35)
    figure.update_yaxes(autorange="reversed")
    return figure


def time_figure(rows: Sequence[Row]) -> go.Figure:
    """Median step time with its quartiles."""
    shown = [row for row in rows if row.step_time_s is not None]
    medians = [1e3 * (row.step_time_s or 0.0) for row in shown]
    low = [m - 1e3 * row.step_time_quartiles_s[0] if row.step_time_quartiles_s else 0 for m, row in zip(medians, shown)]
    high = [
        1e3 * row.step_time_quartiles_s[1] - m if row.step_time_quartiles_s else 0 for m, row in zip(medians, shown)
    ]
    backends = list(dict.fromkeys(row.backend for row in rows))
    figure = go.Figure()
    figure.add_bar(
        y=[label(row) for row in shown],
        x=medians,
        orientation="h",
        marker={"color": [SERIES_COLOURS[backends.index(row.backend) % len(SERIES_COLOURS)] for row in shown]},
        error_x={
            "type": "data",
            "symmetric": False,
            "array": high,
            "arrayminus": low,
            "color": MUTED,
            "thickness": 1.5,
        },
        hovertemplate="%{y}: %{x:.1f} ms<extra></extra>",
        showlegend=False,
    )
    figure.update_layout(xaxis_title="ms per step (median, quartiles)", bargap=0.35)
    figure.update_yaxes(autorange="reversed")
    return figure

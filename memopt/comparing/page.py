"""The self-contained HTML page of a comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..pages import figure_block, render_page
from ..quantities import format_bytes
from .figures import agreement_figure, label, loss_figure, memory_figure, time_figure
from .rows import PLAIN, Row

_ZERO_AT = 1e-9  # where the log axis draws a difference of exactly zero
_ROW_HEIGHT = 34


@dataclass(frozen=True, slots=True)
class Card:
    """One headline of the page: a figure and what it says."""

    figure: str
    meaning: str
    is_good: bool | None = None


@dataclass(frozen=True, slots=True)
class RuleLine:
    """What one rule of one policy decided, on each backend."""

    policy: str
    rule: str
    action: str
    role: str
    by_backend: Mapping[str, Mapping[str, Any]]


def comparison_page(rows: Sequence[Row], environment: Mapping[str, Any], *, complete: bool) -> str:
    """The whole page; opens without a network.

    Args:
        rows: The finished rows.
        environment: Facts of `environment_facts`.
        complete: False when the comparison was interrupted.
    """
    height = 90 + _ROW_HEIGHT * max(1, len(rows))
    return render_page(
        "comparison.html.j2",
        filters={"effect": describe, "facts": describe_facts},
        rows=rows,
        label=label,
        environment=environment,
        complete=complete,
        is_planned=any(row.peak_planned_bytes is not None for row in rows),
        backends=list(dict.fromkeys(row.backend for row in rows)),
        cards=cards(rows),
        savings={label(row): saving(row, rows) for row in rows},
        rules=rule_lines(rows),
        losses=figure_block(loss_figure(rows), height=400),
        agreement=figure_block(agreement_figure(rows, floor=_ZERO_AT), height=height),
        memory=figure_block(memory_figure(rows), height=height),
        times=figure_block(time_figure(rows), height=height),
    )


def cards(rows: Sequence[Row]) -> list[Card]:
    """The headlines: do the backends agree, do the policies, how much memory is saved, what failed."""
    found = []
    plain = [row for row in rows if row.policy == PLAIN and row.max_abs_diff_vs_other_backend is not None]
    if plain:
        worst = max(row.max_abs_diff_vs_other_backend or 0.0 for row in plain)
        found.append(
            Card(f"{worst:.1g}", "largest loss difference between the plain runs of the backends", worst <= 1e-4)
        )
    changed = [row for row in rows if row.policy != PLAIN and row.max_abs_diff_vs_plain is not None]
    if changed:
        equal = sum(row.max_abs_diff_vs_plain == 0 for row in changed)
        worst = max(row.max_abs_diff_vs_plain or 0.0 for row in changed)
        text = (
            "policies train exactly as their plain run"
            if worst == 0
            else f"equal to the bit; the others within {worst:.1g}"
        )
        found.append(Card(f"{equal} of {len(changed)}", text, all(row.ok for row in changed)))
    for backend in dict.fromkeys(row.backend for row in rows):
        best = _best_saving([row for row in rows if row.backend == backend], rows)
        if best is not None:
            row, share = best
            found.append(Card(f"{share:+.0%}".replace("-", "−"), f"peak device memory on {backend} with {row.policy}"))
    failed = [row for row in rows if not row.ok]
    if failed:
        found.append(Card(str(len(failed)), f"of {len(rows)} rows not ok; the reasons are below", False))
    return found


def saving(row: Row, rows: Sequence[Row]) -> float | None:
    """Change of the measured peak against the same backend's plain run; -0.25 is a quarter less."""
    plain = next((other for other in rows if other.backend == row.backend and other.policy == PLAIN), None)
    if plain is None or not plain.peak_measured_bytes or row.peak_measured_bytes is None:
        return None
    return row.peak_measured_bytes / plain.peak_measured_bytes - 1


def _best_saving(own: Sequence[Row], rows: Sequence[Row]) -> tuple[Row, float] | None:
    shares = [(row, share) for row in own if row.policy != PLAIN and (share := saving(row, rows)) is not None]
    return min(shares, key=lambda pair: pair[1], default=None)


def rule_lines(rows: Sequence[Row]) -> list[RuleLine]:
    """One line per policy, rule, action and role, with every backend's figures side by side."""
    found: dict[tuple[str, str, str, str], dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        for effect in row.effects:
            key = (row.policy, effect["rule"] or "(default)", effect["action"], effect["role"])
            found.setdefault(key, {})[row.backend] = effect
    return [RuleLine(*key, by_backend) for key, by_backend in found.items()]


def describe(effect: Mapping[str, Any] | None) -> str:
    """`12 tensors, 3.00 MiB`, or `-` where the backend has no such line."""
    if effect is None:
        return "-"
    size = "" if effect["nbytes"] is None else f", {format_bytes(effect['nbytes'])}"
    return f"{effect['num_tensors']} tensor{'s' if effect['num_tensors'] != 1 else ''}{size}"


def describe_facts(facts: Mapping[str, Any]) -> str:
    """`layers 4, optimizer (name adamw, lr 0.002)`."""
    parts = []
    for name, value in facts.items():
        if isinstance(value, Mapping):
            parts.append(f"{name} ({describe_facts(value)})")
        elif isinstance(value, list | tuple):
            parts.append(f"{name} {' '.join(str(item) for item in value)}")
        else:
            parts.append(f"{name} {value}")
    return ", ".join(parts)

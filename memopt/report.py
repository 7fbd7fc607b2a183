"""What an applied policy did: bytes by role, traffic and step time, planned beside measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from .plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleEffect:
    """What one rule decided in a plan.

    Attributes:
        rule: Its name; None for what no rule decided.
        action: `shard`, `offload`, `recompute` or `keep`.
        role: Of the tensors.
        num_tensors: How many tensors (or values) it decided.
        nbytes: Their bytes per device; None when any of them is unknown.
    """

    rule: str | None
    action: str
    role: str
    num_tensors: int
    nbytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Measured and planned figures of one applied policy; bytes are per device (the largest rank), time per step.

    Attributes:
        backend: Backend name.
        measured_peak_bytes: Device bytes at the peak of a step; None before a step has run.
        measured_by_role: Their split (`param, grad, optimizer_state, activation, gathered, temp`); sums to the peak.
        planned_peak_bytes: What the plan foretold; None where nothing was planned.
        host_bytes: Host bytes held for this device at their peak.
        counted: True where host bytes are counted on the program because the device has one memory (the CPU).
        to_host_bytes, to_device_bytes: Moved over the host link in one step.
        recompute_flops: FLOPs that are computed a second time in one step; None where unknown.
        collectives: Kind -> how many in one step.
        step_time_s: Median of the steps after the first; None before two steps have run.
        effects: What each rule decided, in the policy's order.
        versions: Package -> version.
        notes: Sentences for the reader, such as how a figure was got.
    """

    backend: str
    measured_peak_bytes: int | None = None
    measured_by_role: Mapping[str, int] = field(default_factory=dict)
    planned_peak_bytes: int | None = None
    host_bytes: int = 0
    counted: bool = False
    to_host_bytes: int | None = None
    to_device_bytes: int | None = None
    recompute_flops: float | None = None
    collectives: Mapping[str, int] = field(default_factory=dict)
    step_time_s: float | None = None
    effects: tuple[RuleEffect, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data: what `to_json` writes."""
        return asdict(self)

    def to_json(self, *, indent: int | None = 2) -> str:
        """Sorted JSON."""
        return json.dumps(self.to_dict(), indent=indent, sort_keys=True)

    def to_html(self) -> str:
        """A page of its own, no network needed to open it.

        Raises:
            MemoptError: `extra-missing` without plotly.
        """
        from .pages import report_page

        return report_page(self)


def rule_effects(plan: Plan) -> tuple[RuleEffect, ...]:
    """What each rule decided, by action and role; rules in the order in which they first decide a row."""
    found: dict[tuple[str | None, str, str], list[int | None]] = {}
    for row in plan.rows:
        for rule, action in _decisions(row):
            found.setdefault((rule, action, row.role), []).append(row.nbytes)
    return tuple(
        RuleEffect(rule=rule, action=action, role=role, num_tensors=len(sizes), nbytes=_total(sizes))
        for (rule, action, role), sizes in found.items()
    )


def _decisions(row: Any) -> list[tuple[str | None, str]]:
    """(rule, action) of each slot of a row that does something to it."""
    decided = []
    if row.layout:
        decided.append((row.rules.get("layout"), "shard"))
    if row.memory_kind == "pinned_host" and row.role != "activation":
        decided.append((row.rules.get("memory"), "offload"))
    if row.residual in ("recompute", "offload"):
        decided.append((row.rules.get("residual"), row.residual))
    elif row.residual == "keep" and row.rules.get("residual"):
        decided.append((row.rules["residual"], "keep"))
    return decided


def _total(sizes: list[int | None]) -> int | None:
    known = [size for size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) else None

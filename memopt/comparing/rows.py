"""Rows of a comparison: what one policy did on one backend, beside that backend's plain run and the other backend."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ..quantities import format_bytes
from .jobs import Outcome

PLAIN = "none"  # the policy that does nothing
FRAGMENTED_SHARE = 0.1  # of the reserved bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One policy on one backend. Bytes are per device (the largest rank), times per step.

    Attributes:
        backend, policy: What ran; `policy` is the file's stem, `none` for the plain run.
        ok: It ran to its end, its losses are finite, and they agree with its plain run where they must.
        reason: Why it is not ok; None where it is.
        losses: Mean over the whole batch, one a step.
        final_loss: The last of them.
        max_abs_diff_vs_plain: Largest difference from the same backend's plain run over all steps.
        max_abs_diff_vs_other_backend: Largest difference from the same policy on any other backend.
        peak_planned_bytes: Foretold by the plan; None where nothing was planned.
        peak_measured_bytes: Device bytes at the peak.
        measured_by_role: Their split; `attributed` where a compiler's total was split after the fact.
        host_bytes: Held on the host at the peak; counted on the program where the device has one memory.
        step_time_s, step_time_quartiles_s: Median and quartiles of the steps after the warm-up.
        num_timed_steps: How many those are.
        tokens_per_s: Predicted tokens of the whole batch over `step_time_s`; None with a batch of its own.
        recompute_flops: FLOPs of a step beyond the plain run's, all devices together.
        collectives: Kind -> count in one step.
        effects: What each rule decided (`memopt.report.RuleEffect` as data).
        allocator: On a GPU, `allocated_bytes` and `reserved_bytes` of the framework's allocator at their peaks.
        world_size: Ranks or devices.
        elapsed_s: From start to end of its processes, imports and compilation included.
        notes: How figures were got.
    """

    backend: str
    policy: str
    ok: bool
    reason: str | None = None
    losses: tuple[float, ...] = ()
    final_loss: float | None = None
    max_abs_diff_vs_plain: float | None = None
    max_abs_diff_vs_other_backend: float | None = None
    peak_planned_bytes: int | None = None
    peak_measured_bytes: int | None = None
    measured_by_role: Mapping[str, int] = field(default_factory=dict)
    attributed: bool = False
    host_bytes: int | None = None
    step_time_s: float | None = None
    step_time_quartiles_s: tuple[float, float] | None = None
    num_timed_steps: int = 0
    tokens_per_s: float | None = None
    recompute_flops: float | None = None
    collectives: Mapping[str, int] | None = None
    effects: tuple[Mapping[str, Any], ...] = ()
    allocator: Mapping[str, int] | None = None
    world_size: int = 1
    elapsed_s: float | None = None
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data for `results.json`; a figure that is not finite becomes null, which JSON has a word for."""
        data = asdict(self)
        data["losses"] = [_finite(loss) for loss in self.losses]
        return {key: _finite(value) for key, value in data.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """An outcome and what the row needs to know beside it."""

    backend: str
    policy: str
    outcome: Outcome
    world_size: int
    elapsed_s: float
    tokens_per_step: int
    changes_precision: bool
    peak_planned_bytes: int | None = None


def make_rows(entries: Sequence[Entry], *, tolerance: float) -> tuple[Row, ...]:
    """The rows of everything that has run so far, compared with each other.

    Args:
        entries: In the order in which they ran.
        tolerance: Allowed difference of losses from the plain run, for policies that do not change precision.
    """
    by_key = {(entry.backend, entry.policy): entry for entry in entries}
    return tuple(_compared(_row(entry), entry, by_key, tolerance) for entry in entries)


def _row(entry: Entry) -> Row:
    outcome = entry.outcome
    row = Row(
        backend=entry.backend,
        policy=entry.policy,
        ok=outcome.reason is None,
        reason=outcome.reason,
        losses=outcome.losses,
        final_loss=outcome.losses[-1] if outcome.losses else None,
        world_size=entry.world_size,
        elapsed_s=entry.elapsed_s,
    )
    if outcome.result is None:
        return row
    result = outcome.result
    times = result["step_times_s"]
    median = statistics.median(times) if times else None
    return replace(
        row,
        peak_measured_bytes=result["peak_measured_bytes"],
        peak_planned_bytes=entry.peak_planned_bytes,
        measured_by_role=result["measured_by_role"],
        attributed=result["attributed"],
        host_bytes=result["host_bytes"],
        step_time_s=median,
        step_time_quartiles_s=_quartiles(times),
        num_timed_steps=len(times),
        tokens_per_s=entry.tokens_per_step / median if median and entry.tokens_per_step else None,
        collectives=result["collectives"],
        effects=tuple(result["effects"]),
        allocator=result.get("allocator"),
        notes=(*result["notes"], *_fragmentation(result.get("allocator"))),
    )


def _fragmentation(allocator: Mapping[str, int] | None) -> tuple[str, ...]:
    """A sentence where much more is reserved than was ever allocated; the setting is named, not set."""
    if allocator is None:
        return ()
    allocated, reserved = allocator["allocated_bytes"], allocator["reserved_bytes"]
    if reserved - allocated <= FRAGMENTED_SHARE * reserved:
        return ()
    gap = format_bytes(reserved - allocated)
    return (
        f"{gap} of the {format_bytes(reserved)} reserved were never allocated: fragmentation; "
        "PYTORCH_ALLOC_CONF=expandable_segments:True often closes the gap",
    )


def _compared(row: Row, entry: Entry, by_key: Mapping[tuple[str, str], Entry], tolerance: float) -> Row:
    plain = by_key.get((row.backend, PLAIN))
    others = [other for (name, policy), other in by_key.items() if policy == row.policy and name != row.backend]
    to_plain = None if plain is None else max_abs_difference(row.losses, plain.outcome.losses)
    differences = [max_abs_difference(row.losses, other.outcome.losses) for other in others]
    known = [difference for difference in differences if difference is not None]
    row = replace(
        row,
        max_abs_diff_vs_plain=to_plain,
        max_abs_diff_vs_other_backend=max(known, default=None),
        recompute_flops=_extra_flops(entry, plain),
    )
    fault = _fault(row, tolerance=None if entry.changes_precision else tolerance)
    return replace(row, ok=False, reason=fault) if row.ok and fault else row


def _fault(row: Row, *, tolerance: float | None) -> str | None:
    """Why a row that ran to its end is still not ok."""
    if not all(math.isfinite(loss) for loss in row.losses):
        step = next(index for index, loss in enumerate(row.losses) if not math.isfinite(loss))
        return f"the loss of step {step + 1} is {row.losses[step]}"
    difference = row.max_abs_diff_vs_plain
    if tolerance is not None and difference is not None and difference > tolerance:
        return f"its losses differ from the plain {row.backend} run by {difference:.3g}; {tolerance:g} is allowed"
    return None


def _extra_flops(entry: Entry, plain: Entry | None) -> float | None:
    """FLOPs beyond the plain run's: what is computed a second time."""
    if plain is None or entry.outcome.result is None or plain.outcome.result is None:
        return None
    own, base = entry.outcome.result.get("step_flops"), plain.outcome.result.get("step_flops")
    return None if own is None or base is None else own - base


def max_abs_difference(left: Sequence[float], right: Sequence[float]) -> float | None:
    """Largest difference step by step; None unless both have the same steps, at least one.

    >>> max_abs_difference([1.0, 2.0], [1.0, 2.5])
    0.5
    """
    if not left or len(left) != len(right):
        return None
    differences = [abs(a - b) for a, b in zip(left, right, strict=True)]
    return math.nan if any(math.isnan(difference) for difference in differences) else max(differences)


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _quartiles(times: Sequence[float]) -> tuple[float, float] | None:
    if len(times) < 2:
        return None
    first, _, third = statistics.quantiles(times, n=4, method="inclusive")
    return first, third

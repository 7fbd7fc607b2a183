"""The frontier: the fastest policy for each of several device budgets, from the least possible to keeping all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from .problem import Outcome, Problem
from .solve import Solution, floor, solve


@dataclass(frozen=True, slots=True)
class Point:
    """One budget's best.

    Attributes:
        policy: The policy file's text.
        budget_bytes: What it was solved for.
        outcome: By the model of the step.
        planned_peak_bytes: By the backend, for the chosen policy; None where it was not planned again.
    """

    policy: str
    budget_bytes: float
    outcome: Outcome
    planned_peak_bytes: int | None = None

    def to_json(self) -> dict[str, Any]:
        """The contract's `policy`, `peak_bytes`, `step_time`; and whether the bytes were planned again."""
        replanned = self.planned_peak_bytes is not None
        return {
            "policy": self.policy,
            "peak_bytes": self.planned_peak_bytes if replanned else round(self.outcome.peak_bytes),
            "step_time": self.outcome.step_s,
            "budget_bytes": round(self.budget_bytes),
            "host_bytes": round(self.outcome.host_bytes),
            "exposed_s": self.outcome.exposed_s,
            "recompute_s": self.outcome.recompute_s,
            "replanned": replanned,
        }


def trace_frontier(
    problem: Problem,
    *,
    num_points: int,
    max_cuts: int,
    chosen: tuple[Solution, int],
    write: Callable[[Solution], str],
) -> tuple[Point, ...]:
    """Solve for budgets between the floor and what keeping everything takes.

    Args:
        problem: With the static bytes that planning has taught.
        num_points: At most so many; policies that are equal are one point.
        max_cuts: As in `solve`.
        chosen: The chosen solution and its planned peak; it is one of the points.
        write: Makes a policy's text.
    """
    least = floor(problem, max_cuts=max_cuts).least_device_bytes
    low = problem.device_bytes if least is None else least * 1.001
    most = problem.static_bytes + sum(choice.nbytes for layer in problem.layers() for choice in layer.choices)
    step = max(0.0, most - low) / max(1, num_points - 1)
    solution, planned = chosen
    points = {solution.assignment: Point(write(solution), problem.device_bytes, solution.outcome, planned)}
    for number in range(num_points):
        budget = low + step * number
        found = solve(replace(problem, device_bytes=budget), max_cuts=max_cuts)
        if isinstance(found, Solution) and found.assignment not in points:
            points[found.assignment] = Point(write(found), budget, found.outcome)
    return _undominated(tuple(points.values()))


def _undominated(points: tuple[Point, ...]) -> tuple[Point, ...]:
    """By peak; a point that is neither smaller nor faster than another goes, the planned one never."""
    kept: list[Point] = []
    for point in sorted(points, key=lambda point: (point.outcome.peak_bytes, point.outcome.step_s)):
        if point.planned_peak_bytes is not None or all(point.outcome.step_s < other.outcome.step_s for other in kept):
            kept.append(point)
    return tuple(kept)

"""What binds a solution, and what a little more of each limit would buy: the problem solved again, slightly relaxed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..quantities import format_bytes, format_seconds
from .problem import Problem
from .solve import Solution, solve

_GIB = float(2**30)
_NOTICED = 2e-4  # of the step: less is the solver's tolerance, not a finding


@dataclass(frozen=True, slots=True)
class Relaxation:
    """One limit, relaxed.

    Attributes:
        limit: `device memory`, `host memory`, `host link`.
        change: What was given: `+1 GiB`, `+10%`.
        saved_s: Seconds of the step it buys.
        saved_fraction: Of the step.
    """

    limit: str
    change: str
    saved_s: float
    saved_fraction: float

    def render(self) -> str:
        """One sentence."""
        if self.saved_fraction <= _NOTICED:
            return f"{self.change} of {self.limit} buys nothing"
        return f"{self.change} of {self.limit} buys {format_seconds(self.saved_s)} a step ({self.saved_fraction:.2%})"


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a solution is what it is.

    Attributes:
        binds: Limits whose relaxation pays, the dearest first; empty: compute alone.
        relaxations: All that were tried.
        device_spare_bytes, host_spare_bytes: What the solution leaves unused.
        recompute_s, exposed_s: What of the step is computed again, and what transfers alone take.
    """

    binds: tuple[str, ...]
    relaxations: tuple[Relaxation, ...]
    device_spare_bytes: float
    host_spare_bytes: float
    recompute_s: float
    exposed_s: float

    def sentences(self) -> tuple[str, ...]:
        """For the terminal."""
        binds = f"binds: {', '.join(self.binds)}" if self.binds else "nothing binds but compute"
        spare = (
            f"unused: {format_bytes(self.device_spare_bytes)} of the device, "
            f"{format_bytes(self.host_spare_bytes)} of the host"
        )
        cost = (
            f"computed again: {format_seconds(self.recompute_s)} a step; "
            f"exposed transfers: {format_seconds(self.exposed_s)}"
        )
        return (binds, *(relaxation.render() for relaxation in self.relaxations), spare, cost)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "sentences": list(self.sentences())}


def explain(problem: Problem, solution: Solution, *, max_cuts: int) -> Explanation:
    """Relax each limit by itself and solve again."""
    tried: list[tuple[str, str, Callable[[Problem], Problem]]] = [
        ("device memory", "+1 GiB", lambda p: replace(p, device_bytes=p.device_bytes + _GIB)),
        ("host memory", "+1 GiB", lambda p: replace(p, host_bytes=p.host_bytes + _GIB)),
    ]
    if problem.link is not None:
        tried.append(("host link", "+10%", _faster_link))
    relaxations = tuple(
        _relaxed(problem, solution, limit, change, relax, max_cuts=max_cuts) for limit, change, relax in tried
    )
    paying = sorted((r for r in relaxations if r.saved_fraction > _NOTICED), key=lambda r: -r.saved_s)
    outcome = solution.outcome
    return Explanation(
        binds=tuple(relaxation.limit for relaxation in paying),
        relaxations=relaxations,
        device_spare_bytes=problem.device_bytes - outcome.peak_bytes,
        host_spare_bytes=problem.host_bytes - outcome.host_bytes,
        recompute_s=solution.again_s,
        exposed_s=outcome.exposed_s,
    )


def _faster_link(problem: Problem) -> Problem:
    if problem.link is None:
        return problem
    dram = problem.link.dram_bytes_per_s
    link = replace(
        problem.link,
        bytes_per_s=problem.link.bytes_per_s * 1.1,
        dram_bytes_per_s=None if dram is None else dram * 1.1,
    )
    return replace(problem, link=link)


def _relaxed(
    problem: Problem,
    solution: Solution,
    limit: str,
    change: str,
    relax: Callable[[Problem], Problem],
    *,
    max_cuts: int,
) -> Relaxation:
    found = solve(relax(problem), max_cuts=max_cuts)
    step_s = solution.outcome.step_s
    better_s = found.outcome.step_s if isinstance(found, Solution) else step_s
    saved_s = max(0.0, step_s - better_s)
    return Relaxation(limit, change, saved_s, saved_s / step_s)

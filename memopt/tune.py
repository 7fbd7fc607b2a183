"""`memopt tune`: the fastest policy within a budget, chosen by a program, judged by a simulator, planned again.

Per layer class and tensor: keep, recompute or offload. What the model of the step gets wrong about bytes is learnt from
the backend: its measurement of one policy fixes the bytes no choice changes, and every answer is planned again through
the backend (JAX: compiled again) before it is called feasible.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .errors import MemoptError
from .planning import PlanResult, Progress, prepare
from .quantities import format_seconds
from .roofline import GUESS, rates_for
from .tuning.explain import Explanation, explain
from .tuning.frontier import Point, trace_frontier
from .tuning.layouts import Layout, layouts
from .tuning.presets import presets
from .tuning.problem import Outcome
from .tuning.search import Search, Wishes
from .tuning.solve import Solution


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """The chosen policy and why.

    Attributes:
        text: The policy file.
        result: Its plan, from the backend.
        layout: How it shards and accumulates.
        solution: As the model of the step sees it.
        explanation: What binds.
        frontier: The fastest policy for each of several budgets.
        presets: Name -> what the model of the step says of policies people write by hand, in the same layout.
        tried: (layout, seconds or why not) for every layout allowed.
        host_bytes: What one device's rank may hold of activations.
        rounds: Plans made through the backend for the chosen layout.
        elapsed_s: In all.
    """

    text: str
    result: PlanResult
    layout: Layout
    solution: Solution
    explanation: Explanation
    frontier: tuple[Point, ...]
    presets: Mapping[str, Outcome]
    tried: tuple[tuple[str, str], ...]
    host_bytes: float
    rounds: int
    elapsed_s: float

    @property
    def settings(self) -> tuple[str, ...]:
        """What has to be set in the processes that run the policy; the policy's header says it too."""
        return tuple(verdict.setting for verdict in self.result.verdicts if verdict.fits and verdict.setting)

    def to_json(self) -> dict[str, Any]:
        """The contract's keys: the chosen policy, its plan, the frontier; and why."""
        outcome = self.solution.outcome
        return {
            "policy": self.text,
            "feasible": self.result.fits is not False,
            "settings": list(self.settings),
            "plan": self.result.to_json(),
            "frontier": [point.to_json() for point in self.frontier],
            "explain": self.explanation.to_json(),
            "model": {
                "step_s": outcome.step_s,
                "peak_bytes": outcome.peak_bytes,
                "host_bytes": outcome.host_bytes,
                "bound_s": self.solution.bound_s or None,
                "program_rounds": self.solution.rounds,
            },
            "presets": {
                name: {
                    "step_s": p.step_s,
                    "peak_bytes": p.peak_bytes,
                    "host_bytes": p.host_bytes,
                    "has_host_room": p.host_bytes <= self.host_bytes,
                }
                for name, p in self.presets.items()
            },
            "layouts": [{"layout": label, "outcome": text} for label, text in self.tried],
            "rounds": self.rounds,
            "elapsed_s": round(self.elapsed_s, 3),
        }


def tune(*, workload: Any, backend: Any, target: Any, wishes: Wishes, progress: Progress | None = None) -> Tuned:
    """Choose a policy.

    Args:
        workload, backend, target: As for `planning.prepare`.
        wishes: Budgets and freedoms.
        progress: Told, in one line, what takes long.

    Raises:
        MemoptError: `budget-infeasible` with the nearest feasible budget and what makes it up; `tune-needs-rates` on a
            target with no published rates; `nothing-to-tune`; and what planning raises.
    """
    started = time.monotonic()
    say = progress or (lambda text: None)
    setting = prepare(workload=workload, backend=backend, target=target, budget={"device": wishes.device_bytes})
    rates = rates_for(setting.target, GUESS)
    if rates is None:
        raise MemoptError.of(
            "tune-needs-rates",
            f"`{setting.target.name}` publishes no compute rate, so recompute and transfers cannot be weighed",
            hint="tune for a GPU or TPU target; `memopt plan` gives a policy's bytes on any",
        )
    searches, tried = [], []
    for layout in layouts(
        base=wishes.base,
        workload=setting.workload,
        target=setting.target,
        spec=setting.spec,
        fsdp=wishes.fsdp,
        accumulate=wishes.accumulate,
    ):
        say(f"layout: {layout.label}")
        search = Search(setting, layout, wishes, rates, say)
        try:
            search.run()
        except MemoptError as error:
            tried.append((layout.label, error.problems[0].message))
            searches.append((float("inf"), search, error))
            continue
        step_s = search.result.time.estimate_s or search.solution.outcome.step_s
        tried.append((layout.label, f"{format_seconds(step_s)} a step"))
        searches.append((step_s, search, None))
    _, best, error = min(searches, key=lambda entry: entry[0])
    if error is not None:
        raise error
    say("the frontier, and what binds")
    return _tuned(best, wishes, tuple(tried), time.monotonic() - started)


def _tuned(search: Search, wishes: Wishes, tried: tuple[tuple[str, str], ...], elapsed_s: float) -> Tuned:
    """The whole answer for the layout that won."""
    chosen = (search.solution, search.result.measured.peak_bytes)
    return Tuned(
        text=search.text,
        result=search.result,
        layout=search.layout,
        solution=search.solution,
        explanation=explain(search.choices, search.solution, max_cuts=search.max_cuts),
        frontier=trace_frontier(
            search.choices,
            num_points=wishes.num_points,
            max_cuts=search.max_cuts,
            chosen=chosen,
            write=search.policy_of,
        ),
        presets=presets(search.choices),
        tried=tried,
        host_bytes=search.choices.host_bytes,
        rounds=search.rounds,
        elapsed_s=elapsed_s,
    )

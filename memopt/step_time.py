"""How long a step takes: an interval from the event simulator, what bounds it, and whether it is calibrated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .errors import MemoptError
from .estimate import Measured
from .plan import Plan
from .roofline import GUESS, OPTIMISTIC, PESSIMISTIC, Efficiency, Rates, bound_seconds, rates_for, seconds_of
from .simulate import Simulation, simulate
from .targets import Target
from .timeline import TRANSFERS, Task
from .tuning.costs import ModelCosts, assignment_of, model_costs
from .tuning.judge import step_tasks
from .tuning.problem import Problem

# Half the spread that stays after calibration: rates fitted on half of YaFSDP's published steps put 31 of 32 times of
# the other half within it, 7% off on average (docs/explanation/evidence-plan.md).
CALIBRATED_SPREAD = 0.15
_BOUND_NAMES = {
    "to_host": "host link",
    "to_device": "host link",
    "host_compute": "host compute",
    "collective": "fabric",
}


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one optimizer step.

    Attributes:
        estimate_s, low_s, high_s: None where the target's rates are unknown and nothing was measured.
        bound_by: `compute`, `hbm`, `host link`, `host compute` or `fabric`: what most of the step waits for.
        calibrated: Whether a measured step set the rates; otherwise they are stated guesses.
        least_transfer_s: No step can be shorter than its busiest copy direction at the link's full rate.
        exposed_s, hidden_fraction: Of host transfers, in the estimate.
        collectives_exposed_s: Seconds of the estimate in which the computation waits for collectives.
        model: `timeline` (traced), `layers` (the plan's layers) or None.
        from_what: What it rests on, one sentence.
    """

    estimate_s: float | None
    low_s: float | None
    high_s: float | None
    bound_by: str | None
    calibrated: bool
    least_transfer_s: float | None
    exposed_s: float | None = None
    hidden_fraction: float | None = None
    collectives_exposed_s: float | None = None
    model: str | None = None
    from_what: str = ""

    def to_json(self) -> dict[str, Any]:
        """The contract's keys and ours."""
        return {
            "estimate_s": self.estimate_s,
            "low_s": self.low_s,
            "high_s": self.high_s,
            "bound_by": self.bound_by,
            "calibrated": self.calibrated,
            "least_transfer_s": self.least_transfer_s,
            "model": self.model,
            "from_what": self.from_what,
        }


def step_time(
    measured: Measured, plan: Plan, target: Target, *, calibration: Efficiency | None = None, rates: Rates | None = None
) -> StepTime:
    """The interval for a plan on a target.

    Args:
        measured: What the backend found; its timeline is played where it has one.
        plan: For the model of the layers where it has none.
        target: Rates and links.
        calibration: Efficiencies from a measured step on this hardware; None: stated guesses, and a wider interval.
        rates: Instead of the target's (a calibrated CPU, whose rates nobody publishes).
    """
    least_s = least_transfer_s(measured, target)
    middle = rates or rates_for(target, calibration or GUESS)
    if middle is None:
        why = f"{target.name} publishes no compute rate; give a measured step with --calibrate"
        return StepTime(None, None, None, None, False, least_s, from_what=why)
    played = play(measured, plan, middle)
    if played is None:
        why = "the model has no traced step and no layers with known values"
        return StepTime(None, None, None, None, False, least_s, from_what=why)
    estimate_s = _with_schedule(played, measured)
    if calibration is not None or rates is not None:
        low_s, high_s = estimate_s * (1 - CALIBRATED_SPREAD), estimate_s * (1 + CALIBRATED_SPREAD)
        from_what = f"calibrated on a measured step of this hardware, ±{CALIBRATED_SPREAD:.0%}"
    else:
        ends = [_end(measured, plan, target, efficiency) for efficiency in (OPTIMISTIC, PESSIMISTIC)]
        low_s, high_s = min(*ends, estimate_s), max(*ends, estimate_s)
        from_what = f"not calibrated: {OPTIMISTIC.flops:.0%} to {PESSIMISTIC.flops:.0%} of peak FLOPs assumed"
    return StepTime(
        estimate_s=estimate_s,
        low_s=low_s,
        high_s=high_s,
        bound_by=_bound_by(played, middle),
        calibrated=calibration is not None or rates is not None,
        least_transfer_s=least_s,
        exposed_s=played.simulation.exposed_s,
        hidden_fraction=played.simulation.hidden_fraction,
        collectives_exposed_s=played.simulation.waits_s.get("collective", 0.0),
        model="timeline" if measured.timeline else "layers",
        from_what=from_what,
    )


@dataclass(frozen=True, slots=True)
class Played:
    """A simulated step and what it was made of."""

    tasks: tuple[Task, ...]
    seconds: tuple[float, ...]
    simulation: Simulation


def play(measured: Measured, plan: Plan, rates: Rates) -> Played | None:
    """Simulate the traced step, or the model of the plan's layers; None where there is neither."""
    tasks = measured.timeline or layer_tasks(measured, plan, rates)
    if not tasks:
        return None
    seconds = tuple(seconds_of(tasks, rates))
    return Played(tasks, seconds, simulate(tasks, seconds, link=rates.link))


def layer_tasks(measured: Measured, plan: Plan, rates: Rates) -> tuple[Task, ...]:
    """The step's model from the plan's layers; compute is stretched to the program's FLOPs where those are known."""
    try:
        costs = model_costs(plan, rates)
    except MemoptError:
        return ()  # a model without named layers has no such model; the caller says so
    assignment = assignment_of(plan, costs.classes)
    problem = layer_problem(plan, costs, rates)
    tasks = step_tasks(problem, assignment)
    if not measured.step_flops:
        return tasks
    again_s = sum(
        choice.recompute_s
        for layer, actions in zip(problem.layers(), assignment, strict=True)
        for choice, action in zip(layer.choices, actions, strict=True)
        if action == "recompute"
    )
    modelled = (costs.step_flops + again_s * rates.flops) * problem.steps
    stretch = measured.step_flops / modelled if modelled else 1.0
    return tuple(
        replace(task, seconds=task.seconds * stretch)
        if task.stream == "compute" and task.phase != "optimizer" and task.seconds
        else task
        for task in tasks
    )


def layer_problem(
    plan: Plan,
    costs: ModelCosts,
    rates: Rates,
    *,
    device_bytes: float = 1e18,
    host_bytes: float = 1e18,
    static_bytes: float = 0.0,
) -> Problem:
    """The tuning problem of a plan's layout and micro-batches."""
    return Problem(
        classes=costs.classes,
        static_bytes=static_bytes,
        device_bytes=device_bytes,
        host_bytes=host_bytes,
        link=rates.link,
        middle_s=costs.middle_s,
        tail_s=costs.tail_s,
        steps=plan.accumulate_steps,
    )


def least_transfer_s(measured: Measured, target: Target) -> float | None:
    """Bytes of the busier direction over the link's full rate, and both over the host's memory bandwidth."""
    busiest = max(measured.to_host_bytes, measured.to_device_bytes)
    if busiest == 0:
        return 0.0
    if target.host_link_bytes_per_s is None:
        return None
    least_s = busiest / target.host_link_bytes_per_s
    if target.host_dram_bytes_per_s is not None:
        share = target.host_dram_bytes_per_s / target.devices_per_host_dram
        least_s = max(least_s, (measured.to_host_bytes + measured.to_device_bytes) / share)
    return least_s


def _end(measured: Measured, plan: Plan, target: Target, efficiency: Efficiency) -> float:
    rates = rates_for(target, efficiency)
    played = None if rates is None else play(measured, plan, rates)
    if played is None:
        raise ValueError("rates were known at the guess and must be at the ends")
    return _with_schedule(played, measured)


def _with_schedule(played: Played, measured: Measured) -> float:
    """Where the backend read the compiler's schedule, its exposed seconds stand for the simulated ones."""
    exposed_s = (measured.overlap or {}).get("exposed_s")
    total_s = played.simulation.makespan_s
    if exposed_s is None or measured.timeline:
        return total_s
    return total_s - played.simulation.exposed_s + exposed_s


def _bound_by(played: Played, rates: Rates) -> str:
    """The account with most seconds: waits by stream, and compute by what bounds each task."""
    accounts: dict[str, float] = {}
    for stream, waited_s in played.simulation.waits_s.items():
        if stream in _BOUND_NAMES:
            name = _BOUND_NAMES[stream]
            accounts[name] = accounts.get(name, 0.0) + waited_s
    for task, seconds in zip(played.tasks, played.seconds, strict=True):
        if task.stream == "compute":
            by_phase = "hbm" if task.phase == "optimizer" else "compute"
            bound = {by_phase: seconds} if task.seconds is not None else bound_seconds(task, rates)
            for name, bound_s in bound.items():
                accounts[name] = accounts.get(name, 0.0) + bound_s
    return max(accounts, key=lambda name: accounts[name]) if accounts else "compute"


def overlap_of(measured: Measured, time: StepTime) -> Mapping[str, Any]:
    """The contract's `overlap`: the backend's reading of a schedule, or the simulation's, and which."""
    empty = {"transfers": None, "synchronous": None, "exposed_s": None, "hidden_fraction": None}
    collectives = {"collectives_exposed_s": time.collectives_exposed_s}
    if measured.overlap is not None:
        return {**empty, **collectives, "offset_audit": "unknown", "from": "schedule", **measured.overlap}
    counted = {"transfers": None, "synchronous": None}
    if measured.timeline:
        counted = {
            "transfers": sum(task.stream in TRANSFERS for task in measured.timeline),
            "synchronous": num_synchronous(measured.timeline),
        }
    return {
        **counted,
        "exposed_s": time.exposed_s,
        "hidden_fraction": time.hidden_fraction,
        **collectives,
        "offset_audit": "not_applicable",
        "from": "simulation",
    }


def num_synchronous(tasks: Sequence[Task]) -> int:
    """Host transfers with nothing computed beside them: the next computation issued waits for them."""
    found, following = 0, None
    for index in range(len(tasks) - 1, -1, -1):
        task = tasks[index]
        if task.stream in TRANSFERS:
            found += following is not None and index in tasks[following].after
        elif task.stream in ("compute", "host_compute"):
            following = index
    return found

"""`memopt plan`: what a policy takes on a target, measured by a backend that needs no such device, and judged."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from .backend import Backend, load_backend
from .calibrate import MeasuredRun, calibrated_rates, load_run, measured_seconds
from .errors import MemoptError, Problem, all_of
from .estimate import Measured
from .guarding import guarded, inspected
from .loading import load_policy, validate_options
from .lowering import make_plan as lower
from .plan import Plan
from .plan_result import AnyWorkload, PlanResult, Refused, Setting
from .policy import Policy
from .roofline import Rates
from .step_time import step_time
from .targets import Target, load_target
from .verdicts import capacity_of, verdicts
from .workloads import load_workload
from .workloads.sizes import with_sizes

__all__ = [
    "PlanResult",
    "Progress",
    "Refused",
    "Setting",
    "judged",
    "lowered",
    "measure",
    "plan_policies",
    "plan_policy",
    "prepare",
]

Progress = Callable[[str], None]


def prepare(
    *,
    workload: str | Path | AnyWorkload,
    backend: str | Backend,
    target: str | Target,
    world_size: int | None = None,
    budget: Mapping[str, int] | None = None,
    checks: Sequence[Callable[[], Any]] = (),
) -> Setting:
    """Load what a command names; cheap faults are found before anything is traced, and reported together.

    Args:
        workload, backend, target: What to plan for.
        world_size: Devices in all, instead of the target's number.
        budget: `device` and `host` bytes.
        checks: Further cheap calls whose problems belong beside these, such as loading the policy.

    Raises:
        MemoptError: An unknown backend, target or workload, or a world size the target cannot have.
    """
    loaded, chosen, described, *_ = all_of(
        lambda: _target(target, world_size),
        lambda: load_backend(backend) if isinstance(backend, str) else backend,
        lambda: load_workload(workload),
        *checks,
    )
    spec = inspected(chosen, described)
    spec = with_sizes(spec, described)
    return Setting(workload=described, backend=chosen, target=loaded, spec=spec, budget=dict(budget or {}))


def _target(target: str | Target, world_size: int | None) -> Target:
    loaded = load_target(target) if isinstance(target, str) else target
    if world_size is None:
        return loaded
    if world_size < 1:
        raise MemoptError.of("bad-world-size", f"a world of {world_size} devices; it must be at least 1")
    return loaded.with_devices(world_size)


def lowered(policy: Policy, setting: Setting) -> Plan:
    """The policy's plan for the setting.

    Raises:
        MemoptError: With every problem found.
    """
    options = validate_options(policy, setting.backend)
    return lower(policy, setting.spec, backend=setting.backend, world_size=setting.world_size, options=options)


def measure(plan: Plan, setting: Setting, *, progress: Progress | None = None) -> Measured:
    """The backend's figures for a plan.

    Raises:
        MemoptError: What the backend refuses, or `plan-crashed` for anything it did not foresee.
    """
    backend = setting.backend
    if getattr(backend, "estimate", None) is None:
        raise MemoptError.of(
            "plan-unsupported", f"backend `{backend.name}` cannot plan", hint="give a backend that can, or update it"
        )
    return guarded(
        f"the {backend.name} backend, planning for {setting.target.name},",
        lambda: backend.estimate(
            setting.workload, plan, setting.spec, target=setting.target, progress=progress
        ).check(),
    )


def plan_policy(
    policy: str | Path | Mapping[str, Any] | Policy,
    setting: Setting,
    *,
    name: str | None = None,
    rates: Rates | None = None,
    progress: Progress | None = None,
) -> PlanResult:
    """Plan one policy.

    Args:
        policy: A path, a mapping or a `Policy`.
        setting: From `prepare`.
        name: Shown for it; a path's stem when left out.
        rates: From calibration.
        progress: Told, in one line, what takes long.

    Raises:
        MemoptError: With every problem found.
    """
    started = time.monotonic()
    loaded = load_policy(policy)
    plan = lowered(loaded, setting)
    measured = measure(plan, setting, progress=progress)
    return judged(
        name or (Path(policy).stem if isinstance(policy, (str, Path)) else "policy"),
        plan,
        measured,
        setting,
        rates=rates,
        elapsed_s=time.monotonic() - started,
    )


def judged(
    name: str, plan: Plan, measured: Measured, setting: Setting, *, rates: Rates | None = None, elapsed_s: float = 0.0
) -> PlanResult:
    """Verdicts and step time over a measurement."""
    framework = setting.backend.name
    budget = {**plan.budget, **setting.budget}
    capacity = capacity_of(setting.target, framework, num_devices=setting.world_size)
    return PlanResult(
        policy=name,
        setting=setting,
        plan=plan,
        measured=measured,
        capacity=capacity,
        verdicts=verdicts(
            measured, capacity, target=setting.target, framework=framework, budget=budget, options=plan.options
        ),
        time=step_time(measured, plan, setting.target, rates=rates),
        budget=budget,
        elapsed_s=elapsed_s,
    )


def plan_policies(
    policies: Sequence[str | Path],
    setting: Setting,
    *,
    compiler_options: Mapping[str, Any] | None = None,
    calibrate: str | Path | None = None,
    progress: Progress | None = None,
) -> tuple[PlanResult | Refused, ...]:
    """Plan several files side by side; one that is refused does not stop the others.

    Args:
        policies: Files.
        setting: From `prepare`.
        compiler_options: Added to those of every policy, which win.
        calibrate: A comparison's `results.json` with a row of one of these policies.
        progress: As in `plan_policy`.

    Raises:
        MemoptError: All are refused and there is only one, or the calibration is.
    """
    run = None if calibrate is None else load_run(calibrate, target=setting.target)
    more = {"compiler_options": compiler_options or {}}
    results: list[PlanResult | Refused] = []
    for policy in policies:
        if progress is not None:
            progress(f"planning {policy}")
        try:
            loaded = load_policy(policy).with_backend_options(setting.backend.name, more)
            results.append(plan_policy(loaded, setting, name=Path(policy).stem, progress=progress))
        except MemoptError as error:
            if len(policies) == 1:
                raise
            results.append(Refused(Path(policy).stem, error.problems))
    if run is None:
        return tuple(results)
    return _calibrated(results, setting, run)


def _calibrated(
    results: list[PlanResult | Refused], setting: Setting, run: MeasuredRun
) -> tuple[PlanResult | Refused, ...]:
    steps = []
    for result in results:
        if isinstance(result, Refused):
            continue
        seconds = measured_seconds(
            run,
            backend=setting.backend.name,
            policy=result.policy,
            workload=setting.workload.name,
            world_size=setting.world_size,
        )
        if seconds is not None:
            steps.append((result.measured, result.plan, seconds))
    if not steps:
        known = ", ".join(f"{backend}/{policy}" for backend, policy in run.seconds)
        raise MemoptError(
            Problem(
                "calibrate-no-match",
                f"it has {known} for `{run.workload}`; none is one of these policies on {setting.backend.name} for "
                f"`{setting.workload.name}` with {setting.world_size} devices",
                hint="plan one of the policies that were measured too; the others are then calibrated by it",
                file=run.file,
            )
        )
    rates = calibrated_rates(steps, setting.target)
    return tuple(
        result
        if isinstance(result, Refused)
        else replace(result, time=step_time(result.measured, result.plan, setting.target, rates=rates))
        for result in results
    )

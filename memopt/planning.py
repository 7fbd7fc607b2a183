"""`memopt plan`: what a policy takes on a target, measured by a backend that needs no such device, and judged."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .backend import Backend, load_backend
from .calibrate import calibrated_rates, load_run, measured_seconds
from .errors import MemoptError, Problem
from .estimate import ROLES, Measured, PlannedBytes, planned_bytes
from .loading import load_policy, validate_options
from .lowering import make_plan as lower
from .plan import Plan
from .policy import Policy
from .quantities import format_seconds
from .roofline import Rates
from .spec import ModelSpec
from .step_time import StepTime, overlap_of, step_time
from .targets import Target, load_target
from .verdicts import Capacity, Verdict, advice, capacity_of, verdicts
from .workloads import HfWorkload, Workload, WorkloadConfig, load_workload
from .workloads.sizes import with_sizes

AnyWorkload = WorkloadConfig | Workload | HfWorkload
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What every policy of one command is planned for.

    Attributes:
        workload: Model, batch and optimizer.
        backend: That traces or compiles it.
        target: With as many devices as the world has.
        spec: The model's inventory.
        budget: `device` and `host` bytes from the command line; they replace the policy's.
    """

    workload: AnyWorkload
    backend: Backend
    target: Target
    spec: ModelSpec
    budget: Mapping[str, int] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        """Devices in all."""
        return self.target.num_devices


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanResult:
    """One policy on one target.

    Attributes:
        policy: The file's stem.
        setting: What it was planned for.
        plan: The lowered policy.
        measured: The backend's figures.
        capacity: What the target has.
        verdicts: Device, host pool, host RAM.
        time: The step.
        budget: What was asked for, command line first, then the policy.
        elapsed_s: Seconds this took.
    """

    policy: str
    setting: Setting
    plan: Plan
    measured: Measured
    capacity: Capacity
    verdicts: tuple[Verdict, ...]
    time: StepTime
    budget: Mapping[str, int]
    elapsed_s: float

    @property
    def fits(self) -> bool | None:
        """Every known limit is kept; None where the device's is not known."""
        answers = [verdict.fits for verdict in self.verdicts]
        return False if False in answers else answers[0]

    @property
    def is_over_budget(self) -> bool:
        """A budget was given and something exceeds it: the command's exit code is 1."""
        return any(verdict.fits is False and verdict.limit.startswith("the budget") for verdict in self.verdicts)

    @property
    def advice(self) -> tuple[str, ...]:
        """What to change, or know, biggest first."""
        settings = tuple(verdict.setting for verdict in self.verdicts if verdict.setting)
        too_large = any(verdict.fits is False for verdict in self.verdicts if verdict.name == "device")
        return (*settings, *advice(self.plan, self.measured, fits=not too_large), *self._about_overlap())

    def _about_overlap(self) -> tuple[str, ...]:
        """Transfers the compiler's schedule leaves exposed, and the option that pipelines them."""
        exposed_s, step_s = (self.measured.overlap or {}).get("exposed_s"), self.time.estimate_s
        options = self.plan.options.get("compiler_options") or {}
        option = "xla_gpu_enable_pipelined_host_offloading"
        if self.setting.target.kind != "gpu" or not exposed_s or not step_s or exposed_s < 0.05 * step_s:
            return ()
        share = f"{exposed_s / step_s:.0%} of the step"
        text = f"the schedule leaves {format_seconds(exposed_s)} of transfers exposed ({share})"
        if self.setting.backend.name != "jax" or options.get(option):
            return (f"{text}; offload less",)
        return (f"{text}; try `backend_options: {{jax: {{compiler_options: {{{option}: true}}, check: first_step}}}}`",)

    @property
    def left_out(self) -> tuple[str, ...]:
        """What no figure here covers."""
        return (*self.measured.left_out, *_left_out_of_target(self.setting.target, self.time, self.measured))

    @property
    def planned(self) -> PlannedBytes:
        """Bytes that follow from the plan alone."""
        return planned_bytes(self.plan)

    def to_json(self) -> dict[str, Any]:
        """The contract's keys for one policy, and ours beside them."""
        measured, capacity = self.measured, self.capacity
        return {
            "policy": self.policy,
            "ok": True,
            "backend": self.setting.backend.name,
            "target": self.setting.target.name,
            "world_size": self.setting.world_size,
            "method": measured.method,
            "device": {
                "peak_bytes": measured.peak_bytes,
                "by_role": {role: measured.by_role.get(role, 0) for role in ROLES},
                "attributed": measured.attributed,
                "capacity_bytes": capacity.capacity_bytes,
                "usable_bytes": capacity.usable_bytes,
                "reserve": [{"what": what, "bytes": size, "source": source} for what, size, source in capacity.reserve],
                "band_bytes": list(self.band_bytes),
                "peak_event": measured.peak_event,
                "by_unit": dict(measured.by_unit),
                "largest": [
                    {"path": live.path, "role": live.role, "unit": live.unit, "nbytes": live.nbytes}
                    for live in measured.largest
                ],
            },
            "host": {
                "bytes_per_device": measured.host_bytes,
                "bytes_per_node": measured.host_bytes * capacity.devices_per_node,
                "capacity_per_node": capacity.host_bytes_per_node,
                "devices_per_node": capacity.devices_per_node,
                "counted": measured.counted,
            },
            "traffic": {
                "to_host_bytes": measured.to_host_bytes,
                "to_device_bytes": measured.to_device_bytes,
                "collectives": {kind: dict(figures) for kind, figures in measured.collectives.items()},
            },
            "recompute": {"flops": measured.recompute_flops, "fraction": _fraction(measured)},
            "overlap": dict(overlap_of(measured, self.time)),
            "step_time": self.time.to_json(),
            "budget": dict(self.budget),
            "fits": self.fits,
            "verdicts": [verdict.to_json() for verdict in self.verdicts],
            "advice": list(self.advice),
            "notes": [*measured.notes, *self.plan.warnings],
            "left_out": list(self.left_out),
            "versions": dict(measured.versions),
            "elapsed_s": round(self.elapsed_s, 3),
        }

    @property
    def band_bytes(self) -> tuple[int, int]:
        """Live bytes, and live bytes plus the reserve: what an allocator may report lies between.

        What JAX leaves outside its preallocated share is no part of it: the allocator's own figures never contain it.
        """
        peak = self.measured.peak_bytes
        return peak, peak + sum(size for what, size, _ in self.capacity.reserve if not what.startswith("outside"))


@dataclass(frozen=True, slots=True)
class Refused:
    """A policy that could not be planned, beside others that could."""

    policy: str
    problems: tuple[Problem, ...]

    def to_json(self) -> dict[str, Any]:
        """`ok: false` with the problems."""
        return {"policy": self.policy, "ok": False, "problems": [problem.to_json() for problem in self.problems]}


def prepare(
    *,
    workload: str | Path | AnyWorkload,
    backend: str | Backend,
    target: str | Target,
    world_size: int | None = None,
    budget: Mapping[str, int] | None = None,
) -> Setting:
    """Load what a command names; cheap faults are found before anything is traced.

    Raises:
        MemoptError: An unknown backend, target or workload, or a world size the target cannot have.
    """
    loaded = load_target(target) if isinstance(target, str) else target
    if world_size is not None:
        if world_size < 1:
            raise MemoptError.of("bad-world-size", f"a world of {world_size} devices; it must be at least 1")
        loaded = loaded.with_devices(world_size)
    chosen = load_backend(backend) if isinstance(backend, str) else backend
    described = load_workload(workload)
    spec = guarded(f"inspecting the model of `{described.name}`", lambda: chosen.inspect_workload(described))
    spec = with_sizes(spec, described)
    return Setting(workload=described, backend=chosen, target=loaded, spec=spec, budget=dict(budget or {}))


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


def guarded(what: str, call: Callable[[], Any]) -> Any:
    """Run framework and user code; whatever it raises becomes one error that names the place.

    Raises:
        MemoptError: The framework's own, or `plan-crashed`.
    """
    try:
        return call()
    except MemoptError:
        raise
    except Exception as error:
        frame = _frame_of(error)
        raise MemoptError(
            Problem(
                "plan-crashed",
                f"{what} raised {type(error).__name__}: {str(error).strip() or 'without a message'}",
                hint="the place is the innermost line outside the frameworks; `memopt doctor` prints the versions",
                file=frame.filename if frame else None,
                line=frame.lineno if frame else None,
            )
        ) from error


def _frame_of(error: Exception) -> traceback.FrameSummary | None:
    """The innermost frame outside site-packages: the user's line where there is one, else ours."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "site-packages" not in frame.filename and not frame.filename.startswith("<")]
    outside = [frame for frame in own if f"{Path(__file__).parent}" not in frame.filename]
    return (outside or own or [None])[-1]


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
        verdicts=verdicts(measured, capacity, target=setting.target, framework=framework, budget=budget),
        time=step_time(measured, plan, setting.target, rates=rates),
        budget=budget,
        elapsed_s=elapsed_s,
    )


def plan_policies(
    policies: Sequence[str | Path],
    setting: Setting,
    *,
    calibrate: str | Path | None = None,
    progress: Progress | None = None,
) -> tuple[PlanResult | Refused, ...]:
    """Plan several files side by side; one that is refused does not stop the others.

    Args:
        policies: Files.
        setting: From `prepare`.
        calibrate: A comparison's `results.json` with a row of one of these policies.
        progress: As in `plan_policy`.

    Raises:
        MemoptError: All are refused and there is only one, or the calibration is.
    """
    run = None if calibrate is None else load_run(calibrate, target=setting.target)
    results: list[PlanResult | Refused] = []
    for policy in policies:
        if progress is not None:
            progress(f"planning {policy}")
        try:
            results.append(plan_policy(policy, setting, progress=progress))
        except MemoptError as error:
            if len(policies) == 1:
                raise
            results.append(Refused(Path(policy).stem, error.problems))
    if run is None:
        return tuple(results)
    return _calibrated(results, setting, run)


def _calibrated(results: list[PlanResult | Refused], setting: Setting, run: Any) -> tuple[PlanResult | Refused, ...]:
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


def _fraction(measured: Measured) -> float | None:
    if measured.recompute_flops is None or not measured.step_flops:
        return None
    return measured.recompute_flops / measured.step_flops


def _left_out_of_target(target: Target, step: StepTime, measured: Measured) -> tuple[str, ...]:
    """What the target's figures and the step's model do not cover."""
    found = []
    if target.kind != "cpu" and target.host_link_bytes_per_s is None and measured.to_host_bytes:
        found.append("host transfers take no time in the estimate: the target's host link rate is not published")
    if target.assumed:
        found.append(f"assumed, no source: {', '.join(target.assumed)} of {target.model}")
    if target.kind == "gpu" and target.host_link_bytes_per_s is not None:
        found.append("contention of host links behind one PCIe switch, and of copies with compute for device memory")
    if step.estimate_s is not None and not step.calibrated:
        found.append("kernel launch gaps and stragglers are inside the interval, not the estimate")
    if target.kind != "cpu":
        found.append("the data loader, checkpoints and other processes in host memory")
    return tuple(found)

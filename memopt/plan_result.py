"""One policy on one target: what was measured, what it is judged to be, and the JSON a command prints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .backend import Backend
from .errors import Problem
from .estimate import ROLES, Measured, PlannedBytes, planned_bytes
from .plan import Plan
from .quantities import format_bytes, format_seconds
from .spec import ModelSpec
from .step_time import StepTime, overlap_of
from .targets import Target
from .verdicts import Capacity, Verdict, advice
from .workloads import HfWorkload, Workload, WorkloadConfig

_FAST_DTYPES = ("bfloat16", "float16")
AnyWorkload = WorkloadConfig | Workload | HfWorkload


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
        """What to change, or know, biggest first; a backend's warnings before all."""
        settings = tuple(verdict.setting for verdict in self.verdicts if verdict.setting)
        too_large = any(verdict.fits is False for verdict in self.verdicts if verdict.name == "device")
        about = advice(self.plan, self.measured, fits=not too_large)
        return (*self.measured.warnings, *settings, *about, *self._about_allocator(), *self._about_overlap())

    def _about_allocator(self) -> tuple[str, ...]:
        """An allocator that would want more than the device has gives its cache back at every step, which is slow."""
        held, capacity_bytes = self.measured.reserved_bytes, self.capacity.capacity_bytes
        if not held or capacity_bytes is None:
            return ()
        outside = sum(size for what, size, _ in self.capacity.reserve if what != "fragmentation")
        default, left_bytes = held["default"], capacity_bytes - outside
        if default <= left_bytes or self.measured.peak_bytes > left_bytes:
            return ()
        text = (
            f"torch's allocator would reserve {format_bytes(default)} of {format_bytes(left_bytes)} and then flush it"
        )
        less = held["expandable_segments"]
        if less >= default:
            return (f"{text} in every step, which is slow",)
        return (f"{text}; PYTORCH_ALLOC_CONF=expandable_segments:True makes that {format_bytes(less)}",)

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
        return (*self.measured.left_out, *_left_out_of_target(self.setting.target, self.time, self.measured, self.plan))

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
                "reserved_bytes": dict(self.measured.reserved_bytes),
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
        Where the allocator was replayed, what it held beyond live bytes takes the place of the assumed fragmentation.
        """
        peak = self.measured.peak_bytes
        beyond = {what: size for what, size, _ in self.capacity.reserve if not what.startswith("outside")}
        if self.measured.reserved_bytes:
            beyond["fragmentation"] = max(self.measured.reserved_bytes.values()) - peak
        return peak, peak + sum(beyond.values())


@dataclass(frozen=True, slots=True)
class Refused:
    """A policy that could not be planned, beside others that could."""

    policy: str
    problems: tuple[Problem, ...]

    def to_json(self) -> dict[str, Any]:
        """`ok: false` with the problems."""
        return {"policy": self.policy, "ok": False, "problems": [problem.to_json() for problem in self.problems]}


def _fraction(measured: Measured) -> float | None:
    if measured.recompute_flops is None or not measured.step_flops:
        return None
    return measured.recompute_flops / measured.step_flops


def _left_out_of_target(target: Target, step: StepTime, measured: Measured, plan: Plan) -> tuple[str, ...]:
    """What the target's figures and the step's model do not cover."""
    found = []
    if target.kind != "cpu" and target.host_link_bytes_per_s is None and measured.to_host_bytes:
        found.append("host transfers take no time in the estimate: the target's host link rate is not published")
    if target.assumed:
        found.append(f"assumed, no source: {', '.join(target.assumed)} of {target.model}")
    if target.kind == "gpu" and target.host_link_bytes_per_s is not None:
        found.append("contention of host links behind one PCIe switch, and of copies with compute for device memory")
    if target.kind != "cpu" and step.estimate_s is not None and plan.precision.get("compute") not in _FAST_DTYPES:
        found.append("products in float32, where there are any: they are timed at the bfloat16 rate")
    if step.estimate_s is not None and not step.calibrated:
        found.append("kernel launch gaps and stragglers are inside the interval, not the estimate")
    if target.kind != "cpu":
        found.append("the data loader, checkpoints and other processes in host memory")
    return tuple(found)

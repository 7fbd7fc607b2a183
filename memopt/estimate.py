"""What a plan costs: bytes by role and memory kind from a `Plan` alone, and the type backends report measurements in.

`planned_bytes` needs nothing but the plan. `Measured` is what `BACKEND.estimate` returns: the part only a framework can
know. `verdicts` turns either into fits or does not, by how much, and what to change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .errors import MemoptError
from .plan import Plan
from .timeline import Task

ROLES = ("param", "grad", "optimizer_state", "activation", "gathered", "temp")
METHODS = ("xla-aot", "fake-trace")


@dataclass(frozen=True, slots=True)
class LiveTensor:
    """One tensor alive at the peak; `nbytes` per device."""

    path: str
    role: str
    nbytes: int
    unit: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a backend measured for one policy on one target; everything per device and per optimizer step.

    Attributes:
        method: `xla-aot` (the target's compiler) or `fake-trace` (live tensor bytes of a traced step).
        by_role: Device bytes at the peak by role (`ROLES`); their sum
            is the peak. Missing roles are zero.
        host_bytes: Host bytes held at the host's peak by this device's rank.
        pinned_bytes: The part of `host_bytes` in the framework's pinned pool; None: all of it.
        to_host_bytes, to_device_bytes: Bytes over the host link in one optimizer step.
        collectives: Kind (`all_gather`) -> `{"count": int, "bytes": int}`, bytes as in `Task.nbytes`.
        step_flops: FLOPs of the whole step as the program runs it, recompute included; None where unknown.
        recompute_flops: The part that is computed a second time.
        timeline: The step as tasks; empty where the backend cannot give one (the step's model is then used).
        overlap: The contract's `overlap` keys where the backend read a schedule; None: taken from the simulation.
        reserved_bytes: What the framework's allocator would take from the device, by its setting (`default`,
            `expandable_segments`), from a replay of the step; empty where it was not played.
        memory_timeline: (event, device bytes) along the step, where traced.
        largest: The largest tensors at the peak, biggest first.
        by_unit: Unit -> device bytes at the peak, where known.
        peak_event: What was running at the peak, e.g. `backward of layers.31`.
        warnings: What must be seen before the figures are believed, such as an offload without its whole effect.
        notes: How the figures were got: depths traced and extrapolated, options the compiler was given.
        attributed: True where the split by role is attributed rather than read.
        counted: True where host bytes are counted on the program because the target has one memory.
        left_out: What these figures do not cover, one sentence each.
        versions: Package -> version.
    """

    method: str
    by_role: Mapping[str, int]
    host_bytes: int = 0
    pinned_bytes: int | None = None
    to_host_bytes: int = 0
    to_device_bytes: int = 0
    collectives: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    step_flops: float | None = None
    recompute_flops: float | None = None
    timeline: tuple[Task, ...] = ()
    overlap: Mapping[str, Any] | None = None
    reserved_bytes: Mapping[str, int] = field(default_factory=dict)
    memory_timeline: tuple[tuple[str, int], ...] = ()
    largest: tuple[LiveTensor, ...] = ()
    by_unit: Mapping[str, int] = field(default_factory=dict)
    peak_event: str | None = None
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    attributed: bool = False
    counted: bool = False
    left_out: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def peak_bytes(self) -> int:
        """Device bytes at the peak: the roles' sum."""
        return sum(self.by_role.values())

    def check(self) -> Measured:
        """This, once its figures make sense.

        Raises:
            MemoptError: `bad-measurement`: an unknown role or method, a negative figure, or a peak of nothing (a
                compiler that reports zeros has reported nothing).
        """
        faults = [f"unknown role `{role}`" for role in self.by_role if role not in ROLES]
        faults += [f"negative bytes for `{role}`" for role, nbytes in self.by_role.items() if nbytes < 0]
        if self.method not in METHODS:
            faults.append(f"unknown method `{self.method}`")
        if self.peak_bytes <= 0:
            faults.append("the peak is 0 bytes: the compiler or tracer reported nothing")
        for name in ("host_bytes", "to_host_bytes", "to_device_bytes"):
            if getattr(self, name) < 0:
                faults.append(f"negative `{name}`")
        if faults:
            raise MemoptError.of(
                "bad-measurement",
                "the backend's figures cannot be right: " + "; ".join(faults),
                hint="no figure is shown rather than a wrong one; report the versions that `memopt doctor` prints",
            )
        return self


@dataclass(frozen=True, slots=True)
class PlannedBytes:
    """Bytes per device that follow from a plan alone.

    Attributes:
        resident: (role, memory kind) -> bytes held between steps (parameters, gradients while they live, state).
        saved: Residual (`keep`, `recompute`, `offload`) -> activation bytes.
        gathered: The two largest neighbouring units whole, in the compute dtype: what sharding must hold at once.
        full_grad: Whole gradients kept between micro-batches (`accumulate: {reduce: last}`).
        unknown: Rows whose bytes are not known (no example input).
    """

    resident: Mapping[tuple[str, str], int]
    saved: Mapping[str, int]
    gathered: int
    full_grad: int
    unknown: tuple[str, ...]


ITEMSIZE = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "bool": 1}


def planned_bytes(plan: Plan) -> PlannedBytes:
    """Sum a plan's rows by role, memory kind and residual; needs no framework.

    A parameter's row that is sharded inside a unit makes that unit's whole bytes appear in `gathered` while it is used.
    """
    resident: dict[tuple[str, str], int] = {}
    saved: dict[str, int] = {"keep": 0, "recompute": 0, "offload": 0}
    unknown: list[str] = []
    for row in plan.rows:
        if row.nbytes is None:
            unknown.append(row.path)
        elif row.role == "activation":
            saved[row.residual or "keep"] += row.nbytes
        else:
            key = (row.role, row.memory_kind)
            resident[key] = resident.get(key, 0) + row.nbytes
    return PlannedBytes(resident, saved, _gathered(plan), _full_grad(plan), tuple(unknown))


ROOT = "(root)"
"""Name, in `unit_whole_bytes`, of what belongs to no unit: it is gathered at the start and held to the end."""


def unit_whole_bytes(plan: Plan) -> dict[str, int]:
    """Unit -> bytes of its sharded (or host-held) parameters once gathered, in the compute dtype."""
    whole: dict[str, int] = {}
    width = ITEMSIZE.get(plan.precision.get("compute", ""), 0)
    for row in plan.rows_of("param"):
        if row.global_nbytes is None or not (row.layout or row.memory_kind != "device"):
            continue
        held = ITEMSIZE.get(row.dtype or "", 0)
        as_computed = row.global_nbytes * width // held if width and held and row.trainable else row.global_nbytes
        unit = row.unit or ROOT
        whole[unit] = whole.get(unit, 0) + as_computed
    return whole


def _gathered(plan: Plan) -> int:
    whole = unit_whole_bytes(plan)
    kept, freed = whole.get(ROOT, 0), []
    for unit in plan.units:
        size, parts = whole.get(unit.name, 0), unit.reshard_after_forward
        if parts is False:
            kept += size
        elif parts is not True:  # between forward and backward it is split over so many devices
            kept += size // parts
        freed.append(0 if parts is False else size)
    pairs = [sum(freed[index : index + 2]) for index in range(len(freed))]
    return kept + max(pairs, default=0)


def _full_grad(plan: Plan) -> int:
    if plan.accumulate_steps == 1 or plan.accumulate_reduce == "each":
        return 0
    sharded = {row.path for row in plan.rows_of("param") if row.layout}
    return sum(row.global_nbytes or 0 for row in plan.rows_of("grad") if row.path in sharded)

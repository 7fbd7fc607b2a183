"""Fits or does not, by how much, and what to change: verdicts over a measurement, a plan, a target and a budget.

Three limits are judged apart, because they have three remedies: the device, the framework's pinned host pool, and the
host memory that all ranks of a node share.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import psutil

from .estimate import ROOT, Measured, planned_bytes, unit_whole_bytes
from .plan import Plan
from .quantities import format_bytes
from .targets import Target, framework_fact

_FRAMEWORKS = ("jax", "jaxlib", "torch")


@dataclass(frozen=True, slots=True)
class Verdict:
    """One limit.

    Attributes:
        name: `device`, `host pool` or `host RAM`.
        fits: Whether `needed_bytes` is within `limit_bytes`; None where the limit is unknown.
        needed_bytes: What the plan takes.
        limit_bytes: What there is, reserve taken off.
        limit: What the limit is: a budget, what the framework takes by default, a node's memory.
        setting: What to change when it does not fit, or what the policy needs set before it runs.
    """

    name: str
    fits: bool | None
    needed_bytes: int
    limit_bytes: int | None
    limit: str
    setting: str | None = None

    @property
    def over_bytes(self) -> int:
        """By how much it does not fit; negative: by how much it does."""
        return 0 if self.limit_bytes is None else self.needed_bytes - self.limit_bytes

    def render(self) -> str:
        """One sentence.

        >>> Verdict("device", False, 3 * 2**30, 2 * 2**30, "the budget").render()
        'device: 3.00 GiB of 2.00 GiB (the budget): over by 1.00 GiB'
        """
        head = f"{self.name}: {format_bytes(self.needed_bytes)}"
        if self.limit_bytes is None:
            return f"{head}; the limit is not known ({self.limit})"
        over = self.over_bytes
        state = f"over by {format_bytes(over)}" if over > 0 else f"fits, {format_bytes(-over)} to spare"
        return f"{head} of {format_bytes(self.limit_bytes)} ({self.limit}): {state}"

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a target has for a program of one framework, per device and per node; None where it is not known."""

    capacity_bytes: int | None
    usable_bytes: int | None
    host_bytes_per_node: int | None
    devices_per_node: int
    reserve: tuple[tuple[str, int, str], ...]


def capacity_of(target: Target, framework: str, *, num_devices: int) -> Capacity:
    """The target's memory. On the CPU it is this machine's, which all ranks on it share."""
    if target.kind == "cpu":
        machine_bytes = psutil.virtual_memory().total
        share = machine_bytes // num_devices
        return Capacity(share, share, machine_bytes, num_devices, ())
    per_node = min(target.devices_per_node, num_devices)
    return Capacity(
        target.capacity_bytes,
        target.usable_bytes(framework),
        target.host_bytes_per_node,
        per_node,
        target.reserve(framework),
    )


def verdicts(
    measured: Measured,
    capacity: Capacity,
    *,
    target: Target,
    framework: str,
    budget: Mapping[str, int],
    options: Mapping[str, Any] | None = None,
) -> tuple[Verdict, ...]:
    """Judge all limits; the host's only where host bytes are held on a host of its own.

    Args:
        measured: The backend's figures.
        capacity: What the target has.
        target, framework: Where it runs.
        budget: `device` and `host` bytes.
        options: The framework's `backend_options` of the policy: JAX's may declare the pinned pool it is run with.
    """
    found = []
    if budget.get("device") is not None:
        found.append(_device_budget(measured, budget["device"]))
    if not found or (capacity.usable_bytes is not None and budget["device"] > capacity.usable_bytes):
        found.append(_device(measured, capacity, target, framework))
    if measured.host_bytes and target.kind != "cpu":
        per_node = measured.host_bytes * capacity.devices_per_node
        pinned = measured.host_bytes if measured.pinned_bytes is None else measured.pinned_bytes
        declared_gib = (options or {}).get("pinned_pool_gib")
        pool = _pool(pinned * capacity.devices_per_node, target, framework, declared_gib)
        found += ([pool] if pool else []) + [_host_ram(per_node, capacity, budget.get("host"))]
    elif measured.host_bytes and budget.get("host"):
        per_node = measured.host_bytes * capacity.devices_per_node
        found.append(_host_ram(per_node, capacity, budget["host"]))
    return tuple(found)


def _device_budget(measured: Measured, budget_bytes: int) -> Verdict:
    needed = measured.peak_bytes
    over = needed > budget_bytes
    setting = f"choose a policy that holds less, or raise the budget above {format_bytes(needed)}" if over else None
    return Verdict("device", not over, needed, budget_bytes, "the budget", setting)


def _device(measured: Measured, capacity: Capacity, target: Target, framework: str) -> Verdict:
    needed, usable = measured.peak_bytes, capacity.usable_bytes
    if usable is None:
        return Verdict("device", None, needed, None, f"{target.name} has no published capacity")
    limit = "this machine's memory over its ranks" if target.kind == "cpu" else f"what {framework} can use by default"
    setting = None
    if needed > usable:
        setting = "recompute or offload more, or shard over more devices"
        whole = capacity.capacity_bytes or 0
        if framework == "jax" and target.kind == "gpu" and needed < 0.95 * whole:
            share = math.ceil(needed / whole * 100 + 1) / 100
            setting = f"set XLA_PYTHON_CLIENT_MEM_FRACTION={share:.2f} (it is 0.75 by default), or {setting}"
    return Verdict("device", needed <= usable, needed, usable, limit, setting)


POOL_SETTING = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"  # read by XLA's client when it starts, in units of 2**30 bytes


def _pool(pinned_bytes: int, target: Target, framework: str, declared_gib: int | None) -> Verdict | None:
    """JAX pins host memory in a pool with a cap of its own, one pool per process; a node is usually one process.

    The cap is a setting of the process. A policy that declares it (`pinned_pool_gib`) is judged by that, and what has
    to be set is said; before the first step the real setting is compared with what the step needs.
    """
    if framework != "jax" or target.kind != "gpu":
        return None
    cap = int(framework_fact("jax_gpu_pinned_pool_bytes").value or 0)
    limit = "the pinned pool's cap, one process per node"
    if declared_gib is not None:
        cap, limit = declared_gib * 2**30, "the pinned pool the policy is run with, one process per node"
    fits = pinned_bytes <= cap
    wanted = pool_gib(pinned_bytes)
    if not fits:
        setting = f"set {POOL_SETTING}={wanted} in every process, before JAX starts"
        if declared_gib is not None:
            setting = f"raise `pinned_pool_gib` to {wanted}, and {setting}"
        return Verdict("host pool", False, pinned_bytes, cap, limit, setting)
    needed = f"this policy needs {POOL_SETTING}={declared_gib} in every process, before JAX starts"
    return Verdict("host pool", True, pinned_bytes, cap, limit, None if declared_gib is None else needed)


def pool_gib(pinned_bytes: int) -> int:
    """The pool to ask for, in GiB: a twentieth above what is pinned, for the allocator's rounding.

    >>> pool_gib(120 * 2**30)
    126
    """
    return math.ceil(pinned_bytes * 1.05 / 2**30)


def _host_ram(per_node: int, capacity: Capacity, budget_bytes: int | None) -> Verdict:
    ranks = f"{capacity.devices_per_node} rank{'s' if capacity.devices_per_node > 1 else ''}"
    limit_bytes = budget_bytes if budget_bytes is not None else capacity.host_bytes_per_node
    limit = f"the budget per node, {ranks}" if budget_bytes is not None else f"the node's memory, {ranks}"
    if limit_bytes is None:
        return Verdict("host RAM", None, per_node, None, "the target's host memory is not published")
    setting = None
    if per_node > limit_bytes:
        share = limit_bytes / per_node
        setting = f"offload less: `fraction: {math.floor(share * 100) / 100}` of it would fit; no setting adds memory"
    return Verdict("host RAM", per_node <= limit_bytes, per_node, limit_bytes, limit, setting)


def advice(plan: Plan, measured: Measured, *, fits: bool | None) -> tuple[str, ...]:
    """What a person should know about this plan, or change: the facts that surprise people, biggest first."""
    found: list[tuple[int, str]] = []
    found += _about_gathered(plan, measured)
    found += _about_sharding(plan, measured)
    whole = planned_bytes(plan).full_grad
    if whole:
        text = f"`accumulate: {{reduce: last}}` keeps whole gradients between micro-batches: {format_bytes(whole)}"
        found.append((whole, f"{text}; `reduce: each` keeps shards"))
    found += _about_recompute(plan, measured)
    if fits is False:
        found += _about_activations(plan, measured)
    return tuple(text for _, text in sorted(found, key=lambda pair: -pair[0]))


def _about_gathered(plan: Plan, measured: Measured) -> list[tuple[int, str]]:
    """Units held whole through the peak, and a single unit around everything."""
    whole = unit_whole_bytes(plan)
    if not whole:
        return []
    sharded = [unit for unit in plan.units if whole.get(unit.name)]
    if len(sharded) == 1 and whole[sharded[0].name] > 0.5 * sum(whole.values()):
        size = whole[sharded[0].name]
        text = f"one unit, `{sharded[0].name}`, wraps everything: all {format_bytes(size)} of it are gathered at once"
        return [(size, f"{text}; name the repeated layers in `units` so that each is gathered alone")]
    found = _about_root(plan, whole.get(ROOT, 0), measured)
    for unit in sharded:
        size = whole[unit.name]
        if (
            unit.stack is None
            and (len(unit.members) > 1 or unit.reshard_after_forward is False)
            and size > 0.02 * measured.peak_bytes
        ):
            largest = max(unit.members, key=lambda member: _member_bytes(plan, member))
            text = f"unit `{unit.name}` is gathered whole: {format_bytes(size)}"
            if unit.reshard_after_forward is False:
                text = f"unit `{unit.name}` stays gathered: {format_bytes(size)}"
            found.append((size, f"{text}; give `{largest}` its own unit" if len(unit.members) > 1 else text))
    return found


def _about_root(plan: Plan, size: int, measured: Measured) -> list[tuple[int, str]]:
    """What no unit names is held whole through the peak: embedding and head, as a rule."""
    if size < 0.02 * measured.peak_bytes:
        return []
    rows = [row for row in plan.rows_of("param") if row.unit is None and row.layout]
    largest = sorted(rows, key=lambda row: -(row.global_nbytes or 0))[:2]
    names = " and ".join(f"`{row.path.rsplit('.', 1)[0]}`" for row in largest)
    text = f"what no unit names is gathered whole in the root: {format_bytes(size)}"
    return [(size, f"{text}; give {names} units of their own")]


def _member_bytes(plan: Plan, member: str) -> int:
    return sum(row.global_nbytes or 0 for row in plan.rows_of("param") if row.path.startswith(f"{member}."))


def _about_sharding(plan: Plan, measured: Measured) -> list[tuple[int, str]]:
    """What sharding can save at all: weights, gradients and state, never activations."""
    if plan.world_size == 1:
        return []
    by_role, peak = measured.by_role, measured.peak_bytes
    held = sum(by_role.get(role, 0) for role in ("param", "grad", "optimizer_state"))
    activations = by_role.get("activation", 0)
    could = held - sum(_share(plan, role, by_role.get(role, 0)) for role in ("param", "grad", "optimizer_state"))
    if activations > 0.5 * peak:
        text = f"activations are {activations / peak:.0%} of the peak, which sharding does not touch"
        return [(activations, f"{text} (it can save at most {format_bytes(could)} more); recompute or offload them")]
    return []


def _share(plan: Plan, role: str, held: int) -> int:
    """What would be left of a role were it sharded over the whole world."""
    rows = plan.rows_of(role)
    whole = sum(row.global_nbytes or 0 for row in rows if row.memory_kind == "device")
    return min(held, math.ceil(whole / plan.world_size))


def _about_recompute(plan: Plan, measured: Measured) -> list[tuple[int, str]]:
    """Values that a rule recomputes but that are alive at the peak all the same: a compiler undid it."""
    again = sum(row.nbytes or 0 for row in plan.rows_of("activation") if row.residual == "recompute" and row.nbytes)
    kept = sum(row.nbytes or 0 for row in plan.rows_of("activation") if row.residual == "keep" and row.nbytes)
    kept += measured.host_bytes if measured.counted else 0
    held = measured.by_role.get("activation", 0)
    if again < 0.05 * measured.peak_bytes or held < kept + 0.9 * again:
        return []
    versions = ", ".join(f"{name} {measured.versions[name]}" for name in _FRAMEWORKS if name in measured.versions)
    text = f"recompute has no effect with these versions ({versions}): {format_bytes(held)} of activations are alive"
    return [(again, f"{text} where {format_bytes(kept)} should be kept")]


def _about_activations(plan: Plan, measured: Measured) -> list[tuple[int, str]]:
    kept: dict[str, int] = {}
    for row in plan.rows_of("activation"):
        if row.residual in (None, "keep") and row.nbytes and row.tensor:
            kept[row.tensor] = kept.get(row.tensor, 0) + row.nbytes
    if not kept:
        return []
    tensor, size = max(kept.items(), key=lambda pair: pair[1])
    return [(size, f"`tensor: {tensor}` is kept in every layer: {format_bytes(size)}; recompute or offload it first")]

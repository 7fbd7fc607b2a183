"""What `memopt plan` asks this backend: the step compiled by the target's own compiler, in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from memopt.errors import MemoptError
from memopt.estimate import Measured
from memopt.plan import Plan
from memopt.spec import ModelSpec
from memopt.targets import Target
from memopt.workloads import Workload

from . import aot, compiler_options, effect
from .offset_audit import AuditResult

BUILDER = "memopt_jax.estimate_step:build"

_LEFT_OUT = {
    "gpu": (
        "kernels are compiled without autotuning on a device: another choice of kernel can need other scratch memory",
        "CUDA contexts and NCCL buffers live outside JAX's preallocated share and are not in the peak",
        "fragmentation of JAX's allocator",
    ),
    "tpu": ("the runtime's own buffers beyond what the compiler reserves",),
    "cpu": (
        "Python, the compiler and the data loader: the figures are the step's buffers",
        "an nnx optimizer's own step counter and random-number keys: a dozen bytes",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What the compiling process builds the step from.

    Attributes:
        workload: A configuration, or the reference that loads the workload again.
        plan, spec: As lowered.
        with_plain: Count the FLOPs of the step without a policy too.
    """

    workload: Any
    plan: Plan
    spec: ModelSpec
    with_plain: bool = True


def estimate(
    workload: Any, plan: Plan, spec: ModelSpec, *, target: Target, progress: Callable[[str], None] | None = None
) -> Measured:
    """Compiles the train step for `target` and reports memory, traffic, recompute and overlap.

    Where layers of a Python loop offload activations the step is compiled a second time with those kept, to compare.

    Raises:
        MemoptError: what `aot.compile_step` raises, and `workload-without-reference`.
    """
    step = compile_plan(workload, plan, spec, target=target, progress=progress)
    measured = to_measured(step, target)
    if target.kind == "cpu" or not offloads_in_a_loop(plan, spec):
        return measured
    # Layers in a Python loop are one straight program, in which copies to the host can hold more than they free.
    kept = compile_plan(workload, with_values_kept(plan), spec, target=target, progress=progress)
    sentence = effect.costs_more(offloaded_bytes=step.device.total, kept_bytes=kept.device.total)
    return measured if sentence is None else replace(measured, warnings=(sentence, *measured.warnings))


def compile_plan(
    workload: Any,
    plan: Plan,
    spec: ModelSpec,
    *,
    target: Target,
    progress: Callable[[str], None] | None = None,
    timeout_s: float = aot.DEFAULT_TIMEOUT_S,
    **changes: Any,
) -> aot.CompiledStep:
    """The compiled step of a plan; `changes` are fields of `aot.Request`."""
    options = compiler_options.options_for(
        target.kind, requested=plan.options.get("compiler_options"), offloads=offloads_anything(plan)
    )
    request = aot.Request(
        builder=BUILDER,
        payload=Job(workload=portable(workload), plan=plan, spec=spec),
        target=target.with_devices(plan.world_size),
        mesh=plan.mesh,
        variants=(options,),
    )
    (compiled,) = aot.compile_step(replace(request, **changes), timeout_s=timeout_s, progress=progress)
    return compiled


def offloads_anything(plan: Plan) -> bool:
    """Whether the plan keeps any tensor on the host."""
    return any(row.memory_kind != "device" or row.residual == "offload" for row in plan.rows)


def offloads_in_a_loop(plan: Plan, spec: ModelSpec) -> bool:
    """Whether activations of layers that are no scanned stack go to the host."""
    scanned = {stack.path for stack in spec.stacks if stack.kind == "scan"}
    units = {unit.name for unit in plan.units if unit.stack not in scanned}
    return any(row.residual == "offload" and row.unit in units for row in plan.rows_of("activation"))


def with_values_kept(plan: Plan) -> Plan:
    """The plan with offloaded activations kept on the device."""
    rows = tuple(replace(row, residual="keep") if row.residual == "offload" else row for row in plan.rows)
    return replace(plan, rows=rows)


def portable(workload: Any) -> Any:
    """What crosses to another process: a configuration as it is, a `Workload` by the reference it was loaded from.

    Raises:
        MemoptError: `workload-without-reference`, for one made in a running program.
    """
    if isinstance(workload, str) or not isinstance(workload, Workload):
        return workload
    if workload.ref is None:
        raise MemoptError.of(
            "workload-without-reference",
            f"the workload `{workload.name}` was made in this process; compiling happens in another one",
            hint="write it as a function in a file and name it FILE.py:FUNCTION or package.module:FUNCTION",
        )
    return workload.ref


def to_measured(step: aot.CompiledStep, target: Target) -> Measured:
    """The figures of a compiled step in the plan's terms."""
    is_cpu, report = target.kind == "cpu", step.overlap
    return Measured(
        method="xla-aot",
        by_role=_by_role(step, counted_host_bytes=_counted_host_bytes(step) if is_cpu else 0),
        host_bytes=_counted_host_bytes(step) if is_cpu else step.host.total,
        to_host_bytes=report.to_host_bytes if report is not None else step.sent_host_bytes,
        to_device_bytes=report.to_device_bytes if report is not None else step.sent_host_bytes,
        collectives=step.collectives,
        step_flops=step.compiled_flops if step.compiled_flops is not None else step.jaxpr_flops,
        recompute_flops=_recompute_flops(step),
        overlap=_overlap(step),
        warnings=_warnings(step, is_cpu=is_cpu),
        notes=(*_notes(step), *step.notes),
        attributed=True,
        counted=is_cpu,
        left_out=_LEFT_OUT[target.kind],
        versions=step.versions,
    ).check()


def _by_role(step: aot.CompiledStep, *, counted_host_bytes: int) -> dict[str, int]:
    """Arguments as they are, saved values as far as temporaries go, and the rest as `temp`; the sum is the total.

    A target with one memory holds what is counted as on the host in the same total: it is taken out, as a run's is.
    """
    param = step.argument_roles.get(("param", "device"), 0)
    state = step.argument_roles.get(("optimizer_state", "device"), 0)
    saved = min(step.residuals.get("device", 0), step.device.temp)
    if counted_host_bytes:
        saved = max(0, saved - step.sent_host_bytes)
    return {
        "param": param,
        "optimizer_state": state,
        "activation": saved,
        "temp": step.device.total - counted_host_bytes - param - state - saved,
    }


def _counted_host_bytes(step: aot.CompiledStep) -> int:
    return step.sent_host_bytes + _host_arguments(step)


def _host_arguments(step: aot.CompiledStep) -> int:
    return sum(size for (_, kind), size in step.argument_roles.items() if kind != "device")


def _recompute_flops(step: aot.CompiledStep) -> float | None:
    """By the program as written; what XLA recomputes on its own is in the compiled count and in the notes."""
    if step.plain_flops is None or step.jaxpr_flops is None:
        return None
    return max(0.0, step.jaxpr_flops - step.plain_flops)


def _overlap(step: aot.CompiledStep) -> Mapping[str, Any]:
    report = step.overlap
    if report is None:
        found: dict[str, Any] = {"transfers": [], "synchronous": [], "exposed_s": None, "hidden_fraction": None}
    else:
        found = report.to_json()
        if not step.link_is_known:
            seconds = [name for name in found if name.endswith("_s") or name == "hidden_fraction"]
            found.update(dict.fromkeys(seconds))
            for transfer in (*found["transfers"], *found["synchronous"]):
                transfer.update(transfer_s=None, exposed_s=None, hidden_fraction=None)
    audit: AuditResult = step.audit
    return {**found, "offset_audit": audit.verdict, "offsets": audit.to_json()}


def _notes(step: aot.CompiledStep) -> list[str]:
    notes = ["the peak is argument + output - alias + temp of the compiled program; its split by role is attributed"]
    if step.compiler_options:
        shown = ", ".join(f"{name}={value}" for name, value in sorted(step.compiler_options.items()))
        notes.append(f"compiler options: {shown}")
    if step.jaxpr_flops and step.compiled_flops is not None:
        ratio = step.compiled_flops / step.jaxpr_flops
        notes.append(f"the compiled program's matrix products are {ratio:.3f} of those written")
    if step.named_in_vain:
        named = ", ".join(f"{name} ({size} bytes)" for name, size in sorted(step.named_in_vain.items()))
        notes.append(f"named for the host, but the backward pass does not read it, so it is not sent: {named}")
    sent, kept = step.sent_host_bytes, step.host.temp
    if sent and kept > sent:
        notes.append(f"offloaded values: {sent} bytes sent by the program, {kept} compiled: layouts are padded")
    return notes


def _warnings(step: aot.CompiledStep, *, is_cpu: bool) -> tuple[str, ...]:
    """What must be seen before the figures are believed; where there is one memory, nothing goes to the host."""
    if is_cpu or step.over_capacity:
        return ()
    lost = effect.partly_without_effect(sent_bytes=step.sent_host_bytes, kept_bytes=step.host.temp)
    return () if lost is None else (lost,)

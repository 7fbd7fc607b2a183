"""The compiling process of `aot.py`: builds the step over a mesh of no devices, lowers it, compiles it for the target.

`python -m memopt_jax.aot_worker REQUEST RESULT`; REQUEST is a pickled `aot.Request`, RESULT the pickled answer.

Tracing goes over an abstract mesh, on which shardings keep their memory kind (a CUDA topology with no device would
drop `pinned_host` without a word); only the compile is told the devices.
"""

from __future__ import annotations

import importlib
import math
import pickle
import re
import resource
import sys
import time
import traceback
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from memopt.errors import MemoptError

from . import attribution, compiler_options, effect, flops, hlo, offset_audit, overlap, sent, topology
from .aot import PROGRESS_PREFIX, CompiledStep, MemoryFigures, Request

NOMINAL_LINK_BYTES_PER_S = 10e9

_PLATFORM = {"gpu": "cuda", "tpu": "tpu", "cpu": "cpu"}
_NO_MEMORY = re.compile(r"\(([\d.]+)([KMGT])\) exceeds available HBM|Used ([\d.]+)([KMGT]) of [\d.]+[KMGT] hbm")
_UNIT = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def main(asked: str, answered: str) -> None:
    """Answers one request; a `MemoptError` is an answer too."""
    request: Request = pickle.loads(Path(asked).read_bytes())
    sys.excepthook = partial(_tell_fault, Path(answered))
    try:
        answer: Any = compile_request(request)
    except MemoptError as error:
        answer = error
    Path(answered).write_bytes(pickle.dumps(answer))


def _tell_fault(answered: Path, kind: type[BaseException], fault: BaseException, trace: TracebackType | None) -> None:
    """Turns an error of the user's model (or ours) into an answer that names the place."""
    frames = traceback.extract_tb(trace)
    theirs = [frame for frame in frames if "site-packages" not in frame.filename and "/jax/" not in frame.filename]
    frame = (theirs or frames)[-1]
    error = MemoptError.of(
        "step-failed",
        f"the step could not be built: {kind.__name__}: {fault}",
        hint=f"it was raised at {frame.filename}:{frame.lineno} in `{frame.name}`",
    )
    answered.write_bytes(pickle.dumps(error))
    traceback.print_exception(kind, fault, trace)


def compile_request(request: Request) -> tuple[CompiledStep, ...]:
    """One `CompiledStep` per variant of compiler options."""
    import jax

    _say(f"asking for {request.target.name}")
    devices = topology.devices(request.target)
    mesh = abstract_mesh(request.mesh, devices)
    began_s = time.monotonic()
    _say("building the step")
    step = _builder(request.builder)(request.payload, mesh)
    _say("tracing")
    jitted = jax.jit(step.fn, donate_argnums=step.donate_argnums, out_shardings=step.out_shardings)
    traced = jitted.trace(*step.args)
    counted = flops.count(traced.jaxpr).total / len(devices)
    # With no concrete device in sight, lowering takes the client of the default device: it must be the target's.
    with jax.default_device(devices[0]):
        lowered = traced.lower(lowering_platforms=(_PLATFORM[request.target.kind],))
    trace_s = time.monotonic() - began_s
    plain = getattr(step, "plain_flops", None)
    traffic = _traffic(step, traced)
    versions, known = topology.versions(), ()
    made = []
    for number, options in enumerate(request.variants):
        _say(f"compiling {number + 1} of {len(request.variants)}")
        chosen = dict(options or {})
        if request.work_around and _is_known_to_fail(request, step):
            chosen, known = offset_audit.workaround(chosen), (_KNOWN.format(versions["jaxlib"]),)
        compiled = _compile(request, lowered, devices, chosen, step)
        compiled = _with(compiled, notes=(*known, *compiled.notes))
        made.append(_with(compiled, jaxpr_flops=counted, plain_flops=plain, trace_s=trace_s, **traffic))
    return tuple(made)


def _traffic(step: Any, traced: Any) -> dict[str, Any]:
    """What of the planned residuals the traced program sends; all of it where the builder cannot tell."""
    if not hasattr(step, "named_in_vain"):
        return {"sent_host_bytes": sum(step.offloaded.values())}
    found = sent.sent_to_host(traced.jaxpr.jaxpr)
    return {"sent_host_bytes": sum(found.values()) // step.shards, "named_in_vain": step.named_in_vain(found)}


def abstract_mesh(axes: tuple[tuple[str, int], ...], devices: tuple[Any, ...]) -> Any:
    """A mesh with these axes, and the devices' kind but none of the devices.

    Raises:
        MemoptError: `mesh-devices`, when the product of the axes is not the number of devices.
    """
    import jax
    import numpy as np

    names, sizes = tuple(name for name, _ in axes), tuple(size for _, size in axes)
    if math.prod(sizes) != len(devices):
        shown = " x ".join(f"{name} {size}" for name, size in axes)
        raise MemoptError.of(
            "mesh-devices",
            f"the mesh {shown} has {math.prod(sizes)} devices and the target has {len(devices)}",
            hint="give one axis -1, or name a target of that many devices",
        )
    grid = np.array(devices, dtype=object).reshape(sizes)
    return jax.sharding.Mesh(grid, names, axis_types=(jax.sharding.AxisType.Auto,) * len(names)).abstract_mesh


def _builder(name: str) -> Any:
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def _compile(request: Request, lowered: Any, devices: Any, options: dict[str, Any], step: Any) -> CompiledStep:
    import jax

    began_s = time.monotonic()
    try:
        compiled = lowered.compile(compiler_options=options or None, device_assignment=devices)
    except jax.errors.JaxRuntimeError as error:
        return _refused(request, error, options, step)
    except ValueError as error:
        raise compiler_options.explained(error, options, request.target.kind) from error
    compile_s = time.monotonic() - began_s
    text = _text(compiled, request)
    module = hlo.parse(text) if text is not None else None
    audited = offset_audit.AuditResult("not_applicable")
    if module is not None:
        audited = offset_audit.audit(module, platform=request.target.kind, compiler_options=options)
    if audited.verdict in ("wrong", "unknown") and request.work_around:
        _say(f"the recorded offsets are {audited.verdict}: compiling without them")
        return _work_around(request, lowered, devices, options, step, audited)
    device, host = figures(compiled.memory_analysis())
    result = CompiledStep(
        target=request.target.name,
        device=device,
        host=host,
        argument_roles=attribution.argument_bytes(step.args),
        residuals=attribution.residual_bytes(module) if module is not None else {},
        planned_host_bytes=sum(step.offloaded.values()),
        compiled_flops=flops.count_compiled(module).total if module is not None else None,
        audit=audited,
        compiler_options=options,
        text=text if request.keep_text else None,
        notes=() if module is not None else (_UNREADABLE,),
        versions=topology.versions(),
        compile_s=compile_s,
        peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )
    if request.target.kind != "cpu":
        effect.require_effect(sent_bytes=result.planned_host_bytes, kept_bytes=result.host.total)
    return _with_schedule(result, module, request) if module is not None else result


_UNREADABLE = (
    "this jaxlib cannot read the program that this libtpu compiled: memory is the compiler's own, the schedule and the "
    "compiled program's products are unknown"
)


def _text(compiled: Any, request: Request) -> str | None:
    """The program's text; None where a TPU's newer compiler writes one that this jaxlib cannot read.

    On a GPU the error stands: a program that cannot be read cannot be audited.
    """
    import jax

    try:
        return compiled.as_text()
    except jax.errors.JaxRuntimeError as error:
        if request.target.kind != "tpu":
            raise compiler_options.explained(error, {}, request.target.kind) from error
        return None


_KNOWN = (
    f"jaxlib {{}} records wrong slice offsets; compiled without the `{offset_audit.ANNOTATOR_PASS}` pass, "
    "which is unproven on a device: run the check first"
)


def _is_known_to_fail(request: Request, step: Any) -> bool:
    """Whether this compiler is known to record wrong offsets for a step like this: no need to compile it twice."""
    if request.target.kind != "gpu" or not offset_audit.is_affected(topology.versions()["jaxlib"]):
        return False
    on_host = any(kind != "device" for _, kind in attribution.argument_bytes(step.args))
    return on_host or sum(step.offloaded.values()) > 0


def _work_around(
    request: Request, lowered: Any, devices: Any, options: dict[str, Any], step: Any, first: Any
) -> CompiledStep:
    again = _compile(
        _with(request, work_around=False), lowered, devices, offset_audit.workaround(options), step
    )  # fmt: skip
    note = (
        f"this jaxlib records {len(first.of('wrong'))} wrong and {len(first.of('unknown'))} unknown slice offsets; "
        f"compiled without the `{offset_audit.ANNOTATOR_PASS}` pass, which is unproven on a device: run the check first"
    )
    return _with(again, notes=(*again.notes, note))


def _with_schedule(result: CompiledStep, module: hlo.Module, request: Request) -> CompiledStep:
    """Adds what the schedule says; a processor's program has none."""
    target = request.target
    if target.kind == "cpu" or not module.is_scheduled:
        return result
    link = request.link_bytes_per_s or target.host_link_bytes_per_s
    # Bytes and synchronous transfers need no rate. Where it is not published any will do to walk the schedule, and
    # `link_is_known` keeps the seconds from being shown.
    rates = overlap.rates_of(target, host_link_bytes_per_s=link or NOMINAL_LINK_BYTES_PER_S)
    report = overlap.read(module, target, rates=rates)
    return _with(result, overlap=report, collectives=report.collectives, link_is_known=link is not None)


def figures(analysis: Any) -> tuple[MemoryFigures, MemoryFigures]:
    """Device and host memory of `compiled.memory_analysis()`.

    Raises:
        MemoptError: `no-memory-figures`, where the compiler reports none: zero bytes are never shown as a result.
    """
    if analysis is None:
        raise MemoptError.of("no-memory-figures", "the compiler reports no memory figures for this program")
    device, host = (
        MemoryFigures(*(getattr(analysis, f"{space}{part}_size_in_bytes") for part in _PARTS))
        for space in ("", "host_")
    )
    if device.total <= 0:
        raise MemoptError.of("no-memory-figures", "the compiler reports 0 bytes for this program, which cannot be")
    return device, host


_PARTS = ("argument", "output", "alias", "temp")


def _refused(request: Request, error: Exception, options: Mapping[str, Any], step: Any) -> CompiledStep:
    """A TPU's compiler refuses what does not fit and says how much it needs; anything else is an error."""
    message = str(error)
    found = _NO_MEMORY.search(message)
    if found is None:
        unknown = compiler_options.explained(error, options, request.target.kind)
        raise unknown from error
    amount, unit = (part for part in found.groups() if part is not None)
    needed_bytes = int(float(amount) * _UNIT[unit])
    roles = attribution.argument_bytes(step.args)
    argument_bytes = sum(size for (_, kind), size in roles.items() if kind == "device")
    return CompiledStep(
        target=request.target.name,
        device=MemoryFigures(argument_bytes, 0, 0, max(needed_bytes - argument_bytes, 0)),
        host=MemoryFigures(0, 0, 0, 0),
        over_capacity=True,
        argument_roles=roles,
        planned_host_bytes=sum(step.offloaded.values()),
        compiler_options=dict(options),
        notes=("the compiler refused the program: " + message.splitlines()[0],),
        versions=topology.versions(),
    )


def _with(record: Any, **changes: Any) -> Any:
    import dataclasses

    return dataclasses.replace(record, **changes)


def _say(what: str) -> None:
    print(PROGRESS_PREFIX + what, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

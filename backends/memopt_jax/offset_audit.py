"""Checks the offsets that XLA's GPU compiler records for slices in loops against the program's own index arithmetic.

The GPU runtime copies a slice of a stacked buffer (an offloaded residual, say) at the byte offset recorded beside the
instruction, not at the index the instruction computes. Where the two disagree the wrong layer's data is read: wrong
gradients and no error (openxla/xla#46231). Here every recorded offset is evaluated for every iteration of its loop and
compared with the index. What it means and what to do is in docs/explanation/offset-audit.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from memopt.errors import MemoptError

from . import hlo
from .hlo import Instruction, Module
from .scalars import Frame, entry_frame

Verdict = Literal["right", "wrong", "worked_around", "unknown", "not_applicable"]

ANNOTATOR_PASS = "dynamic-slice-annotator"
_DISABLE = "xla_disable_hlo_passes"
MAX_OUTER_RUNS = 16  # iterations of an enclosing loop that are followed: the first and the last of them suffice

# Versions of jaxlib whose GPU compiler records wrong offsets for offloaded residuals: seen in compiled text.
FIRST_AFFECTED, FIRST_FIXED = (0, 10, 2), (0, 11, 1)


@dataclass(frozen=True, slots=True)
class Finding:
    """One recorded offset.

    Attributes:
        instruction: Name of the slice or update, and the computation it is in.
        direction: `to_device` for a read, `to_host` for a write, of a host buffer; `on_device` for other buffers.
        recorded: (byte offset, byte stride) as recorded.
        computed: (byte offset, byte stride) of the index operands over the first two iterations; None where unknown.
        verdict: `right`, `wrong` or `unknown`.
    """

    instruction: str
    direction: Literal["to_device", "to_host", "on_device"]
    recorded: tuple[int, int]
    computed: tuple[int, int] | None
    verdict: Literal["right", "wrong", "unknown"]


@dataclass(frozen=True, slots=True)
class AuditResult:
    """The verdict on one compiled program, and every recorded offset behind it."""

    verdict: Verdict
    findings: tuple[Finding, ...] = ()

    def of(self, verdict: str) -> tuple[Finding, ...]:
        """The findings with that verdict."""
        return tuple(finding for finding in self.findings if finding.verdict == verdict)

    def to_json(self) -> dict[str, Any]:
        """Verdict, counts, and the findings that are not right."""
        counts = {verdict: len(self.of(verdict)) for verdict in ("right", "wrong", "unknown")}
        bad = [
            {"instruction": finding.instruction, "direction": finding.direction,
             "recorded": list(finding.recorded), "computed": list(finding.computed) if finding.computed else None}
            for finding in self.findings if finding.verdict != "right"
        ]  # fmt: skip
        return {"verdict": self.verdict, "counts": counts, "not_right": bad}


def audit(
    text_or_module: str | Module, *, platform: str = "gpu", compiler_options: Mapping[str, Any] | None = None
) -> AuditResult:
    """Judges the offsets recorded in a compiled program.

    Args:
        text_or_module: What `compiled.as_text()` returns, or that parsed.
        platform: `gpu` (also `cuda`); on any other nothing is recorded and the audit does not apply.
        compiler_options: What it was compiled with, to tell a program whose recording was switched off.

    Returns:
        `right` when every recorded offset equals the index at every iteration; `wrong` when one does not; `unknown`
        when one could not be evaluated; `worked_around` when recording was switched off and nothing is recorded;
        `not_applicable` when nothing is recorded and nothing needed to be.
    """
    if platform not in ("gpu", "cuda"):
        return AuditResult("not_applicable")
    module = hlo.parse(text_or_module) if isinstance(text_or_module, str) else text_or_module
    findings = tuple(_findings(module))
    if any(finding.verdict == "wrong" for finding in findings):
        return AuditResult("wrong", findings)
    if any(finding.verdict == "unknown" for finding in findings):
        return AuditResult("unknown", findings)
    if findings:
        return AuditResult("right", findings)
    switched_off = ANNOTATOR_PASS in str((compiler_options or {}).get(_DISABLE, "")).split(",")
    return AuditResult("worked_around" if switched_off else "not_applicable")


def workaround(compiler_options: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Compiler options with the recording of offsets switched off as well: the runtime then computes the index."""
    options = dict(compiler_options or {})
    passes = [name for name in str(options.get(_DISABLE, "")).split(",") if name]
    if ANNOTATOR_PASS not in passes:
        passes.append(ANNOTATOR_PASS)
    options[_DISABLE] = ",".join(passes)
    return options


def is_affected(jaxlib_version: str) -> bool:
    """Whether this jaxlib's GPU compiler is known to record wrong offsets (0.10.2 up to 0.11.0).

    >>> is_affected("0.10.2"), is_affected("0.11.1"), is_affected("0.10.1")
    (True, False, False)
    """
    numbers = tuple(int(part) for part in jaxlib_version.split(".")[:3] if part.isdecimal())
    return FIRST_AFFECTED <= numbers < FIRST_FIXED


def require_right(result: AuditResult) -> None:
    """Refuses a program whose recorded offsets are wrong or could not be evaluated.

    Raises:
        MemoptError: `wrong-recorded-offsets` or `unknown-recorded-offsets`.
    """
    if result.verdict not in ("wrong", "unknown"):
        return
    message = _told(result)
    if result.verdict == "unknown":
        raise MemoptError.of("unknown-recorded-offsets", message, hint=_WAY_OUT)
    raise MemoptError.of("wrong-recorded-offsets", message, hint=_WAY_OUT)


_WAY_OUT = (
    "use jax >= 0.11.1 (Python >= 3.12), or compile with "
    f'{{"{_DISABLE}": "{ANNOTATOR_PASS}"}} and run Applied.check on the device first'
)


def _told(result: AuditResult) -> str:
    bad = result.of(result.verdict)
    shown = "; ".join(
        f"{item.instruction} ({item.direction}): recorded offset {item.recorded[0]} and stride {item.recorded[1]}, "
        + (f"computed {item.computed[0]} and {item.computed[1]}" if item.computed else "index not evaluable")
        for item in bad[:3]
    )
    more = "; ..." if len(bad) > 3 else ""
    return f"{len(bad)} of {len(result.findings)} recorded slice offsets are {result.verdict}: {shown}{more}"


@dataclass(slots=True)
class _Samples:
    """What was seen of one recorded slice: recorded and computed byte offset per run."""

    direction: Literal["to_device", "to_host", "on_device"]
    recorded: tuple[int, int]
    pairs: list[tuple[int, int | None]]

    def finding(self, name: str) -> Finding:
        computed = [value for _, value in self.pairs]
        if not computed or any(value is None for value in computed):
            return Finding(name, self.direction, self.recorded, None, "unknown")
        stride = computed[1] - computed[0] if len(computed) > 1 else 0  # type: ignore[operator]
        is_right = all(said == value for said, value in self.pairs)
        return Finding(name, self.direction, self.recorded, (computed[0], stride), "right" if is_right else "wrong")  # type: ignore[arg-type]


def _findings(module: Module) -> Iterator[Finding]:
    recording = _computations_with_records(module)
    samples: dict[str, _Samples] = {}
    if module.entry in recording:
        _visit(entry_frame(module), (), recording, samples)
    for name in sorted(recording):  # a record in a computation nothing was seen to run is unknown, not right
        for item in module[name].instructions:
            record = _record(item)
            if record is not None:
                key = f"{item.name} in {name}"
                seen = samples.get(key) or _Samples(_direction(module[name], item), record[:2], [])
                yield seen.finding(key)


def _visit(frame: Frame, counters: tuple[int, ...], recording: set[str], samples: dict[str, _Samples]) -> None:
    """Samples every record of one run; `counters` are the iterations of the enclosing loops, innermost first."""
    for item in frame.computation.instructions:
        record = _record(item)
        if record is not None:
            offset, stride, depth = record
            key = f"{item.name} in {frame.computation.name}"
            if depth is None:
                said = offset
            else:
                said = offset + stride * counters[depth] if depth < len(counters) else None
            seen = samples.setdefault(key, _Samples(_direction(frame.computation, item), (offset, stride), []))
            computed = _computed_offset(frame, item)
            seen.pairs.append((said, computed) if said is not None else (0, None))
        elif item.opcode == "while" and item.callee("body") in recording:
            _visit_loop(frame, item, counters, recording, samples)
        else:
            for callee in frame.module.callees(item):
                if callee in recording:
                    arguments = frame.arguments_of(item)
                    # A branch takes one of the operands after the selector; values that differ by branch are unknown.
                    arguments = (None,) if item.branches else arguments
                    _visit(frame.call(callee, arguments), counters, recording, samples)


def _visit_loop(
    frame: Frame, loop: Instruction, counters: tuple[int, ...], recording: set[str], samples: dict[str, _Samples]
) -> None:
    body = loop.callee("body")
    if body is None:
        return
    states = list(frame.iterations(loop))
    numbered = list(enumerate(states))
    if counters and len(numbered) > MAX_OUTER_RUNS:
        numbered = numbered[: MAX_OUTER_RUNS // 2] + numbered[-MAX_OUTER_RUNS // 2 :]
    for number, state in numbered:
        _visit(frame.call(body, (state,)), (number, *counters), recording, samples)


def _record(item: Instruction) -> tuple[int, int, int | None] | None:
    """(byte offset, byte stride, loop depth) recorded beside a slice; depth None when it does not move."""
    if item.opcode not in ("dynamic-slice", "dynamic-update-slice"):
        return None
    config = item.config.get("dynamic_slice_config")
    if config is None:
        return None
    linear = config.get("linear", config)  # a message of its own in later versions
    offset, stride = int(linear.get("byte_offset", 0)), int(linear.get("byte_stride", 0))
    depth = config.get("loop_index")
    return offset, stride, None if depth is None and stride == 0 else int(depth or 0)


def _direction(computation: hlo.Computation, item: Instruction) -> Literal["to_device", "to_host", "on_device"]:
    buffer = computation.operand(item, 0)
    if buffer is None or not any(array.is_host for array in buffer.arrays):
        return "on_device"
    return "to_device" if item.opcode == "dynamic-slice" else "to_host"


def _computed_offset(frame: Frame, item: Instruction) -> int | None:
    """Byte offset of the slice by the index operands, clamped as XLA clamps it."""
    buffer = frame.computation.operand(item, 0)
    first_index = 1 if item.opcode == "dynamic-slice" else 2
    part = item if item.opcode == "dynamic-slice" else frame.computation.operand(item, 1)
    if buffer is None or part is None or len(buffer.arrays) != 1 or len(part.arrays) != 1:
        return None
    whole, piece = buffer.arrays[0], part.arrays[0]
    total = 0.0
    for dim, stride in enumerate(whole.strides_bytes()):
        index = frame.operand(item, first_index + dim)
        if not isinstance(index, int):
            return None
        total += min(max(index, 0), whole.dims[dim] - piece.dims[dim]) * stride
    return int(total)


def _computations_with_records(module: Module) -> set[str]:
    """Computations that hold a record, and those that run one of them."""
    holding = {name for name, computation in module.computations.items() if any(map(_record, computation.instructions))}
    while True:
        callers = {
            name
            for name, computation in module.computations.items()
            if name not in holding
            and any(callee in holding for item in computation.instructions for callee in module.callees(item))
        }
        if not callers:
            return holding
        holding |= callers

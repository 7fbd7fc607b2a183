"""Compiles a train step for devices that are not there, in a process of its own, and reports what the compiler says.

The process has its own environment, which must be set before JAX loads, and it may crash or abort: the caller's
process never does. Memory is `argument + output - alias + temp`, for the device and for the host; the compiler's
"peak" counts host bytes on GPUs and TPUs and leaves temporaries out on the CPU, so it is never used.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from memopt.errors import MemoptError
from memopt.targets import Target

from . import topology
from .offset_audit import AuditResult

PROGRESS_PREFIX = "memopt-progress: "
DEFAULT_TIMEOUT_S = 900.0
_LAST_WORDS = 30  # lines of a dying compiler that are kept; the first of a crash matter as much as the last
_SHOWN = 12


@dataclass(frozen=True, slots=True)
class MemoryFigures:
    """One memory space of a compiled program, per device, in bytes.

    Attributes:
        argument: What the step is given.
        output: What it returns.
        alias: What of the output reuses donated arguments.
        temp: Everything in between, at its highest.
    """

    argument: int
    output: int
    alias: int
    temp: int

    @property
    def total(self) -> int:
        """Bytes needed: `argument + output - alias + temp`."""
        return self.argument + self.output - self.alias + self.temp


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledStep:
    """What the target's compiler says about one train step; everything per device and step.

    Attributes:
        target: Target name.
        device, host: Memory by space. On the CPU there is one memory and `host` is zero.
        over_capacity: The compiler refused the program because it does not fit; `device.total` is what it needs and
            nothing else is known.
        argument_roles: Role (`param`, `optimizer_state`, `batch`) and memory kind -> bytes of the arguments.
        residuals: Memory kind -> bytes of stacked values that a loop saves for a later loop.
        planned_host_bytes: Bytes of residuals that the plan's rows send to the host.
        sent_host_bytes: Bytes of them that the traced program sends: what its backward pass does not read is not sent.
        named_in_vain: Tensor or path -> planned bytes of what is not sent.
        jaxpr_flops: Matrix products of the program as written, over all devices, per device.
        plain_flops: The same for the step with no policy; None where no such step was given.
        compiled_flops: Matrix products of the compiled program.
        audit: The recorded offsets.
        overlap: `overlap.OverlapReport`, or None where the schedule cannot be read (the CPU, an unknown link).
        link_is_known: False where the target's host link is not published: no seconds of `overlap` mean anything.
        collectives: Kind -> count and bytes.
        compiler_options: What it was compiled with.
        text: The compiled program, where asked for.
        notes: Sentences on how the figures came about.
        versions: Package -> version.
        compile_s, trace_s, peak_rss_bytes: What the compile itself took.
    """

    target: str
    device: MemoryFigures
    host: MemoryFigures
    over_capacity: bool = False
    argument_roles: Mapping[tuple[str, str], int] = field(default_factory=dict)
    residuals: Mapping[str, int] = field(default_factory=dict)
    planned_host_bytes: int = 0
    sent_host_bytes: int = 0
    named_in_vain: Mapping[str, int] = field(default_factory=dict)
    jaxpr_flops: float | None = None
    plain_flops: float | None = None
    compiled_flops: float | None = None
    audit: AuditResult = field(default_factory=lambda: AuditResult("not_applicable"))
    overlap: Any = None
    link_is_known: bool = True
    collectives: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    compiler_options: Mapping[str, Any] = field(default_factory=dict)
    text: str | None = None
    notes: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    compile_s: float = 0.0
    trace_s: float = 0.0
    peak_rss_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What crosses to the compiling process.

    Attributes:
        builder: `module:function`, called as `function(payload, mesh)` and returning a `step.TrainStep`.
        payload: Anything that can be pickled.
        target: What to compile for.
        mesh: (axis, size) outer to inner; the product is the number of devices.
        variants: Compiler options, one program each.
        work_around: Compile again without recorded offsets where the audit does not find them right.
        keep_text: Return the compiled program's text.
        link_bytes_per_s: Host link to play the schedule at, instead of the target's.
    """

    builder: str
    payload: Any
    target: Target
    mesh: tuple[tuple[str, int], ...]
    variants: tuple[Mapping[str, Any] | None, ...] = (None,)
    work_around: bool = True
    keep_text: bool = False
    link_bytes_per_s: float | None = None


def compile_step(
    request: Request, *, timeout_s: float = DEFAULT_TIMEOUT_S, progress: Callable[[str], None] | None = None
) -> tuple[CompiledStep, ...]:
    """Compiles the request's variants in a fresh process and returns one `CompiledStep` each.

    Raises:
        MemoptError: `target-plugin-missing`, `plugin-version-mismatch`, `bad-target`; `compiler-crashed` with the
            last words of the process; `compiler-timeout`; and whatever the step's builder raises.
    """
    topology.require(request.target)
    with tempfile.TemporaryDirectory(prefix="memopt-aot-") as folder:
        asked, answered = Path(folder, "request.pickle"), Path(folder, "result.pickle")
        asked.write_bytes(pickle.dumps(request))
        command = [sys.executable, "-m", "memopt_jax.aot_worker", str(asked), str(answered)]
        words = _run(command, topology.environment(request.target, _base_environment()), timeout_s, progress, request)
        if not answered.exists():
            raise _no_answer(request, words)
        answer = pickle.loads(answered.read_bytes())
    if isinstance(answer, MemoptError):
        raise answer
    return answer


def _base_environment() -> dict[str, str]:
    """This process's environment, with its import path, so that the child finds what the caller can import."""
    env = dict(os.environ)
    env["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    env["PYTHONUNBUFFERED"] = "1"
    return env


@dataclass(slots=True)
class _Words:
    """What a process said, and how it ended."""

    lines: deque[str]
    first: list[str]
    returncode: int


def _run(
    command: Sequence[str],
    env: Mapping[str, str],
    timeout_s: float,
    progress: Callable[[str], None] | None,
    request: Request,
) -> _Words:
    words = _Words(deque(maxlen=_LAST_WORDS), [], 0)
    with subprocess.Popen(
        command, env=dict(env), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace",
    ) as process:  # fmt: skip
        reader = threading.Thread(target=_listen, args=(process.stdout, words, progress), daemon=True)
        reader.start()
        try:
            words.returncode = process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise MemoptError.of(
                "compiler-timeout",
                f"compiling for `{request.target.name}` took more than {timeout_s:.0f} s and was stopped; it was at: "
                + (words.lines[-1] if words.lines else "its start"),
                hint="give it more time, or plan fewer layers to see what takes it",
            ) from None
        finally:
            process.kill()  # does nothing to a process that has ended
            reader.join()
    return words


def _listen(stream: IO[str] | None, words: _Words, progress: Callable[[str], None] | None) -> None:
    for line in stream or ():
        line = line.rstrip()
        if line.startswith(PROGRESS_PREFIX):
            said = line.removeprefix(PROGRESS_PREFIX)
            words.lines.append(said)
            if progress is not None:
                progress(said)
        elif line:
            if len(words.first) < _SHOWN and _is_telling(line):
                words.first.append(line)
            words.lines.append(line)


def _is_telling(line: str) -> bool:
    """Whether a line of a dying process says why: a failed check or an error, not a stack frame."""
    return any(mark in line for mark in ("Check failed", "F0000", "Fatal", "FATAL", "Error:", "error:", "Killed"))


def _no_answer(request: Request, words: _Words) -> MemoptError:
    code = words.returncode
    try:
        ended = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    except ValueError:
        ended = f"was ended by signal {-code}"
    told = [line for line in words.first if line not in words.lines][:_SHOWN] + list(words.lines)[-_SHOWN:]
    hint = "the lines above are its last words; `memopt doctor` prints the versions to report"
    if code == -signal.SIGKILL:
        hint = "it was probably killed for want of memory: close other programs, or plan fewer layers or devices"
    return MemoptError.of(
        "compiler-crashed",
        f"the process that compiled for `{request.target.name}` {ended} and gave no result. Its last words:\n    "
        + "\n    ".join(told or ["(none)"]),
        hint=hint,
    )

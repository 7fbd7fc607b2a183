"""One row of a comparison as a job for processes of its own, and what comes back from them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..backend import Launch
from ..errors import Problem
from ..guarding import CRASHED

POLL_S = 0.1
_SHOWN = 300  # characters of a message that may be a compiler's


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a worker is told. Everything in it is plain data: it crosses to the worker as JSON.

    Attributes:
        backend: Backend name.
        policy: Path of the policy file; None for the plain run, in which no part of memopt touches the model.
        baseline: The framework's own tool that the plain run uses, such as `fsdp2`; None for none.
        workload: Reference, paths absolute.
        batches: `.npy` file of int32 `[steps, batch, sequence + 1]`, or None for a workload with a batch of its own.
        steps, warmup_steps: Steps in all, and how many of the first are not timed.
        seed: Of the weights.
        world_size: Ranks or devices.
        device: `cpu` or `gpu`.
        events: File the worker appends JSON lines to.
    """

    backend: str
    policy: str | None
    workload: str
    batches: str | None
    steps: int
    warmup_steps: int
    seed: int
    world_size: int
    device: str
    events: str
    baseline: str | None = None

    def write(self, path: Path) -> None:
        """Saves it for `memopt.worker`."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: str | Path) -> Job:
        """What `write` saved."""
        return cls(**json.loads(Path(path).read_text(encoding="utf-8")))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a job.

    Attributes:
        losses: Of the steps that were reported, in order.
        result: The worker's figures (see `memopt.worker`); None when it did not get to the end.
        problems: What it was refused for, as data.
        reason: Why there is no result, in words; None with a result.
        is_crash: Its processes' output says more than the reason: they crashed, died or went silent.
    """

    losses: tuple[float, ...] = ()
    result: Mapping[str, Any] | None = None
    problems: tuple[Problem, ...] = ()
    reason: str | None = None
    is_crash: bool = False


@dataclass(slots=True)
class _Seen:
    """Events read so far."""

    losses: list[float] = field(default_factory=list)
    result: dict[str, Any] | None = None
    problems: list[Problem] = field(default_factory=list)


def run_job(
    job: Job, launch: Launch, *, log: Path, stall_s: float, on_event: Callable[[Mapping[str, Any]], None]
) -> Outcome:
    """Runs the job's processes to their end and reads their events as they come.

    The workers are a session of their own: Ctrl-C reaches this process alone, which then ends them.

    Args:
        job: The row.
        launch: Command and environment.
        log: Where the processes' output goes.
        stall_s: The processes are ended after so long without an event.
        on_event: Called with every event.
    """
    seen, alive_s = _Seen(), time.monotonic()
    environment = {**os.environ, **launch.environment}
    with log.open("wb") as output, _Tail(Path(job.events)) as tail:
        process = subprocess.Popen(
            launch.command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            while True:
                ended = process.poll() is not None
                for event in tail.events():
                    alive_s = time.monotonic()
                    _take(event, seen)
                    on_event(event)
                if ended:
                    break
                if time.monotonic() - alive_s > stall_s:
                    return Outcome(losses=tuple(seen.losses), reason=_stalled(stall_s, seen, log), is_crash=True)
                time.sleep(POLL_S)
        finally:
            end(process)
    return _outcome(seen, process.returncode, log)


def end(process: subprocess.Popen[bytes], *, grace_s: float = 10.0) -> None:
    """Ends the process and its session; asks first, so that torchrun can end its own ranks."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(grace_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


class _Tail:
    """Reads the lines of a file that another process appends to."""

    def __init__(self, path: Path) -> None:
        path.touch()
        self._file = path.open(encoding="utf-8")
        self._rest = ""

    def __enter__(self) -> _Tail:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def events(self) -> Iterator[dict[str, Any]]:
        """Every event whose line is complete."""
        *lines, self._rest = (self._rest + self._file.read()).split("\n")
        for line in lines:
            yield json.loads(line)


def _take(event: Mapping[str, Any], seen: _Seen) -> None:
    kind = event["event"]
    if kind == "step":
        seen.losses.append(event["loss"])
    elif kind == "result":
        seen.result = dict(event["result"])
    elif kind == "problems" and not seen.problems:  # every rank reports the same ones
        seen.problems = [Problem(**problem) for problem in event["problems"]]


def _outcome(seen: _Seen, exit_code: int, log: Path) -> Outcome:
    losses = tuple(seen.losses)
    if seen.problems:
        is_crash = any(problem.code == CRASHED for problem in seen.problems)
        reason = "; ".join((_in_one_line if is_crash else Problem.render)(problem) for problem in seen.problems)
        return Outcome(losses=losses, problems=tuple(seen.problems), reason=reason, is_crash=is_crash)
    if seen.result is None or exit_code != 0:
        reason = f"the worker ended with exit code {exit_code} after {len(seen.losses)} steps; {last_line(log)}"
        return Outcome(losses=losses, reason=reason, is_crash=True)
    return Outcome(losses=tuple(seen.result["losses"]), result=seen.result)


def _in_one_line(problem: Problem) -> str:
    """`FILE:LINE: what was raised`."""
    message = " ".join(problem.message.split())
    shown = message if len(message) <= _SHOWN else message[: _SHOWN - 3] + "..."
    return f"{problem.file}:{problem.line}: {shown}" if problem.file else shown


def _stalled(stall_s: float, seen: _Seen, log: Path) -> str:
    return f"no sign of life for {stall_s:g} s after {len(seen.losses)} steps; ended. {last_line(log)}"


def last_line(log: Path) -> str:
    """The end of a worker's output in words."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return f"its last line: {lines[-1][:_SHOWN]}" if lines else "it printed nothing"

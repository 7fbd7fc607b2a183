"""Train the same model from the same weights on the same text under several policies and backends, and compare."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from .backend import load_backend
from .comparing.environment import environment_facts
from .comparing.jobs import Job, Outcome, run_job
from .comparing.planned import planned_peaks
from .comparing.rows import PLAIN, Entry, Row, make_rows
from .comparing.run import RunConfig, load_run
from .data import BYTE_VOCABULARY, byte_batches, default_text, text_files
from .errors import MemoptError, Problem
from .loading import load_policy
from .outputs import require_folder
from .policy import Policy
from .workloads import HfWorkload, Workload, WorkloadConfig, load_workload

WARMUP_STEPS = 3  # compilation, recorded schedules and the measured step are in these


class Progress(Protocol):
    """Is told what happens; the command line draws it."""

    def row_started(self, backend: str, policy: str) -> None:
        """A row's processes are starting."""

    def event(self, event: Mapping[str, Any]) -> None:
        """A worker said something (see `memopt.worker`)."""

    def row_finished(self, row: Row) -> None:
        """A row is done, or could not be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What was compared and what came out.

    Attributes:
        rows: One per backend and policy, in the order in which they ran; those not reached are absent.
        environment: Versions, device, workload and shapes, warm-up, repeats, seed, text.
        complete: False when it was interrupted.
        page: The HTML page, where one was written.
    """

    rows: tuple[Row, ...]
    environment: Mapping[str, Any]
    complete: bool = True
    page: Path | None = None

    @property
    def ok(self) -> bool:
        """Every row was reached and is ok."""
        return self.complete and all(row.ok for row in self.rows)

    def row(self, backend: str, policy: str) -> Row:
        """The row of one policy on one backend.

        Raises:
            KeyError: There is none.
        """
        for row in self.rows:
            if (row.backend, row.policy) == (backend, policy):
                return row
        raise KeyError((backend, policy))

    def to_dict(self) -> dict[str, Any]:
        """What `results.json` holds."""
        return {
            "rows": [row.to_dict() for row in self.rows],
            "environment": dict(self.environment),
            "complete": self.complete,
        }

    def to_json(self, *, indent: int | None = 2) -> str:
        """JSON that any parser takes."""
        return json.dumps(self.to_dict(), indent=indent, sort_keys=True, allow_nan=False)


def compare(
    run: str | Path | Mapping[str, Any],
    *,
    out: str | Path | None = None,
    steps: int | None = None,
    plan: bool = False,
    progress: Progress | None = None,
) -> Comparison:
    """Runs every policy on every backend, each in processes of its own, and writes `results.json` and `index.html`.

    The plain run, in which nothing of memopt touches the model, comes first on each backend; on torch it is DDP.
    Weights and batches are made once, in numpy. Both files are rewritten after every row, so that an interrupted
    comparison leaves what it has; `KeyboardInterrupt` ends the workers and gives the finished rows back. What a row
    that crashed had printed is kept in `logs/`.

    Args:
        run: RUN.yaml, or a mapping of its keys.
        out: Folder for the files; nothing is written when left out.
        steps: Overrides the run's number of steps.
        plan: Also plan every row, for `peak_planned_bytes`; as `plan: true` in the run.
        progress: Is told what happens.

    Raises:
        MemoptError: `bad-output`; everything wrong with the run, its policies and its workload. A policy that a
            backend refuses, a missing extra and a crash are rows with a reason instead.
    """
    if out is not None:
        require_folder(out, option="--out")
    config = load_run(run, steps=steps, plan=plan)
    policies = _policies(config)
    with tempfile.TemporaryDirectory(prefix="memopt-compare-") as scratch:
        logs = None if out is None else Path(out) / "logs"
        session = _Session.prepare(config, Path(scratch), progress, logs)
        comparison = Comparison(rows=(), environment=session.environment, complete=False)
        entries: list[Entry] = []
        try:
            for backend in config.backends:
                planned = session.planned(backend, policies) if config.plan else {}
                for name, policy in {**policies, **_baselines(config, backend)}.items():
                    entry = session.run(backend, name, policy)
                    entries.append(replace(entry, peak_planned_bytes=planned.get(policy.path or "")))
                    comparison = replace(comparison, rows=make_rows(entries, tolerance=config.tolerance))
                    if progress is not None:
                        progress.row_finished(comparison.rows[-1])
                    comparison = _written(comparison, out)
        except KeyboardInterrupt:
            return _written(comparison, out)
    return _written(replace(comparison, complete=True), out)


@dataclass(frozen=True, slots=True)
class _NamedPolicy:
    """A policy file; no file for the plain run that the user did not list, nor for a baseline."""

    path: str | None
    policy: Policy
    baseline: str | None = None

    @property
    def is_plain(self) -> bool:
        return self.policy == Policy(version=1)

    @property
    def changes_precision(self) -> bool:
        precision = self.policy.precision
        return precision is not None and set(precision.model_dump().values()) != {"float32"}


def _policies(config: RunConfig) -> dict[str, _NamedPolicy]:
    """Policies by row name, the plain run first."""
    problems, found = [], {PLAIN: _NamedPolicy(None, Policy(version=1))}
    for path in config.policies:
        try:
            policy = _NamedPolicy(path, load_policy(path))
        except MemoptError as error:
            problems.extend(error.problems)
            continue
        name = PLAIN if policy.is_plain else Path(path).stem
        if name == PLAIN and (not policy.is_plain or found[PLAIN].path is not None):
            problems.append(_second_plain(path, policy, found[PLAIN].path))
        found[name] = policy
    if problems:
        raise MemoptError(problems)
    return found


def _baselines(config: RunConfig, backend: str) -> dict[str, _NamedPolicy]:
    """The rows in which the framework's own tools do the work, of those it has."""
    has = getattr(load_backend(backend), "baselines", ())
    return {name: _NamedPolicy(None, Policy(version=1), name) for name in config.baselines if name in has}


def _second_plain(path: str, policy: _NamedPolicy, first: str | None) -> Problem:
    """`none` is the plain run, which every other row is compared with: no policy that acts, and one file at most."""
    if policy.is_plain:
        message, hint = f"{path} and {first} both do nothing, and `{PLAIN}` is one row", "take one out"
    else:
        message, hint = f"{path} is called `{PLAIN}`, as the plain run is, and it has rules or settings", "rename it"
    return Problem(code="compare-same-name", message=message, hint=hint, path="policies", file=path)


@dataclass(frozen=True, slots=True)
class _Session:
    """What all rows share."""

    config: RunConfig
    scratch: Path
    batches: Path | None
    tokens_per_step: int
    environment: Mapping[str, Any]
    warmup_steps: int
    progress: Progress | None
    logs: Path | None

    @classmethod
    def prepare(cls, config: RunConfig, scratch: Path, progress: Progress | None, logs: Path | None) -> _Session:
        """Cuts the batches and gathers the facts."""
        warmup = min(WARMUP_STEPS, config.steps - 1)
        workload = _described_workload(config)
        batches, tokens, text = None, 0, {}
        if isinstance(workload, WorkloadConfig | HfWorkload):
            _check_vocabulary(workload)
            files = text_files(config.data.text) if config.data.text else default_text()
            batch = _batch_of(workload, config)
            array = byte_batches(files, batch=batch, sequence=workload.sequence, steps=config.steps, seed=config.seed)
            batches, tokens = scratch / "batches.npy", batch * workload.sequence
            np.save(batches, array)
            text = {
                "num_files": len(files),
                "num_bytes": sum(Path(file).stat().st_size for file in files),
                "source": list(config.data.text) or "the Python standard library's sources",
            }
        facts = environment_facts(config, workload, warmup_steps=warmup, text=text)
        return cls(config, scratch, batches, tokens, facts, warmup, progress, logs)

    def run(self, backend: str, name: str, policy: _NamedPolicy) -> Entry:
        """One row, from start to end."""
        if self.progress is not None:
            self.progress.row_started(backend, name)
        started_s = time.monotonic()
        job = self._job(backend, name, policy)
        outcome = self._outcome(job, name)
        return Entry(
            backend=backend,
            policy=name,
            outcome=outcome,
            world_size=job.world_size,
            elapsed_s=time.monotonic() - started_s,
            tokens_per_step=self.tokens_per_step,
            changes_precision=policy.changes_precision,
        )

    def planned(self, backend: str, policies: Mapping[str, _NamedPolicy]) -> dict[str, int]:
        """Planned peaks by policy file; a plain run without a file has none."""
        if self.progress is not None:
            self.progress.row_started(backend, "planning")
        files = [policy.path for policy in policies.values() if policy.path is not None]
        return planned_peaks(
            files,
            workload=self.config.workload,
            backend=backend,
            target=self.config.target,
            world_size=self.config.world.get(backend, 1),
        )

    def _job(self, backend: str, name: str, policy: _NamedPolicy) -> Job:
        return Job(
            backend=backend,
            policy=None if policy.is_plain else policy.path,
            workload=self.config.workload,
            batches=None if self.batches is None else str(self.batches),
            steps=self.config.steps,
            warmup_steps=self.warmup_steps,
            seed=self.config.seed,
            world_size=self.config.world.get(backend, 1),
            device=self.config.target.partition(":")[0],
            events=str(self.scratch / f"{backend}-{name}.events.jsonl"),
            baseline=policy.baseline,
        )

    def _outcome(self, job: Job, name: str) -> Outcome:
        job_file = self.scratch / f"{job.backend}-{name}.job.json"
        job.write(job_file)
        try:
            launch = load_backend(job.backend).launch(str(job_file), world_size=job.world_size)
        except MemoptError as error:  # the framework is not installed: the other backend still runs
            reason = "; ".join(problem.render() for problem in error.problems)
            return Outcome(problems=error.problems, reason=reason)
        log = self.scratch / f"{job.backend}-{name}.log"
        return self._logged(run_job(job, launch, log=log, stall_s=self.config.stall_s, on_event=self._forward), log)

    def _logged(self, outcome: Outcome, log: Path) -> Outcome:
        """A crash's whole output is kept beside the results, and the reason says where."""
        if self.logs is None:
            return outcome
        kept = self.logs / log.name
        if not outcome.is_crash:
            kept.unlink(missing_ok=True)  # of an earlier comparison
            return outcome
        self.logs.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(log, kept)
        return replace(outcome, reason=f"{outcome.reason}; all it printed: {kept}")

    def _forward(self, event: Mapping[str, Any]) -> None:
        if self.progress is not None:
            self.progress.event(event)


def _described_workload(config: RunConfig) -> WorkloadConfig | Workload | HfWorkload:
    """The workload, without importing a user's module here: that would bring a framework into this process."""
    if config.workload.endswith((".yaml", ".yml")) or config.workload.startswith("hf:"):
        return load_workload(config.workload)
    return Workload(config.workload.rpartition(":")[2], _unloaded, _unloaded, {}, None, ref=config.workload)


def _batch_of(workload: WorkloadConfig | HfWorkload, config: RunConfig) -> int:
    """Sequences of a step over all ranks."""
    if isinstance(workload, WorkloadConfig):
        return workload.batch
    return workload.batch_per_rank * config.world.get("torch", 1)  # no other backend builds a Transformers model


def _unloaded(*_: Any) -> Any:
    raise TypeError("a workload given by a function is loaded by the workers alone")


def _check_vocabulary(workload: WorkloadConfig | HfWorkload) -> None:
    if workload.vocab < BYTE_VOCABULARY:
        raise MemoptError.of(
            "workload-vocabulary-too-small",
            f"`{workload.name}` has {workload.vocab} tokens, and text is read as {BYTE_VOCABULARY} bytes",
            hint=f"use a vocab of at least {BYTE_VOCABULARY}",
            path="vocab",
        )


def _written(comparison: Comparison, out: str | Path | None) -> Comparison:
    """Writes the files whole or not at all: each is made beside its place and moved over it."""
    if out is None:
        return comparison
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    _replace_file(folder / "results.json", comparison.to_json() + "\n")  # first: a page can be made again, a run cannot
    page = _page(comparison)
    if page is None:
        return comparison
    _replace_file(folder / "index.html", page)
    return replace(comparison, page=folder / "index.html")


def _page(comparison: Comparison) -> str | None:
    """The page, or None without the `report` extra; the command line says so."""
    try:
        from .comparing.page import comparison_page
    except ModuleNotFoundError as error:
        if error.name != "plotly":
            raise
        return None
    return comparison_page(comparison.rows, comparison.environment, complete=comparison.complete)


def _replace_file(path: Path, text: str) -> None:
    beside = path.with_name(path.name + ".part")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)

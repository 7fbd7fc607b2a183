"""RUN.yaml: which workload, policies and backends are compared, and on which text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ..backend import backend_names
from ..errors import MemoptError, Problem, did_you_mean
from ..loading import draft_document

MINIMUM_STEPS = 2  # the optimizer's state exists from the second on, and with it the peak
Count = Annotated[int, Field(ge=1)]


class _Config(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", validate_default=True)


class DataConfig(_Config):
    """`text`: paths or globs of text files, read as bytes; empty for the Python standard library's sources."""

    text: tuple[str, ...] = ()


class RunConfig(_Config):
    """One comparison.

    Attributes:
        workload: What `--workload` takes.
        policies: Policy files. The one that does nothing is the plain run (`none`); it is added where it is missing.
        baselines: Rows in which the frameworks' own tools do the work and memopt does not: `fsdp2`, `save_on_cpu`
            (torch), `checkpoint` (both: every layer is recomputed), `checkpoint_dots` (JAX's own policy that keeps the
            products). A backend runs those it has.
        backends: Backend names, in the order in which they run.
        steps: Optimizer steps of each row.
        seed: Of the weights and the batches.
        world: Ranks (torch) or devices (jax) of each backend; 1 where left out.
        target: Where the rows run: `cpu`, or `gpu:MODEL` for this machine's GPUs.
        data: The text.
        plan: Also plan every row (`memopt plan`), for the planned peak beside the measured one.
        tolerance: A row's losses may differ by this much from its own backend's plain run.
        stall_s: A row without any sign of life for so long is ended.
    """

    workload: str
    policies: Annotated[tuple[str, ...], Field(min_length=1)]
    backends: Annotated[tuple[str, ...], Field(min_length=1)] = ("jax", "torch")
    baselines: tuple[Literal["checkpoint", "checkpoint_dots", "fsdp2", "save_on_cpu"], ...] = ()
    steps: Annotated[int, Field(ge=MINIMUM_STEPS)] = 30
    seed: Annotated[int, Field(ge=0)] = 0
    world: dict[str, Count] = Field(default_factory=dict)
    target: Annotated[str, Field(pattern=r"^(cpu|gpu(:.+)?)$")] = "cpu"
    data: DataConfig = DataConfig()
    plan: bool = False
    tolerance: Annotated[float, Field(ge=0)] = 1e-4
    stall_s: Annotated[float, Field(gt=0)] = 300.0


def load_run(source: str | Path | Mapping[str, Any], *, steps: int | None = None, plan: bool = False) -> RunConfig:
    """The comparison a file or mapping describes, with every path in it made absolute and found to exist.

    A relative path is looked for beside the file, then in the working directory.

    Args:
        source: RUN.yaml or a mapping of its keys.
        steps: Overrides the file's.
        plan: Plan every row, whatever the file says.

    Raises:
        MemoptError: Everything wrong with it: the YAML's own problems, `compare-no-such-file`, `compare-same-name`,
            `compare-too-few-steps`, `unknown-backend`.
    """
    base = Path() if isinstance(source, Mapping) else Path(source).parent
    draft = draft_document(source, RunConfig)
    run = draft.value
    if run is None:
        raise MemoptError(draft.problems)
    problems = [*_unknown_backends(run), *_same_names(run)]
    if steps is not None and steps < MINIMUM_STEPS:
        problems.append(
            Problem(
                code="compare-too-few-steps",
                message=f"{steps} steps; at least {MINIMUM_STEPS}",
                hint="the optimizer's state exists from the second on, and with it the peak",
            )
        )
    workload, policies = run.workload, []
    if workload.endswith((".yaml", ".yml")):
        workload = _found(workload, base, "workload", problems)
    elif workload.startswith("hf:"):
        workload = "hf:" + _found(workload.removeprefix("hf:"), base, "workload", problems)
    elif ".py:" in workload:
        file, _, function = workload.rpartition(":")
        workload = f"{_found(file, base, 'workload', problems)}:{function}"
    for index, policy in enumerate(run.policies):
        policies.append(_found(policy, base, f"policies.{index}", problems))
    text = tuple(pattern if Path(pattern).is_absolute() else str(base.resolve() / pattern) for pattern in run.data.text)
    made_up = {".".join(str(part) for part in place) for place in draft.mended}
    problems = [*draft.problems, *(one for one in problems if one.path not in made_up)]
    if problems:
        raise MemoptError(problems)
    return run.model_copy(
        update={
            "workload": workload,
            "policies": tuple(policies),
            "data": DataConfig(text=text),
            "steps": run.steps if steps is None else steps,
            "plan": run.plan or plan,
        }
    )


def _found(path: str, base: Path, where: str, problems: list[Problem]) -> str:
    tried = [base / path, Path(path)]
    for candidate in tried:
        if candidate.exists():
            return str(candidate.resolve())
    folder = next((file.parent for file in tried if file.parent.is_dir()), Path())
    near = did_you_mean(Path(path).stem, sorted(file.stem for file in folder.glob("*.yaml")))
    places = " and ".join(dict.fromkeys(f"`{file}`" for file in tried))
    problems.append(
        Problem(code="compare-no-such-file", message=f"no such file: tried {places}", hint=near, path=where)
    )
    return path


def _unknown_backends(run: RunConfig) -> list[Problem]:
    known = backend_names()
    named = [*((f"backends.{index}", name) for index, name in enumerate(run.backends))]
    named += [(f"world.{name}", name) for name in run.world]
    return [
        Problem(
            code="unknown-backend",
            message=f"no backend is called `{name}`; there are {', '.join(known) or 'none'}",
            hint=did_you_mean(name, known),
            path=where,
        )
        for where, name in named
        if name not in known
    ]


def _same_names(run: RunConfig) -> list[Problem]:
    """Rows are told apart by the file's stem, or a baseline's name."""
    by_stem: dict[str, list[str]] = {}
    for baseline in run.baselines:
        by_stem.setdefault(baseline, []).append(f"the baseline {baseline}")
    for policy in run.policies:
        by_stem.setdefault(Path(policy).stem, []).append(policy)
    return [
        Problem(
            code="compare-same-name",
            message=f"{len(files)} rows would be called `{stem}`: {', '.join(files)}",
            hint="rename one: a row is known by its file's name",
            path="policies",
        )
        for stem, files in by_stem.items()
        if len(files) > 1
    ]

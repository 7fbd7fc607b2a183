"""Everything that can be said of policy files: alone, for a backend, for a world, for a workload.

What a file alone does not need is imported where it is used: `memopt validate` answers at once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .backend import Backend, backend_names, load_backend, missing_frameworks, require_frameworks
from .errors import MemoptError, Problem, all_of
from .guarding import inspected
from .loading import DocumentSource, Draft, draft_policy, load_policy, validate_options
from .policy import Policy
from .policy_checks import doubtful_axes

if TYPE_CHECKING:
    from .plan import Plan
    from .spec import ModelSpec

UNSUPPORTED = "unsupported-by-backend"
OTHER_BACKEND = "workload-other-backend"
_DEFAULT_MESH = ("fsdp",)
Place = tuple[str | int, ...]


@dataclass(frozen=True)
class Setting:
    """What policies are judged against, beside themselves.

    Attributes:
        backends: With some, what all of them cannot do is refused.
        workload: With one, rules are matched against its model: dead and shadowed rules, units that match nothing.
        world_size: With one, the mesh must fill it.
    """

    backends: tuple[Backend, ...] = ()
    workload: Any = None
    world_size: int | None = None

    @classmethod
    def prepare(cls, *, workload: str | None, backend: str | None, world_size: int | None) -> Setting:
        """The setting that those names mean; a workload without a backend is judged on those installed.

        Raises:
            MemoptError: Where the workload or the backend is not found, with both faults.
        """
        if workload is not None:
            from .workloads import load_workload
        named = (backend,) if backend is not None else _installed() if workload is not None else ()
        loaded, *backends = all_of(
            lambda: None if workload is None else load_workload(workload),
            *(lambda name=name: load_backend(name) for name in named),
            *(lambda name=name: require_frameworks(name) for name in named if workload is not None),
        )
        return cls(tuple(backends[: len(named)]), loaded, world_size)

    @cached_property
    def models(self) -> tuple[ModelSpec | MemoptError, ...]:
        """For each backend the workload's inventory, or why there is none."""
        return tuple(self._inspected(one) for one in self.backends)

    def _inspected(self, backend: Backend) -> ModelSpec | MemoptError:
        try:
            return inspected(backend, self.workload)
        except MemoptError as error:
            return error


def policy_problems(
    file: Path, *, workload: str | None = None, backend: str | None = None, world_size: int | None = None
) -> list[Problem]:
    """Every problem of one policy file; see `problems_in`.

    Args:
        file: The policy.
        workload: See `Setting`.
        backend: See `Setting`; left out with a workload: what one installed backend can do is no problem.
        world_size: See `Setting`.

    Raises:
        MemoptError: Where the workload or the backend is not found.
    """
    return problems_in(file, Setting.prepare(workload=workload, backend=backend, world_size=world_size))


@dataclass(frozen=True)
class Verdict:
    """What is said of a policy file.

    Attributes:
        problems: In the order of the file.
        notes: What is right under a condition that only a workload can show; one sentence each.
    """

    problems: tuple[Problem, ...]
    notes: tuple[str, ...] = ()


def problems_in(file: DocumentSource, setting: Setting) -> list[Problem]:
    """The problems of `verdict_on`."""
    return list(verdict_on(file, setting).problems)


def verdict_on(file: DocumentSource, setting: Setting) -> Verdict:
    """Every problem of a policy file at once: a fault hides no other, but for text that is not YAML at all.

    Of a policy with faults in itself, the other rules and settings are judged against the setting all the same, each
    by itself.
    """
    try:
        draft = draft_policy(file)
    except MemoptError as error:
        return Verdict(error.problems)
    if draft.value is None:
        return Verdict(draft.problems)
    notes: tuple[str, ...] = ()
    if setting.workload is None:
        found = _without_model(draft.value, setting)
        notes = () if draft.mended else tuple(doubtful_axes(draft.value, _axes(draft.value))[1])
    else:
        found = _against_workload(draft, draft.value, setting)
    if not draft.problems:
        return Verdict(tuple(found), notes)
    return Verdict(tuple(_in_order([*draft.problems, *_of_what_was_written(found, draft)])), notes)


def _axes(policy: Policy) -> tuple[str, ...]:
    return tuple(policy.mesh or _DEFAULT_MESH)


def plan_for(policy: Path, workload: str, backend: str, *, world_size: int | None = None) -> Plan:
    """The plan of a policy file for a workload; without `world_size` for the fewest devices that the mesh takes.

    Raises:
        MemoptError: With every problem found.
    """
    from .lowering import make_plan
    from .workloads import load_workload

    chosen, loaded, described, _ = all_of(
        lambda: load_backend(backend),
        lambda: load_policy(policy),
        lambda: load_workload(workload),
        lambda: require_frameworks(backend),
    )
    options = validate_options(loaded, chosen)
    spec = inspected(chosen, described)
    size = world_size or least_world(loaded)
    return make_plan(loaded, spec, backend=chosen, world_size=size, options=options)


def _of_what_was_written(found: Sequence[Problem], draft: Draft[Policy]) -> list[Problem]:
    """Without what is said of places where something else stands than was written, or of rules about such."""
    broken = {_dotted(_scope(path)) for path in draft.mended}
    changed = {_dotted(path) for path in draft.mended}
    kept = [
        problem
        for problem in found
        if not _is_within(problem.path, changed if problem.code == "unknown-axis" else broken)
    ]
    return [problem for problem in kept if problem.code != "unknown-axis" or "mesh" not in changed]


def _dotted(path: Place) -> str:
    return ".".join(str(part) for part in path)


def _scope(path: Place) -> Place:
    """What is judged as a whole: a rule, else a block of the policy."""
    return path[:2] if path[0] == "rules" else path[:1]


def _is_within(path: str | None, places: Collection[str]) -> bool:
    return path is not None and any(path == place or path.startswith(f"{place}.") for place in places)


def _in_order(problems: Sequence[Problem]) -> list[Problem]:
    return sorted(dict.fromkeys(problems), key=lambda problem: (problem.line or 0, problem.column or 0))


def _without_model(policy: Policy, setting: Setting) -> list[Problem]:
    problems = doubtful_axes(policy, _axes(policy))[0]
    if setting.world_size is None and not setting.backends:
        return problems
    from .lowering.mesh import lower_mesh
    from .lowering.refusals import refuse_by_policy
    from .spec import ModelSpec

    mesh = {axis: size for axis, size in (policy.mesh or {}).items() if size != 1}
    if setting.world_size is not None:
        nothing = ModelSpec(backend="", family=None, tensors=(), modules=())
        mesh = dict(lower_mesh(policy, nothing, setting.world_size, problems))
    for one in setting.backends:
        capabilities = one.capabilities(_options_of(policy, one))
        problems += refuse_by_policy(policy, mesh, backend=one.name, capabilities=capabilities)
    return problems


def _options_of(policy: Policy, backend: Backend) -> dict[str, Any]:
    """The backend's options; its defaults where those written are refused, which is reported already."""
    try:
        return validate_options(policy, backend)
    except MemoptError:
        return validate_options(Policy(version=1), backend)


def _installed() -> tuple[str, ...]:
    """The backends whose frameworks are here; all of them where none is, so that the error names what to install."""
    names = backend_names()
    return tuple(name for name in names if not missing_frameworks(name)) or names


def _against_workload(draft: Draft[Policy], policy: Policy, setting: Setting) -> list[Problem]:
    from .lowering import make_plan, rule_problems

    found: list[Sequence[Problem]] = []
    size = setting.world_size or least_world(policy)
    for one, spec in zip(setting.backends, setting.models, strict=True):
        if isinstance(spec, MemoptError):
            found.append([*spec.problems, *_without_model(policy, Setting((one,), None, setting.world_size))])
        elif draft.problems:
            refused = _without_model(policy, Setting((one,)))
            found.append([*rule_problems(policy, spec, world_size=size), *refused])
        else:
            try:
                make_plan(policy, spec, backend=one, world_size=size, options=validate_options(policy, one))
                found.append([])
            except MemoptError as error:
                found.append(error.problems)
    return _merged(found)


def least_world(policy: Policy) -> int:
    """The smallest world that the mesh fills, where none was given."""
    size = 1
    for axis_size in (policy.mesh or {}).values():
        size *= max(1, axis_size)
    return size


def _merged(found: Sequence[Sequence[Problem]]) -> list[Problem]:
    """Each problem once.

    A workload is of one framework: backends of the others have no say. And what one backend refuses and another can do
    is no problem of the policy.
    """
    own = [problems for problems in found if all(problem.code != OTHER_BACKEND for problem in problems)] or found
    can_all = any(all(problem.code != UNSUPPORTED for problem in problems) for problems in own)
    merged: dict[Problem, None] = {}
    for problems in own:
        for problem in problems:
            if problem.code != UNSUPPORTED or not can_all:
                merged.setdefault(problem, None)
    return list(merged)

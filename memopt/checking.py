"""Everything that can be said of a policy file: alone, for a backend, for a world, for a workload.

What a file alone does not need is imported where it is used: `memopt validate` answers at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .backend import Backend, backend_names, load_backend, missing_frameworks, require_frameworks
from .errors import MemoptError, Problem, all_of
from .guarding import inspected
from .loading import load_policy, validate_options
from .policy import Policy

if TYPE_CHECKING:
    from .plan import Plan

UNSUPPORTED = "unsupported-by-backend"


def policy_problems(
    file: Path, *, workload: str | None = None, backend: str | None = None, world_size: int | None = None
) -> list[Problem]:
    """Every problem of a policy file.

    Args:
        file: The policy.
        workload: With one, rules are matched against its model: dead and shadowed rules, units that match nothing.
        backend: With one, what it cannot do is refused; without one, what none of the backends can do.
        world_size: With one, the mesh must fill it.

    Raises:
        MemoptError: Where the workload or the backend is not found.
    """
    chosen = [load_backend(backend)] if backend is not None else []
    try:
        policy = load_policy(file)
    except MemoptError as error:
        return list(error.problems)
    if workload is not None:
        names = [backend] if backend is not None else _installed()
        for name in names:
            require_frameworks(name)
        return _against_workload(policy, workload, [load_backend(name) for name in names], world_size)
    return _without_model(policy, chosen, world_size)


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


def _without_model(policy: Policy, chosen: Sequence[Backend], world_size: int | None) -> list[Problem]:
    if world_size is None and not chosen:
        return []
    from .lowering.mesh import lower_mesh
    from .lowering.refusals import refuse_by_policy
    from .spec import ModelSpec

    problems: list[Problem] = []
    mesh = {axis: size for axis, size in (policy.mesh or {}).items() if size != 1}
    if world_size is not None:
        nothing = ModelSpec(backend="", family=None, tensors=(), modules=())
        mesh = dict(lower_mesh(policy, nothing, world_size, problems))
    for one in chosen:
        capabilities = one.capabilities(validate_options(policy, one))
        problems += refuse_by_policy(policy, mesh, backend=one.name, capabilities=capabilities)
    return problems


def _installed() -> list[str]:
    """The backends whose frameworks are here; all of them where none is, so that the error names what to install."""
    names = backend_names()
    return [name for name in names if not missing_frameworks(name)] or list(names)


def _against_workload(
    policy: Policy, workload: str, candidates: Sequence[Backend], world_size: int | None
) -> list[Problem]:
    from .lowering import make_plan
    from .workloads import load_workload

    loaded = load_workload(workload)
    found: list[list[Problem]] = []
    for one in candidates:
        try:
            spec = inspected(one, loaded)
            size = world_size or least_world(policy)
            make_plan(policy, spec, backend=one, world_size=size, options=validate_options(policy, one))
            found.append([])
        except MemoptError as error:
            found.append(list(error.problems))
    return _merged(found)


def least_world(policy: Policy) -> int:
    """The smallest world that the mesh fills, where none was given."""
    size = 1
    for axis_size in (policy.mesh or {}).values():
        size *= max(1, axis_size)
    return size


def _merged(found: Sequence[Sequence[Problem]]) -> list[Problem]:
    """Each problem once; what one backend refuses and another can do is no problem of the policy."""
    can_all = any(all(problem.code != UNSUPPORTED for problem in problems) for problems in found)
    merged: dict[Problem, None] = {}
    for problems in found:
        for problem in problems:
            if problem.code != UNSUPPORTED or not can_all:
                merged.setdefault(problem, None)
    return list(merged)

"""What is judged of a policy beside its models: names given twice, mesh sizes, axes, backends' options."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

from .backend import Backend, backend_names, load_backend
from .errors import MemoptError, Problem, did_you_mean
from .mending import judge
from .model_keys import Path
from .policy import Policy
from .source import Source
from .spelling import meant_key


def check_data(data: Any, place: Source, *, reported: Collection[Path] = ()) -> list[Problem]:
    """Every such problem; what is of the wrong type is left to the policy's models.

    Args:
        data: The policy's plain data.
        place: Where each value is.
        reported: Places that a problem was reported of before.
    """
    if not isinstance(data, Mapping):
        return []
    return [*_names(data.get("rules"), place), *_mesh(data.get("mesh"), place), *_options(data, place, reported)]


def _names(rules: Any, place: Source) -> list[Problem]:
    if not isinstance(rules, list):
        return []
    names = [rule.get("name") if isinstance(rule, Mapping) else None for rule in rules]
    counts = Counter(name for name in names if isinstance(name, str))
    return [
        Problem(
            "rule-name-twice",
            f"rule {names.index(name)} is called `{name}` already",
            hint="names are how the plan and every message point at a rule: make each unique",
            **place.at(("rules", i, "name")),
        )
        for i, name in enumerate(names)
        if isinstance(name, str) and counts[name] > 1 and names.index(name) != i
    ]


def _mesh(mesh: Any, place: Source) -> list[Problem]:
    if not isinstance(mesh, Mapping):
        return []
    sizes = {axis: size for axis, size in mesh.items() if isinstance(size, int) and not isinstance(size, bool)}
    problems = [
        Problem(
            "mesh-size",
            f"axis `{axis}` has size {size}; sizes are 1 and more, or -1 for what is left",
            hint=f"write `{axis}: -1`, or take the axis out",
            **place.at(("mesh", axis)),
        )
        for axis, size in sizes.items()
        if size < 1 and size != -1
    ]
    free = [axis for axis, size in sizes.items() if size == -1]
    if len(free) > 1:
        problems.append(
            Problem(
                "mesh-size",
                f"{' and '.join(f'`{axis}`' for axis in free)} are both -1; one axis at most takes what is left",
                hint="give all but one a size",
                **place.at(("mesh", free[1])),
            )
        )
    return problems


def _options(data: Mapping[str, Any], place: Source, reported: Collection[Path]) -> list[Problem]:
    """Each backend's options by that backend's own model; those of a misspelt backend by the one that is meant."""
    written = data.get("backend_options")
    if not isinstance(written, Mapping) or not written:
        return []
    problems: list[Problem] = []
    known = backend_names()
    for name, options in written.items():
        meant = name
        if name not in known:
            message = f"no backend is called `{name}`; there are {', '.join(known) or 'none'}"
            at = place.at(("backend_options", name))
            problems.append(Problem("unknown-backend", message, hint=did_you_mean(name, known), **at))
            meant = meant_key(name, [one for one in known if one not in written])
        if meant is not None and isinstance(options, Mapping):
            prefix = ("backend_options", name)
            inside = [path[2:] for path in reported if path[:2] == prefix and len(path) > 2]
            problems += judge(options, load_backend(meant).options(), place, prefix=prefix, reported=inside).problems
    return problems


def complete_options(backend: Backend, written: Mapping[str, Any], place: Source) -> dict[str, Any]:
    """A backend's options, checked by its own model, defaults filled in.

    Raises:
        MemoptError: With every problem found.
    """
    judged = judge(written, backend.options(), place, prefix=("backend_options", backend.name))
    if judged.problems or judged.value is None:
        raise MemoptError(judged.problems)
    return judged.value.model_dump(mode="json")


def unknown_axes(policy: Policy, axes: Collection[str], *, existing: Collection[str] = ()) -> list[Problem]:
    """Rules that shard over an axis nobody has.

    Args:
        policy: The policy.
        axes: The mesh's.
        existing: Axes the model is sharded over already.
    """
    return [
        _unknown_axis(policy, i, axis, axes)
        for i, rule in enumerate(policy.rules)
        if rule.action == "shard"
        for axis in rule.axes
        if axis not in axes and axis not in existing
    ]


def doubtful_axes(policy: Policy, axes: Collection[str]) -> tuple[list[Problem], list[str]]:
    """The same with no model at hand: problems, and notes.

    A model may be sharded over axes that the policy's mesh does not have, and a rule may add the mesh's axes to those
    (`axis: {expert: 0, fsdp: auto}`): such a rule is worth a note. One with a misspelt axis, or with none that is
    known, is a problem.
    """
    problems, notes = [], []
    for i, rule in enumerate(policy.rules):
        named = list(rule.axes) if rule.action == "shard" else []
        for axis in named:
            if axis in axes:
                continue
            if did_you_mean(axis, list(axes)) is None and any(other in axes for other in named):
                notes.append(
                    f"rule `{rule.name}` shards over `{axis}`, which the mesh does not have: the model must be sharded "
                    "over it already (judged with --workload)"
                )
            else:
                problems.append(_unknown_axis(policy, i, axis, axes))
    return problems, notes


def _unknown_axis(policy: Policy, i: int, axis: str, axes: Collection[str]) -> Problem:
    return Problem(
        "unknown-axis",
        f"rule `{policy.rules[i].name}` shards over `{axis}`, which the mesh does not have; its axes are "
        f"{', '.join(axes)}",
        hint=did_you_mean(axis, list(axes)) or f"add it: `mesh: {{{axis}: -1}}`",
        **policy.source.at(("rules", i, "axis")),
    )

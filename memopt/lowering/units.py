"""Units: which modules are gathered, recomputed and freed as a whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from ..errors import Problem, did_you_mean
from ..matching import any_matches, canonical
from ..plan import PlanUnit
from ..policy import Policy, Unit
from ..spec import ModelSpec, StackSpec


@dataclass(frozen=True)
class UnitTable:
    """The units, and the way from a path to its unit.

    Attributes:
        units: In model order.
        by_member: Member's module path -> unit name.
        raw: Module path -> raw path, where a pattern would not find the raw one by itself (`layers_3` of flax linen).
    """

    units: tuple[PlanUnit, ...]
    by_member: Mapping[str, str]
    raw: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def by_name(self) -> Mapping[str, PlanUnit]:
        """Unit name -> unit."""
        return {unit.name: unit for unit in self.units}

    def of(self, path: str) -> str | None:
        """The unit a path lies in, or None for what is left in the root."""
        return next((self.by_member[prefix] for prefix in prefixes(path) if prefix in self.by_member), None)


def prefixes(path: str) -> Iterator[str]:
    """The path and its parents, longest first; a trailing `[i]` is dropped.

    >>> list(prefixes("layers.3.attn[0]"))
    ['layers.3.attn', 'layers.3', 'layers']
    """
    current = path.partition("[")[0]
    while current:
        yield current
        current = current.rpartition(".")[0]


def lower_units(policy: Policy, spec: ModelSpec, problems: list[Problem]) -> UnitTable:
    """The policy's units, or the repeated layers where it names none."""
    modules = _module_order(spec)
    if policy.units is None:
        layers = [path for stack in outer_stacks(spec) for path in _layers_of(stack)]
        drafts = [((path,), Unit(match=(path,))) for path in layers]
    else:
        drafts = _written(policy, spec, modules, problems)
    order = {path: i for i, path in enumerate(modules)}
    drafts.sort(key=lambda draft: min(order[member] for member in draft[0]))
    units = tuple(_unit(members, entry, policy, spec) for members, entry in drafts)
    by_member = {member: unit.name for unit in units for member in unit.members}
    problems.extend(_overlaps(policy, by_member))
    return UnitTable(units, by_member, raw_paths(spec))


def raw_paths(spec: ModelSpec) -> dict[str, str]:
    """Module path -> raw path, where more than wrappers and a leading `model.` lie between them."""
    return {
        module.path: module.raw_path
        for module in spec.modules
        if module.raw_path not in ("", module.path) and canonical(module.raw_path) != module.path
    }


def raw_names(names: Iterable[str], raw: Mapping[str, str]) -> list[str]:
    """What values are called by the raw paths of their modules.

    >>> raw_names(["layers.3.mlp.input"], {"layers.3": "layers_3"})
    ['layers_3.mlp.input']
    """
    found = []
    for name in names if raw else ():
        module = next((prefix for prefix in prefixes(name) if prefix in raw), None)
        if module is not None:
            found.append(raw[module] + name[len(module) :])
    return found


def outer_stacks(spec: ModelSpec) -> tuple[StackSpec, ...]:
    """The stacks that are not inside a layer of another stack."""
    layers = {layer for stack in spec.stacks for layer in _layers_of(stack)}
    return tuple(stack for stack in spec.stacks if not any(prefix in layers for prefix in prefixes(stack.path)))


def _layers_of(stack: StackSpec) -> list[str]:
    return [f"{stack.path}.{i}" if stack.path else str(i) for i in range(stack.length)]


def _module_order(spec: ModelSpec) -> list[str]:
    """Every module path but the root's, layers of scanned stacks included (their modules may carry no index)."""
    scans = tuple(f"{stack.path}." for stack in spec.stacks if stack.kind == "scan")
    paths = dict.fromkeys(
        module.path
        for module in spec.modules
        if module.path and not (module.path.startswith(scans) and _lacks_index(module.path, scans))
    )
    paths |= dict.fromkeys(layer for stack in spec.stacks for layer in _layers_of(stack))
    return list(paths)


def _lacks_index(path: str, scans: tuple[str, ...]) -> bool:
    """Whether it is the traced body's module, which stands for all layers and is none of them."""
    head = max((scan for scan in scans if path.startswith(scan)), key=len)
    return not path[len(head) :].partition(".")[0].isdigit()


def _written(
    policy: Policy, spec: ModelSpec, modules: Iterable[str], problems: list[Problem]
) -> list[tuple[tuple[str, ...], Unit]]:
    raw = {module.path: module.raw_path for module in spec.modules}
    free = dict.fromkeys(modules)
    drafts: list[tuple[tuple[str, ...], Unit]] = []
    for i, entry in enumerate(policy.units or ()):
        found = {
            pattern: [path for path in modules if any_matches((pattern,), (path, raw.get(path, path)))]
            for pattern in entry.match
        }
        matched = list(dict.fromkeys(path for paths in found.values() for path in paths))  # a group is named as written
        for pattern in entry.match:
            if not found[pattern]:
                problems.append(_matches_nothing(policy, spec, i, pattern))
        members = tuple(path for path in matched if path in free)
        for path in members:
            del free[path]
        if members:
            drafts.extend([(members, entry)] if entry.group else [((path,), entry) for path in members])
        elif matched:
            problems.append(
                Problem(
                    "shadowed-unit",
                    f"every module that `{', '.join(entry.match)}` matches is taken by an entry above it",
                    hint="the first entry that matches wins: move this one up, or remove it",
                    **policy.source.at(("units", i)),
                )
            )
    return drafts


def _unit(members: tuple[str, ...], entry: Unit, policy: Policy, spec: ModelSpec) -> PlanUnit:
    prefetch = entry.prefetch or policy.unit_defaults.prefetch
    reshard = entry.reshard_after_forward
    stack, index = stack_of(members[0], spec) if len(members) == 1 else (None, None)
    return PlanUnit(
        name="+".join(members),
        members=members,
        reshard_after_forward=policy.unit_defaults.reshard_after_forward if reshard is None else reshard,
        prefetch_forward=prefetch.forward,
        prefetch_backward=prefetch.backward,
        stack=stack,
        index=index,
        inferred=policy.units is None,
    )


def stack_of(path: str, spec: ModelSpec) -> tuple[str | None, int | None]:
    """The stack that a module is a layer of, and its index there."""
    parent, _, index = path.rpartition(".")
    if index.isdigit() and any(stack.path == parent and int(index) < stack.length for stack in spec.stacks):
        return parent, int(index)
    return None, None


def _overlaps(policy: Policy, by_member: Mapping[str, str]) -> list[Problem]:
    inside = [
        (member, outer)
        for member in by_member
        for outer in list(prefixes(member))[1:]
        if outer in by_member and by_member[outer] != by_member[member]
    ]
    if not inside:
        return []
    member, outer = inside[0]
    more = f", and {len(inside) - 1} more" if len(inside) > 1 else ""
    return [
        Problem(
            "overlapping-units",
            f"unit `{member}` lies inside unit `{outer}`{more}; a tensor belongs to one unit",
            hint="keep the outer or the inner pattern; `*` stays within one part of a path, `**` does not",
            **policy.source.at(("units",)),
        )
    ]


def _matches_nothing(policy: Policy, spec: ModelSpec, i: int, pattern: str) -> Problem:
    """Names what the model really has: the repeated classes with their counts and paths, and the nearest."""
    places = repeated_classes(spec)
    known = {stack_path for paths in places.values() for stack_path, _ in paths}
    listing = "; ".join(
        f"`{name}` × {sum(count for _, count in paths)} at {', '.join(f'`{path}`' for path, _ in paths)}"
        for name, paths in places.items()
    )
    modules = [module.path for module in spec.modules if module.path]
    near_class = did_you_mean(pattern, list(places), limit=1)
    if near_class:
        name = near_class.split("`")[1]
        path = places[name][0][0]
        hint = f"did you mean the class `{name}`? units are named by path: `{path}`"
    else:
        hint = (
            did_you_mean(canonical(pattern), [*known, *modules]) or "patterns match module paths, `*` within one part"
        )
    return Problem(
        "unit-matches-nothing",
        f"`{pattern}` matches no module; the model's repeated blocks are {listing or 'none'}",
        hint=hint,
        **policy.source.at(("units", i)),
    )


def repeated_classes(spec: ModelSpec) -> dict[str, list[tuple[str, int]]]:
    """Class name of each stack's layers -> (glob of the layers, count), the largest stack first."""
    places: dict[str, list[tuple[str, int]]] = {}
    for stack in outer_stacks(spec):
        glob = f"{stack.path}.*" if stack.path else "*"
        places.setdefault(stack.block_class, []).append((glob, stack.length))
    if places:
        return places
    counts = Counter(module.class_name for module in spec.modules if module.path and module.param_nbytes)
    first = {module.class_name: module.path for module in reversed(spec.modules) if module.path}
    return {name: [(first[name], count)] for name, count in counts.items() if count > 1}

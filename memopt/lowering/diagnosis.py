"""Why a rule, or one pattern of its lists, matches nothing: the cause and the nearest names the model has."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..errors import Problem, did_you_mean
from ..matching import matches, selects
from ..policy import Policy
from ..rules import Match, Rule
from ..spec import ModelSpec
from ..vocabulary import TABLES
from .entries import Entry
from .notes import listing
from .selectors import acting_roles, in_unit, is_named
from .units import UnitTable


def dead_rule(
    policy: Policy,
    i: int,
    entries: Sequence[Entry],
    spec: ModelSpec,
    units: UnitTable,
    unreached: Sequence[Entry],
) -> Problem:
    """Why rule `i` covers nothing; `unreached`: what its selectors hold for and its action cannot reach."""
    rule = policy.rules[i]
    where = policy.source.at(("rules", i, "match"))
    if not unreached:
        hint = _why_dead(rule.match, rule, entries, spec, units) or "remove it, or mark it `optional: true`"
        return Problem("dead-rule", f"rule `{rule.name}` matches nothing in this model", hint=hint, **where)
    head = f"rule `{rule.name}` matches nothing that it can {rule.action}"
    names = listing(entry.path for entry in unreached)
    if all(entry.unit is None and units.of(entry.path) is not None for entry in unreached):
        text = f"{head}: {names} leave their unit, so it holds none of them"
        return Problem("dead-rule", text, hint="name what the next unit takes in: `layers.*.input`", **where)
    if all(entry.unit is None for entry in unreached):
        text = f"{head}: {names} lie in no unit, and only units have regions"
        return Problem("outside-units", text, hint="list their modules under `units`", **where)
    if any(entry.tensor.op == "topk" for entry in unreached):
        text = f"{head}: {names} are results of topk, which are kept unless named by `op`"
        return Problem("dead-rule", text, hint="select them with `op: topk`", **where)
    text = f"{head}: {names} are inputs of units, named by what makes them"
    hint = f"to {rule.action} what is inside a unit select it by unit: `match: {{unit: {unreached[0].unit}}}`"
    return Problem("dead-rule", text, hint=hint, **where)


def dead_patterns(policy: Policy, i: int, entries: Sequence[Entry], units: UnitTable) -> list[Problem]:
    """A pattern of a list that selects nothing is a slip, even where its neighbours select something."""
    rule = policy.rules[i]
    if rule.optional:
        return []
    roles = acting_roles(rule)
    inside = [entry for entry in entries if entry.role in roles]
    tests: dict[str, Callable[[str, Entry], bool]] = {
        "path": lambda pattern, entry: not entry.unnamed and selects((pattern,), entry.tensor),
        "unit": lambda pattern, entry: in_unit((pattern,), entry, units),
        "name": lambda pattern, entry: is_named((pattern,), entry.tensor.checkpoint_name),
    }
    return [
        Problem(
            "dead-pattern",
            f"rule `{rule.name}`: `{pattern}` matches nothing, the others of its list do",
            hint=_path_hint((pattern,), inside, entries) if key == "path" else f"take it out of `{key}`",
            **policy.source.at(("rules", i, "match", key, k)),
        )
        for key, test in tests.items()
        for k, pattern in enumerate(getattr(rule.match, key) or ())
        if len(getattr(rule.match, key)) > 1 and not any(test(pattern, entry) for entry in inside)
    ]


def absent_tensors(rule: Rule, entries: Sequence[Entry]) -> list[str]:
    """Neutral names are shared by all families: one that this model lacks is worth a note, no more."""
    present = {entry.tensor.tensor for entry in entries}
    absent = [name for name in rule.match.tensor or () if name not in present]
    return [f"rule `{rule.name}`: this model has no {listing(absent)}"] if absent else []


def _why_dead(match: Match, rule: Rule, entries: Sequence[Entry], spec: ModelSpec, units: UnitTable) -> str | None:
    """The selector that is the cause, where one is by itself."""
    roles = acting_roles(rule)
    inside = [entry for entry in entries if entry.role in roles and not entry.unnamed]
    if match.tensor is not None and spec.family is None:
        return f"the model has no table of tensor names (families: {', '.join(TABLES)}); select by `path`"
    if match.tensor is not None and not any(entry.tensor.tensor in match.tensor for entry in inside):
        have = sorted({entry.tensor.tensor for entry in inside if entry.tensor.tensor})
        return f"the {spec.family} table has, in this model, {', '.join(have) or 'none'}"
    if match.name is not None and not any(is_named(match.name, entry.tensor.checkpoint_name) for entry in inside):
        have = sorted({entry.tensor.checkpoint_name for entry in inside if entry.tensor.checkpoint_name})
        return did_you_mean(match.name[0], have) or f"the model's checkpoint names are {', '.join(have) or 'none'}"
    if match.unit is not None and not any(in_unit(match.unit, entry, units) for entry in entries):
        if not units.units:
            return _no_units(spec)
        names = [unit.name for unit in units.units]
        globs = list(dict.fromkeys(f"{unit.stack}.*" if unit.stack else unit.name for unit in units.units))
        return did_you_mean(match.unit[0], globs + names) or f"the units are {listing(globs)}"
    if match.path is not None and not any(selects(match.path, entry.tensor) for entry in inside):
        return _path_hint(match.path, inside, entries)
    if match.min_bytes is not None and all(entry.global_nbytes is None for entry in inside):
        return "sizes are unknown here; pass example_inputs= (or a workload), or select by path"
    if match.op is not None:
        have = sorted({entry.tensor.op for entry in inside if entry.tensor.op})
        return f"operations known in this model: {', '.join(have) or 'none'}"
    return "its selectors hold for no tensor together; remove it, loosen one, or mark it `optional: true`"


def _no_units(spec: ModelSpec) -> str:
    """A model without repeated layers has the units that the policy names, and it names none."""
    modules = [module.path for module in spec.modules if module.path]
    if not modules:
        return "no repeated layers were found and the model is a single module, so there are no units"
    return f"no repeated layers were found, so there are no units; name modules: `units: [...]` of {listing(modules)}"


def _path_hint(patterns: Sequence[str], inside: Sequence[Entry], entries: Sequence[Entry]) -> str:
    elsewhere = {entry.role for entry in entries if not entry.unnamed and selects(patterns, entry.tensor)}
    if elsewhere:
        return f"the pattern matches tensors of role {', '.join(sorted(elsewhere))}; the rule is about others"
    for pattern in patterns:
        if any(matches(f"{pattern}.**", entry.path) for entry in inside):
            return f"`{pattern}` is a module; its tensors are `{pattern}.**`"
    starred = list(dict.fromkeys(_starred(entry) for entry in inside))
    return did_you_mean(patterns[0], starred) or f"paths here look like {listing(starred)}"


def _starred(entry: Entry) -> str:
    path = entry.path
    for stack, index in entry.layers.items():
        path = path.replace(f"{stack}.{index}", f"{stack}.*", 1)
    return path

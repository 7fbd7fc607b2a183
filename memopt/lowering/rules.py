"""Which rule covers which entry: selectors, `layers`, `fraction`, and what a rule may not point at."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..errors import Problem, did_you_mean
from ..matching import any_matches, is_input_name, matches, selects
from ..policy import KeepRule, Match, OffloadRule, Policy, RecomputeRule, Rule, ShardRule
from ..spec import ModelSpec
from ..vocabulary import TABLES
from .entries import Entry
from .stacks import pick_layers
from .units import UnitTable

_STATE = frozenset({"param", "grad", "optimizer_state"})
_ACTIVATION = frozenset({"activation"})


@dataclass(frozen=True)
class Coverage:
    """What one rule covers.

    Attributes:
        entries: Indices of the entries it covers, after `layers` and `fraction`.
        outside: Paths of values it names that lie in no unit, where recompute and offload do not reach.
        notes: Sentences for the plan's warnings.
        problems: What is wrong with it.
    """

    entries: tuple[int, ...]
    outside: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()


def acting_roles(rule: Rule) -> frozenset[str]:
    """The roles a rule is about; without `role`, those its action can act on."""
    if rule.match.role is not None:
        return frozenset(rule.match.role)
    if isinstance(rule, RecomputeRule):
        return _ACTIVATION
    if isinstance(rule, ShardRule):
        return _STATE
    if isinstance(rule, OffloadRule) and _names_activations(rule.match):
        return _ACTIVATION
    return _STATE | _ACTIVATION


def _names_activations(match: Match) -> bool:
    by_input = match.path is not None and any(is_input_name(pattern) for pattern in match.path)
    return by_input or any(selector is not None for selector in (match.tensor, match.op, match.name))


def cover(policy: Policy, i: int, entries: Sequence[Entry], spec: ModelSpec, units: UnitTable) -> Coverage:
    """What rule `i` covers, without regard to the other rules."""
    rule = policy.rules[i]
    place = policy.source.at
    selected = [n for n, entry in enumerate(entries) if _is_selected(rule, entry, units)]
    problems: list[Problem] = []
    outside: list[str] = []
    if isinstance(rule, OffloadRule | RecomputeRule):
        problems += _own_inputs(policy, i, [entries[n] for n in selected])
        reachable = [n for n in selected if _is_reachable(rule, entries[n])]
        outside = [entries[n].path for n in selected if entries[n].role == "activation" and entries[n].unit is None]
        selected = reachable
    if not selected:
        if not rule.optional and not problems:
            problems.append(_dead(policy, i, entries, spec, units, outside))
        return Coverage((), tuple(outside), problems=tuple(problems))
    notes: list[str] = []
    if rule.match.layers is not None:
        selected, faults = pick_layers(rule.match.layers, selected, entries, spec)
        problems += [Problem(code, text, hint, **place(("rules", i, "match", "layers"))) for code, text, hint in faults]
    fraction = rule.fraction if isinstance(rule, OffloadRule | RecomputeRule) else 1.0
    if fraction < 1 and selected:
        selected, cut_notes = cut(fraction, selected, entries, rule.name)
        notes += cut_notes
        if not selected:
            problems.append(
                Problem(
                    "fraction-without-layers",
                    f"rule `{rule.name}` takes a fraction {fraction:g} of tensors that lie in no stack of layers; "
                    "`fraction` cuts along layers",
                    hint="leave `fraction` out, or select tensors of the layers",
                    **place(("rules", i, "fraction")),
                )
            )
    if rule.match.names_values and outside:
        notes.append(
            f"rule `{rule.name}`: {_listing(outside)} lie in no unit, where values are kept; give their modules a unit"
        )
    if isinstance(rule, OffloadRule | RecomputeRule) and _misses_unnamed(rule.match, selected, entries):
        notes.append(
            f"rule `{rule.name}`: `min_bytes`, `dtype` and `trainable` cannot be judged for values without a name; "
            "those it leaves to the rules below"
        )
    return Coverage(tuple(selected), tuple(outside), tuple(notes), tuple(problems))


def _misses_unnamed(match: Match, selected: Iterable[int], entries: Sequence[Entry]) -> bool:
    limits = match.min_bytes is not None or match.dtype is not None or match.trainable is not None
    return limits and not match.names_values and any(entries[n].role == "activation" for n in selected)


def _is_selected(rule: Rule, entry: Entry, units: UnitTable) -> bool:
    """Whether all selectors but `layers` hold."""
    match, tensor = rule.match, entry.tensor
    if entry.role not in acting_roles(rule):
        return False
    if match.unit is not None and not _in_unit(match.unit, entry, units):
        return False
    if entry.unnamed:
        return not match.names_values and match.min_bytes is None and match.dtype is None and match.trainable is None
    return (
        (match.tensor is None or tensor.tensor in match.tensor)
        and (match.op is None or tensor.op in match.op)
        and (match.trainable is None or (entry.role != "activation" and tensor.trainable == match.trainable))
        and (match.dtype is None or entry.dtype in match.dtype)
        and (match.min_bytes is None or (entry.global_nbytes or 0) >= max(match.min_bytes, 1))
        and (match.name is None or _is_named(match.name, tensor.checkpoint_name))
        and (match.path is None or selects(match.path, tensor))
    )


def _is_named(patterns: Iterable[str], name: str | None) -> bool:
    return name is not None and any(matches(pattern, name) for pattern in patterns)


def _in_unit(patterns: Iterable[str], entry: Entry, units: UnitTable) -> bool:
    if entry.unit is None:
        return False
    return any_matches(patterns, (entry.unit, *units.by_name[entry.unit].members))


def _is_reachable(rule: OffloadRule | RecomputeRule, entry: Entry) -> bool:
    """Values outside units have no region; `topk` results are kept unless named by `op`; inputs are not recomputed."""
    if entry.role != "activation":
        return True
    if entry.unit is None or (entry.own_input and isinstance(rule, RecomputeRule)):
        return False
    return entry.tensor.op != "topk" or (rule.match.op is not None and "topk" in rule.match.op)


def _own_inputs(policy: Policy, i: int, selected: Sequence[Entry]) -> list[Problem]:
    rule = policy.rules[i]
    if not isinstance(rule, RecomputeRule) or not rule.match.names_values or rule.match.op is not None:
        return []
    named = [entry for entry in selected if entry.own_input and _points_at_input(rule.match, entry)]
    if not named:
        return []
    unit = named[0].unit
    return [
        Problem(
            "recompute-unit-input",
            f"rule `{rule.name}` recomputes {_listing([entry.path for entry in named])}, a unit's own input: "
            f"the backward pass of `{unit}` starts from it, and nothing in the unit can make it again",
            hint="keep it (leave it out of the rule) or offload it: "
            "`{name: input, action: offload, match: {path: 'layers.*.input'}}`",
            **policy.source.at(("rules", i, "match")),
        )
    ]


def _points_at_input(match: Match, entry: Entry) -> bool:
    """Whether the rule names the input as such; the name of the module that made it does not."""
    names = [name for name in (entry.path, *entry.tensor.aliases) if is_input_name(name)]
    by_path = match.path is not None and any_matches([p for p in match.path if is_input_name(p)], names)
    return by_path or match.name is not None or (match.tensor is not None and entry.tensor.tensor in match.tensor)


def cut(fraction: float, selected: Sequence[int], entries: Sequence[Entry], name: str) -> tuple[list[int], list[str]]:
    """The first layers of each stack, as many as the fraction asks for; ties round up, at least one.

    The first layers' residuals wait longest for the backward pass, so they have the most time to travel.
    """
    by_stack: dict[str, set[int]] = defaultdict(set)
    for n in selected:
        stack = _outer(entries[n].layers)
        if stack is not None:
            by_stack[stack].add(entries[n].layers[stack])
    notes = []
    taken: dict[str, set[int]] = {}
    for stack, indices in by_stack.items():
        asked = fraction * len(indices)
        count = max(1, math.floor(asked + 0.5))
        taken[stack] = set(sorted(indices)[:count])
        if not math.isclose(asked, count, abs_tol=1e-9):
            notes.append(
                f"rule `{name}`: a fraction {fraction:g} of {len(indices)} layers is {count} layers "
                f"({count / len(indices):.3f}) of `{stack}`"
            )
    left = [entries[n].path for n in selected if _outer(entries[n].layers) is None]
    if left and taken:
        notes.append(f"rule `{name}`: `fraction` cuts along layers; {_listing(left)} lie in none and are left out")
    kept = [n for n in selected if entries[n].layers and _is_taken(entries[n].layers, taken)]
    return kept, notes


def _outer(layers: Mapping[str, int]) -> str | None:
    return min(layers, key=len) if layers else None


def _is_taken(layers: Mapping[str, int], taken: Mapping[str, set[int]]) -> bool:
    stack = _outer(layers)
    return stack is not None and layers[stack] in taken[stack]


def _listing(paths: Iterable[str], *, limit: int = 3) -> str:
    names = list(dict.fromkeys(paths))
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(f"`{name}`" for name in names[:limit]) + more


def _dead(
    policy: Policy, i: int, entries: Sequence[Entry], spec: ModelSpec, units: UnitTable, outside: Sequence[str]
) -> Problem:
    rule = policy.rules[i]
    match = rule.match
    where = policy.source.at(("rules", i, "match"))
    head = f"rule `{rule.name}` matches nothing"
    if outside:
        return Problem(
            "outside-units",
            f"{head} that it can {rule.action}: {_listing(outside)} lie in no unit, and only units have regions",
            hint="list their modules under `units`",
            **where,
        )
    hint = _why_dead(match, rule, entries, spec, units)
    return Problem("dead-rule", f"{head} in this model", hint=hint or "remove it, or mark it `optional: true`", **where)


def _why_dead(match: Match, rule: Rule, entries: Sequence[Entry], spec: ModelSpec, units: UnitTable) -> str | None:
    """The selector that is the cause, where one is by itself."""
    roles = acting_roles(rule)
    inside = [entry for entry in entries if entry.role in roles and not entry.unnamed]
    if match.tensor is not None and spec.family is None:
        return f"the model has no table of tensor names (families: {', '.join(TABLES)}); select by `path`"
    if match.tensor is not None and not any(entry.tensor.tensor in match.tensor for entry in inside):
        have = sorted({entry.tensor.tensor for entry in inside if entry.tensor.tensor})
        return f"the {spec.family} table has, in this model, {', '.join(have) or 'none'}"
    if match.name is not None and not any(_is_named(match.name, entry.tensor.checkpoint_name) for entry in inside):
        have = sorted({entry.tensor.checkpoint_name for entry in inside if entry.tensor.checkpoint_name})
        return did_you_mean(match.name[0], have) or f"the model's checkpoint names are {', '.join(have) or 'none'}"
    if match.unit is not None and not any(_in_unit(match.unit, entry, units) for entry in entries):
        names = [unit.name for unit in units.units]
        globs = list(dict.fromkeys(f"{unit.stack}.*" if unit.stack else unit.name for unit in units.units))
        return did_you_mean(match.unit[0], globs + names) or f"the units are {_listing(globs)}"
    if match.path is not None and not any(selects(match.path, entry.tensor) for entry in inside):
        return _path_hint(match.path, inside, entries)
    if match.min_bytes is not None and all(entry.global_nbytes is None for entry in inside):
        return "sizes are unknown here; pass example_inputs= (or a workload), or select by path"
    if isinstance(rule, KeepRule | ShardRule | OffloadRule | RecomputeRule) and match.op is not None:
        have = sorted({entry.tensor.op for entry in inside if entry.tensor.op})
        return f"operations known in this model: {', '.join(have) or 'none'}"
    return "its selectors hold for no tensor together; remove it, loosen one, or mark it `optional: true`"


def _path_hint(patterns: Sequence[str], inside: Sequence[Entry], entries: Sequence[Entry]) -> str:
    elsewhere = {entry.role for entry in entries if not entry.unnamed and selects(patterns, entry.tensor)}
    if elsewhere:
        return f"the pattern matches tensors of role {', '.join(sorted(elsewhere))}; the rule is about others"
    for pattern in patterns:
        if any(matches(f"{pattern}.**", entry.path) for entry in inside):
            return f"`{pattern}` is a module; its tensors are `{pattern}.**`"
    starred = list(dict.fromkeys(_starred(entry) for entry in inside))
    return did_you_mean(patterns[0], starred) or f"paths here look like {_listing(starred)}"


def _starred(entry: Entry) -> str:
    path = entry.path
    for stack, index in entry.layers.items():
        path = path.replace(f"{stack}.{index}", f"{stack}.*", 1)
    return path

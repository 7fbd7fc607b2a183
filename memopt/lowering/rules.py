"""Which rule covers which entry: selectors, `layers`, `fraction`, and what a rule may not point at."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ..errors import Problem
from ..matching import any_matches, is_input_name
from ..policy import Policy
from ..rules import Match, OffloadRule, RecomputeRule, Rule
from ..spec import ModelSpec
from .diagnosis import absent_tensors, dead_patterns, dead_rule
from .entries import Entry
from .notes import listing, starred
from .selectors import acting_roles, is_reachable, is_selected
from .stacks import pick_layers
from .units import UnitTable


@dataclass
class Coverage:
    """What one rule covers, without regard to the other rules.

    Attributes:
        entries: Indices of the entries it covers, after `layers` and `fraction`.
        notes: Sentences for the plan's warnings.
        problems: What is wrong with it.
    """

    entries: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def cover(policy: Policy, i: int, entries: Sequence[Entry], spec: ModelSpec, units: UnitTable) -> Coverage:
    """What rule `i` covers."""
    rule = policy.rules[i]
    selected = [n for n, entry in enumerate(entries) if is_selected(rule, entry, units)]
    reached = [n for n in selected if is_reachable(rule, entries[n])]
    unreached = [entries[n] for n in selected if not is_reachable(rule, entries[n])]
    coverage = Coverage(problems=_own_inputs(policy, i, unreached, spec))
    if not reached:
        if not rule.optional and not coverage.problems:
            coverage.problems.append(dead_rule(policy, i, entries, spec, units, unreached))
        return coverage
    coverage.problems += dead_patterns(policy, i, entries, units)
    coverage.notes += [*absent_tensors(rule, entries), *_limits(rule, unreached, [entries[n] for n in reached])]
    coverage.notes += _unknown_sizes(rule, entries)
    if rule.match.layers is not None:
        place = policy.source.at(("rules", i, "match", "layers"))
        reached, faults = pick_layers(rule.match.layers, reached, entries, spec)
        coverage.problems += [
            Problem(code, f"rule `{rule.name}`: {text}", hint, **place)
            for code, text, hint in faults
            if code != "dead-rule" or not rule.optional
        ]
    if isinstance(rule, OffloadRule | RecomputeRule) and rule.fraction < 1 and reached:
        reached = _cut(policy, i, rule.fraction, reached, entries, coverage)
    coverage.entries = reached
    return coverage


def _limits(rule: Rule, unreached: Sequence[Entry], reached: Sequence[Entry]) -> list[str]:
    """Where the rule stops, in sentences."""
    if not isinstance(rule, OffloadRule | RecomputeRule):
        return []
    notes = []
    outside = [entry.path for entry in unreached if entry.unit is None]
    if rule.match.names_values and outside:
        notes.append(
            f"rule `{rule.name}`: {listing(outside)} lie in no unit, where values are kept; give their modules a unit"
        )
    if _misses_unnamed(rule.match, reached):
        notes.append(
            f"rule `{rule.name}`: `min_bytes`, `dtype` and `trainable` cannot be judged for values without a name; "
            "those it leaves to the rules below"
        )
    return notes


def _unknown_sizes(rule: Rule, entries: Sequence[Entry]) -> list[str]:
    """`min_bytes` cannot be judged where shapes are unknown, as without example inputs."""
    if rule.match.min_bytes is None:
        return []
    roles = acting_roles(rule)
    inside = [entry for entry in entries if entry.role in roles and entry.unit is not None and not entry.unnamed]
    unknown = [entry.path for entry in inside if entry.global_nbytes is None]
    if not unknown:
        return []
    return [f"rule `{rule.name}`: `min_bytes` leaves out {len(unknown)} tensors of unknown size, {listing(unknown)}"]


def _misses_unnamed(match: Match, reached: Iterable[Entry]) -> bool:
    has_limit = match.min_bytes is not None or match.dtype is not None or match.trainable is not None
    return has_limit and not match.names_values and any(entry.role == "activation" for entry in reached)


def _own_inputs(policy: Policy, i: int, unreached: Sequence[Entry], spec: ModelSpec) -> list[Problem]:
    rule = policy.rules[i]
    if not isinstance(rule, RecomputeRule) or not rule.match.names_values or rule.match.op is not None:
        return []
    named = [entry for entry in unreached if entry.own_input and _points_at_input(rule.match, entry)]
    if not named:
        return []
    unit, names = named[0].unit, listing(starred(entry.path, spec) for entry in named)
    return [
        Problem(
            "recompute-unit-input",
            f"rule `{rule.name}` recomputes {names}, a unit's own input: the backward pass of `{unit}` starts from "
            "it, and nothing in the unit can make it again",
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


def _cut(
    policy: Policy, i: int, fraction: float, reached: Sequence[int], entries: Sequence[Entry], coverage: Coverage
) -> list[int]:
    """The first layers of each stack, as many as the fraction asks for; ties round up, at least one.

    The first layers' residuals wait longest for the backward pass, so they have the most time to travel.
    """
    name = policy.rules[i].name
    by_stack: dict[str, set[int]] = defaultdict(set)
    for n in reached:
        stack = _outer(entries[n].layers)
        if stack is not None:
            by_stack[stack].add(entries[n].layers[stack])
    if not by_stack:
        coverage.problems.append(
            Problem(
                "fraction-without-layers",
                f"rule `{name}` takes a fraction {fraction:g} of tensors that lie in no stack of layers; "
                "`fraction` cuts along layers",
                hint="leave `fraction` out, or select tensors of the layers",
                **policy.source.at(("rules", i, "fraction")),
            )
        )
        return []
    taken = {stack: _first_layers(fraction, indices) for stack, indices in by_stack.items()}
    coverage.notes += [
        f"rule `{name}`: a fraction {fraction:g} of {len(indices)} layers is {len(taken[stack])} layers "
        f"({len(taken[stack]) / len(indices):.3f}) of `{stack}`"
        for stack, indices in by_stack.items()
        if not math.isclose(fraction * len(indices), len(taken[stack]), abs_tol=1e-9)
    ]
    left = [entries[n].path for n in reached if not entries[n].layers]
    if left:
        coverage.notes.append(
            f"rule `{name}`: `fraction` cuts along layers; {listing(left)} lie in none and are left out"
        )
    return [n for n in reached if _is_taken(entries[n].layers, taken)]


def _first_layers(fraction: float, indices: Iterable[int]) -> set[int]:
    ordered = sorted(indices)
    return set(ordered[: max(1, math.floor(fraction * len(ordered) + 0.5))])


def _outer(layers: Mapping[str, int]) -> str | None:
    return min(layers, key=len) if layers else None


def _is_taken(layers: Mapping[str, int], taken: Mapping[str, set[int]]) -> bool:
    stack = _outer(layers)
    return stack is not None and layers[stack] in taken[stack]

"""Which rule covers which entry: selectors, `layers`, `fraction`, and what a rule may not point at."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..errors import Problem
from ..matching import any_matches, is_input_name
from ..policy import Match, OffloadRule, Policy, RecomputeRule
from ..spec import ModelSpec
from .diagnosis import absent_tensors, dead_patterns, dead_rule
from .entries import Entry
from .notes import listing
from .selectors import is_selected
from .stacks import pick_layers
from .units import UnitTable


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


def cover(policy: Policy, i: int, entries: Sequence[Entry], spec: ModelSpec, units: UnitTable) -> Coverage:
    """What rule `i` covers, without regard to the other rules."""
    rule = policy.rules[i]
    place = policy.source.at
    selected = [n for n, entry in enumerate(entries) if is_selected(rule, entry, units)]
    problems: list[Problem] = []
    outside: list[str] = []
    if isinstance(rule, OffloadRule | RecomputeRule):
        problems += _own_inputs(policy, i, [entries[n] for n in selected])
        reachable = [n for n in selected if _is_reachable(rule, entries[n])]
        outside = [entries[n].path for n in selected if entries[n].role == "activation" and entries[n].unit is None]
        selected = reachable
    if not selected:
        if not rule.optional and not problems:
            problems.append(dead_rule(policy, i, entries, spec, units, outside))
        return Coverage((), tuple(outside), problems=tuple(problems))
    problems += dead_patterns(policy, i, entries, units)
    notes = absent_tensors(rule, entries)
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
            f"rule `{rule.name}`: {listing(outside)} lie in no unit, where values are kept; give their modules a unit"
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
            f"rule `{rule.name}` recomputes {listing([entry.path for entry in named])}, a unit's own input: "
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
        notes.append(f"rule `{name}`: `fraction` cuts along layers; {listing(left)} lie in none and are left out")
    kept = [n for n in selected if entries[n].layers and _is_taken(entries[n].layers, taken)]
    return kept, notes


def _outer(layers: Mapping[str, int]) -> str | None:
    return min(layers, key=len) if layers else None


def _is_taken(layers: Mapping[str, int], taken: Mapping[str, set[int]]) -> bool:
    stack = _outer(layers)
    return stack is not None and layers[stack] in taken[stack]

"""Slots: for each tensor, which rule decides its layout, its memory and (activations) its residual."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..errors import Problem
from ..policy import Policy
from ..rules import KeepRule, OffloadRule, RecomputeRule, Rule, ShardRule
from .entries import Entry
from .rules import Coverage

LAYOUT, MEMORY, RESIDUAL = "layout", "memory", "residual"


@dataclass(frozen=True)
class Decisions:
    """Who decides what.

    Attributes:
        winners: Entry index -> slot -> rule index.
        losers: Entry index -> rule indices that cover it and decide nothing of it.
    """

    winners: Mapping[int, Mapping[str, int]]
    losers: Mapping[int, tuple[int, ...]]


def slots_of(rule: Rule, role: str) -> tuple[str, ...]:
    """The slots a rule fills for a tensor of that role."""
    if role == "activation":
        return () if isinstance(rule, ShardRule) else (RESIDUAL,)
    if isinstance(rule, KeepRule):
        return (LAYOUT, MEMORY)
    if isinstance(rule, ShardRule):
        return (LAYOUT,)
    return () if isinstance(rule, RecomputeRule) else (MEMORY,)


def decide(policy: Policy, entries: Sequence[Entry], coverage: Sequence[Coverage]) -> Decisions:
    """First match wins for each slot; a rule that covers and decides nothing is a loser there."""
    winners: dict[int, dict[str, int]] = {}
    losers: dict[int, list[int]] = {}
    for i, rule in enumerate(policy.rules):
        for n in coverage[i].entries:
            won = winners.setdefault(n, {})
            free = [slot for slot in slots_of(rule, entries[n].role) if slot not in won]
            won.update(dict.fromkeys(free, i))
            if not free:
                losers.setdefault(n, []).append(i)
    return Decisions(winners, {n: tuple(rules) for n, rules in losers.items()})


def shadowed(policy: Policy, coverage: Sequence[Coverage], decisions: Decisions) -> list[Problem]:
    """A problem for each rule that covers something and decides nothing."""
    active = {i for won in decisions.winners.values() for i in won.values()}
    problems = []
    for i, rule in enumerate(policy.rules):
        if i in active or not coverage[i].entries or rule.optional:
            continue
        above = sorted({j for n in coverage[i].entries for j in decisions.winners[n].values()})
        names = ", ".join(f"`{policy.rules[j].name}`" for j in above)
        problems.append(
            Problem(
                "shadowed-rule",
                f"rule `{rule.name}` decides nothing: {names} above it take every tensor it matches",
                hint="the first match wins: move it up, remove it, or mark it `optional: true`",
                **policy.source.at(("rules", i)),
            )
        )
    return problems


def residual_of(rule: Rule | None) -> str:
    """What a rule makes of an activation."""
    if isinstance(rule, OffloadRule):
        return "offload"
    return "recompute" if isinstance(rule, RecomputeRule) else "keep"

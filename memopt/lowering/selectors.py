"""Selectors: whether a rule's `match` holds for an entry, `layers` and `fraction` left aside."""

from __future__ import annotations

from collections.abc import Iterable

from ..matching import any_matches, matches, selects
from ..rules import OffloadRule, RecomputeRule, Rule, ShardRule
from .entries import Entry
from .units import UnitTable, raw_names

_STATE = frozenset({"param", "grad", "optimizer_state"})
_ACTIVATION = frozenset({"activation"})


def acting_roles(rule: Rule) -> frozenset[str]:
    """The roles a rule is about; without `role`, those its action can act on."""
    if rule.match.role is not None:
        return frozenset(rule.match.role)
    if isinstance(rule, RecomputeRule):
        return _ACTIVATION
    if isinstance(rule, ShardRule):
        return _STATE
    if isinstance(rule, OffloadRule) and rule.match.names_activations:
        return _ACTIVATION
    return _STATE | _ACTIVATION


def needs_units(rule: Rule) -> bool:
    """Whether what a rule selects depends on the units."""
    return rule.match.unit is not None or "activation" in acting_roles(rule)


def is_selected(rule: Rule, entry: Entry, units: UnitTable) -> bool:
    """Whether all selectors but `layers` hold."""
    match, tensor = rule.match, entry.tensor
    if entry.role not in acting_roles(rule):
        return False
    if match.unit is not None and not in_unit(match.unit, entry, units):
        return False
    if entry.unnamed:
        return not match.names_values and match.min_bytes is None and match.dtype is None and match.trainable is None
    return (
        (match.tensor is None or tensor.tensor in match.tensor)
        and (match.op is None or tensor.op in match.op)
        and (match.trainable is None or (entry.role != "activation" and tensor.trainable == match.trainable))
        and (match.dtype is None or entry.dtype in match.dtype)
        and (match.min_bytes is None or (entry.global_nbytes or 0) >= max(match.min_bytes, 1))
        and (match.name is None or is_named(match.name, tensor.checkpoint_name))
        and (match.path is None or selects(match.path, tensor))
    )


def is_named(patterns: Iterable[str], name: str | None) -> bool:
    return name is not None and any(matches(pattern, name) for pattern in patterns)


def in_unit(patterns: Iterable[str], entry: Entry, units: UnitTable) -> bool:
    if entry.unit is None:
        return False
    names = (entry.unit, *units.by_name[entry.unit].members)
    return any_matches(patterns, (*names, *raw_names(names, units.raw)))


def is_reachable(rule: Rule, entry: Entry) -> bool:
    """Whether the action can reach a selected entry.

    Values outside units have no region; a unit's own input cannot be made again inside it; `topk` results are kept
    unless named by `op`, as a second choice of experts may differ from the first.
    """
    if entry.role != "activation" or not isinstance(rule, OffloadRule | RecomputeRule):
        return True
    if entry.unit is None or (entry.own_input and isinstance(rule, RecomputeRule)):
        return False
    return entry.tensor.op != "topk" or (rule.match.op is not None and "topk" in rule.match.op)

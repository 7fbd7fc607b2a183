"""Policies people write by hand, as assignments: what `tune` must not be slower than."""

from __future__ import annotations

from collections.abc import Mapping

from .judge import judge
from .problem import Action, Assignment, Choice, Outcome
from .problem import Problem as Choices

_ATTENTION = frozenset({"q", "k", "v", "attn_out", "attn_stats"})


def preset_assignments(problem: Choices) -> Mapping[str, Assignment]:
    """Name -> what it does with each choice of each layer; those that offload only where there is a link."""
    found = {"recompute": _assign(problem, "keep", "recompute", "recompute")}
    if problem.link is not None:
        found["offload inputs"] = _assign(problem, "offload", "recompute", "recompute")
        found["offload attention"] = _assign(problem, "offload", "offload", "recompute")
        found["offload all"] = _assign(problem, "offload", "offload", "offload")
    return {**found, "keep all": _assign(problem, "keep", "keep", "keep")}


def _assign(problem: Choices, own_input: Action, attention: Action, others: Action) -> Assignment:
    def of(choice: Choice) -> Action:
        if "recompute" not in choice.actions:
            return own_input
        return attention if _ATTENTION.issuperset(choice.name.split("+")) else others

    return tuple(tuple(of(choice) for choice in layer.choices) for layer in problem.layers())


def presets(problem: Choices) -> dict[str, Outcome]:
    """Each of them in the model of the step."""
    return {name: judge(problem, assignment) for name, assignment in preset_assignments(problem).items()}

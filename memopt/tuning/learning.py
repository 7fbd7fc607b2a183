"""What a plan through the backend teaches the model of the step: bytes it did not foresee, and a slower link."""

from __future__ import annotations

from dataclasses import replace

from ..plan_result import PlanResult
from .judge import judge
from .problem import Assignment
from .problem import Problem as Choices

NOTICED = 0.02  # of the step: exposed seconds below it are no reason to choose again
_SLOWEST = 0.02  # of the link's rate; no schedule is believed to be worse
_HALVINGS = 24


def learn_bytes(choices: Choices, result: PlanResult, assignment: Assignment) -> Choices:
    """The bytes no choice changes, corrected by what the backend found for one assignment."""
    error = result.measured.peak_bytes - judge(choices, assignment).peak_bytes
    return replace(choices, static_bytes=max(0.0, choices.static_bytes + error))


def learn_link(choices: Choices, result: PlanResult, assignment: Assignment) -> Choices | None:
    """The link as slow as the compiled schedule makes it look; None where nothing is to be learnt.

    A compiler may start copies later than they could start. The simulator does not know its schedule, but at a slower
    link it exposes as much, and what is chosen then asks less of the link.
    """
    exposed_s = (result.measured.overlap or {}).get("exposed_s")
    if exposed_s is None or choices.link is None:
        return None
    modelled = judge(choices, assignment)
    if exposed_s <= modelled.exposed_s + NOTICED * modelled.step_s:
        return None
    low, high = _SLOWEST, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        hides_more = judge(_slowed(choices, middle), assignment).exposed_s < exposed_s
        low, high = (low, middle) if hides_more else (middle, high)
    return _slowed(choices, high)


def _slowed(choices: Choices, share: float) -> Choices:
    link = choices.link
    if link is None:
        return choices
    dram = None if link.dram_bytes_per_s is None else link.dram_bytes_per_s * share
    return replace(choices, link=replace(link, bytes_per_s=link.bytes_per_s * share, dram_bytes_per_s=dram))

"""Solves a `Problem`: exactly, layer by layer, where it is small; by counts per layer class where it is not.

The program's optimum is the simulator's except where both copy directions share the host's memory, which the program
leaves out: it then promises too little time, never too much. So a small problem is solved again without the assignments
already tried until no other can be better. For layer classes the program says how many layers; which ones is tried in a
few ways a person would write, and the simulator decides.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from scipy.optimize import OptimizeResult

from .judge import is_sound, judge
from .problem import Action, Assignment, Outcome, Problem
from .program import CONST, Block, Linear, Program

EXACT_DECISIONS = 48
_MAX_ROUNDS = 300
_TIE = 1e-9
_EXPOSED = 0.005  # of the step: below it, a slower program cannot find much
_COUNTED: tuple[Action, ...] = ("keep", "offload", "recompute")


@dataclass(frozen=True, slots=True)
class Solution:
    """The best assignment found.

    Attributes:
        assignment: Per layer and choice.
        outcome: As simulated.
        bound_s: No assignment can be faster than this (0 where nothing is proven).
        rounds: Programs solved.
    """

    assignment: Assignment
    outcome: Outcome
    bound_s: float
    rounds: int

    @property
    def again_s(self) -> float:
        """Seconds spent making values again. None where all are kept: then no layer is run again at all, and what each
        rerun costs beside its named values (norms), which the model of the step adds to every layer, does not arise.
        """
        is_kept = all(action == "keep" for actions in self.assignment for action in actions)
        return 0.0 if is_kept else self.outcome.recompute_s

    @property
    def gap(self) -> float:
        """How far from the bound, relative to it."""
        return 0.0 if not self.bound_s else max(0.0, self.outcome.step_s / self.bound_s - 1)


@dataclass(frozen=True, slots=True)
class Infeasible:
    """Nothing fits; what is the least that would.

    Attributes:
        least_device_bytes: The smallest device budget any choice meets with this host budget; None if none does.
        assignment: What meets it.
    """

    least_device_bytes: float | None
    assignment: Assignment | None


def solve(problem: Problem, *, max_cuts: int = 2, time_limit_s: float = 10.0) -> Solution | Infeasible:
    """The fastest assignment within both budgets, or the nearest device budget for which there is one.

    Args:
        problem: The problem.
        max_cuts: Larger problems: how many tensors may be treated unlike in layers of one class. Each is a cut in a
            scan and two lines in the policy.
        time_limit_s: Per program.
    """
    if problem.num_decisions <= EXACT_DECISIONS:
        found = _solve_exactly(problem, time_limit_s=time_limit_s)
    else:
        found = _solve_by_counts(problem, max_cuts=max_cuts, time_limit_s=time_limit_s)
    return found or floor(problem, max_cuts=max_cuts, time_limit_s=time_limit_s)


def floor(problem: Problem, *, max_cuts: int = 2, time_limit_s: float = 10.0) -> Infeasible:
    """The smallest device budget that any choice meets."""
    exact = problem.num_decisions <= EXACT_DECISIONS
    free = replace(problem, device_bytes=1e18)
    program = Program(free, _blocks(free, exact=exact), max_cuts=None if exact else max_cuts)
    result = program.rows.solve({program.peak: 1.0}, time_limit_s=time_limit_s, rel_gap=0.0)
    if result.x is None:
        return Infeasible(None, None)
    tried = [(judge(free, found).peak_bytes, found) for found in _assignments(program, result)]
    least_bytes, assignment = min(tried, key=lambda pair: pair[0])
    return Infeasible(least_bytes, assignment)


def _blocks(problem: Problem, *, exact: bool) -> tuple[Block, ...]:
    if exact:
        return tuple(Block(layer, 1) for layer in problem.layers())
    return tuple(Block(layer, layer.count) for layer in problem.classes)


def _objective(program: Program) -> Linear:
    """The end of the step; among equals, fewer bytes moved and less computed again."""
    goal: Linear = {program.end: 1.0}
    for number in range(len(program.blocks)):
        for count in program.counts[number]:
            goal[count["offload"]] = goal.get(count["offload"], 0.0) + _TIE
            goal[count["recompute"]] = goal.get(count["recompute"], 0.0) + _TIE
    return goal


def _solve_exactly(problem: Problem, *, time_limit_s: float) -> Solution | None:
    program = Program(problem, _blocks(problem, exact=True))
    best: tuple[Assignment, Outcome] | None = None
    bound_s = 0.0
    for number in range(1, _MAX_ROUNDS + 1):
        result = program.rows.solve(_objective(program), time_limit_s=time_limit_s, rel_gap=0.0)
        if result.x is None:
            return None if best is None else Solution(*best, bound_s=best[1].step_s, rounds=number)
        promised_s = _promised_s(program, result)
        bound_s = promised_s if best is None else min(best[1].step_s, max(bound_s, promised_s))
        if best is not None and promised_s >= best[1].step_s * (1 - 1e-9):
            return Solution(*best, bound_s=best[1].step_s, rounds=number)
        assignment = _exact_assignment(program, result)
        outcome = judge(problem, assignment)
        if outcome.fits(problem) and (best is None or outcome.step_s < best[1].step_s):
            best = (assignment, outcome)
        _forbid(program, result)
    return None if best is None else Solution(*best, bound_s=bound_s, rounds=_MAX_ROUNDS)


def _promised_s(program: Program, result: OptimizeResult) -> float:
    problem = program.problem
    return float(result.x[program.end]) * program.time_unit * problem.steps + problem.tail_s


def _forbid(program: Program, result: OptimizeResult) -> None:
    """At least one action must differ from this result's."""
    row: Linear = {CONST: -1.0}
    for counts in program.counts:
        for count in counts:
            for index in count.values():
                if result.x[index] > 0.5:
                    row[index] = -1.0
                    row[CONST] += 1.0
                else:
                    row[index] = 1.0
    program.rows.at_least(row, {})


def _exact_assignment(program: Program, result: OptimizeResult) -> Assignment:
    return tuple(tuple(_exact_action(count, result) for count in counts) for counts in program.counts)


def _exact_action(count: dict[str, int], result: OptimizeResult) -> Action:
    for action in _COUNTED:
        if result.x[count[action]] > 0.5:
            return action
    return "drop"


def _solve_by_counts(problem: Problem, *, max_cuts: int, time_limit_s: float) -> Solution | None:
    """Counts, then layers. Where copies are exposed the counts are too hopeful - a layer's copies are not spread as its
    class's are - so programs that believe in a slower link, or in none, are asked too, and the simulator decides.
    """
    best = _by_counts(problem, problem, max_cuts=max_cuts, time_limit_s=time_limit_s)
    if best is None or best.outcome.exposed_s < _EXPOSED * best.outcome.step_s:
        return best
    for wary in _wary(problem):
        found = _by_counts(problem, wary, max_cuts=max_cuts, time_limit_s=time_limit_s)
        if found is not None and found.outcome.step_s < best.outcome.step_s:
            best = found
    return best


def _wary(problem: Problem) -> Iterator[Problem]:
    link = problem.link
    for share in (0.8, 0.6, 0.3):
        if link is not None:
            yield replace(problem, link=replace(link, bytes_per_s=link.rate(1) * share))
    yield replace(problem, link=None)


def _by_counts(problem: Problem, asked: Problem, *, max_cuts: int, time_limit_s: float) -> Solution | None:
    """The program's memory is an upper bound for contiguous cuts, so what it finds should fit; its budget is tightened
    where a placement does not.
    """
    for number in range(1, 6):
        program = Program(asked, _blocks(problem, exact=False), max_cuts=max_cuts)
        result = program.rows.solve(_objective(program), time_limit_s=time_limit_s, rel_gap=1e-4)
        if result.x is None:
            break
        outcomes = [(found, judge(problem, found)) for found in _assignments(program, result)]
        fitting = [pair for pair in outcomes if pair[1].fits(problem)]
        if fitting:
            return Solution(*min(fitting, key=lambda pair: pair[1].step_s), bound_s=0.0, rounds=number)
        over = min(pair[1].peak_bytes for pair in outcomes) - problem.device_bytes
        asked = replace(asked, device_bytes=asked.device_bytes - max(over, 0.001 * problem.device_bytes))
    return None


def _assignments(program: Program, result: OptimizeResult) -> Iterator[Assignment]:
    """Sound ways to say which layers, given how many of each block."""
    if all(block.size == 1 for block in program.blocks):
        yield _exact_assignment(program, result)
        return
    seen: set[Assignment] = set()
    for place in (_contiguous, _every):
        layers: list[tuple[Action, ...]] = []
        for block, counts in zip(program.blocks, program.counts, strict=True):
            whole = [{action: round(float(result.x[index])) for action, index in count.items()} for count in counts]
            layers += zip(*(place(count, block.size) for count in whole), strict=True)
        found = tuple(layers)
        if found not in seen and is_sound(program.problem, found):
            seen.add(found)
            yield found


def _contiguous(count: dict[str, int], size: int) -> list[Action]:
    """What is made again comes first, then what is sent away, last what stays: it is wanted back soonest."""
    actions: list[Action] = [action for action in reversed(_COUNTED) for _ in range(count[action])]
    actions.extend("drop" for _ in range(size - len(actions)))
    return actions


def _every(count: dict[str, int], size: int) -> list[Action]:
    """A part that is offloaded is offloaded in every n-th layer, so that each copy has n layers to hide under."""
    if not 0 < count["offload"] < size or count["keep"] or count["offload"] + count["recompute"] < size:
        return _contiguous(count, size)
    stride = -(-size // count["offload"])
    return [_alternating(index, stride) for index in range(size)]


def _alternating(index: int, stride: int) -> Action:
    return "offload" if index % stride == 0 else "recompute"

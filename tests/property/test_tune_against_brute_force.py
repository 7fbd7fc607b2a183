"""The solver against every assignment there is, judged by the event simulator, on 200 random small problems."""

from __future__ import annotations

import itertools
import random

import pytest

from memopt.simulate import HostLink
from memopt.tuning.judge import is_sound, judge
from memopt.tuning.problem import Choice, LayerClass, Problem
from memopt.tuning.solve import Infeasible, Solution, solve

NUM_CASES = 200


def random_problem(seed: int) -> Problem:
    """One or two classes, two or three tensors a layer in a chain, at most six decisions; every regime occurs."""
    rng = random.Random(seed)
    classes = []
    left = 6
    for number in range(rng.choice([1, 1, 2])):
        num_choices = rng.choice([1, 2, 3])
        if left < num_choices:
            break
        count = rng.randint(1, left // num_choices)
        left -= count * num_choices
        choices = []
        for place in range(num_choices):
            chained = place > 0 and rng.random() < 0.6
            source = place == 0 and rng.random() < 0.4
            choices.append(
                Choice(
                    name=f"t{place}",
                    nbytes=float(rng.randint(1, 20)),
                    recompute_s=rng.uniform(0.1, 2.0),
                    parents=(f"t{rng.randrange(place)}",) if chained else (),
                    needed=rng.random() < 0.8,
                    actions=("keep", "offload") if source else ("keep", "offload", "recompute"),
                )
            )
        forward_s = rng.uniform(0.5, 3.0)
        collective = rng.random() < 0.4
        classes.append(
            LayerClass(
                name=f"stack{number}",
                count=count,
                choices=tuple(choices),
                forward_s=forward_s,
                backward_s=2 * forward_s,
                recompute_s=rng.choice([0.0, 0.2]),
                gather_s=rng.uniform(0.1, 2.0) if collective else 0.0,
                reduce_s=rng.uniform(0.1, 2.0) if collective else 0.0,
                gather_again=rng.random() < 0.7,
            )
        )
    total = sum(c.nbytes * k.count for k in classes for c in k.choices)
    forward_s = sum(k.forward_s * k.count for k in classes)
    rate = total / (forward_s * rng.uniform(0.3, 4.0))
    dram = rate * rng.uniform(0.6, 1.9) if rng.random() < 0.3 else None
    return Problem(
        classes=tuple(classes),
        static_bytes=float(rng.randint(0, 10)),
        device_bytes=total * rng.uniform(0.2, 1.2) + 5,
        host_bytes=total * rng.uniform(0.0, 1.0),
        link=HostLink(rate, dram),
        middle_s=rng.choice([0.0, 1.0]),
        tail_s=rng.choice([0.0, 0.5]),
        buffers=rng.choice([1, 2]),
        steps=rng.choice([1, 1, 2]),
    )


def every_assignment(problem: Problem):
    per_layer = []
    for layer in problem.layers():
        options = [choice.actions + (() if choice.needed else ("drop",)) for choice in layer.choices]
        per_layer.append(list(itertools.product(*options)))
    for assignment in itertools.product(*per_layer):
        if is_sound(problem, assignment):
            yield assignment


def brute_force(problem: Problem) -> tuple[float | None, float]:
    """The least step time that fits (None: nothing does), and the least peak within the host budget."""
    best, least = None, float("inf")
    for assignment in every_assignment(problem):
        outcome = judge(problem, assignment)
        if outcome.host_bytes <= problem.host_bytes * (1 + 1e-9):
            least = min(least, outcome.peak_bytes)
        if outcome.fits(problem) and (best is None or outcome.step_s < best):
            best = outcome.step_s
    return best, least


@pytest.mark.parametrize("block", range(10))
def test_the_solver_equals_brute_force(block: int):
    per_block = NUM_CASES // 10
    feasible = 0
    for seed in range(block * per_block, (block + 1) * per_block):
        problem = random_problem(seed)
        best, least = brute_force(problem)
        found = solve(problem)
        if best is None:
            assert isinstance(found, Infeasible), seed
            assert found.least_device_bytes == pytest.approx(least, rel=1e-6), seed
            continue
        feasible += 1
        assert isinstance(found, Solution), (seed, best)
        assert found.outcome.fits(problem), seed
        assert found.outcome.step_s <= best * (1 + 1e-6), (seed, found.outcome.step_s, best)
    assert feasible >= per_block // 3, "the cases must not be mostly infeasible"

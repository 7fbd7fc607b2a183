"""How good and how fast the tuning solver is: against brute force, on large problems, and with wrong beliefs.

Run: `python tests/benchmarks/plan_tune.py`.
"""

from __future__ import annotations

import random
import runpy
import statistics
import time
from pathlib import Path

from memopt.tuning.judge import judge
from memopt.tuning.solve import Infeasible, Solution, solve

PROPERTY = Path(__file__).parents[1] / "property"
CASES = runpy.run_path(str(PROPERTY / "test_tune_against_brute_force.py"))
REGRET = runpy.run_path(str(PROPERTY / "test_tune_regret.py"))


def against_brute_force() -> None:
    gaps, infeasible, solve_s = [], 0, []
    for seed in range(CASES["NUM_CASES"]):
        problem = CASES["random_problem"](seed)
        best, _ = CASES["brute_force"](problem)
        started = time.perf_counter()
        found = solve(problem)
        solve_s.append(time.perf_counter() - started)
        if best is None:
            assert isinstance(found, Infeasible), seed
            infeasible += 1
        else:
            assert isinstance(found, Solution), seed
            gaps.append(found.outcome.step_s / best - 1)
    print(
        f"brute force: {len(gaps)} feasible cases, largest gap {max(gaps):.1e}; {infeasible} infeasible, all said so; "
        f"solver median {statistics.median(solve_s) * 1e3:.0f} ms, worst {max(solve_s):.2f} s"
    )


def large() -> None:
    """126 layers, eight choices that stand for twelve tensors and more, over budgets and links."""
    worst = 0.0
    for budget in (0.1, 0.25, 0.5, 0.9):
        for link in (12e9, 25e9, 55e9, 350e9):
            problem = REGRET["believed"](layers=126, budget=budget, link=link)
            started = time.perf_counter()
            found = solve(problem)
            elapsed_s = time.perf_counter() - started
            worst = max(worst, elapsed_s)
            assert isinstance(found, Solution)
            everything = sum((layer.forward_s + layer.backward_s) for layer in problem.layers())
            full = everything + sum(choice.recompute_s for layer in problem.layers() for choice in layer.choices)
            print(
                f"126 layers, {budget:.0%} of the bytes, {link / 1e9:.0f} GB/s: {found.outcome.step_s:.3f} s "
                f"(full recompute {full:.3f}, no recompute {everything:.3f}), {elapsed_s:.2f} s to solve"
            )
    print(f"126 layers: worst {worst:.2f} s")


def regret() -> None:
    rng = random.Random(0)
    regrets = []
    for budget in (0.15, 0.3, 0.6):
        for link in (12e9, 55e9, 250e9):
            belief = REGRET["believed"](layers=32, budget=budget, link=link)
            chosen = solve(belief)
            assert isinstance(chosen, Solution)
            for _ in range(20):
                truth = REGRET["perturbed"](belief, rng)
                best = solve(truth)
                assert isinstance(best, Solution)
                step_s = judge(truth, chosen.assignment).step_s
                regrets.append(step_s / min(step_s, best.outcome.step_s) - 1)
    regrets.sort()
    print(
        f"regret with link, compute and value times off by up to 30%: median {statistics.median(regrets):.2%}, "
        f"nine in ten within {regrets[int(0.9 * len(regrets))]:.2%}, worst {regrets[-1]:.2%} of {len(regrets)}"
    )


if __name__ == "__main__":
    against_brute_force()
    large()
    regret()

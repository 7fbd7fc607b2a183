"""The search within one layout: measure a policy, solve, plan the answer again, correct the model, until it fits.

What wins is the least estimate among the policies that were planned, full recompute and those people write by hand
included - not what the model of the step thinks best.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import MemoptError, Problem
from ..guarding import inspected
from ..loading import load_policy
from ..planning import PlanResult, Progress, Setting, judged, lowered, plan_policy
from ..policy import Policy
from ..quantities import format_bytes, format_seconds
from ..roofline import Rates
from ..step_time import layer_problem
from ..verdicts import POOL_SETTING, pool_gib
from ..workloads.sizes import with_sizes
from .costs import ModelCosts, assignment_of, model_costs
from .judge import judge
from .layouts import OFFLOAD_OPTIONS, Layout
from .learning import NOTICED, learn_bytes, learn_link
from .policy_text import TensorRule, render_policy, tensor_rules
from .presets import preset_assignments
from .problem import Assignment
from .problem import Problem as Choices
from .solve import Infeasible, Solution, solve

# Of a node's memory, for the system, the loader and the framework itself. Assumed; `--host-budget` replaces it.
HOST_RESERVE = 0.10
_ROUNDS = 5
_PATIENCE = 2  # plans over budget before layers of one stack are all treated alike
_WORTH_A_CUT = 0.003  # of the step: less does not pay for layers that are treated unlike
_WORTH = 0.05  # of the budget: less unused memory is not worth another plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What the user allows.

    Attributes:
        device_bytes: The budget.
        host_bytes_per_node: Host budget; None: the node's memory less `HOST_RESERVE`.
        base: A policy whose layout is kept.
        fsdp, accumulate: Values to try.
        max_cuts: Tensors that may be treated unlike in layers of one stack.
        num_points: Of the frontier.
    """

    device_bytes: int
    host_bytes_per_node: int | None = None
    base: Policy | None = None
    fsdp: tuple[int, ...] = ()
    accumulate: tuple[int, ...] = ()
    max_cuts: int = 2
    num_points: int = 8


@dataclass(frozen=True, slots=True)
class Candidate:
    """A policy that was planned through the backend."""

    solution: Solution
    text: str
    result: PlanResult

    @property
    def step_s(self) -> float:
        """The plan's estimate: with the compiled schedule's exposed transfers where the backend reads them."""
        return self.result.time.estimate_s or self.solution.outcome.step_s


class Search:
    """One layout: measure a first policy, solve, plan the answer again, correct, until it fits."""

    result: PlanResult
    solution: Solution
    text: str

    def __init__(self, setting: Setting, layout: Layout, wishes: Wishes, rates: Rates, say: Progress) -> None:
        self.layout, self.wishes, self.rates, self.say = layout, wishes, rates, say
        self.setting = self._with_workload(setting, layout)
        supported = setting.backend.capabilities(layout.backend_options.get(setting.backend.name, {})).supported
        self.may_offload = "offload:activation" in supported
        if rates.link is None:
            say("the target's host link rate is not published: nothing is offloaded")
        scanned = any(stack.kind == "scan" for stack in setting.spec.stacks)
        self.max_cuts = wishes.max_cuts if not scanned or "layers:scan" in supported else 0
        self.rounds = 0
        self.choices: Choices
        self.costs: ModelCosts
        self.planned: dict[Assignment, Candidate] = {}

    @staticmethod
    def _with_workload(setting: Setting, layout: Layout) -> Setting:
        if layout.workload is setting.workload:
            return setting
        spec = inspected(setting.backend, layout.workload)
        return replace(setting, workload=layout.workload, spec=with_sizes(spec, layout.workload))

    def run(self) -> None:
        """Find the fastest policy that fits when planned.

        Raises:
            MemoptError: `budget-infeasible`, or what planning raises.
        """
        self._measure_recompute()
        static_bytes = self.choices.static_bytes
        tuned: list[Candidate] = []
        for number in range(_ROUNDS):
            if number == _PATIENCE and not any(is_acceptable(candidate.result) for candidate in tuned):
                # A cut scan can hold bytes of its own: leave cuts out, and forget what they have taught.
                self.max_cuts, self.choices = 0, replace(self.choices, static_bytes=static_bytes)
            found = self._solve()
            if found.assignment in self.planned:
                break
            tuned.append(self._candidate(found, "tuned"))
            if not self._learn(tuned[-1]):
                break
        self._plan_without_link(replace(self.choices, link=None, static_bytes=static_bytes))
        best = self._best() or self._nothing(tuned)
        self._plan_presets(best)
        self._finish(self._best() or best)

    def _solve(self) -> Solution:
        """The model's fastest; layers are treated alike unless a cut is worth its lines and the bytes it can hold."""
        found = solve(self.choices, max_cuts=self.max_cuts)
        if isinstance(found, Infeasible):
            return self._least(found)
        if not _is_cut(self.choices, found.assignment):
            return found
        alike = solve(self.choices, max_cuts=0)
        if isinstance(alike, Solution) and alike.outcome.step_s <= found.outcome.step_s * (1 + _WORTH_A_CUT):
            return alike
        return found

    def _measure_recompute(self) -> None:
        """One plan of full recompute fixes the bytes no choice changes, and is the first policy to be faster than."""
        text = self._text((), header=("Recomputes every layer.",))
        probe = self._plan(text, "recompute")
        self.costs = model_costs(probe.plan, self.rates)
        self.choices = self._problem(probe)
        assignment = assignment_of(probe.plan, self.costs.classes)
        self.planned[assignment] = Candidate(Solution(assignment, judge(self.choices, assignment), 0.0, 0), text, probe)

    def _candidate(self, solution: Solution, name: str) -> Candidate:
        text = self.policy_of(solution)
        found = Candidate(solution, text, self._plan(text, name))
        self.planned[solution.assignment] = found
        return found

    def _best(self) -> Candidate | None:
        fitting = [candidate for candidate in self.planned.values() if is_acceptable(candidate.result)]
        return min(fitting, key=lambda candidate: candidate.step_s, default=None)

    def _nothing(self, tuned: list[Candidate]) -> Candidate:
        least = min(tuned or self.planned.values(), key=lambda candidate: candidate.result.measured.peak_bytes)
        raise infeasible(least.result, self.layout)

    def _plan_without_link(self, choices: Choices) -> None:
        """Where the best so far waits for copies in the compiled schedule, the best that copies nothing is planned."""
        best = self._best()
        exposed_s = (best.result.measured.overlap or {}).get("exposed_s") if best is not None else None
        if best is None or not exposed_s or exposed_s < NOTICED * best.step_s:
            return
        for _ in range(_PATIENCE):
            found = solve(choices, max_cuts=self.max_cuts)
            if isinstance(found, Infeasible) or found.assignment in self.planned:
                return
            result = self._candidate(found, "without-offload").result
            if is_acceptable(result):
                return
            choices = learn_bytes(choices, result, found.assignment)

    def _plan_presets(self, best: Candidate) -> None:
        """Plans those hand-written policies that may fit and could be faster than the best so far.

        Where the backend reads a compiled schedule it may hide more than the simulator thinks: such a policy is
        planned unless it were slower with everything hidden.
        """
        reads_schedule = (best.result.measured.overlap or {}).get("exposed_s") is not None
        scale = best.step_s / judge(self.choices, best.solution.assignment).step_s
        for name, assignment in preset_assignments(self.choices).items():
            outcome = judge(self.choices, assignment)
            least_s = outcome.step_s - (outcome.exposed_s if reads_schedule else 0.0)
            if assignment not in self.planned and outcome.fits(self.choices) and least_s * scale < best.step_s:
                self.say(f"planning `{name}` beside it")
                self._candidate(Solution(assignment, outcome, 0.0, 0), "preset")

    def _finish(self, best: Candidate) -> None:
        """The answer: its text says what it needs, and where nothing is computed again there are no regions."""
        self.solution = replace(best.solution, outcome=judge(self.choices, best.solution.assignment))
        self.text, self.result = self.policy_of(self.solution), best.result
        if all(action == "keep" for actions in self.solution.assignment for action in actions):
            self._keep_everything()
        self._declare_pool()

    def _keep_everything(self) -> None:
        """All named values stay: where those without a name fit too, nothing needs to be computed again at all."""
        header = describe(self.setting, self.wishes, self.solution)
        text = self._text((), header=header, with_regions=False)
        result = self._plan(text, "tuned")
        if is_acceptable(result):
            self.text, self.result = text, result

    def _declare_pool(self) -> None:
        """Where the pinned pool's default is too small the policy declares the pool it needs, and is judged by it."""
        pool = next((verdict for verdict in self.result.verdicts if verdict.name == "host pool"), None)
        if pool is None or pool.fits is not False:
            return
        wanted = pool_gib(pool.needed_bytes)
        note = f"Set {POOL_SETTING}={wanted} in every process, before JAX starts: {format_bytes(pool.needed_bytes)} of"
        self.text = self.policy_of(
            self.solution,
            notes=(note, "a node's memory are pinned, where XLA's default is 64 GiB."),
            options={"pinned_pool_gib": wanted},
        )
        plan = lowered(self._loaded(self.text, "tuned"), self.setting)
        self.result = judged("tuned", plan, self.result.measured, self.setting, elapsed_s=self.result.elapsed_s)

    def _plan(self, text: str, name: str) -> PlanResult:
        """Through the same file a user would load."""
        self.rounds += 1
        return plan_policy(self._loaded(text, name), self.setting, name=name, progress=self.say)

    @staticmethod
    def _loaded(text: str, name: str) -> Policy:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / f"{name}.yaml"
            file.write_text(text, encoding="utf-8")
            return load_policy(file)

    def _problem(self, probe: PlanResult) -> Choices:
        capacity = probe.capacity
        per_node = self.wishes.host_bytes_per_node
        if per_node is None:
            per_node = int((capacity.host_bytes_per_node or 0) * (1 - HOST_RESERVE))
        host_bytes = per_node / capacity.devices_per_node - self.costs.host_state_bytes
        problem = layer_problem(
            probe.plan,
            self.costs,
            self.rates if self.may_offload else replace(self.rates, link=None),
            device_bytes=self.wishes.device_bytes,
            host_bytes=max(0.0, host_bytes),
        )
        modelled = judge(problem, assignment_of(probe.plan, self.costs.classes))
        return replace(problem, static_bytes=max(0.0, probe.measured.peak_bytes - modelled.peak_bytes))

    def _learn(self, candidate: Candidate) -> bool:
        """Correct the model by what the plan says; False once it fits and nothing worth having is left."""
        result, assignment = candidate.result, candidate.solution.assignment
        modelled = judge(self.choices, assignment)
        error = result.measured.peak_bytes - modelled.peak_bytes
        unused = self.wishes.device_bytes - result.measured.peak_bytes
        is_used = unused < _WORTH * self.wishes.device_bytes or modelled.recompute_s == 0
        slower = learn_link(self.choices, result, assignment)
        if slower is not None and slower.link is not None and self.choices.link is not None:
            share = slower.link.bytes_per_s / self.choices.link.bytes_per_s
            self.say(f"the compiled schedule exposes what a link of {share:.0%} of the rate would")
            self.choices = slower
        if is_acceptable(result) and (is_used or error >= 0):
            return slower is not None
        self.choices = learn_bytes(self.choices, result, assignment)
        self.say(f"planned {format_bytes(result.measured.peak_bytes)}, expected {format_bytes(modelled.peak_bytes)}")
        return True

    def _least(self, found: Infeasible) -> Solution:
        """The model says nothing fits: plan what takes least; only if that does not fit either is it so."""
        if found.assignment is None:
            raise MemoptError.of(
                "budget-infeasible", "no choice of keep, recompute and offload is possible within the host budget"
            )
        least = Solution(found.assignment, judge(self.choices, found.assignment), 0.0, 0)
        known = self.planned.get(least.assignment)
        result = known.result if known is not None else self._candidate(least, "least").result
        if not is_acceptable(result):
            raise infeasible(result, self.layout)
        self.choices = learn_bytes(self.choices, result, least.assignment)
        again = solve(self.choices, max_cuts=self.max_cuts)
        return least if isinstance(again, Infeasible) else again

    def _text(
        self,
        rules: Sequence[TensorRule],
        *,
        header: Sequence[str],
        with_regions: bool = True,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        stacks = [stack.path for stack in self.setting.spec.stacks]
        return render_policy(
            header=header,
            settings=self.layout.settings,
            layout_rules=self.layout.rules,
            rules=rules,
            units=[f"{path}.*" for path in stacks] if with_regions else [],
            backend_options=self._options(rules, options or {}),
        )

    def _options(self, rules: Sequence[TensorRule], more: Mapping[str, Any]) -> Mapping[str, Any]:
        """The base policy's options, or what offloading wants on this target."""
        name = self.setting.backend.name
        own = dict(self.layout.backend_options.get(name, {}))
        if self.wishes.base is None and any(rule.action == "offload" for rule in rules):
            own |= OFFLOAD_OPTIONS.get((name, self.setting.target.kind), {})
        own |= more
        return {**self.layout.backend_options, **({name: own} if own else {})}

    def policy_of(
        self, solution: Solution, *, notes: Sequence[str] = (), options: Mapping[str, Any] | None = None
    ) -> str:
        """The policy file of a solution; `notes` go to its header, `options` to this backend's options."""
        rules = [
            replace(rule, comment=reason(rule, self.choices, solution))
            for rule in tensor_rules(self.costs.classes, solution.assignment)
        ]
        header = (*describe(self.setting, self.wishes, solution), *notes)
        return self._text(rules, header=header, options=options)


def _is_cut(choices: Choices, assignment: Assignment) -> bool:
    """Whether layers of one class are treated unlike."""
    start = 0
    for layer in choices.classes:
        if len(set(assignment[start : start + layer.count])) > 1:
            return True
        start += layer.count
    return False


def reason(rule: TensorRule, choices: Choices, solution: Solution) -> str:
    """What a rule costs and what it saves, from the choices it covers."""
    nbytes, again_s = 0.0, 0.0
    for layer, actions in zip(choices.layers(), solution.assignment, strict=True):
        for choice, action in zip(layer.choices, actions, strict=True):
            if action == rule.action and set(choice.name.split("+")) & set(rule.tensors):
                nbytes += choice.nbytes
                again_s += choice.recompute_s
    share = again_s * choices.steps / solution.outcome.step_s
    saved = (
        f"making them again would add {share:.1%} to the step" if again_s else "nothing in a layer can make them again"
    )
    if rule.action == "keep":
        return f"{format_bytes(nbytes)} stay on the device: {saved}."
    return f"{format_bytes(nbytes)} go to the host under the compute of other layers: {saved}."


def describe(setting: Setting, wishes: Wishes, solution: Solution) -> tuple[str, ...]:
    """The file's first comment: for what it was tuned, and what the model of the step says of it."""
    outcome = solution.outcome
    where = f"{setting.workload.name} on {setting.target.name} with {setting.backend.name}"
    again, waits = format_seconds(solution.again_s), format_seconds(outcome.exposed_s)
    step_s = outcome.step_s - outcome.recompute_s + solution.again_s
    return (
        f"Tuned for {where}: at most {format_bytes(wishes.device_bytes)} a device.",
        f"By the model of the step: {format_seconds(step_s)}, of which {again} computes values again and",
        f"{waits} waits for the host link; {format_bytes(outcome.host_bytes)} of activations on the host per device.",
        "Written by `memopt tune`; edit it, and ask `memopt plan` again.",
    )


def _rounded_up(nbytes: int) -> str:
    unit, size = ("GiB", 2**30) if nbytes >= 2**30 else ("MiB", 2**20)
    return f"{math.ceil(nbytes / size * 10) / 10}{unit}"


def is_acceptable(result: PlanResult) -> bool:
    """Within every limit that no setting moves: the pinned pool's cap is one, and the answer declares what it needs."""
    return all(verdict.fits is not False for verdict in result.verdicts if verdict.name != "host pool")


def infeasible(result: PlanResult, layout: Layout) -> MemoptError:
    """Nothing fits: the nearest budget that would, and what makes it up."""
    roles = sorted(result.measured.by_role.items(), key=lambda pair: -pair[1])
    makes = ", ".join(f"{role} {format_bytes(nbytes)}" for role, nbytes in roles if nbytes)
    peak = result.measured.peak_bytes
    over = [verdict.render() for verdict in result.verdicts if verdict.fits is False and verdict.name != "device"]
    budget = format_bytes(result.budget.get("device"))
    message = f"nothing fits in {budget} with {layout.label}; the nearest that does takes {format_bytes(peak)}: {makes}"
    return MemoptError(
        Problem(
            "budget-infeasible",
            "; ".join([message, *over]),
            hint=f"give --budget {_rounded_up(peak)}, more devices or micro-batches, or shorter sequences",
        )
    )

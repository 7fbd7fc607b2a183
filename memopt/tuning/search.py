"""The search within one layout: measure a policy, solve, plan the answer again, correct the model, until it fits."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import MemoptError, Problem
from ..loading import load_policy
from ..planning import PlanResult, Progress, Setting, guarded, plan_policy
from ..policy import Policy
from ..quantities import format_bytes, format_seconds
from ..roofline import Rates
from ..step_time import layer_problem
from ..workloads.sizes import with_sizes
from .costs import ModelCosts, assignment_of, model_costs
from .judge import judge
from .layouts import Layout
from .policy_text import TensorRule, render_policy, tensor_rules
from .problem import Assignment
from .problem import Problem as Choices
from .solve import Infeasible, Solution, solve

# Of a node's memory, for the system, the loader and the framework itself. Assumed; `--host-budget` replaces it.
HOST_RESERVE = 0.10
_ROUNDS = 5
_PATIENCE = 2  # plans over budget before layers of one stack are all treated alike
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

    @staticmethod
    def _with_workload(setting: Setting, layout: Layout) -> Setting:
        if layout.workload is setting.workload:
            return setting
        what = f"inspecting the model of `{layout.workload.name}`"
        spec = guarded(what, lambda: setting.backend.inspect_workload(layout.workload))
        return replace(setting, workload=layout.workload, spec=with_sizes(spec, layout.workload))

    def run(self) -> None:
        """Find a policy that fits when planned.

        Raises:
            MemoptError: `budget-infeasible`, or what planning raises.
        """
        probe = self._plan(self._text((), header=("Recomputes every layer.",)), "recompute")
        self.costs = model_costs(probe.plan, self.rates)
        self.choices = self._problem(probe)
        static_bytes = self.choices.static_bytes
        best: tuple[float, Solution, str, PlanResult] | None = None
        for number in range(_ROUNDS):
            if number == _PATIENCE and best is None:
                # A cut scan can hold bytes of its own: leave cuts out, and forget what they have taught.
                self.max_cuts, self.choices = 0, replace(self.choices, static_bytes=static_bytes)
            found = solve(self.choices, max_cuts=self.max_cuts)
            if isinstance(found, Infeasible):
                found = self._least(found)
            text = self.policy_of(found)
            result = self._plan(text, "tuned")
            step_s = found.outcome.step_s
            if is_acceptable(result) and (best is None or step_s < best[0]):
                best = (step_s, found, text, result)
            if self._learn(result, found.assignment):
                break
        if best is None:
            raise infeasible(result, self.layout)
        _, self.solution, self.text, self.result = best
        if all(action == "keep" for actions in self.solution.assignment for action in actions):
            self._keep_everything()

    def _keep_everything(self) -> None:
        """All named values stay: where those without a name fit too, nothing needs to be computed again at all."""
        header = describe(self.setting, self.wishes, self.solution)
        text = self._text((), header=header, with_regions=False)
        result = self._plan(text, "tuned")
        if is_acceptable(result):
            self.text, self.result = text, result

    def _plan(self, text: str, name: str) -> PlanResult:
        """Through the same file a user would load."""
        self.rounds += 1
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / f"{name}.yaml"
            file.write_text(text, encoding="utf-8")
            policy = load_policy(file)
        return plan_policy(policy, self.setting, name=name, progress=self.say)

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

    def _learn(self, result: PlanResult, assignment: Assignment) -> bool:
        """Correct the static bytes by what the plan says; True once it fits and nothing worth having is left."""
        modelled = judge(self.choices, assignment)
        error = result.measured.peak_bytes - modelled.peak_bytes
        unused = self.wishes.device_bytes - result.measured.peak_bytes
        is_used = unused < _WORTH * self.wishes.device_bytes or modelled.recompute_s == 0
        if is_acceptable(result) and (is_used or error >= 0):
            return True
        self.choices = replace(self.choices, static_bytes=max(0.0, self.choices.static_bytes + error))
        self.say(f"planned {format_bytes(result.measured.peak_bytes)}, expected {format_bytes(modelled.peak_bytes)}")
        return False

    def _least(self, found: Infeasible) -> Solution:
        """The model says nothing fits: plan what takes least; only if that does not fit either is it so."""
        if found.assignment is None:
            raise MemoptError.of(
                "budget-infeasible", "no choice of keep, recompute and offload is possible within the host budget"
            )
        least = Solution(found.assignment, judge(self.choices, found.assignment), 0.0, 0)
        result = self._plan(self.policy_of(least), "least")
        if not is_acceptable(result):
            raise infeasible(result, self.layout)
        error = result.measured.peak_bytes - least.outcome.peak_bytes
        self.choices = replace(self.choices, static_bytes=max(0.0, self.choices.static_bytes + error))
        again = solve(self.choices, max_cuts=self.max_cuts)
        return least if isinstance(again, Infeasible) else again

    def _text(self, rules: Sequence[TensorRule], *, header: Sequence[str], with_regions: bool = True) -> str:
        stacks = [stack.path for stack in self.setting.spec.stacks]
        return render_policy(
            header=header,
            settings=self.layout.settings,
            layout_rules=self.layout.rules,
            rules=rules,
            units=[f"{path}.*" for path in stacks] if with_regions else [],
            backend_options=self.layout.backend_options,
        )

    def policy_of(self, solution: Solution) -> str:
        rules = [
            replace(rule, comment=reason(rule, self.choices, solution))
            for rule in tensor_rules(self.costs.classes, solution.assignment)
        ]
        header = describe(self.setting, self.wishes, solution)
        return self._text(rules, header=header)


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
    again, waits = format_seconds(outcome.recompute_s), format_seconds(outcome.exposed_s)
    return (
        f"Tuned for {where}: at most {format_bytes(wishes.device_bytes)} a device.",
        f"By the model of the step: {format_seconds(outcome.step_s)}, of which {again} computes values again and",
        f"{waits} waits for the host link; {format_bytes(outcome.host_bytes)} of activations on the host per device.",
        "Written by `memopt tune`; edit it, and ask `memopt plan` again.",
    )


def _rounded_up(nbytes: int) -> str:
    unit, size = ("GiB", 2**30) if nbytes >= 2**30 else ("MiB", 2**20)
    return f"{math.ceil(nbytes / size * 10) / 10}{unit}"


def is_acceptable(result: PlanResult) -> bool:
    """Within every limit that no setting moves: the pinned pool's cap is a setting, which the plan names."""
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

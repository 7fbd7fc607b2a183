"""As few layers as tell what all of them cost: which to trace, and the whole model's step from their traces.

Layers that are alike (class, shapes, what the plan does to them) are traced once or a few times. Every stretch of the
step (a layer's forward, its backward, the head, the optimizer ...) has a level of live bytes that grows linearly with
the number of such layers; it is fitted on two depths for each kind of layer and accepted only where a further, deeper
trace agrees to the byte, else the traces go deeper, in the end to the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from memopt.plan import Plan
from memopt.spec import ModelSpec
from memopt.timeline import Task

from .alike import kind_of
from .inventory import names_of
from .ledger import ROLES
from .reserved import Block
from .trace import Amounts, Label, LayerCut, Traced, trace_step
from .work import Work, fitted

_MAX_PERIOD = 4
_WHOLE_UP_TO = 6


@dataclass(frozen=True, slots=True)
class Run:
    """Layers of one stack that repeat: `period` layers, `repeats` times, from layer `first` on."""

    stack: str
    first: int
    period: int
    repeats: int


def find_runs(stack: str, kinds: Sequence[Any]) -> list[Run]:
    """Cut a stack's layers into runs of repeating kinds, longest first at each place.

    >>> [(run.first, run.period, run.repeats) for run in find_runs("layers", "AAABBBB")]
    [(0, 1, 3), (3, 1, 4)]
    >>> [(run.first, run.period, run.repeats) for run in find_runs("layers", "ABABAB")]
    [(0, 2, 3)]
    """
    runs, at = [], 0
    while at < len(kinds):
        best = Run(stack, at, 1, 1)
        for period in range(1, min(_MAX_PERIOD, len(kinds) - at) + 1):
            pattern, repeats = kinds[at : at + period], 1
            while kinds[at + repeats * period : at + (repeats + 1) * period] == pattern:
                repeats += 1
            if repeats > 1 and repeats * period > best.repeats * best.period:
                best = Run(stack, at, period, repeats)
        runs.append(best)
        at += best.period * best.repeats
    return runs


def cuts_of(runs: Sequence[Run], repeats: Sequence[int]) -> tuple[LayerCut, ...]:
    """The layers to trace when each run is repeated so many times; the others are taken from its middle."""
    layers: dict[str, list[int]] = {}
    places: dict[str, list[str]] = {}
    for number, (run, kept) in enumerate(zip(runs, repeats)):
        kept = min(kept, run.repeats)
        head = (kept + 1) // 2
        for turn in range(kept):
            at = turn if turn < head else run.repeats - (kept - turn)
            # Named from the nearer end, so that a name means the same layer at every depth.
            name = f"{turn}" if turn < 2 else f"{turn - kept}" if turn - kept >= -2 else "middle"
            for inner in range(run.period):
                layers.setdefault(run.stack, []).append(run.first + at * run.period + inner)
                places.setdefault(run.stack, []).append(f"{number}/{name}/{inner}")
    return tuple(LayerCut(stack, tuple(layers[stack]), tuple(places[stack])) for stack in layers)


def _kind(layer: nn.Module, plan: Plan, path: str) -> Any:
    """What makes two layers cost the same: classes, shapes, settings, and what the plan says of everything in them."""
    rows = tuple(
        (
            row.path[len(path) :],
            row.role,
            row.residual,
            row.memory_kind,
            tuple(sorted(row.layout.items())),
            row.update_on,
        )
        for row in plan.rows
        if row.path == path or row.path.startswith(f"{path}.")
    )
    units = tuple(
        (
            unit.name[len(path) :],
            unit.region,
            unit.unnamed_residual,
            unit.reshard_after_forward,
            unit.prefetch_forward,
            unit.prefetch_backward,
        )
        for unit in plan.units
        if unit.name == path or unit.name.startswith(f"{path}.")
    )
    return kind_of(layer), rows, units


def _runs(workload: Any, plan: Plan, spec: ModelSpec) -> list[Run]:
    with torch.device("meta"):
        model = workload.model()
        modules = names_of(model).modules
        runs: list[Run] = []
        ids: dict[Any, int] = {}
        for stack in spec.stacks:
            if stack.path not in modules or any(stack.path.startswith(f"{run.stack}.") for run in runs):
                continue  # a stack inside another's layers repeats with them
            kinds = []
            for number in range(stack.length):
                path = f"{stack.path}.{number}" if stack.path else str(number)
                kinds.append(ids.setdefault(_kind(modules[path], plan, path), len(ids)))
            runs += find_runs(stack.path, kinds)
    return runs


@dataclass(frozen=True, slots=True)
class Unrolling:
    """How the deepest trace's step becomes the whole model's: layers to repeat, and what those hold before the step."""

    block: Block
    start_bytes: int


@dataclass(frozen=True, slots=True)
class Fit:
    """The step of the whole model, from traces of some of its layers."""

    segments: Mapping[Label, Mapping[str, int]]
    origins: Mapping[Label, str]
    amounts: Amounts
    host_bytes: int
    deepest: Traced
    work: Work
    note: str
    is_whole: bool
    runs: tuple[Run, ...] = ()
    unrolling: tuple[Unrolling, ...] = ()

    @property
    def peak(self) -> Label:
        """The stretch with the highest level."""
        return max(self.segments, key=lambda label: sum(self.segments[label].values()))


def _whole(trace: Traced, note: str) -> Fit:
    segments = {label: peak.by_role for label, peak in trace.segments.items()}
    origins = {label: peak.origin for label, peak in trace.segments.items()}
    return Fit(segments, origins, trace.amounts, trace.host_bytes, trace, trace.work, note, is_whole=True)


def _fitted(base: Traced, more: Sequence[Traced], times: Sequence[int], note: str) -> Fit:
    """`base`, plus for each kind of layer its cost (a trace with one repeat more, less `base`) so many times."""
    labels = [label for label in base.segments if all(label in trace.segments for trace in more)]

    def level(label: Label, role: str) -> int:
        start = base.segments[label].by_role[role]
        return start + sum(n * (one.segments[label].by_role[role] - start) for one, n in zip(more, times))

    amounts = base.amounts
    for one, n in zip(more, times):
        amounts = amounts.plus(one.amounts, n).plus(base.amounts, -n)
    return Fit(
        {label: {role: level(label, role) for role in ROLES} for label in labels},
        {label: base.segments[label].origin for label in labels},
        amounts,
        base.host_bytes + sum(n * (one.host_bytes - base.host_bytes) for one, n in zip(more, times)),
        more[-1] if more else base,
        fitted(base.work, [one.work for one in more], times) if more else base.work,
        note,
        is_whole=False,
    )


def _agrees(fit: Fit, trace: Traced, peak: Label) -> bool:
    """Whether a deeper trace is as foretold: at the stretch that will be the peak, at its own peak, and in all."""
    own = max(trace.segments, key=lambda label: trace.segments[label].nbytes)
    for label in {peak, own}:
        if label not in fit.segments or dict(fit.segments[label]) != dict(trace.segments[label].by_role):
            return False
        if fit.origins[label] != trace.segments[label].origin:
            return False
    return fit.amounts == trace.amounts and fit.host_bytes == trace.host_bytes


def fit_step(workload: Any, plan: Plan, spec: ModelSpec, *, progress: Callable[[str], None] = lambda text: None) -> Fit:
    """Trace as few layers as will do; see the module's docstring."""
    runs = _runs(workload, plan, spec)
    total = sum(run.period * run.repeats for run in runs)
    ahead = max((max(unit.prefetch_forward, unit.prefetch_backward) for unit in plan.units), default=1)
    depth = max(4, 3 + ahead)

    traced: dict[tuple[int, ...], Traced] = {}

    def trace(repeats: Sequence[int]) -> Traced:
        if tuple(repeats) not in traced:
            cuts = cuts_of(runs, repeats)
            progress(f"tracing {sum(len(cut.layers) for cut in cuts) or 'all'} of {total or 'all'} layers")
            traced[tuple(repeats)] = trace_step(workload, plan, spec, cuts=cuts)
        return traced[tuple(repeats)]

    while True:
        base = [min(run.repeats, max(2, -(-depth // run.period))) for run in runs]
        long = [number for number, run in enumerate(runs) if run.repeats > base[number] + 2]
        num_layers = sum(run.period * kept for run, kept in zip(runs, base))
        if not long or total <= _WHOLE_UP_TO or num_layers * (len(long) + 2) >= total * 2:
            fit = _whole(trace([run.repeats for run in runs]), f"all {total} layers traced")
            return replace(fit, runs=tuple(runs))
        base = [run.repeats if number not in long else base[number] for number, run in enumerate(runs)]
        for stride in (1, 2):  # buffers that layers use in turn make odd and even depths differ
            fit = _fitted_at(trace, runs, base, long, stride)
            if fit is not None:
                return fit
        progress("the peak is another event at another depth: going deeper")
        depth *= 2


def _fitted_at(
    trace: Callable[[Sequence[int]], Traced],
    runs: Sequence[Run],
    base: Sequence[int],
    long: Sequence[int],
    stride: int,
) -> Fit | None:
    """The fit on depths that far apart; None where a deeper trace disagrees with it, or the model is not so deep."""
    base = [kept + (runs[n].repeats - kept) % stride if n in long else kept for n, kept in enumerate(base)]
    if any(runs[number].repeats < base[number] + 2 * stride for number in long):
        return None
    first = trace(base)
    more = [trace(_raised(base, [number], stride)) for number in long]
    deeper = trace(_raised(base, long, 2 * stride))
    times = [(runs[number].repeats - base[number]) // stride for number in long]
    depths = [base, _raised(base, long, stride), _raised(base, long, 2 * stride)]
    layers = [sum(run.period * kept for run, kept in zip(runs, one)) for one in depths]
    note = f"traced {', '.join(map(str, layers))} of {sum(run.period * run.repeats for run in runs)} layers"
    note += "; the rest follows linearly"
    fit = replace(_fitted(first, more, times, note), runs=tuple(runs))
    if not _agrees(_fitted(first, more, [2] * len(long), note), deeper, fit.peak):
        return None
    return replace(fit, unrolling=_unrolling(runs, base, long, stride, first, more))


def _unrolling(
    runs: Sequence[Run],
    base: Sequence[int],
    long: Sequence[int],
    stride: int,
    first: Traced,
    more: Sequence[Traced],
) -> tuple[Unrolling, ...]:
    """The layers of `more[-1]` to repeat, last first."""
    kept = _raised(base, long[-1:], stride)
    found = []
    for number, trace in zip(long, more):
        run = runs[number]
        at = sum(one.period * times for one, times in zip(runs[:number], kept))
        times = run.repeats - kept[number]
        start_bytes = times * (trace.allocations.start_bytes - first.allocations.start_bytes) // stride
        middle = at + run.period * (2 if kept[number] > 4 else 1)
        found.append(Unrolling(Block(middle, run.period, times), start_bytes))
    return tuple(reversed(found))


def reserved(fit: Fit) -> dict[str, int]:
    """What torch's allocator on CUDA would reserve, by its setting."""
    step = fit.deepest.allocations
    for part in fit.unrolling:
        step = step.unrolled(part.block, more_start_bytes=part.start_bytes)
    peak = sum(fit.segments[fit.peak].values())
    return {
        name: max(peak, step.reserved_bytes(is_expandable=is_expandable))
        for name, is_expandable in (("default", False), ("expandable_segments", True))
    }


def tasks_of(fit: Fit, plan: Plan) -> tuple[Task, ...]:
    """The whole step as tasks for the simulator."""
    work = fit.work
    for part in fit.unrolling:
        work = work.unrolled(part.block)
    work = work.with_micro_batches(fit.deepest.num_micro, plan.accumulate_steps)
    layers = [
        f"{run.stack}.{number}" if run.stack else str(number)
        for run in fit.runs
        for number in range(run.first, run.first + run.period * run.repeats)
    ]
    return work.tasks(layers, [unit_at(layer, plan) for layer in layers])


def unit_at(path: str, plan: Plan) -> str | None:
    """The unit a path lies in."""
    for unit in plan.units:
        if any(path == member or path.startswith(f"{member}.") for member in unit.members):
            return unit.name
    return None


def _raised(base: Sequence[int], numbers: Sequence[int], by: int) -> list[int]:
    return [kept + by if number in numbers else kept for number, kept in enumerate(base)]

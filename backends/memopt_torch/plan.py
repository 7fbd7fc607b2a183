"""`memopt plan` on torch: trace a step with fake tensors, of as few layers as tell what all of them cost.

Layers that are alike (class, shapes, what the plan does to them) are traced once or a few times. Every stretch of the
step (a layer's forward, its backward, the head, the optimizer ...) has a level of live bytes that grows linearly with
the number of such layers; it is fitted on two depths for each kind of layer and accepted only where a further, deeper
trace agrees to the byte, else the traces go deeper, in the end to the whole model.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from memopt.estimate import LiveTensor, Measured
from memopt.matching import canonical
from memopt.plan import Plan
from memopt.spec import ModelSpec

from .alike import kind_of
from .inventory import names_of
from .ledger import ROLES
from .trace import Amounts, Label, LayerCut, Traced, trace_step
from .workloads import build

_MAX_PERIOD = 4
_WHOLE_UP_TO = 6
_LEFT_OUT = (
    "memory beyond live tensors, which the reserve stands for: contexts of CUDA, cuBLAS and NCCL",
    "torch.compile, which fuses operators and keeps other values",
    "staging buffers of the collectives' library (gloo copies what it reduces and scatters)",
    "kernels' own workspaces; operators are those torch picks on the CPU",
    "anything else the training loop does around the workload's step",
)

_NO_CLIPPING = "gradient clipping: the workload has no `clip_norm`"


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
    """How the deepest trace's allocations become the whole model's: one layer of a run, so many times more."""

    layer: int
    times: int
    start_bytes: int


@dataclass(frozen=True, slots=True)
class _Fit:
    """The step of the whole model, from traces of some of its layers."""

    segments: Mapping[Label, Mapping[str, int]]
    origins: Mapping[Label, str]
    amounts: Amounts
    host_bytes: int
    deepest: Traced
    note: str
    is_whole: bool
    runs: tuple[Run, ...] = ()
    unrolling: tuple[Unrolling, ...] | None = ()

    @property
    def peak(self) -> Label:
        """The stretch with the highest level."""
        return max(self.segments, key=lambda label: sum(self.segments[label].values()))


def _whole(trace: Traced, note: str) -> _Fit:
    segments = {label: peak.by_role for label, peak in trace.segments.items()}
    origins = {label: peak.origin for label, peak in trace.segments.items()}
    return _Fit(segments, origins, trace.amounts, trace.host_bytes, trace, note, is_whole=True)


def _fitted(base: Traced, more: Sequence[Traced], times: Sequence[int], note: str) -> _Fit:
    """`base`, plus for each kind of layer its cost (a trace with one repeat more, less `base`) so many times."""
    labels = [label for label in base.segments if all(label in trace.segments for trace in more)]

    def level(label: Label, role: str) -> int:
        start = base.segments[label].by_role[role]
        return start + sum(n * (one.segments[label].by_role[role] - start) for one, n in zip(more, times))

    amounts = base.amounts
    for one, n in zip(more, times):
        amounts = amounts.plus(one.amounts, n).plus(base.amounts, -n)
    return _Fit(
        {label: {role: level(label, role) for role in ROLES} for label in labels},
        {label: base.segments[label].origin for label in labels},
        amounts,
        base.host_bytes + sum(n * (one.host_bytes - base.host_bytes) for one, n in zip(more, times)),
        more[-1] if more else base,
        note,
        is_whole=False,
    )


def _agrees(fit: _Fit, trace: Traced, peak: Label) -> bool:
    """Whether a deeper trace is as foretold: at the stretch that will be the peak, at its own peak, and in all."""
    own = max(trace.segments, key=lambda label: trace.segments[label].nbytes)
    for label in {peak, own}:
        if label not in fit.segments or dict(fit.segments[label]) != dict(trace.segments[label].by_role):
            return False
        if fit.origins[label] != trace.segments[label].origin:
            return False
    return fit.amounts == trace.amounts and fit.host_bytes == trace.host_bytes


def fit_step(
    workload: Any, plan: Plan, spec: ModelSpec, *, progress: Callable[[str], None] = lambda text: None
) -> _Fit:
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
) -> _Fit | None:
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
) -> tuple[Unrolling, ...] | None:
    """The layers of `more[-1]` to repeat, last first; None where kinds of layers take turns within a run."""
    if any(runs[number].period > 1 for number in long):
        return None
    kept = _raised(base, long[-1:], stride)
    found = []
    for number, trace in zip(long, more):
        at = sum(run.period * times for run, times in zip(runs[:number], kept))
        times = runs[number].repeats - kept[number]
        start_bytes = times * (trace.allocations.start_bytes - first.allocations.start_bytes) // stride
        found.append(Unrolling(layer=at + (2 if kept[number] > 4 else 1), times=times, start_bytes=start_bytes))
    return tuple(reversed(found))


def reserved(fit: _Fit) -> dict[str, int]:
    """What torch's allocator on CUDA would reserve, by its setting; empty where the step cannot be put together."""
    if fit.unrolling is None:
        return {}
    step = fit.deepest.allocations
    for part in fit.unrolling:
        step = step.unrolled(part.layer, part.times, more_start_bytes=part.start_bytes)
    peak = sum(fit.segments[fit.peak].values())
    return {
        name: max(peak, step.reserved_bytes(is_expandable=is_expandable))
        for name, is_expandable in (("default", False), ("expandable_segments", True))
    }


def _raised(base: Sequence[int], numbers: Sequence[int], by: int) -> list[int]:
    return [kept + by if number in numbers else kept for number, kept in enumerate(base)]


def estimate(
    workload: Any, plan: Plan, spec: ModelSpec, *, target: Any = None, progress: Callable[[str], None] | None = None
) -> Measured:
    """The measured part of `memopt plan`: see `memopt.backend.Backend.estimate`.

    Args:
        workload: A `Workload`, `WorkloadConfig` or `HfWorkload`.
        plan: What to plan.
        spec: The model's inventory.
        target: Where it would run; live tensor bytes do not depend on it, what CUDA's allocator reserves is added.
        progress: Told in a short line what is being traced.
    """
    if not hasattr(workload, "loss"):
        workload = build(workload, world_size=plan.world_size)
    fit = fit_step(workload, plan, spec, progress=progress or (lambda text: None))
    by_role = fit.segments[fit.peak]
    result = fit.deepest.result
    return Measured(
        method="fake-trace",
        by_role={role: nbytes for role, nbytes in by_role.items() if nbytes},
        host_bytes=fit.host_bytes,
        to_host_bytes=fit.amounts.to_host_bytes,
        to_device_bytes=fit.amounts.to_device_bytes,
        collectives={
            kind: {"count": calls, "bytes": nbytes} for kind, (calls, nbytes) in fit.amounts.collectives.items()
        },
        step_flops=fit.amounts.flops,
        recompute_flops=fit.amounts.recomputed_flops,
        reserved_bytes=reserved(fit) if getattr(target, "kind", None) == "gpu" else {},
        memory_timeline=tuple((phase, live) for live, phase in result.timeline),
        largest=tuple(
            LiveTensor(path=_place(module, origin), role=role, nbytes=nbytes, unit=_unit_of(canonical(module), plan))
            for nbytes, role, _, origin, module in result.peak.largest
        ),
        by_unit=_by_unit(result.peak.by_module, plan) if fit.is_whole else {},
        peak_event=_told(fit.peak, fit.origins[fit.peak], fit.runs, spec),
        notes=(fit.note, "live tensor bytes of the second step"),
        left_out=_LEFT_OUT if workload.clip_norm is not None else (*_LEFT_OUT, _NO_CLIPPING),
        versions=_versions(),
    )


def _place(module: str, origin: str) -> str:
    """A parameter's path, or the module a value was made in and the operator that made it."""
    path = canonical(module)
    return path if not origin else f"{path} ({origin})" if path else origin


def _unit_of(path: str, plan: Plan) -> str | None:
    """The unit a path lies in."""
    for unit in plan.units:
        if any(path == member or path.startswith(f"{member}.") for member in unit.members):
            return unit.name
    return None


def _by_unit(by_module: Mapping[str, int], plan: Plan) -> dict[str, int]:
    """Bytes at the peak by unit, of what was made while a unit's modules ran, and its parameters."""
    found: dict[str, int] = {}
    for module, nbytes in by_module.items():
        unit = _unit_of(canonical(module), plan)
        if unit is not None:
            found[unit] = found.get(unit, 0) + nbytes
    return found


def _told(label: Label, origin: str, runs: Sequence[Run], spec: ModelSpec) -> str:
    """The peak's place in words: `backward of layers.31 (mul.Tensor)`."""
    if len(label) == 1:
        where = {"start": "before the first layer", "optimizer": "the optimizer's step"}[label[0]]
        return f"{where} ({origin})"
    kind, stack, place = label
    number, turn, inner = place.split("/")
    run = runs[int(number)]
    if turn == "middle":
        return f"{kind if kind == 'after' else f'{kind} of'} a layer of {stack} ({origin})"
    at = run.first + (int(turn) % run.repeats) * run.period + int(inner)
    if kind == "after" and at + 1 == next(one.length for one in spec.stacks if one.path == stack):
        return f"after {stack}: head and loss ({origin})"
    return f"{kind if kind == 'after' else f'{kind} of'} {stack}.{at} ({origin})"


def _versions() -> dict[str, str]:
    found = {"torch": str(torch.__version__)}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # a model of the user's own needs none
        found["transformers"] = importlib.metadata.version("transformers")
    return found

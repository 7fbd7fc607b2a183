"""One training step run on fake tensors: the real engine, regions and optimizer, no memory and no other ranks.

What is planned is what runs: the policy is applied by the same code, under `FakeTensorMode` and a process group that
only pretends, and the step is measured by the same meter. A model can be traced with fewer layers than it has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses import fake_tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves, tree_map

from memopt.errors import MemoptError
from memopt.plan import Plan, PlanRow
from memopt.spec import ModelSpec

from .fake import fake_gaps, told_where
from .inventory import names_of
from .journal import Journal
from .ledger import SegmentPeak
from .measure import Collective, StepMeter, StepResult, is_host_storage
from .reserved import Allocations, Place, allocations
from .work import Work

Label = tuple[str, ...]
"""Where in a step: (`forward` | `after` | `backward`, stack, place of the layer) or (`start`,), (`optimizer`,)."""


@dataclass(frozen=True, slots=True)
class LayerCut:
    """Which layers of a stack are traced.

    Attributes:
        stack: Canonical path.
        layers: Numbers of the layers kept, ascending.
        places: A name for each kept layer that means the same at every depth, such as `0`, `1`, `-2`, `-1`.
    """

    stack: str
    layers: tuple[int, ...]
    places: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Amounts:
    """What a step does, in amounts that add up.

    Attributes:
        flops, recomputed_flops: Of all operators; of those run again.
        to_host_bytes, to_device_bytes: Over the host link.
        collectives: Kind -> (calls, bytes).
    """

    flops: int
    recomputed_flops: int
    to_host_bytes: int
    to_device_bytes: int
    collectives: Mapping[str, tuple[int, int]]

    def plus(self, other: Amounts, times: int = 1) -> Amounts:
        """This and `times` the other."""
        kinds = {*self.collectives, *other.collectives}
        zero = (0, 0)
        return Amounts(
            self.flops + times * other.flops,
            self.recomputed_flops + times * other.recomputed_flops,
            self.to_host_bytes + times * other.to_host_bytes,
            self.to_device_bytes + times * other.to_device_bytes,
            {
                kind: tuple(
                    a + times * b for a, b in zip(self.collectives.get(kind, zero), other.collectives.get(kind, zero))
                )  # type: ignore[misc]
                for kind in sorted(kinds)
            },
        )


@dataclass(frozen=True, slots=True)
class Traced:
    """A traced step.

    Attributes:
        segments: Highest moment of each stretch of the step.
        amounts: The whole step's, all micro-batches.
        host_bytes: Highest host bytes.
        result: Everything the meter found.
        allocations: Each allocation's life, for the allocator's replay.
        work: What was run, copied and sent, and who waited for whom, for the simulator.
        num_micro: Micro-batches that were run.
    """

    segments: Mapping[Label, SegmentPeak]
    amounts: Amounts
    host_bytes: int
    result: StepResult
    allocations: Allocations
    work: Work
    num_micro: int


@contextmanager
def fake_world(world_size: int) -> Iterator[fake_tensor.FakeTensorMode]:
    """Fake tensors, and a process group of that many ranks whose collectives do nothing (none for one rank).

    Raises:
        MemoptError: `plan-in-process-group`.
    """
    if dist.is_available() and dist.is_initialized():
        raise MemoptError.of(
            "plan-in-process-group",
            "planning needs a pretended process group, and this process has a real one",
            hint="plan in a process of its own: `memopt plan ...`, not under torchrun",
        )
    with ExitStack() as stack:
        if world_size > 1:
            from torch.testing._internal.distributed.fake_pg import FakeStore

            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
            stack.callback(dist.destroy_process_group)
        yield stack.enter_context(fake_tensor.FakeTensorMode(allow_non_fake_inputs=True))


def cut_plan(plan: Plan, cuts: Sequence[LayerCut]) -> Plan:
    """The plan of a model whose stacks hold the kept layers only, renumbered."""
    rename = _renamer(cuts)
    rows: list[PlanRow] = []
    for row in plan.rows:
        path = rename(row.path)
        if path is not None:
            unit = None if row.unit is None else rename(row.unit)
            aliases = tuple(alias for name in row.aliases if (alias := rename(name)) is not None)
            rows.append(replace(row, path=path, unit=unit, aliases=aliases))
    units = []
    for unit in plan.units:
        members = tuple(member for name in unit.members if (member := rename(name)) is not None)
        if members:
            name = "+".join(part for old in unit.name.split("+") if (part := rename(old)) is not None)
            index = unit.index
            for cut in cuts:
                if unit.stack == cut.stack and index in cut.layers:
                    index = cut.layers.index(index)
            units.append(replace(unit, name=name, members=members, index=index))
    return replace(plan, rows=tuple(rows), units=tuple(units))


def _renamer(cuts: Sequence[LayerCut]) -> Callable[[str], str | None]:
    """Old path -> new path, or None for what is cut away. Raw paths (a prefix before the stack's) are renamed too."""

    def rename(path: str) -> str | None:
        for cut in cuts:
            at = path.find(f"{cut.stack}.")
            if at != 0 and (at < 0 or path[at - 1] != "."):
                continue
            head, rest = path[: at + len(cut.stack) + 1], path[at + len(cut.stack) + 1 :]
            number, _, tail = rest.partition(".")
            if not number.isdigit():
                continue
            if int(number) not in cut.layers:
                return None
            path = f"{head}{cut.layers.index(int(number))}" + (f".{tail}" if tail else "")
        return path

    return rename


def cut_model(model: nn.Module, cuts: Sequence[LayerCut]) -> None:
    """Take the other layers out of the model, in place."""
    for cut in cuts:
        stack = names_of(model).modules[cut.stack]
        assert isinstance(stack, nn.ModuleList | nn.Sequential)
        kept = [stack[number] for number in cut.layers]
        stack._modules.clear()
        for number, layer in enumerate(kept):
            stack._modules[str(number)] = layer


@dataclass
class _Marks:
    """Notes in the ledger where the step comes to each layer."""

    meter: StepMeter
    journal: Journal
    starts: list[tuple[int, Label]] = field(default_factory=list)
    places: list[tuple[int, Place]] = field(default_factory=list)

    def __call__(self, *label: str, layer: int = -1) -> None:
        self.starts.append((len(self.meter.ledger.events), label))
        self.places.append((len(self.meter.ledger.events), Place(label[0], layer)))
        self.journal.enter(Place(label[0], layer))

    def watch(self, model: nn.Module, cuts: Sequence[LayerCut], stack: ExitStack) -> None:
        """Mark each kept layer's forward and backward, and the optimizer's step."""
        modules = names_of(model).modules
        watched = [(cut.stack, number, place) for cut in cuts for number, place in enumerate(cut.places)]
        for layer, (path, number, place) in enumerate(watched):
            module = modules[f"{path}.{number}"]
            stack.callback(module.register_forward_pre_hook(self._before(path, place, layer)).remove)
            stack.callback(module.register_forward_hook(self._after(path, place, layer)).remove)
        stack.callback(register_optimizer_step_pre_hook(lambda *_: self("optimizer")).remove)

    def _before(self, stack: str, place: str, layer: int) -> Callable[..., None]:
        return lambda *_: self("forward", stack, place, layer=layer)

    def _after(self, stack: str, place: str, layer: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self("after", stack, place, layer=layer)
            for leaf in tree_leaves(output):
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                    leaf.register_hook(lambda grad: self("backward", stack, place, layer=layer))
                    return

        return hook

    def segments(self) -> dict[Label, SegmentPeak]:
        """The highest moment under each label; a label met twice (micro-batches) counts at its higher."""
        peaks = self.meter.ledger.segment_peaks([start for start, _ in self.starts])
        best: dict[Label, SegmentPeak] = {}
        for (_, label), peak in zip(self.starts, peaks):
            if label not in best or peak.nbytes > best[label].nbytes:
                best[label] = peak
        return best


def trace_step(workload: Any, plan: Plan, spec: ModelSpec, *, cuts: Sequence[LayerCut] = ()) -> Traced:
    """Run the second training step of a workload under a plan on fake tensors, and measure it.

    Args:
        workload: A `memopt.workloads.Workload`; its batch is one rank's micro-batch.
        plan: For the whole model.
        spec: Of the whole model.
        cuts: Layers to trace; left out: the whole model. Every stack's layers get a place in the labels.

    Raises:
        MemoptError: `trace-reads-values`, `trace-operator-unknown`, `plan-in-process-group`, and what applying the
            policy refuses.
    """
    shortened = [cut for cut in cuts if len(cut.layers) < len(_stack_layers(spec, cut.stack))]
    num_micro = min(plan.accumulate_steps, 3)
    cut = replace(cut_plan(plan, shortened) if shortened else plan, accumulate_steps=num_micro)
    with fake_world(plan.world_size), told_where(workload.name):
        model = _fake_model(workload)
        if shortened:
            cut_model(model, shortened)
        with fake_gaps():
            return _two_steps(workload, model, cut, spec, cuts, num_micro=num_micro, steps=plan.accumulate_steps)


def _stack_layers(spec: ModelSpec, path: str) -> range:
    return range(next(stack.length for stack in spec.stacks if stack.path == path))


def _fake_model(workload: Any) -> nn.Module:
    """The workload's model on fake CPU tensors; built on the meta device, where builders may convert and copy."""
    with fake_tensor.unset_fake_temporarily(), torch.device("meta"):
        model = workload.model()
    made: dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            data = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
            is_parameter = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = nn.Parameter(data, requires_grad=tensor.requires_grad) if is_parameter else data
        return made[id(tensor)]

    for module in model.modules():
        for held in (module._parameters, module._buffers, vars(module)):
            for name, value in list(held.items()):
                if isinstance(value, torch.Tensor):
                    held[name] = fake(value)
    return model


def _fake_batch(batch: Any) -> Any:
    def fake(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        made = torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu")
        return made.requires_grad_(leaf.requires_grad)

    return tree_map(fake, dict(batch) if isinstance(batch, Mapping) else batch)


def _two_steps(
    workload: Any,
    model: nn.Module,
    plan: Plan,
    spec: ModelSpec,
    cuts: Sequence[LayerCut],
    *,
    num_micro: int,
    steps: int,
) -> Traced:
    from .apply import apply

    applied = apply(model, plan, spec, optimizer=None, mesh=None)
    optimizer = applied.optimizer(workload.optimizer)
    batch = _fake_batch(workload.batch)
    laps: list[Amounts] = []
    journal = Journal(is_host_storage)
    meter = StepMeter(model, (optimizer,), engine=applied.engine, batch=batch, track_modules=True, journal=journal)

    def step(finish: Callable[[], None]) -> None:
        for _ in range(num_micro):
            workload.loss(model, batch).backward()
            finish()
        if workload.clip_norm is not None:
            applied.clip_grad_norm_(workload.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        finish()

    def lap() -> None:
        laps.append(_so_far(meter, applied))
        journal.lap += 1
        journal.enter(Place("between"))

    step(lambda: None)
    before = _so_far(meter, applied)
    with ExitStack() as stack:
        marks = _Marks(meter, journal)
        stack.enter_context(journal.kept())
        stack.enter_context(meter)
        marks("start")
        marks.watch(model, cuts, stack)
        step(lap)
    result = meter.result()
    return Traced(
        segments=marks.segments(),
        amounts=_all_micro_steps(before, laps, steps),
        host_bytes=result.peak.host_nbytes,
        result=result,
        allocations=allocations(meter.ledger, marks.places),
        work=Work.of(journal),
        num_micro=num_micro,
    )


def _so_far(meter: StepMeter, applied: Any) -> Amounts:
    flops, recomputed = meter.flops
    moved = [applied.regions.transfers, *applied.optimizer_offloads]
    return Amounts(
        flops,
        recomputed,
        sum(transfers.to_host_bytes for transfers in moved),
        sum(transfers.to_device_bytes for transfers in moved),
        {kind: _pair(calls) for kind, calls in meter.collectives.items()},
    )


def _pair(calls: Collective) -> tuple[int, int]:
    return calls.num_calls, calls.nbytes


def _all_micro_steps(before: Amounts, laps: list[Amounts], steps: int) -> Amounts:
    """A step's amounts when only some of its micro-batches were run: those between the first and last are alike."""
    whole = laps[-1].plus(before, -1)
    num_run = len(laps) - 1
    if steps <= num_run:
        return whole
    middle = laps[1].plus(laps[0], -1)
    return whole.plus(middle, steps - num_run)

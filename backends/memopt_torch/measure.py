"""Count what a training step really holds: live storages by role, collectives, FLOPs, all from one dispatch mode.

The mode sees every operator below autograd, so it counts eager steps and fake-tensor steps alike; storages that are
resized in place (FSDP2 frees and refills its gathered parameters that way) are followed through `resize_`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from memopt.timeline import Phase as WorkPhase

from .journal import Journal
from .ledger import Ledger, Peak, Phase, Role
from .operators import collective_name, flop_formula, tensors_by_argument

_PLAIN_DISPATCH = torch._C._disabled_torch_dispatch_impl
# Buffers that stand for host memory although the CPU has only one kind: registered by whoever offloads into them.
_host_storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
_running: list[StepMeter] = []


def register_host_storage(tensor: torch.Tensor) -> None:
    """Count `tensor`'s storage as host memory in every later measurement (offload buffers on a CPU-only run)."""
    storage = tensor.untyped_storage()
    key = storage._cdata
    _host_storages[key] = weakref.ref(storage, lambda _, key=key: _host_storages.pop(key, None))
    for meter in _running:
        meter.ledger.mark_host(storage)


def note_role(tensor: torch.Tensor, role: Role) -> None:
    """Tell a measurement under way what a storage it has just seen is for; nothing happens without one."""
    for meter in _running:
        meter.ledger.mark(tensor.untyped_storage(), role)


def is_host_storage(storage: torch.UntypedStorage) -> bool:
    """Whether that storage was registered as host memory."""
    return storage._cdata in _host_storages


def is_wrapper_type(kind: type) -> bool:
    """Whether tensors of that type only wrap others (DTensor, sharded parameters) and hold no bytes themselves."""
    from torch._subclasses.fake_tensor import FakeTensor

    return kind.__torch_dispatch__ is not _PLAIN_DISPATCH and not issubclass(kind, FakeTensor)


def plain_tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors with storages of their own inside `value` (a tensor, a wrapper, a sparse one, any pytree of them)."""
    for leaf in tree_leaves(value):
        if not isinstance(leaf, torch.Tensor):
            continue
        if not is_wrapper_type(type(leaf)):
            yield from (leaf,) if leaf.layout is torch.strided else _parts_of_sparse(leaf)
        elif hasattr(leaf, "__tensor_flatten__"):
            for name in getattr(leaf, "__tensor_flatten__")()[0]:  # noqa: B009  # the stubs do not know it
                yield from plain_tensors(getattr(leaf, name))
        else:
            yield from plain_tensors(getattr(leaf, "_local_tensor", getattr(leaf, "local", None)))


def _parts_of_sparse(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Indices and values; none of a layout that shows no storage (oneDNN's). Nobody who watches operators sees it."""
    with _disable_current_modes():
        if tensor.layout is torch.sparse_coo:
            return tensor._indices(), tensor._values()
        if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
            return tensor.crow_indices(), tensor.col_indices(), tensor.values()
        if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
            return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return ()


@dataclass(frozen=True, slots=True)
class Collective:
    """Calls of one kind of collective in a step.

    Attributes:
        num_calls: How many.
        nbytes: Sum over calls of the larger of input and output, on this rank.
    """

    num_calls: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step did.

    Attributes:
        peak: Device bytes at the highest moment.
        flops: All FLOPs of the step, from the operators run.
        recomputed_flops: Those run again in the backward pass.
        collectives: Kind -> calls and bytes.
        timeline: (live device bytes, phase) after each change, thinned to at most 2,000 points, maxima kept.
        num_ops: Operators run.
    """

    peak: Peak
    flops: int
    recomputed_flops: int
    collectives: Mapping[str, Collective]
    timeline: tuple[tuple[int, str], ...]
    num_ops: int

    @property
    def recompute_fraction(self) -> float:
        """Recomputed FLOPs over the step's FLOPs; 0.0 for a step without any."""
        return self.recomputed_flops / self.flops if self.flops else 0.0


@dataclass(eq=False)
class StepMeter(TorchDispatchMode):
    """Counts one training step run inside it: `with StepMeter(model, batch=batch) as meter: step()`.

    Parameters, gradients, optimizer state, buffers and the engine's own buffers that exist already are in the count
    from the start. The peak of a training run is that of the second step, when the optimizer's state exists.

    Attributes:
        model: Its parameters, gradients and buffers are counted (buffers as `param`).
        optimizers: Their state is counted; optimizers that step inside are found by themselves.
        engine: Anything with `buffers() -> Iterable[(tensor, role)]`.
        batch: Tensors of the input batch, any pytree (as `activation`).
        track_modules: Note the module each storage is born in (slower; for pages).
        journal: Where the work itself is noted, for planning.
    """

    model: nn.Module
    optimizers: tuple[torch.optim.Optimizer, ...] = ()
    engine: Any = None
    batch: Any = None
    track_modules: bool = False
    journal: Journal | None = None
    ledger: Ledger = field(init=False)
    _flops: dict[bool, int] = field(init=False)
    _collectives: dict[str, list[int]] = field(init=False)
    _num_ops: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self._flops = {False: 0, True: 0}
        self._collectives = {}
        self._streams: dict[Any, int] = {}
        self._undo: list[Any] = []
        self._in_optimizer = False
        self._device = next((tensor.device.type for tensor in self._model_tensors()), "cpu")

    # What is there before the step.

    def _model_tensors(self) -> Iterator[torch.Tensor]:
        yield from plain_tensors(list(self.model.parameters()))
        yield from plain_tensors(list(self.model.buffers()))

    def _see_start(self) -> None:
        for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers()):
            self.ledger.module = name
            for plain in plain_tensors(tensor):
                self._see(plain, role="param")
        self.ledger.module = ""
        for tensor, role in self._engine_buffers():
            self._see(tensor, role=role)
        self._see_gradients()
        for optimizer in self.optimizers:
            self._see_state(optimizer)
        for tensor in plain_tensors(self.batch):
            self._see(tensor, role="activation")

    def _engine_buffers(self) -> Iterator[tuple[torch.Tensor, Role]]:
        if self.engine is not None:
            for tensor, role in self.engine.buffers():
                for plain in plain_tensors(tensor):
                    yield plain, role
        for tensor in _fsdp2_gathered(self.model):
            yield tensor, "gathered"

    def _see_gradients(self) -> None:
        for parameter in self.model.parameters():
            for tensor in plain_tensors(parameter.grad):
                self._see(tensor, role="grad")

    def _see_state(self, optimizer: torch.optim.Optimizer) -> None:
        for state in optimizer.state.values():
            for tensor in plain_tensors(state):
                self._see(tensor, role="optimizer_state")
        offload = getattr(optimizer, "_memopt_offload", None)
        for tensor in () if offload is None else offload.host_tensors():
            self._see(tensor)

    def _see(self, tensor: torch.Tensor, *, role: Role | None = None) -> None:
        storage = tensor.untyped_storage()
        is_host = is_host_storage(storage)
        if not is_host and tensor.device.type == "cpu" and self._device != "cpu":
            if not tensor.is_pinned():
                return  # ordinary host tensors of a GPU run: no device bytes, and not what a policy moved
            is_host = True
        self.ledger.see(storage, shape=tuple(tensor.shape), role=role, is_host=is_host)

    # The step.

    def __enter__(self) -> StepMeter:
        self._see_start()
        self._follow_resizes()
        self._undo.append(register_optimizer_step_pre_hook(self._before_optimizer).remove)
        self._undo.append(register_optimizer_step_post_hook(self._after_optimizer).remove)
        if self.track_modules:
            self._follow_modules()
        self.ledger.enter("forward")
        super().__enter__()
        _running.append(self)
        return self

    def __exit__(self, *exc_info: Any) -> None:
        _running.remove(self)
        super().__exit__(*exc_info)
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()
        self._see_gradients()
        for tensor, role in self._engine_buffers():
            self.ledger.mark(tensor.untyped_storage(), role)
        self.ledger.close()

    def __torch_dispatch__(self, func: Any, types: Iterable[type], args: Any = (), kwargs: Any = None) -> Any:
        if any(is_wrapper_type(kind) for kind in types):
            return NotImplemented  # the wrapper unwraps itself; its inner operators come back here
        kwargs = kwargs or {}
        self.ledger.enter(self._phase())
        self.ledger.origin = func.__name__
        self.ledger.stream = self._stream()
        self._num_ops += 1
        out = func(*args, **kwargs)
        if not func.is_view:  # a view makes no memory; one of unknown memory looks into a library's own buffers
            for leaf in tree_leaves(out):
                if isinstance(leaf, torch.Tensor):
                    self._see(leaf)
        name = collective_name(func)
        if name is not None:
            self._count_collective(name, func, args, out)
            return out
        flops = self._count_flops(func, args, kwargs, out)
        if self.journal is not None:
            self.journal.operator(func, args, kwargs, out, flops=flops, phase=_work_phase(self.ledger.phase))
        return out

    def _stream(self) -> int:
        """The stream in use, numbered as they come up. On processors streams are names, which is all it takes."""
        stream = torch.cpu.current_stream()
        return (
            0 if stream is torch.cpu._default_cpu_stream else self._streams.setdefault(stream, len(self._streams) + 1)
        )

    def _phase(self) -> Phase:
        if torch._C._current_graph_task_id() != -1:
            # Backward formulas run without grad mode; only a recomputed forward turns it on.
            return "recompute" if torch.is_grad_enabled() else "backward"
        return "optimizer" if self._in_optimizer else "forward"

    def _before_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._in_optimizer = True
        self._see_gradients()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                for tensor in plain_tensors(parameter.grad):
                    self._see(tensor, role="grad")

    def _after_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._see_state(optimizer)
        self._in_optimizer = False
        self.ledger.enter("forward")

    def _follow_resizes(self) -> None:
        original = torch.UntypedStorage.resize_

        def resize_(self_: torch.UntypedStorage, size: int) -> Any:
            result = original(self_, size)
            self.ledger.origin = "resize_"
            self.ledger.enter(self._phase())
            if not is_host_storage(self_):
                self.ledger.see(self_)
            return result

        setattr(torch.UntypedStorage, "resize_", resize_)  # noqa: B010  # the stubs fix the parameter names
        self._undo.append(lambda: setattr(torch.UntypedStorage, "resize_", original))

    def _follow_modules(self) -> None:
        from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

        names = {id(module): name for name, module in self.model.named_modules()}
        stack: list[str] = []

        def before(module: nn.Module, *_: Any) -> None:
            stack.append(self.ledger.module)
            self.ledger.module = names.get(id(module), self.ledger.module)

        def after(module: nn.Module, *_: Any) -> None:
            if stack:
                self.ledger.module = stack.pop()

        self._undo.append(register_module_forward_pre_hook(before).remove)
        self._undo.append(register_module_forward_hook(after, always_call=True).remove)

    def _count_collective(self, name: str, func: Any, args: Any, out: Any) -> None:
        nbytes = max(tensors_by_argument(args, out))
        entry = self._collectives.setdefault(name, [0, 0])
        entry[0] += 1
        entry[1] += nbytes
        if self.journal is not None:
            phase = _work_phase(self.ledger.phase)
            self.journal.collective(func, args, out, kind=name, nbytes=nbytes, phase=phase)

    def _count_flops(self, func: Any, args: Any, kwargs: Any, out: Any) -> int:
        formula = flop_formula(func)
        if formula is None:
            return 0
        flops = formula(*args, **kwargs, out_val=out)
        self._flops[self.ledger.phase == "recompute"] += flops
        return flops

    @property
    def flops(self) -> tuple[int, int]:
        """FLOPs so far, and those of them that were recomputed."""
        return sum(self._flops.values()), self._flops[True]

    @property
    def collectives(self) -> dict[str, Collective]:
        """Collectives so far."""
        return {name: Collective(*entry) for name, entry in sorted(self._collectives.items())}

    def result(self) -> StepResult:
        """The figures of the step that was run inside."""
        phase_of = dict(self.ledger.phases)
        points: list[tuple[int, str]] = []
        phase = "start"
        for event, live in enumerate(self.ledger.timeline()):
            phase = phase_of.get(event, phase)
            points.append((live, phase))
        return StepResult(
            peak=self.ledger.peak(),
            flops=sum(self._flops.values()),
            recomputed_flops=self._flops[True],
            collectives=self.collectives,
            timeline=tuple(_thinned(points, 2000)),
            num_ops=self._num_ops,
        )


def _work_phase(phase: Phase) -> WorkPhase:
    return "forward" if phase == "start" else phase


def _thinned(points: list[tuple[int, str]], limit: int) -> Iterator[tuple[int, str]]:
    width = -(-len(points) // limit) or 1
    for first in range(0, len(points), width):
        yield max(points[first : first + width])


def _fsdp2_gathered(model: nn.Module) -> Iterator[torch.Tensor]:
    """The tensors FSDP2 gathers parameters into (resized to nothing while sharded)."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        state = module._get_fsdp_state()
        for group in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]:
            if group is not None:
                for fsdp_param in group.fsdp_params:
                    yield from fsdp_param.all_gather_outputs

"""Models built on the meta device: real values unit by unit, so that no rank ever holds more than one unit whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from memopt.errors import MemoptError, Problem

from .units import Unit


class MetaInitialiser:
    """Gives parameters and buffers on the meta device values, as their modules' own initialisers make them.

    Every rank draws the same numbers (seeded by rank 0), so slices of one tensor fit together and parameters kept whole
    are equal.

    Args:
        model: Its modules are initialised by the nearest `_init_weights` above them (Transformers' models), else by
            their own `reset_parameters` or `reset_buffers`.
    """

    def __init__(self, model: nn.Module) -> None:
        self.device = real_device()
        self._by_module: dict[int, Callable[[nn.Module], object]] = {}
        for outer in model.modules():
            initialise = getattr(outer, "_init_weights", None)
            if callable(initialise):
                for inner in outer.modules():
                    self._by_module[id(inner)] = initialise  # the innermost model that has one comes last
        self._seed = _shared_seed()
        self._fresh = _Fresh()

    def initialise_unit(self, unit: Unit) -> None:
        """Real values for a unit's parameters and for the buffers of the modules that own them."""
        if not any(entry.held.is_meta for _, entry in unit.entries()):
            return
        modules: dict[nn.Module, None] = {}
        for section, entry in unit.entries():
            real = _unwritten(entry.held, self.device)
            parameter = nn.Parameter(real, requires_grad=entry.held.requires_grad)
            self._fresh.add(parameter)
            for site in entry.sites:
                site.module._parameters[site.name] = parameter
                modules[site.module] = None
            entry.held = entry.used = parameter
            section.device = self.device
        self._run(modules)
        self._fresh.refuse_unwritten((entry.path, entry.held) for _, entry in unit.entries())

    def initialise_buffers(self, model: nn.Module) -> None:
        """Real values for all other buffers, those that are not saved in a state dict among them."""
        modules = [m for m in model.modules() if any(b is not None and b.is_meta for b in m._buffers.values())]
        self._run(modules)
        names = {
            f"{path}.{name}" if path else name: buffer
            for path, module in model.named_modules()
            if module in modules
            for name, buffer in module._buffers.items()
            if buffer is not None
        }
        self._fresh.refuse_unwritten(names.items())

    def _run(self, modules: Iterable[nn.Module]) -> None:
        with _seeded(self._seed), torch.no_grad():
            self._seed += 1
            for module in modules:
                for name, buffer in module._buffers.items():
                    if buffer is not None and buffer.is_meta:
                        module._buffers[name] = self._fresh.add(_unwritten(buffer, self.device))
                initialise = self._by_module.get(id(module))
                if initialise is not None:
                    initialise(module)
                    continue
                for method in ("reset_parameters", "reset_buffers"):
                    reset = getattr(module, method, None)
                    if callable(reset):
                        reset()


def has_meta(model: nn.Module) -> bool:
    """Whether any parameter is on the meta device."""
    return any(parameter.is_meta for parameter in model.parameters())


def real_device() -> torch.device:
    """Where a model on the meta device gets its values."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _shared_seed() -> int:
    seed = torch.tensor(torch.initial_seed() % 2**62)
    if dist.is_initialized():
        seed = seed.to(real_device() if dist.get_backend() == "nccl" else "cpu")
        dist.broadcast(seed, src=0)
    return int(seed)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield


def _unwritten(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Memory for a tensor; floating-point memory is filled with NaN, so that what is written in part shows too."""
    if tensor.dtype.is_floating_point:
        return torch.full(tensor.shape, float("nan"), dtype=tensor.dtype, device=device)
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)


class _Fresh:
    """Tensors whose memory is new, and how often each has been written since."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[torch.Tensor, int]] = {}

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        """Remembers a tensor as it is now."""
        self._made[id(tensor)] = (tensor, tensor._version)
        return tensor

    def is_unwritten(self, tensor: torch.Tensor) -> bool:
        """Whether nothing, or not everything, has been written. A tensor put in its place counts as written."""
        if not tensor.numel() or id(tensor) not in self._made:
            return False
        if tensor._version == self._made[id(tensor)][1]:
            return True
        return tensor.dtype.is_floating_point and bool(tensor.detach().isnan().any())

    def refuse_unwritten(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Raises for each tensor that nothing has given a value.

        Raises:
            MemoptError: `meta-without-initialiser`.
        """
        missing = [name for name, tensor in tensors if self.is_unwritten(tensor)]
        if missing:
            raise MemoptError(
                Problem(
                    "meta-without-initialiser",
                    "the model was built on the meta device, and nothing gives this tensor its value",
                    path=name,
                    hint="give its module a `reset_parameters` (or `reset_buffers`) method that writes it, or build "
                    "the model on a real device",
                )
                for name in missing
            )

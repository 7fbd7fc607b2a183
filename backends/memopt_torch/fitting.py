"""Whether a check can afford its reference: what keeping every activation would take, measured without keeping them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .measure import StepMeter

if TYPE_CHECKING:
    from .apply import Applied


class KeptBytes(TorchDispatchMode):
    """Around one recomputation after another: adds up what each has made that is still alive when it ends, which is
    what its unit would have kept since the forward pass.

    Attributes:
        nbytes: The sum over all units.
    """

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0
        self._made: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            for leaf in tree_leaves(out):
                if isinstance(leaf, torch.Tensor):
                    storage = leaf.untyped_storage()
                    self._made[storage._cdata] = weakref.ref(storage)
        return out

    def __exit__(self, *exc_info: Any) -> None:
        super().__exit__(*exc_info)
        alive = (storage for made in self._made.values() if (storage := made()) is not None)
        self.nbytes += sum(storage.nbytes() for storage in alive)
        self._made.clear()


def limit_bytes(applied: Applied) -> int | None:
    """Bytes of one device: the policy's budget, else the GPU's memory; None where neither is known."""
    budget = applied.plan.budget.get("device")
    if budget is not None:
        return budget
    device = next((parameter.device for parameter in applied.model.parameters()), torch.device("cpu"))
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


def recompute_and_measure(applied: Applied, run: Callable[[], Any]) -> tuple[Any, int]:
    """Runs with every unit recomputed.

    Returns:
        What `run` returned, and the bytes that one device would need if nothing were recomputed: the peak of this run
        and all that its recomputations made for the backward pass.
    """
    kept = KeptBytes()
    meter = StepMeter(applied.model, optimizers=applied.optimizers, engine=applied.engine)
    with applied.regions.reference("recompute", around=kept), meter:
        result = run()
    return result, meter.result().peak.nbytes + kept.nbytes


def fits_everywhere(needed_bytes: int, limit: int) -> bool:
    """Whether it fits on every rank: all must choose the same reference."""
    everyone = [needed_bytes <= limit]
    if dist.is_initialized():
        everyone = [True] * dist.get_world_size()
        dist.all_gather_object(everyone, needed_bytes <= limit)
    return all(everyone)

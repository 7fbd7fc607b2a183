"""Stand-ins for gradients that are kept whole for a later reduction: `zero_grad` is noticed, reading one is refused."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from memopt.errors import MemoptError

from .sharded import ShardedTensor

aten = torch.ops.aten


class Unreduced(ShardedTensor):
    """What `.grad` holds between the micro-batches of a deferred accumulation. It has no values.

    Attributes:
        is_zeroed: Somebody has called `zero_grad(set_to_none=False)`.
        replaces: A reduced gradient that the user had kept from before, to be added to at the end.
    """

    is_zeroed: bool
    replaces: torch.Tensor | None

    @classmethod
    def of(cls, held: ShardedTensor, *, replaces: torch.Tensor | None) -> Unreduced:
        """The stand-in for the gradient of a sharded parameter."""
        made = cls(torch.empty(0, dtype=held.dtype, device=held.device), held.slice)
        made.is_zeroed = False
        made.replaces = replaces
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is aten.zero_.default:
            args[0].is_zeroed = True
            return args[0]
        if func is aten._foreach_zero_.default:
            for tensor in args[0]:
                tensor.zero_()
            return None
        marks = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Unreduced)]
        raise MemoptError.of(
            "gradient-not-reduced",
            f"`{func}` asks for a gradient in the middle of an accumulation, when the policy has not reduced it yet",
            path=marks[0].slice.path,
            hint="use gradients after the last of accumulate.steps backward passes, or set accumulate.reduce: each",
        )


def was_zeroed(grad: torch.Tensor | None) -> bool:
    """Whether what stood for a kept gradient has been taken away by `zero_grad` of either kind."""
    return grad is None or (isinstance(grad, Unreduced) and grad.is_zeroed)


def refuse_unreduced(micro_step: int, accumulate_steps: int) -> None:
    """Refuses an optimizer step in the middle of an accumulation whose gradients are not reduced yet.

    Raises:
        MemoptError: `accumulate-steps`.
    """
    if micro_step % accumulate_steps:
        raise MemoptError.of(
            "accumulate-steps",
            f"the optimizer steps after {micro_step % accumulate_steps} backward passes, but the policy reduces "
            f"gradients at the last of {accumulate_steps}: they were not reduced",
            path="accumulate.steps",
            hint="step after every accumulate.steps backward passes, or set accumulate.reduce: each",
        )

"""A model's own checkpointing: together with the policy's it would recompute twice, so it is refused."""

from __future__ import annotations

import torch
from torch import nn

from memopt.errors import MemoptError


def own_checkpointing(path: str, what: str) -> MemoptError:
    return MemoptError.of(
        "own-checkpointing",
        f"{what}; together with the policy's rule it would be recomputed twice and the rule's values lost",
        path=path,
        hint="turn it off (Transformers: `model.gradient_checkpointing_disable()`; torch: call the module itself "
        "instead of `checkpoint(module, ...)`) and let the policy recompute, or leave this unit out of the rules",
    )


def refuse_outer_checkpoint(path: str) -> None:
    top = torch._C._autograd._top_saved_tensors_default_hooks(True)  # pyright: ignore[reportAttributeAccessIssue]
    is_in_checkpoint = top is not None and "_checkpoint_hook" in getattr(top[0], "__qualname__", "")
    if is_in_checkpoint or torch._C._current_graph_task_id() != -1:
        raise own_checkpointing(path, "this unit is called inside a checkpoint of the model's own")


def refuse_own_checkpointing(module: nn.Module, path: str, *, is_deep: bool) -> None:
    """Refuse Transformers' gradient checkpointing and torch's checkpoint wrappers on a unit (`is_deep`: below it too).

    Raises:
        MemoptError: `own-checkpointing`.
    """
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

    for inner in module.modules() if is_deep else (module,):
        if getattr(inner, "gradient_checkpointing", False) is True:
            raise own_checkpointing(path, f"gradient checkpointing is on in this `{type(inner).__name__}`")
        if isinstance(inner, CheckpointWrapper):
            raise own_checkpointing(path, "this unit is, or contains, a module in torch's CheckpointWrapper")

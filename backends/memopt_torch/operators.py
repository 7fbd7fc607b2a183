"""What an operator costs: the FLOPs of its matrix products, and the device memory it reads and writes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

# Nothing runs on the device for these, though their schemas do not say that they only look at memory.
_FREE = frozenset(
    {
        "_local_scalar_dense", "_unsafe_view", "alias", "detach", "empty", "empty_like", "empty_strided", "lift_fresh",
        "new_empty", "new_empty_strided", "resize_", "set_", "split_with_sizes",
    }
)  # fmt: skip
# The first argument is only written.
_OVERWRITE = frozenset({"_foreach_copy_", "_foreach_zero_", "copy_", "fill_", "zero_"})
# Of a large operand these read no more than what they give back.
_PICK = frozenset({"embedding", "gather", "index", "index_select", "nll_loss_forward"})
_NOT_READ = frozenset({"nll_loss_backward"})  # of a large operand, only the shape


# c10d's operator names (torch/csrc/distributed/c10d/Ops.cpp) -> what the contract calls them.
_COLLECTIVES = {
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "all_reduce": "all_reduce",
    "broadcast_": "broadcast",
    "broadcast": "broadcast",
    "alltoall_base_": "all_to_all",
    "alltoall_": "all_to_all",
    "all_to_all_single": "all_to_all",
    "send": "send",
    "recv_": "recv",
    "barrier": "barrier",
}


def collective_name(func: Any) -> str | None:
    """What the contract calls the collective an operator is; None for what moves nothing between ranks."""
    if func.namespace not in ("c10d", "_c10d_functional", "c10d_functional"):
        return None
    return _COLLECTIVES.get(func._overloadpacket.__name__)


def flop_formula(func: Any) -> Callable[..., int] | None:
    """How many FLOPs a call of the operator takes, for those that multiply matrices."""
    packet = func._overloadpacket
    return flop_registry.get(packet) or _MORE_FLOPS.get(packet.__name__)


def bytes_moved(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    """Bytes an operator reads and writes, each operand once; 0 where nothing runs.

    Args:
        func: The overload called.
        args, kwargs: Its arguments.
        out: What it gave back.
    """
    name = func._overloadpacket.__name__
    if func.is_view or name in _FREE:
        return 0
    if name == "all_gather_copy_in":  # FSDP2's own: its schema does not say that it writes
        return 2 * sum(map(_nbytes, args[0]))
    made = [tensor for tensor in tree_leaves(out) if isinstance(tensor, torch.Tensor)]
    written_names, is_written = _written(func)
    read: list[torch.Tensor] = []
    written: list[torch.Tensor] = []
    for at, value in enumerate(args):
        tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
        if at < len(is_written) and is_written[at]:
            written += tensors
            if name in _OVERWRITE:
                continue
        read += tensors
    for key, value in kwargs.items():  # `out=`
        target = written if key in written_names else read
        target += [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    known = {tensor.untyped_storage()._cdata for tensor in (*read, *written)}
    fresh = [tensor for tensor in made if tensor.untyped_storage()._cdata not in known]
    if not written and not fresh:
        return 0  # a view by another name
    num_written = sum(map(_nbytes, (*written, *fresh)))
    if name in _PICK:
        return 2 * num_written
    return num_written + (0 if name in _NOT_READ else sum(map(_nbytes, read)))


@functools.cache
def _written(func: Any) -> tuple[frozenset[str], tuple[bool, ...]]:
    """Names of the arguments an operator writes to, and which of the positional ones they are."""
    arguments = func._schema.arguments
    flags = tuple(argument.alias_info is not None and argument.alias_info.is_write for argument in arguments)
    return frozenset(argument.name for argument, flag in zip(arguments, flags) if flag), flags


def _nbytes(tensor: torch.Tensor) -> int:
    """Of an expanded tensor, what lies in memory."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def tensors_by_argument(args: Sequence[Any], out: Any) -> Iterator[int]:
    """Bytes of the tensors in each argument, lists summed, and in the result."""
    for value in (*args, out):
        yield sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


def _cpu_attention_flops(query: Any, key: Any, value: Any, *_: Any, out_val: Any = None, **__: Any) -> int:
    """2·(Q·Kᵀ) + 2·(P·V): batch, heads, query and key lengths, head sizes."""
    batch, heads, q_length, head = query.shape
    return 2 * batch * heads * q_length * key.shape[-2] * (head + value.shape[-1])


def _cpu_attention_backward_flops(grad: Any, query: Any, key: Any, value: Any, *rest: Any, **kwargs: Any) -> int:
    """Five products where the forward has two: the scores again, then the gradients of V, P, Q and K."""
    batch, heads, q_length, head = query.shape
    return 2 * batch * heads * q_length * key.shape[-2] * (3 * head + 2 * value.shape[-1])


def _grouped_flops(left: Any, right: Any, *_: Any, out_val: Any = None, **__: Any) -> int:
    """Products of groups of rows with a matrix each: rows x inner x columns, times the groups where both have them."""
    groups = left.shape[0] if left.dim() == right.dim() == 3 else 1
    return 2 * groups * left.shape[-2] * left.shape[-1] * right.shape[-1]


def _grouped_backward_flops(rows: Any, weights: Any, *_: Any, out_val: Any = None, **__: Any) -> int:
    """The gradients of the rows [T, K] and of the weights [G, K, N]."""
    return 4 * rows.shape[0] * weights.shape[-2] * weights.shape[-1]


# torch's own table has CUDA's attention and no grouped products (experts); the last two are what Transformers falls
# back to.
_MORE_FLOPS: dict[str, Callable[..., int]] = {
    "_scaled_dot_product_flash_attention_for_cpu": _cpu_attention_flops,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _cpu_attention_backward_flops,
    "_grouped_mm": _grouped_flops,
    "grouped_mm_fallback": _grouped_flops,
    "grouped_mm_fallback_backward": _grouped_backward_flops,
}

"""Sharded parameters: tensors that show the whole (global) shape and hold one contiguous slice of the flat values.

A slice of the flattened parameter is all a rank keeps. Optimizers that work value by value (SGD, AdamW, Lion ...) run
on the slice unchanged, in their for-loop, foreach and fused forms; norms and sums are completed by one all-reduce.
Whatever needs the whole tensor (matrix products, views of another shape) is refused by name: computing it on a slice
would be silently wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.optim.optimizer import _foreach_supported_types as _optimizer_types
from torch.utils._foreach_utils import _foreach_supported_types as _clipping_types

from memopt.errors import MemoptError

from .boxes import Box, boxes_of

aten = torch.ops.aten


@dataclass(frozen=True, eq=False, slots=True)
class FlatSlice:
    """Which values of a parameter this rank holds.

    Attributes:
        path: Canonical path of the parameter, for messages.
        shape: The parameter's whole shape.
        start: First flat index held here.
        stop: One past the last flat index held here; `start == stop` where this rank holds none.
        group: Process group over which the slices are spread, or None when this process holds everything.
    """

    path: str
    shape: torch.Size
    start: int
    stop: int
    group: dist.ProcessGroup | None


class ShardedTensor(torch.Tensor):
    """A tensor of global shape whose storage is this rank's flat slice (`local`)."""

    local: torch.Tensor
    slice: FlatSlice

    @staticmethod
    def __new__(cls, local: torch.Tensor, slice: FlatSlice) -> ShardedTensor:
        wrapper = torch.Tensor._make_wrapper_subclass(cls, slice.shape, dtype=local.dtype, device=local.device)
        wrapper.local = local
        wrapper.slice = slice
        return wrapper

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return _dispatch(func, args, kwargs or {})

    def __repr__(self, **_: Any) -> str:
        held = self.slice
        return f"ShardedTensor({held.path}, shape={tuple(held.shape)}, values [{held.start}, {held.stop}) here)"

    def __deepcopy__(self, memo: dict) -> Any:
        raise MemoptError.of(
            "sharded-deepcopy",
            "a sharded model cannot be deep-copied: the copy would share this one's buffers and process groups",
            path=self.slice.path,
            hint="copy the model before memopt.apply_policy, or save it with run.save(dir) and load the copy",
        )

    # torch.distributed.checkpoint's protocol for tensors that say themselves which parts they hold.

    def __create_write_items__(self, fqn: str, obj: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.local)
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(box.offsets), number),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=_chunk(box), properties=properties, size=self.slice.shape),
            )
            for number, box in enumerate(self._boxes())
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_chunk(box) for box in self._boxes()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        for box, values in self.parts():
            if index.offset is not None and tuple(index.offset) == box.offsets:
                return values
        raise KeyError(index)

    def parts(self) -> Iterator[tuple[Box, torch.Tensor]]:
        """The boxes of the whole tensor held here, each with its values (a view)."""
        for box in self._boxes():
            at = box.start - self.slice.start
            yield box, self.local.detach()[at : at + box.numel].view(box.sizes)

    def _boxes(self) -> tuple[Box, ...]:
        return boxes_of(self.slice.shape, self.slice.start, self.slice.stop)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise MemoptError.of(
            "sharded-pickle",
            "a sharded parameter cannot be pickled: each rank holds a slice only",
            path=self.slice.path,
            hint="save with run.save(dir): sharded, nothing gathered, loads at any world size and into a plain model",
        )


# As DTensor does for itself: on GPUs optimizers and clipping take their foreach form for listed types only.
for _types in (_optimizer_types, _clipping_types):
    if ShardedTensor not in _types:
        _types.append(ShardedTensor)


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes))


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor that holds this rank's values; a plain tensor is its own."""
    return tensor.local if isinstance(tensor, ShardedTensor) else tensor


def whole_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The whole value of a sharded tensor on every rank of its group; allocates it. One all-reduce."""
    if not isinstance(tensor, ShardedTensor):
        return tensor.detach()
    held = tensor.slice
    flat = torch.zeros(held.shape.numel(), dtype=tensor.dtype, device=tensor.device)
    flat[held.start : held.stop].copy_(tensor.local)
    if held.group is not None:
        dist.all_reduce(flat, group=held.group)
    return flat.view(held.shape)


def _unwrap(value: Any) -> Any:
    if type(value) is ShardedTensor or isinstance(value, ShardedTensor):
        return value.local
    if isinstance(value, list | tuple):
        return type(value)(_unwrap(item) for item in value)
    return value


def _first(args: Sequence[Any]) -> ShardedTensor:
    for arg in args:
        if isinstance(arg, ShardedTensor):
            return arg
        if isinstance(arg, list | tuple):
            for item in arg:
                if isinstance(item, ShardedTensor):
                    return item
    raise TypeError("no sharded tensor among the arguments")  # dispatch guarantees one


def _wrap_like(result: Any, like: torch.Tensor) -> Any:
    """Results of the slice's own shape are sharded alike; what belongs to a plain tensor stays plain."""
    if isinstance(like, ShardedTensor) and isinstance(result, torch.Tensor) and result.shape == like.local.shape:
        return ShardedTensor(result, like.slice)
    return result


def _same_slice(a: FlatSlice, b: FlatSlice) -> bool:
    return (a.start, a.stop, a.shape) == (b.start, b.stop, b.shape)


def _operand(func: Any, like: ShardedTensor, arg: Any) -> Any:
    """What a pointwise op on slices takes for an operand: a slice of the same layout, one value, or a rank's part of a
    whole tensor of the same shape."""
    if isinstance(arg, ShardedTensor):
        if not _same_slice(arg.slice, like.slice):
            raise _refusal(func, like, "the operands are sharded differently")
        return arg.local
    if not isinstance(arg, torch.Tensor) or arg.dim() == 0:
        return arg
    if arg.shape == like.slice.shape:
        if not any(arg.stride()):  # one value expanded, as the gradient of a sum is
            return arg[(0,) * arg.dim()]
        return arg.reshape(-1)[like.slice.start : like.slice.stop]
    if arg.numel() == 1:
        return arg.reshape(())
    raise _refusal(func, like, f"the other operand has shape {tuple(arg.shape)}")


def _pointwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    like = _first([*args, *kwargs.values()])
    target = kwargs.get("out", args[0])
    if func._schema.is_mutable and not isinstance(target, ShardedTensor):
        raise _refusal(func, like, "its result would go to a whole tensor without the other ranks' parts")
    local_args = [_operand(func, like, arg) for arg in args]
    result = func(*local_args, **{name: _operand(func, like, value) for name, value in kwargs.items()})
    return target if func._schema.is_mutable else _wrap_like(result, like)


def _put_where(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`tensor[mask] = value` with a mask of the tensor's own layout (Rprop): value by value like any pointwise op."""
    target, indices, value = args[0], args[1], args[2]
    masks = [index for index in indices if index is not None]
    is_mask = len(masks) == 1 and isinstance(masks[0], ShardedTensor) and masks[0].dtype is torch.bool
    if not isinstance(target, ShardedTensor) or not is_mask or value.numel() != 1 or any(args[3:]):
        raise _refusal(func, _first([*args, *masks]), "only one value by a mask of the same layout can be put")
    target.local[_operand(func, target, masks[0])] = value.reshape(())
    return target


def _like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`zeros_like` and kin: a fresh slice. Memory formats of the whole tensor mean nothing to a flat slice."""
    kwargs = {name: value for name, value in kwargs.items() if name != "memory_format"}
    return ShardedTensor(func(args[0].local, *args[1:], **kwargs), args[0].slice)


def _fill(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    func(args[0].local, *args[1:], **kwargs)
    return args[0]


def _copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`copy_` from a slice of the same layout, or from a whole tensor (each rank takes its part)."""
    target, source = args[0], args[1]
    if isinstance(target, ShardedTensor):
        held = target.slice
        if isinstance(source, ShardedTensor):
            target.local.copy_(_operand(func, target, source))
        elif source.numel() == 1 and held.shape.numel() != 1:
            target.local.copy_(source.reshape(()))
        elif source.shape == held.shape:
            target.local.copy_(source.reshape(-1)[held.start : held.stop])
        else:
            raise _refusal(func, target, f"the source has shape {tuple(source.shape)}")
        return target
    target.copy_(whole_tensor(source))
    return target


def _reduced(func: Any, args: tuple[Any, ...], combine: str) -> torch.Tensor:
    """Completes a full reduction over the group; `combine` is the c10d reduction."""
    tensor = args[0]
    local = tensor.local
    if local.numel() == 0:  # a neutral value: this rank holds nothing of the tensor
        neutral = {"SUM": 0, "MAX": -torch.inf, "MIN": torch.inf}[combine]
        result = torch.full((), neutral, dtype=local.dtype, device=local.device)
    else:
        result = func(local, *args[1:])
    if tensor.slice.group is not None:
        dist.all_reduce(result, op=getattr(dist.ReduceOp, combine), group=tensor.slice.group)
    return result


def vector_norms(
    tensors: Sequence[torch.Tensor], order: float = 2.0, *, dtype: torch.dtype | None = None
) -> list[torch.Tensor]:
    """Norms of whole tensors, some of them sharded, with one all-reduce for all of them."""
    if order == 0:
        raise _refusal(aten._foreach_norm.Scalar, _first(tensors), "the 0-norm is not offered")
    largest = order == float("inf")
    parts = [_partial_norm(local_tensor(tensor), order, dtype) for tensor in tensors]
    sharded = [i for i, tensor in enumerate(tensors) if isinstance(tensor, ShardedTensor)]
    group = next((tensors[i].slice.group for i in sharded), None)  # type: ignore[attr-defined]
    if group is not None:
        stacked = torch.stack([parts[i] for i in sharded])
        dist.all_reduce(stacked, op=dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=group)
        for i, part in zip(sharded, stacked.unbind(), strict=True):
            parts[i] = part
    return parts if largest else [part.pow(1.0 / order) for part in parts]


def _partial_norm(values: torch.Tensor, order: float, dtype: torch.dtype | None) -> torch.Tensor:
    """What one rank adds to a norm: its maximum, or its sum of powers."""
    values = values if dtype is None else values.to(dtype)
    if values.numel() == 0:
        return torch.zeros((), dtype=values.dtype, device=values.device)
    norm = torch.linalg.vector_norm(values, order)
    return norm if order == float("inf") else norm.pow(order)


def _norm(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if any(value not in (None, [], ()) for value in args[2:3]):
        raise _refusal(func, args[0], "a norm along dimensions needs whole rows")
    order = args[1] if len(args) > 1 else 2
    return vector_norms([args[0]], float(order), dtype=kwargs.get("dtype"))[0]


def _foreach(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Foreach and fused optimizer kernels: lists of slices; empty slices are left out of fused ones by the kernels."""
    name = func._schema.name
    if "norm" in name:
        order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
        return vector_norms(args[0], float(order), dtype=kwargs.get("dtype"))
    likes = _first(args)
    result = func(*_unwrap(args), **{key: _unwrap(value) for key, value in kwargs.items()})
    if "non_finite_check" in name and likes.slice.group is not None:
        # An overflow on one rank must stop the step on all of them (loss scaling).
        dist.all_reduce(args[1], op=dist.ReduceOp.MAX, group=likes.slice.group)
    if result is None or not isinstance(result, list | tuple):
        return result
    sources = next(arg for arg in args if isinstance(arg, list | tuple))
    return [_wrap_like(item, source) for item, source in zip(result, sources, strict=True)]


def _same_view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Views that keep the shape (`detach`, `alias`, `view_as` itself)."""
    tensor = args[0]
    if func in (aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default):
        wanted = [size if size != -1 else None for size in args[1]]
        fits = len(wanted) == len(tensor.slice.shape) and all(
            want in (None, have) for want, have in zip(wanted, tensor.slice.shape, strict=True)
        )
        if not fits:
            raise _refusal(func, tensor, f"a view of shape {tuple(args[1])} needs the whole tensor")
    # The very tensor: a detached one would have a version counter of its own, and writes to it would go unnoticed.
    return ShardedTensor(tensor.local, tensor.slice)


def _refusal(func: Any, tensor: ShardedTensor, why: str) -> MemoptError:
    return MemoptError.of(
        "sharded-parameter-op",
        f"`{func}` cannot run on a sharded parameter: {why}",
        path=tensor.slice.path,
        hint="in a model: call it through a module's forward, or name the method with "
        "run.register_method(module, 'name'). In an optimizer: Muon and Adafactor made by "
        "run.optimizer(cls, ...) get whole tensors; another that needs them can run on the fsdp2 engine",
    )


_TABLE: Mapping[Any, Callable[[Any, tuple, dict], Any]] = {
    aten.detach.default: _same_view,
    aten.alias.default: _same_view,
    aten.view.default: _same_view,
    aten.expand.default: _same_view,
    aten.zeros_like.default: _like,
    aten.ones_like.default: _like,
    aten.empty_like.default: _like,
    aten.full_like.default: _like,
    aten._to_copy.default: _like,
    aten.clone.default: _like,
    aten.zero_.default: _fill,
    aten.fill_.Scalar: _fill,
    aten.fill_.Tensor: _fill,
    aten.copy_.default: _copy,
    aten.index_put_.default: _put_where,
    aten.linalg_vector_norm.default: _norm,
    aten.norm.Scalar: _norm,
    aten.norm.ScalarOpt_dim: _norm,
    aten.sum.default: lambda func, args, kwargs: _reduced(func, args, "SUM"),
    aten.max.default: lambda func, args, kwargs: _reduced(func, args, "MAX"),
    aten.min.default: lambda func, args, kwargs: _reduced(func, args, "MIN"),
}


def _mean(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    return _reduced(aten.sum.default, args, "SUM") / args[0].slice.shape.numel()


def _dispatch(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    result = _handler(func)(func, args, kwargs)
    if func._schema.is_mutable:
        # Below autograd nothing counts writes; the engine tells by the count whether gathered copies are out of date.
        target = kwargs.get("out", args[0])
        written = _unwrap(target) if isinstance(target, list | tuple) else [local_tensor(target)]
        torch.autograd.graph.increment_version(written)
    return result


def _handler(func: Any) -> Callable[[Any, Any, dict[str, Any]], Any]:
    """What runs an operator on slices."""
    handler = _TABLE.get(func)
    if handler is not None:
        return handler
    if func._schema.name.startswith(("aten::_foreach_", "aten::_fused_", "aten::_amp_foreach_")):
        return _foreach
    if func is aten.mean.default:
        return _mean
    return _pointwise if torch.Tag.pointwise in func.tags else _refused


def _refused(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    raise _refusal(func, _first([*args, *kwargs.values()]), "it needs the whole tensor")

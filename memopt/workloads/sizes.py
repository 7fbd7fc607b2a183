"""Sizes of a layer's named values from a workload's numbers, for inventories that do not run the model."""

from __future__ import annotations

from dataclasses import replace

from ..spec import ModelSpec, TensorSpec
from ..vocabulary import tensor_name
from .config import WorkloadConfig


def value_widths(config: WorkloadConfig) -> dict[str, int]:
    """Neutral name -> numbers per token; experts' values are left out, as nobody knows how many tokens one gets."""
    queries, keys = config.heads * config.size_per_head, config.kv_heads * config.size_per_head
    widths = {"layer_input": config.hidden, "attn_stats": config.heads, "o": config.hidden}
    if config.mla is None:
        widths |= {"q": queries, "k": keys, "v": keys, "attn_out": queries}
    else:
        head = config.mla.qk_nope_head_dim + config.mla.qk_rope_head_dim
        values = config.heads * config.mla.v_head_dim
        widths |= {"q": config.heads * head, "k": config.heads * head, "v": values, "attn_out": values}
    if config.moe is None:
        wide = config.intermediate
        widths |= {"mlp_gate": wide, "mlp_up": wide, "mlp_act": wide, "mlp_down": config.hidden}
    return widths


def with_sizes(spec: ModelSpec, workload: object) -> ModelSpec:
    """The inventory with the sizes of named values filled in where it has none, for the whole batch.

    An inventory of one device's sizes, or a workload that is no set of numbers, is given back as it is.
    """
    values = spec.tensors_of("activation")
    knows_sizes = any(value.shape is not None for value in values)
    if not isinstance(workload, WorkloadConfig) or (knows_sizes and spec.batch != "global"):
        return spec
    widths = value_widths(workload)
    return replace(
        spec, tensors=tuple(_sized(tensor, spec.family, widths, workload) for tensor in spec.tensors), batch="global"
    )


def _sized(tensor: TensorSpec, family: str | None, widths: dict[str, int], config: WorkloadConfig) -> TensorSpec:
    if tensor.role != "activation" or tensor.shape is not None:
        return tensor
    name = tensor.tensor or tensor_name(family, tensor.path)
    if name not in widths:
        return tensor
    return replace(tensor, shape=(config.batch, config.sequence, widths[name]), dtype="float32", tensor=name)

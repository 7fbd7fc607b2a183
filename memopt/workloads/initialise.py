"""One numpy initialiser, so that both frameworks start from the same weights.

Every tensor has a generator of its own, seeded by the run's seed and the tensor's path: the values do not depend on the
order in which tensors are made, and a rank that needs one layer makes one layer.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import numpy as np

from .config import MlaConfig, WorkloadConfig

STANDARD_DEVIATION = 0.02  # of the normal distribution; Transformers' `initializer_range`


def weight_shapes(config: WorkloadConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every trainable tensor of the model, in model order.

    Returns:
        Canonical path (Transformers' names without the leading `model.`) and shape in torch orientation: a projection
        is `[out, in]`, stacked experts are `[experts, out, in]`.
    """
    yield "embed_tokens.weight", (config.vocab, config.hidden)
    for layer in range(config.layers):
        prefix = f"layers.{layer}."
        attention = _grouped_attention(config) if config.mla is None else _latent_attention(config, config.mla)
        for path, shape in (*attention, *_mlp_shapes(config, layer), *_norm_shapes(config)):
            yield prefix + path, shape
    yield "norm.weight", (config.hidden,)
    if not config.tie_embeddings:
        yield "lm_head.weight", (config.vocab, config.hidden)


def initial_weights(config: WorkloadConfig, *, seed: int) -> Iterator[tuple[str, np.ndarray]]:
    """The weights training starts from, one tensor at a time: at most one is held here.

    Norm weights are ones, all others normal with deviation `STANDARD_DEVIATION`.

    Args:
        config: The workload.
        seed: The run's seed.

    Returns:
        Canonical path and float32 array, as in `weight_shapes`.
    """
    for path, shape in weight_shapes(config):
        yield path, initial_weight(path, shape, seed=seed)


def initial_weight(path: str, shape: tuple[int, ...], *, seed: int) -> np.ndarray:
    """The initial value of one tensor, float32; the same whichever process makes it.

    >>> bool((initial_weight("a.weight", (2, 3), seed=0) == initial_weight("a.weight", (2, 3), seed=0)).all())
    True
    """
    if path.endswith("norm.weight"):
        return np.ones(shape, np.float32)
    generator = np.random.default_rng([seed, zlib.crc32(path.encode())])
    return generator.standard_normal(shape, dtype=np.float32) * np.float32(STANDARD_DEVIATION)


def _grouped_attention(config: WorkloadConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    queries, keys = config.heads * config.size_per_head, config.kv_heads * config.size_per_head
    yield "self_attn.q_proj.weight", (queries, config.hidden)
    yield "self_attn.k_proj.weight", (keys, config.hidden)
    yield "self_attn.v_proj.weight", (keys, config.hidden)
    yield "self_attn.o_proj.weight", (config.hidden, queries)


def _latent_attention(config: WorkloadConfig, mla: MlaConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    queries = config.heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    if mla.q_lora_rank is None:
        yield "self_attn.q_proj.weight", (queries, config.hidden)
    else:
        yield "self_attn.q_a_proj.weight", (mla.q_lora_rank, config.hidden)
        yield "self_attn.q_a_layernorm.weight", (mla.q_lora_rank,)
        yield "self_attn.q_b_proj.weight", (queries, mla.q_lora_rank)
    yield "self_attn.kv_a_proj_with_mqa.weight", (mla.kv_lora_rank + mla.qk_rope_head_dim, config.hidden)
    yield "self_attn.kv_a_layernorm.weight", (mla.kv_lora_rank,)
    yield (
        "self_attn.kv_b_proj.weight",
        (config.heads * (mla.qk_nope_head_dim + mla.v_head_dim), mla.kv_lora_rank),
    )
    yield "self_attn.o_proj.weight", (config.hidden, config.heads * mla.v_head_dim)


def _mlp_shapes(config: WorkloadConfig, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    moe = config.moe
    if moe is None or layer < moe.dense_layers:
        yield from _gated_mlp("mlp", config.hidden, config.intermediate)
        return
    yield "mlp.experts.gate_up_proj", (moe.experts, 2 * moe.intermediate, config.hidden)
    yield "mlp.experts.down_proj", (moe.experts, config.hidden, moe.intermediate)
    yield "mlp.gate.weight", (moe.experts, config.hidden)
    yield from _gated_mlp("mlp.shared_experts", config.hidden, moe.intermediate * moe.shared_experts)


def _gated_mlp(path: str, hidden: int, intermediate: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{path}.gate_proj.weight", (intermediate, hidden)
    yield f"{path}.up_proj.weight", (intermediate, hidden)
    yield f"{path}.down_proj.weight", (hidden, intermediate)


def _norm_shapes(config: WorkloadConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "input_layernorm.weight", (config.hidden,)
    yield "post_attention_layernorm.weight", (config.hidden,)

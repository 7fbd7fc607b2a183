"""DeepSeek-V3 in flax nnx: Transformers' module names, the same numbers as `DeepseekV3ForCausalLM`.

Shapes: B sequences, S positions, D width, H heads, E routed experts, K experts per token.

Source: DeepSeek-V3 technical report (2024), sections 2.1.1 (latent attention) and 2.1.2 (experts, sigmoid routing in
groups with a correction bias). The balancing of that bias during training and multi-token prediction are left out.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from memopt.workloads.config import MlaConfig, MoeConfig, WorkloadConfig

from ..naming import is_traced
from .attention import causal_attention
from .causal_lm import CausalLM
from .experts import ExpertParallel, routed_experts
from .layers import (
    Buffer,
    Embedding,
    Linear,
    RMSNorm,
    SwiGLU,
    normal,
    rotate_interleaved,
    stacked,
)

_LATENT_EPS = 1e-6  # of the norms of the latent vectors, whatever the model's own


class DeepseekV3Attention(nnx.Module):
    """Multi-head latent attention; `q`, `k` and `v` name what enters the attention itself."""

    def __init__(self, config: WorkloadConfig, mla: MlaConfig, *, rngs: nnx.Rngs) -> None:
        self.heads, self.mla = config.heads, mla
        queries = config.heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
        if mla.q_lora_rank is None:
            self.q_proj = Linear(config.hidden, queries, rngs=rngs)
        else:
            self.q_a_proj = Linear(config.hidden, mla.q_lora_rank, rngs=rngs)
            self.q_a_layernorm = RMSNorm(mla.q_lora_rank, eps=_LATENT_EPS)
            self.q_b_proj = Linear(mla.q_lora_rank, queries, rngs=rngs)
        self.kv_a_proj_with_mqa = Linear(config.hidden, mla.kv_lora_rank + mla.qk_rope_head_dim, rngs=rngs)
        self.kv_a_layernorm = RMSNorm(mla.kv_lora_rank, eps=_LATENT_EPS)
        self.kv_b_proj = Linear(mla.kv_lora_rank, config.heads * (mla.qk_nope_head_dim + mla.v_head_dim), rngs=rngs)
        self.o_proj = Linear(config.heads * mla.v_head_dim, config.hidden, rngs=rngs)

    def __call__(self, x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        batch, length, _ = x.shape
        mla = self.mla
        q, q_rotated = jnp.split(self._queries(x).reshape(batch, length, self.heads, -1), [mla.qk_nope_head_dim], -1)
        latent, k_rotated = jnp.split(self.kv_a_proj_with_mqa(x), [mla.kv_lora_rank], axis=-1)
        keys_values = self.kv_b_proj(self.kv_a_layernorm(latent)).reshape(batch, length, self.heads, -1)
        k, v = jnp.split(keys_values, [mla.qk_nope_head_dim], axis=-1)
        k_rotated = rotate_interleaved(k_rotated[:, :, None], cos, sin)  # one for all heads
        k_rotated = jnp.broadcast_to(k_rotated, (*k.shape[:-1], mla.qk_rope_head_dim))
        q = checkpoint_name(jnp.concatenate([q, rotate_interleaved(q_rotated, cos, sin)], axis=-1), "q")
        k = checkpoint_name(jnp.concatenate([k, k_rotated], axis=-1), "k")
        v = checkpoint_name(v, "v")
        out: Any = causal_attention(q, k, v, (mla.qk_nope_head_dim + mla.qk_rope_head_dim) ** -0.5)
        return self.o_proj(jnp.reshape(out, (batch, length, -1)))

    def _queries(self, x: jax.Array) -> jax.Array:
        if self.mla.q_lora_rank is None:
            return self.q_proj(x)
        return self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))


class DeepseekV3TopkRouter(nnx.Module):
    """Scores of all experts, and the chosen ones: the best of the best groups, their weights summing to the scaling."""

    def __init__(self, config: WorkloadConfig, moe: MoeConfig, *, rngs: nnx.Rngs) -> None:
        self.moe = moe
        self.weight = nnx.Param(normal(rngs, (moe.experts, config.hidden)))
        self.e_score_correction_bias = Buffer(jnp.zeros((moe.experts,), jnp.float32))

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """`[B, S, D]` to logits `[B, S, E]`, weights `[B, S, K]` and experts int `[B, S, K]`, in float32."""
        logits = jnp.einsum("bsd,ed->bse", x.astype(jnp.float32), self.weight[...].astype(jnp.float32))
        scores = jax.nn.sigmoid(logits)
        chosen = self._chosen(jax.lax.stop_gradient(scores) + self.e_score_correction_bias[...].astype(jnp.float32))
        weights = jnp.take_along_axis(scores, chosen, axis=-1)
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20) * self.moe.routed_scaling
        return logits, weights, chosen

    def _chosen(self, scores: jax.Array) -> jax.Array:
        grouped = scores.reshape(*scores.shape[:-1], self.moe.groups, -1)
        of_groups = jnp.sum(jax.lax.top_k(grouped, 2)[0], axis=-1)
        best = jax.lax.top_k(of_groups, self.moe.groups_per_token)[1]
        is_best = jnp.any(best[..., None] == jnp.arange(self.moe.groups), axis=-2)
        open_to_choice = jnp.where(is_best[..., None], grouped, -jnp.inf).reshape(scores.shape)
        return jax.lax.top_k(open_to_choice, self.moe.experts_per_token)[1]


class DeepseekV3Experts(nnx.Module):
    """The routed experts, their weights stacked.

    Attributes:
        expert_parallel: How tokens and experts lie on the mesh; set on the class by `apply_policy`.
    """

    expert_parallel: ClassVar[ExpertParallel | None] = None

    def __init__(self, config: WorkloadConfig, moe: MoeConfig, *, rngs: nnx.Rngs) -> None:
        self.gate_up_proj = nnx.Param(normal(rngs, (moe.experts, 2 * moe.intermediate, config.hidden)))
        self.down_proj = nnx.Param(normal(rngs, (moe.experts, config.hidden, moe.intermediate)))

    def __call__(self, x: jax.Array, chosen: jax.Array, weights: jax.Array) -> jax.Array:
        parallel = self.expert_parallel
        if parallel is not None and (not is_traced(x) or x.shape[0] % parallel.num_data):
            parallel = None
        return routed_experts(x, weights, chosen, self.gate_up_proj[...], self.down_proj[...], parallel)


class DeepseekV3MoE(nnx.Module):
    """Routed experts and the shared ones, which every token goes to."""

    def __init__(self, config: WorkloadConfig, moe: MoeConfig, *, rngs: nnx.Rngs) -> None:
        self.experts = DeepseekV3Experts(config, moe, rngs=rngs)
        self.gate = DeepseekV3TopkRouter(config, moe, rngs=rngs)
        self.shared_experts = SwiGLU(config.hidden, moe.intermediate * moe.shared_experts, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        _, weights, chosen = self.gate(x)
        return self.experts(x, chosen, weights) + self.shared_experts(x)


class DeepseekV3DecoderLayer(nnx.Module):
    """One layer: attention, then a plain MLP or experts, each behind a norm and added to what came in."""

    def __init__(self, config: WorkloadConfig, *, is_dense: bool, rngs: nnx.Rngs) -> None:
        mla, moe = _blocks_of(config)
        self.self_attn = DeepseekV3Attention(config, mla, rngs=rngs)
        if is_dense:
            self.mlp: Any = SwiGLU(config.hidden, config.intermediate, rngs=rngs)
        else:
            self.mlp = DeepseekV3MoE(config, moe, rngs=rngs)
        self.input_layernorm = RMSNorm(config.hidden, eps=config.norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden, eps=config.norm_eps)

    def __call__(self, x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class DeepseekV3ForCausalLM(CausalLM):
    """The whole model.

    Dense layers and layers with experts hold different parameters, so they are two scans one after the other.

    Attributes:
        consecutive_stacks: The policy's name of the layers -> the stacks they are, in order: `layers.0` is the first
            dense layer, as in Transformers.
    """

    consecutive_stacks: ClassVar = MappingProxyType({"layers": ("dense_layers", "layers")})

    def __init__(self, config: WorkloadConfig, *, rngs: nnx.Rngs) -> None:
        _, moe = _blocks_of(config)
        num_dense, num_moe = moe.dense_layers, config.layers - moe.dense_layers
        self.embed_tokens = Embedding(config.vocab, config.hidden, rngs=rngs)
        self.dense_layers = _stack(config, num_dense, is_dense=True, rngs=rngs)
        self.layers = _stack(config, num_moe, is_dense=False, rngs=rngs)
        self.add_head(config, rngs=rngs)

    def stacks(self) -> tuple[Any, ...]:
        return tuple(stack for stack in (self.dense_layers, self.layers) if stack is not None)


def _blocks_of(config: WorkloadConfig) -> tuple[MlaConfig, MoeConfig]:
    """The two blocks that a workload of this family has; `WorkloadConfig` refuses one without them."""
    if config.mla is None or config.moe is None:
        raise TypeError(f"workload `{config.name}` is no deepseek_v3")
    return config.mla, config.moe


def _stack(config: WorkloadConfig, num_layers: int, *, is_dense: bool, rngs: nnx.Rngs) -> Any:
    if num_layers == 0:
        return None
    return stacked(lambda keys: DeepseekV3DecoderLayer(config, is_dense=is_dense, rngs=keys), num_layers, rngs=rngs)

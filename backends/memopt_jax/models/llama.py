"""Llama in flax nnx: scanned layers, Transformers' module names, the same numbers as `LlamaForCausalLM`.

Shapes: B sequences, S positions, D width, H query heads, G key heads.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from memopt.workloads.config import WorkloadConfig

from .attention import causal_attention
from .causal_lm import CausalLM
from .layers import Embedding, Linear, RMSNorm, SwiGLU, rotate, stacked


class LlamaAttention(nnx.Module):
    """Grouped-query attention; queries and keys carry the names `q` and `k` after the rotary embedding."""

    def __init__(self, config: WorkloadConfig, *, rngs: nnx.Rngs) -> None:
        self.head_dim = config.size_per_head
        self.q_proj = Linear(config.hidden, config.heads * self.head_dim, rngs=rngs)
        self.k_proj = Linear(config.hidden, config.kv_heads * self.head_dim, rngs=rngs)
        self.v_proj = Linear(config.hidden, config.kv_heads * self.head_dim, rngs=rngs)
        self.o_proj = Linear(config.heads * self.head_dim, config.hidden, rngs=rngs)

    def __call__(self, x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        batch, length, _ = x.shape
        heads = (batch, length, -1, self.head_dim)
        q = checkpoint_name(rotate(self.q_proj(x).reshape(heads), cos, sin), "q")
        k = checkpoint_name(rotate(self.k_proj(x).reshape(heads), cos, sin), "k")
        v = self.v_proj(x).reshape(heads)
        out: Any = causal_attention(q, k, v, self.head_dim**-0.5)
        return self.o_proj(jnp.reshape(out, (batch, length, -1)))


class LlamaDecoderLayer(nnx.Module):
    """One layer: attention and MLP, each behind a norm, each added to what came in."""

    def __init__(self, config: WorkloadConfig, *, rngs: nnx.Rngs) -> None:
        self.self_attn = LlamaAttention(config, rngs=rngs)
        self.mlp = SwiGLU(config.hidden, config.intermediate, rngs=rngs)
        self.input_layernorm = RMSNorm(config.hidden, eps=config.norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden, eps=config.norm_eps)

    def __call__(self, x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class LlamaForCausalLM(CausalLM):
    """The whole model; its layers are one scan."""

    def __init__(self, config: WorkloadConfig, *, rngs: nnx.Rngs) -> None:
        self.embed_tokens = Embedding(config.vocab, config.hidden, rngs=rngs)
        self.layers = stacked(lambda keys: LlamaDecoderLayer(config, rngs=keys), config.layers, rngs=rngs)
        self.add_head(config, rngs=rngs)

    def stacks(self) -> tuple[Any, ...]:
        return (self.layers,)

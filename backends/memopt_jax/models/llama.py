"""Llama in flax nnx: scanned layers, Transformers' module names, the same numbers as `LlamaForCausalLM`.

Shapes: B sequences, S positions, D width, H query heads, G key heads, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from memopt.workloads.config import WorkloadConfig
from memopt.workloads.rotary import inverse_frequencies

from .attention import causal_attention
from .layers import Embedding, Linear, RMSNorm, SwiGLU, mean_cross_entropy, rotary_angles, rotate, run_stack, stacked


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


class LlamaForCausalLM(nnx.Module):
    """Tokens to logits, or to the mean loss when labels are given.

    With labels, logits exist for one block of positions at a time: at a vocabulary of 128 thousand they would
    otherwise be the largest tensor of the step.
    """

    def __init__(self, config: WorkloadConfig, *, rngs: nnx.Rngs) -> None:
        self.embed_tokens = Embedding(config.vocab, config.hidden, rngs=rngs)
        self.layers = stacked(lambda keys: LlamaDecoderLayer(config, rngs=keys), config.layers, rngs=rngs)
        self.norm = RMSNorm(config.hidden, eps=config.norm_eps)
        self.lm_head = None if config.tie_embeddings else Linear(config.hidden, config.vocab, rngs=rngs)
        self.rotary = tuple(inverse_frequencies(config).tolist())

    def __call__(self, tokens: jax.Array, labels: jax.Array | None = None) -> jax.Array:
        """Run the model.

        Args:
            tokens: int `[B, S]`.
            labels: int `[B, S]`, the token that follows each position.

        Returns:
            float32 logits `[B, S, V]`, or the mean cross entropy with labels.
        """
        x = self.embed_tokens(tokens)
        cos, sin = rotary_angles(self.rotary, tokens.shape[1], x.dtype)
        x = self.norm(run_stack(self.layers, x, cos, sin))
        if labels is not None:
            return mean_cross_entropy(self._head, x, labels)
        return self._head(x).astype(jnp.float32)

    def _head(self, x: jax.Array) -> jax.Array:
        if self.lm_head is not None:
            return self.lm_head(x)
        return jnp.einsum("...d,vd->...v", x, self.embed_tokens.weight[...])

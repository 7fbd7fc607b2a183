"""What the language models share: embedding, layers, norm, and a head that gives logits or the loss.

Shapes: B sequences, S positions, D width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from memopt.workloads.config import WorkloadConfig
from memopt.workloads.rotary import inverse_frequencies

from .layers import Embedding, Linear, RMSNorm, mean_cross_entropy, rotary_angles, run_stack


class CausalLM(nnx.Module):
    """Tokens to logits, or to the mean loss when labels are given.

    With labels, logits exist for one block of positions at a time: at a vocabulary of 128 thousand they would
    otherwise be the largest tensor of the step.
    """

    embed_tokens: Embedding
    norm: RMSNorm
    lm_head: Linear | None
    rotary: tuple[float, ...]

    def add_head(self, config: WorkloadConfig, *, rngs: nnx.Rngs) -> None:
        """What stands behind the layers; the embedding and the layers draw their weights before it."""
        self.norm = RMSNorm(config.hidden, eps=config.norm_eps)
        self.lm_head = None if config.tie_embeddings else Linear(config.hidden, config.vocab, rngs=rngs)
        self.rotary = tuple(inverse_frequencies(config).tolist())

    def stacks(self) -> tuple[Any, ...]:
        """The scanned stacks of layers, in the order they run."""
        raise NotImplementedError

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
        for stack in self.stacks():
            x = run_stack(stack, x, cos, sin)
        x = self.norm(x)
        if labels is not None:
            return mean_cross_entropy(self._head, x, labels)
        return self._head(x).astype(jnp.float32)

    def _head(self, x: jax.Array) -> jax.Array:
        if self.lm_head is not None:
            return self.lm_head(x)
        return jnp.einsum("...d,vd->...v", x, self.embed_tokens.weight[...])

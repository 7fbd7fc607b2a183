"""The workloads' models in flax nnx."""

from __future__ import annotations

from typing import Any

from memopt.errors import MemoptError
from memopt.workloads.config import WorkloadConfig


def build(config: WorkloadConfig, *, rngs: Any = None) -> Any:
    """The model of a workload: `model(tokens)` gives logits, `model(tokens, labels)` the mean loss.

    Args:
        config: The workload.
        rngs: `nnx.Rngs` for the initial weights; None takes seed 0. Call under `nnx.eval_shape` to allocate nothing.

    Raises:
        MemoptError: `unknown-family`.
    """
    from flax import nnx

    rngs = nnx.Rngs(0) if rngs is None else rngs
    if config.family == "llama":
        from .llama import LlamaForCausalLM

        return LlamaForCausalLM(config, rngs=rngs)
    if config.family == "deepseek_v3":
        from .deepseek import DeepseekV3ForCausalLM

        return DeepseekV3ForCausalLM(config, rngs=rngs)
    raise MemoptError.of(
        "unknown-family",
        f"the JAX backend has no model of family `{config.family}`",
        hint="use family llama or deepseek_v3",
    )

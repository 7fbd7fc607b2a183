"""The two frameworks' models are the same function of the same weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from memopt.data import byte_batches
from memopt.workloads import RopeScaling, WorkloadConfig, load_workload

CONFIGS = Path(__file__).parents[2] / "configs" / "workloads"


def described(name: str) -> WorkloadConfig:
    config = load_workload(CONFIGS / f"{name}.yaml")
    assert isinstance(config, WorkloadConfig)
    return config


LLAMA = described("llama-tiny")
DEEPSEEK = described("deepseek-tiny")
assert DEEPSEEK.mla is not None
VARIANTS = {
    "llama-tiny": LLAMA,
    "tied": LLAMA.model_copy(update={"tie_embeddings": True}),
    "stretched-rotary": LLAMA.model_copy(
        update={"rope_theta": 500000.0, "rope_scaling": RopeScaling(original_sequence=32)}
    ),
    "wide-heads": LLAMA.model_copy(update={"head_dim": 48, "kv_heads": 4}),
    "deepseek-tiny": DEEPSEEK,
    "deepseek, whole queries": DEEPSEEK.model_copy(
        update={"mla": DEEPSEEK.mla.model_copy(update={"q_lora_rank": None})}
    ),
}


def torch_side(config: WorkloadConfig, tokens: np.ndarray) -> tuple[np.ndarray, float]:
    import torch

    from memopt_torch.workloads import build

    workload = build(config, seed=0)
    model = workload.model()
    ids = torch.from_numpy(tokens.astype(np.int64))
    with torch.no_grad():
        return model(input_ids=ids[:, :-1]).logits.numpy(), float(workload.loss(model, {"tokens": ids}))


def jax_side(config: WorkloadConfig, tokens: np.ndarray) -> tuple[np.ndarray, float]:
    from memopt_jax.workloads import build

    workload = build(config, seed=0)
    model = workload.model()
    return np.asarray(model(tokens[:, :-1])), float(workload.loss(model, {"tokens": tokens}))


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_agree_within_1e_5_in_float32_on_the_same_weights(name):
    config = VARIANTS[name]
    (tokens,) = byte_batches(batch=2, sequence=48, steps=1, seed=0)
    torch_logits, torch_loss = torch_side(config, tokens)
    jax_logits, jax_loss = jax_side(config, tokens)
    assert torch_logits.shape == jax_logits.shape == (2, 48, config.vocab)
    assert np.abs(torch_logits).max() > 0.05  # not two zeros
    np.testing.assert_allclose(jax_logits, torch_logits, rtol=0, atol=1e-5)
    assert jax_loss == pytest.approx(torch_loss, abs=1e-5)


def test_bfloat16_weights_would_be_noticed():
    """The test above can fail: weights rounded to bfloat16 leave its tolerance."""
    (tokens,) = byte_batches(batch=2, sequence=48, steps=1, seed=0)
    from memopt_jax.workloads import build

    reference, _ = jax_side(LLAMA, tokens)
    from flax import nnx

    model = build(LLAMA, seed=0).model()
    state = nnx.state(model, nnx.Param)
    import jax
    import jax.numpy as jnp

    nnx.update(model, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16).astype(jnp.float32), state))
    assert np.abs(np.asarray(model(tokens[:, :-1])) - reference).max() > 1e-5

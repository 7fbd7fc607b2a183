"""Workloads that are not YAML: a local Transformers model, and what a backend refuses to build."""

from __future__ import annotations

import json

import pytest

from memopt.errors import MemoptError
from memopt.workloads import WorkloadConfig, load_workload

SIZES = {"layers": 2, "hidden": 16, "intermediate": 24, "heads": 4, "kv_heads": 2, "vocab": 256, "sequence": 8}


@pytest.fixture
def folder(tmp_path):
    """A folder as `save_pretrained` writes it, without weights."""
    config = {
        "model_type": "llama", "vocab_size": 300, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32, "use_cache": True,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return tmp_path


def test_a_local_transformers_model_trains_on_torch_without_a_cache(folder):
    import torch

    from memopt_torch.workloads import build

    workload = build(load_workload(f"hf:{folder}"))
    assert workload.batch["tokens"].shape == (1, 33)
    model = workload.model()
    assert model.config.use_cache is False
    loss = workload.loss(model, {"tokens": torch.zeros((1, 33), dtype=torch.int64)})
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_jax_refuses_a_transformers_model_and_says_what_to_do(folder):
    from memopt_jax.workloads import build

    with pytest.raises(MemoptError) as caught:
        build(load_workload(f"hf:{folder}"))
    (problem,) = caught.value.problems
    assert problem.code == "workload-other-backend"
    assert "FILE.py:FUNCTION" in (problem.hint or "")


def test_an_architecture_that_transformers_does_not_know_is_named(folder):
    from memopt_torch.workloads import build

    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "no_such_model"}))
    with pytest.raises(MemoptError, match="no_such_model"):
        build(load_workload(f"hf:{folder}")).model()


def test_a_batch_that_does_not_divide_over_the_ranks_is_refused_with_both_numbers():
    from memopt_torch.workloads import build

    config = WorkloadConfig(name="t", batch=6, **SIZES)
    assert build(config, world_size=3).batch["tokens"].shape == (2, 9)
    with pytest.raises(MemoptError, match="a batch of 6 sequences does not divide over 4 ranks"):
        build(config, world_size=4)


@pytest.mark.parametrize("weight_decay, momentum", [(0.0, 0.0), (0.1, 0.9)])
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_both_frameworks_take_the_same_optimizer_step(name, weight_decay, momentum):
    import jax.numpy as jnp
    import numpy as np
    import optax
    import torch

    from memopt.workloads import OptimizerConfig
    from memopt_jax.workloads import optimizer
    from memopt_torch.workloads import optimizer_factory

    config = OptimizerConfig(name=name, lr=0.01, weight_decay=weight_decay, momentum=momentum)
    start = np.linspace(-1, 1, 7, dtype=np.float32)
    gradients = [np.cos(start * step).astype(np.float32) for step in range(1, 6)]
    parameter = torch.nn.Parameter(torch.from_numpy(start.copy()))
    stepper = optimizer_factory(config)([parameter])
    tx = optimizer(config)
    value, state = jnp.asarray(start), tx.init(jnp.asarray(start))
    for gradient in gradients:
        parameter.grad = torch.from_numpy(gradient.copy())
        stepper.step()
        updates, state = tx.update(jnp.asarray(gradient), state, value)
        value = optax.apply_updates(value, updates)
    assert np.abs(parameter.detach().numpy() - start).max() > 1e-3
    np.testing.assert_allclose(np.asarray(value), parameter.detach().numpy(), rtol=0, atol=1e-6)

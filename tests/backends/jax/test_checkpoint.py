"""Checkpoints keep values, kinds and layouts, and can be resumed on another mesh and under another policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh

from memopt import MemoptError, apply_policy

ON_HOST = {
    "version": 1,
    "rules": [
        {"name": "s", "action": "shard", "match": {"role": "param"}},
        {"name": "o", "action": "offload", "match": {"role": "optimizer_state", "path": "layers.**"}},
    ],
}


def trained(build: Callable[[nnx.Rngs], nnx.Module], policy: Any, inputs: jax.Array, mesh: Mesh | None = None) -> Any:
    model = build(nnx.Rngs(0))
    run = apply_policy(model, policy, example_inputs=inputs, mesh=mesh)
    optimizer = run.optimizer(optax.adamw, learning_rate=1e-2)

    def fn(model: Any, optimizer: Any, batch: jax.Array) -> jax.Array:
        loss, gradients = nnx.value_and_grad(lambda model: (model(batch) ** 2).mean())(model)
        optimizer.update(model, gradients)
        return loss

    step = run.step(fn)
    return run, lambda: float(step(model, optimizer, inputs)), optimizer


def test_a_checkpoint_resumes_on_one_device_without_the_policy(
    nnx_models: Mapping[str, Any], inputs: jax.Array, one_device: Mesh, tmp_path: Path
) -> None:
    run, step, optimizer = trained(nnx_models["scan"], ON_HOST, inputs)
    step()
    run.save(tmp_path / "one", step=1)
    next_loss = step()
    again, step_again, _ = trained(nnx_models["scan"], {"version": 1}, inputs, one_device)
    assert again.load(tmp_path / "one") == {"step": 1}
    assert step_again() == pytest.approx(next_loss, rel=1e-6)
    # and back under the policy: kinds and layouts are the policy's, and the restored state can be donated
    run.load(tmp_path / "one")
    kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(nnx.state(optimizer)) if leaf.ndim > 1}
    assert kinds == {"device", "pinned_host"}
    assert step() == next_loss


def test_a_checkpoint_of_another_model_is_refused_by_name(
    nnx_models: Mapping[str, Any], inputs: jax.Array, tmp_path: Path
) -> None:
    run, _, _ = trained(nnx_models["scan"], {"version": 1}, inputs)
    run.save(tmp_path / "one")
    other, _, _ = trained(nnx_models["loop"], {"version": 1}, inputs)
    before = np.asarray(other.model.head.kernel[...])
    with pytest.raises(MemoptError) as caught:
        other.load(tmp_path / "one")
    assert {problem.code for problem in caught.value.problems} == {"checkpoint-mismatch"}
    assert any("layers.0.mlp.up.kernel" in (problem.path or "") for problem in caught.value.problems)
    assert np.array_equal(np.asarray(other.model.head.kernel[...]), before)
    with pytest.raises(MemoptError, match="checkpoint-exists"):
        run.save(tmp_path / "one")
    with pytest.raises(MemoptError, match="checkpoint-missing"):
        run.load(tmp_path / "two")

"""`memopt check` on JAX: a workload's own model, one batch, the policy on and off."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx

from memopt.api import apply_policy
from memopt.applied import Check
from memopt.errors import MemoptError
from memopt.policy import Policy
from memopt.workloads import HfWorkload, Workload, WorkloadConfig
from memopt.workloads.example import example_tokens, example_values

from .workloads import build, built_model


def check_workload(
    workload: WorkloadConfig | HfWorkload | Workload, policy: Policy, *, world_size: int = 1, seed: int = 0
) -> Check:
    """Builds the model with seeded weights, applies the policy and compares every gradient of one batch.

    On the CPU there are as many devices as are asked for, if JAX has not been used in this process before.

    Raises:
        MemoptError: `no-such-device`, `workload-other-backend`, and what the policy or the workload refuses.
    """
    _ask_for_devices(world_size)
    if isinstance(workload, Workload):
        built, batch = workload, _values(workload.batch, seed)
        inputs = tuple(batch.values())
    else:
        built = build(workload, seed=seed)  # refuses a Transformers model
        tokens = jnp.asarray(example_tokens(cast(WorkloadConfig, workload), seed=seed))
        batch, inputs = {"tokens": tokens}, (tokens[:, :-1], tokens[:, 1:])
    model = built_model(built)
    _require_devices(world_size)
    applied = apply_policy(model, policy, example_inputs=inputs)
    applied.optimizer(built.optimizer)

    def step(model: Any, optimizer: Any, batch: Mapping[str, Any]) -> jax.Array:
        loss, gradients = nnx.value_and_grad(built.loss)(model, batch)
        optimizer.update(model, gradients)
        return loss

    applied.step(step)
    return applied.check(batch)


def _ask_for_devices(world_size: int) -> None:
    if world_size > 1:
        with suppress(RuntimeError):  # JAX is in use already, and has the devices it has
            jax.config.update("jax_num_cpu_devices", world_size)


def _require_devices(world_size: int) -> None:
    if jax.device_count() != world_size:
        raise MemoptError.of(
            "no-such-device",
            f"the check is for {world_size} devices and jax sees {jax.device_count()}",
            hint=f"write `--world-size {jax.device_count()}`",
        )


def _values(batch: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """The batch's own values; made up where it has shapes alone."""
    return {
        name: jnp.asarray(example_values(value.shape, str(value.dtype), seed=seed), value.dtype)
        if isinstance(value, jax.ShapeDtypeStruct)
        else value
        for name, value in batch.items()
    }

"""Workloads as flax nnx models, with the same weights as the other backend's."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx

from memopt.errors import MemoptError
from memopt.workloads import HfWorkload, OptimizerConfig, Workload, WorkloadConfig
from memopt.workloads.initialise import initial_weight, weight_shapes

from . import models
from .models.layers import Buffer


def build(config: WorkloadConfig | HfWorkload, *, seed: int | None = None) -> Workload:
    """The workload with an nnx model; nothing is allocated before `.model()` is called.

    Args:
        config: A YAML workload.
        seed: With a seed, `.model()` holds `initial_weights`; without, nnx's own (`nnx.eval_shape`: shapes alone).

    Raises:
        MemoptError: `workload-other-backend` for a Transformers model.
    """
    if isinstance(config, HfWorkload):
        raise MemoptError.of(
            "workload-other-backend",
            f"`hf:{config.path}` is a torch model; the JAX backend cannot build it",
            hint="describe it as a YAML workload (families llama and deepseek_v3), or give FILE.py:FUNCTION",
        )
    return Workload(
        name=config.name,
        model=lambda: _initialised(config, seed),
        loss=next_token_loss,
        batch={"tokens": jax.ShapeDtypeStruct((config.batch, config.sequence + 1), jnp.int32)},
        optimizer=optimizer(config.optimizer),
    )


def built_model(workload: Workload) -> nnx.Module:
    """The workload's model; under `nnx.eval_shape` with shapes for weights.

    Raises:
        MemoptError: `workload-other-backend` for another framework's module, `workload-model-kind` for one of JAX's
            that is no nnx module.
    """
    model = workload.model()
    if isinstance(model, nnx.Module):
        return model
    kind = f"a {type(model).__module__}.{type(model).__qualname__}"
    if isinstance(model, linen.Module):
        raise MemoptError.of(
            "workload-model-kind",
            f"the model of workload `{workload.name}` is {kind}; workloads on JAX take a flax.nnx module",
            hint="let the workload's `model` build an nnx module",
        )
    raise MemoptError.of(
        "workload-other-backend",
        f"`{workload.name}` builds {kind}, not a flax nnx module",
        hint="let the workload's `model` build an nnx module, or name the backend that the model is of",
    )


def next_token_loss(model: Callable[..., jax.Array], batch: Mapping[str, jax.Array]) -> jax.Array:
    """Mean cross entropy of each token given those before it.

    Args:
        model: `model(tokens, labels)` gives the loss.
        batch: `tokens` `[B, S + 1]`.
    """
    tokens = batch["tokens"]
    return model(tokens[:, :-1], tokens[:, 1:])


def optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """The optax transformation of `config`; the same update as torch's class of that name."""
    if config.name == "sgd":
        return optax.chain(
            optax.add_decayed_weights(config.weight_decay), optax.sgd(config.lr, momentum=config.momentum or None)
        )
    first, second = config.betas
    return optax.adamw(config.lr, b1=first, b2=second, eps=config.eps, weight_decay=config.weight_decay)


def load_initial_weights(model: nnx.Module, config: WorkloadConfig, *, seed: int) -> None:
    """Gives the model's parameters `initial_weights`; a scanned stack's layers are put on its first axis.

    Raises:
        MemoptError: `workload-weights-mismatch` when the model's parameters are not those of the description.
    """
    shapes, used = dict(weight_shapes(config)), set()
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        name = ".".join(str(part) for part in path)
        layers = _layer_names(name, config, num=variable.shape[0])
        names = [name] if name in shapes else layers
        if any(each not in shapes for each in names):
            raise MemoptError.of("workload-weights-mismatch", f"the description has no `{names[0]}`")
        values = [initial_weight(each, shapes[each], seed=seed) for each in names]
        variable.set_value(jnp.asarray(values[0] if name in shapes else np.stack(values), variable.dtype))
        used.update(names)
    if used != set(shapes):
        raise MemoptError.of("workload-weights-mismatch", f"the model lacks {sorted(set(shapes) - used)[:5]}")


def _layer_names(name: str, config: WorkloadConfig, *, num: int) -> list[str]:
    """Canonical names of a scanned stack's `num` layers: `layers.mlp.w` is `layers.0.mlp.w` and so on.

    `dense_layers` are the first of a model with experts; `layers` are then the rest.
    """
    stack, _, rest = name.partition(".")
    first = config.moe.dense_layers if config.moe is not None and stack == "layers" else 0
    return [f"layers.{first + index}.{rest}" for index in range(num)]


def _initialised(config: WorkloadConfig, seed: int | None) -> nnx.Module:
    if seed is None:
        return models.build(config)
    model = nnx.eval_shape(lambda: models.build(config))  # nnx's own initialisation would be compiled and thrown away
    load_initial_weights(model, config, seed=seed)
    for _, variable in nnx.to_flat_state(nnx.state(model, Buffer)):
        variable.set_value(jnp.zeros(variable.shape, variable.dtype))
    return model

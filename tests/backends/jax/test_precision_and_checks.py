"""Compute dtype reaches activations; what cannot be had is refused; faults put in on purpose are caught."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh

from memopt import MemoptError, apply_policy
from memopt_jax import weights
from memopt_jax.compiled import CompiledStep
from memopt_jax.values import equations

REST = {"name": "rest", "action": "recompute", "match": {"unit": "layers.*"}}
BF16 = {"compute": "bfloat16", "reduce": "bfloat16"}


def products(model: nnx.Module, inputs: jax.Array) -> set[str]:
    """Dtypes of the matrix products of the layers."""
    graph, state = nnx.split(model)
    traced = jax.make_jaxpr(lambda state, x: nnx.merge(graph, state)(x))(state, inputs)
    return {str(e.outvars[0].aval.dtype) for e in equations(traced.jaxpr) if e.primitive.name == "dot_general"}


@pytest.mark.parametrize("form", ["scan", "loop"])
def test_compute_dtype_reaches_weights_and_activations_and_masters_stay(
    nnx_models: Mapping[str, Any], inputs: jax.Array, one_device: Mesh, form: str
) -> None:
    model = nnx_models[form](nnx.Rngs(0))
    apply_policy(model, {"version": 1, "precision": BF16, "rules": [REST]}, example_inputs=inputs, mesh=one_device)
    assert products(model, inputs) == {"bfloat16"}
    gradients = nnx.grad(lambda model: (model(inputs).astype(jnp.float32) ** 2).mean())(model)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(gradients)} == {"float32"}
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))} == {"float32"}


def test_masters_of_another_dtype_are_refused_by_name(nnx_models: Mapping[str, Any], inputs: jax.Array) -> None:
    model = nnx_models["loop"](nnx.Rngs(0))
    nnx.update(model, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), nnx.state(model, nnx.Param)))
    with pytest.raises(MemoptError, match="precision-unsupported"):
        apply_policy(model, {"version": 1, "precision": BF16}, example_inputs=inputs)


def applied(build: Callable[[nnx.Rngs], nnx.Module], rules: list[Any], inputs: jax.Array, mesh: Mesh) -> Any:
    model = build(nnx.Rngs(0))
    policy = {"version": 1, "rules": rules, "backend_options": {"jax": {"check": "first_step"}}}
    run = apply_policy(model, policy, example_inputs=inputs, mesh=mesh)
    optimizer = run.optimizer(optax.sgd(1e-2))

    def fn(model: Any, optimizer: Any, batch: jax.Array) -> jax.Array:
        loss, gradients = nnx.value_and_grad(lambda model: (model(batch) ** 2).mean())(model)
        optimizer.update(model, gradients)
        return loss

    step = run.step(fn)
    return run, lambda: step(model, optimizer, inputs)


def test_the_first_steps_check_passes_and_updates_nothing_twice(
    nnx_models: Mapping[str, Any], inputs: jax.Array, one_device: Mesh
) -> None:
    run, step = applied(nnx_models["scan"], [REST], inputs, one_device)
    step()
    check = run.check(inputs)
    assert check.ok
    assert check.max_grad_rel_diff == 0.0
    assert run.check(inputs, reference="recompute", layout=True).ok


def test_the_check_is_compiled_as_the_step_is(
    nnx_models: Mapping[str, Any], inputs: jax.Array, one_device: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, step = applied(nnx_models["scan"], [REST], inputs, one_device)
    compiled: list[str] = []
    plain = CompiledStep._compile

    def counted(self: CompiledStep, traced: Any, **how: Any) -> Any:
        compiled.append(str(traced.fun_name))
        return plain(self, traced, **how)

    monkeypatch.setattr(CompiledStep, "_compile", counted)
    step()
    assert len(compiled) == 2  # the policy's side of the check, then the step


@pytest.mark.parametrize("fault", ["misplaced scale", "stale weight", "dropped layer"])
def test_a_fault_put_in_on_purpose_is_caught_before_the_first_step(
    nnx_models: Mapping[str, Any], inputs: jax.Array, one_device: Mesh, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = {"name": "p", "action": "offload", "match": {"role": "param", "path": "layers.**"}}
    plain = weights.WeightPlan.use
    broken: dict[str, Callable[[weights.WeightPlan, jax.Array], jax.Array]] = {
        "misplaced scale": lambda plan, value: plain(plan, value) * 1.01,
        "stale weight": lambda plan, value: jax.lax.stop_gradient(plain(plan, value)),
        "dropped layer": lambda plan, value: jnp.zeros_like(plain(plan, value)),
    }
    _, step = applied(nnx_models["scan"], [host, REST], inputs, one_device)
    monkeypatch.setattr(weights.WeightPlan, "use", _first_only(broken[fault], plain, num_weights=5))
    with pytest.raises(MemoptError, match="check-failed"):
        step()


def _first_only(
    broken: Callable[..., jax.Array], plain: Callable[..., jax.Array], *, num_weights: int
) -> Callable[..., jax.Array]:
    """The fault in the first program traced (the policy's), the right thing in the second (the reference's)."""
    traced = 0

    def use(plan: weights.WeightPlan, value: jax.Array) -> jax.Array:
        nonlocal traced
        traced += 1
        return broken(plan, value) if traced <= num_weights else plain(plan, value)

    return use


def test_a_right_policy_in_bfloat16_differs_by_nothing(
    nnx_models: Mapping[str, Any], inputs: jax.Array, one_device: Mesh
) -> None:
    """XLA keeps more bits where it fuses, and what it fuses depends on what is kept: both sides must round alike."""
    model = nnx_models["scan"](nnx.Rngs(0))
    offload = {"name": "inputs", "action": "offload", "match": {"path": "layers.*.input"}}
    policy = {"version": 1, "precision": BF16, "rules": [offload, REST]}
    run = apply_policy(model, policy, example_inputs=inputs, mesh=one_device)
    optimizer = run.optimizer(optax.sgd(1e-2))

    def fn(model: Any, optimizer: Any, batch: jax.Array) -> jax.Array:
        loss, gradients = nnx.value_and_grad(lambda model: (model(batch).astype(jnp.float32) ** 2).mean())(model)
        optimizer.update(model, gradients)
        return loss

    run.step(fn)(run.model, optimizer, inputs)
    check = run.check(inputs)
    assert check.ok
    assert check.max_grad_rel_diff == 0.0
    assert check.loss_diff == 0.0

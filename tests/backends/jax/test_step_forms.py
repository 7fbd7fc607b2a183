"""The forms a step and a check take: a batch of several arguments, a loss of one's own, and what is no step."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from memopt import MemoptError, apply_policy
from memopt.errors import MemoptWarning
from memopt_jax.function_apply import FunctionApplied
from memopt_jax.linen_apply import PolicyModule

RECOMPUTE = {"version": 1, "units": ["layers.*"], "rules": [
    {"name": "weights", "action": "shard", "match": {"role": ["param", "grad", "optimizer_state"]}},
    {"name": "again", "action": "recompute", "match": {"unit": "layers.*"}},
]}  # fmt: skip
X, Y = jnp.linspace(-1.0, 1.0, 32).reshape(4, 8), jnp.linspace(0.0, 1.0, 32).reshape(4, 8)


class NnxNet(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(2)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x


class LinenNet(nn.Module):
    def setup(self) -> None:
        self.layers = [nn.Dense(8) for _ in range(2)]

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x


def _distance(model: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((model(x) - y) ** 2)


def _train_two(model: Any, optimizer: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    loss, gradients = nnx.value_and_grad(_distance)(model, x, y)
    optimizer.update(model, gradients)
    return loss


def _train_one(model: Any, optimizer: Any, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    return _train_two(model, optimizer, *batch)


def _nnx() -> tuple[Any, Any]:
    run = apply_policy(NnxNet(), RECOMPUTE, example_inputs=(X,))
    return run, run.optimizer(optax.sgd(0.1))


def _nnx_losses(step: Any, *calls: Any) -> list[float]:
    run, optimizer = _nnx()
    compiled = run.step(step)
    losses = [float(call(lambda *batch, **named: compiled(run.model, optimizer, *batch, **named))) for call in calls]
    assert run.report().measured_peak_bytes > 0
    return losses


def test_a_batch_of_two_arguments_trains_as_one_of_a_pair() -> None:
    pair = _nnx_losses(_train_one, *[lambda call: call((X, Y))] * 3)
    forms = [lambda call: call(X, Y), lambda call: call(X, y=Y), lambda call: call(y=Y, x=X)]
    assert _nnx_losses(_train_two, *forms) == pair
    assert pair[2] < pair[0]


def test_a_number_in_the_batch_is_traced_and_shared_by_all_devices() -> None:
    def scaled(model: Any, optimizer: Any, x: jax.Array, y: jax.Array, scale: float = 1.0) -> jax.Array:
        return scale * _train_two(model, optimizer, x, y)

    full, half = _nnx_losses(scaled, lambda call: call(X, Y), lambda call: call(X, Y, 0.5))
    assert half < 0.6 * full


def _linen() -> tuple[Any, Any, Any]:
    model = LinenNet()
    variables = model.init(jax.random.key(0), X)
    run = apply_policy(model, RECOMPUTE, params=variables, example_inputs=(X,))
    return run, variables, run.optimizer(optax.adam(0.1))


def test_a_linen_step_takes_two_arguments_and_is_checked_with_them() -> None:
    run, params, optimizer = _linen()

    def loss_of(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.mean((run.model.apply(params, x) - y) ** 2)

    def train(params: Any, opt_state: Any, x: jax.Array, y: jax.Array) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(params, x, y)
        params, opt_state = optimizer.update_and_apply(gradients, opt_state, params)
        return params, opt_state, loss

    assert run.check(X, Y, loss=loss_of, state=(params, None)).ok
    step, opt_state, losses = run.step(train), optimizer.init(params), []
    for _ in range(3):
        params, opt_state, loss = step(params, opt_state, X, y=Y)
        losses.append(float(loss))
    assert losses[2] < losses[0]
    by_step, by_loss = run.check(X, Y), run.check(X, Y, loss=loss_of, layout=True)
    assert by_step.ok
    assert by_loss.ok
    assert by_step.max_grad_rel_diff == 0.0


def test_a_loss_is_checked_before_any_step_or_optimizer_was_made() -> None:
    run = apply_policy(NnxNet(), RECOMPUTE, example_inputs=(X,))
    check = run.check(X, Y, loss=_distance)
    assert (check.ok, check.max_grad_rel_diff) == (True, 0.0)


def test_a_wrong_recomputation_is_found_through_a_loss_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from memopt_jax import nnx_applied

    run, _ = _nnx()
    gradients = nnx_applied.NnxApplied._gradients

    def wrong(self: Any, fn: Any, batch: Any, reference: str | None) -> Any:
        scale = 1.0 if reference is None else 1.5
        return gradients(self, lambda model, tap, x, y: fn(model, tap, scale * x, y), batch, reference)

    monkeypatch.setattr(nnx_applied.NnxApplied, "_gradients", wrong)
    assert not run.check(X, Y, loss=_distance).ok


def _scan_loss(params: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params["layers"])[0] ** 2)


def _linen_run() -> tuple[Any, Any, Any]:
    model = LinenNet()
    variables = model.init(jax.random.key(0), X)
    run = apply_policy(model, RECOMPUTE, params=variables, example_inputs=X)
    return run, run.place_params(variables), lambda params, x: jnp.mean(run.model.apply(params, x) ** 2)


def _function_run() -> tuple[Any, Any, Any]:
    params = {"layers": jnp.stack([jnp.eye(8)] * 3)}
    run = apply_policy(_scan_loss, {"version": 1}, params=params, example_inputs=X)
    return run, run.place_params(params), lambda params, x: run.model(params, x)


@pytest.mark.parametrize(
    "build, called", [(_linen_run, (PolicyModule, "apply")), (_function_run, (FunctionApplied, "_call"))]
)
def test_the_reference_is_a_program_of_its_own(build: Any, called: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name = called
    call = getattr(owner, name)

    def wrong(self: Any, *args: Any) -> Any:
        applied = getattr(self, "_applied", self)
        return call(self, *args) * (1.001 if applied._reference is None else 1.0)

    monkeypatch.setattr(owner, name, wrong)
    run, params, loss = build()
    assert not run.check(X, loss=loss, state=(params, None)).ok
    monkeypatch.undo()
    run, params, loss = build()
    assert run.check(X, loss=loss, state=(params, None)).ok


def test_a_loss_that_does_not_call_the_policys_model_is_no_check() -> None:
    run, params, loss = _linen_run()
    module: Any = LinenNet()
    for blind in (lambda params, x: jnp.mean(module.apply(params, x) ** 2), jax.jit(loss)):
        with pytest.raises(MemoptError, match=r"(?s)check-without-model.*call `run.model`"):
            run.check(X, loss=blind, state=(params, None))


def test_a_step_that_does_not_call_the_policys_model_is_told(recwarn: pytest.WarningsRecorder) -> None:
    run, params, loss = _linen_run()
    module: Any = LinenNet()
    optimizer = run.optimizer(optax.sgd(0.1))

    def step_of(loss: Any) -> Any:
        def fn(params: Any, state: Any, x: jax.Array) -> tuple[Any, Any, jax.Array]:
            value, gradients = jax.value_and_grad(loss)(params, x)
            return *optimizer.update_and_apply(gradients, state, params), value

        return run.step(fn)

    params, state, _ = step_of(loss)(params, optimizer.init(params), X)
    assert not recwarn.list
    with pytest.warns(MemoptWarning, match=r"policy-not-called.*`layers.0` first.*call `run.model`"):
        step_of(lambda params, x: jnp.mean(module.apply(params, x) ** 2))(params, state, X)


def test_the_check_of_the_first_step_sees_every_argument() -> None:
    policy = {**RECOMPUTE, "backend_options": {"jax": {"check": "first_step"}}}
    run = apply_policy(NnxNet(), policy, example_inputs=(X,))
    optimizer = run.optimizer(optax.sgd(0.1))
    assert float(run.step(_train_two)(run.model, optimizer, X, Y)) > 0


def test_what_is_no_step_is_refused_with_the_form() -> None:
    run, optimizer = _nnx()
    with pytest.raises(MemoptError, match=r"`_loss_only` takes 2 arguments, and a step is called as fn\(model,"):
        run.step(_loss_only)
    step = run.step(_train_two)
    for call in (lambda: step(run.model, optimizer, X), lambda: step(run.model, optimizer, X, Y, z=1)):
        with pytest.raises(MemoptError, match="`_train_two` cannot be called so: ") as error:
            call()
        assert error.value.problems[0].code == "step-arguments"
    with pytest.raises(MemoptError, match="`y` by keyword alone"):
        run.step(_by_keyword)(run.model, optimizer, X, y=Y)
    with pytest.raises(MemoptError, match="check-needs-a-step"):
        _linen()[0].check(X)


def _loss_only(model: Any, batch: Any) -> Any:
    return model(batch)


def _by_keyword(model: Any, optimizer: Any, x: Any, *, y: Any) -> Any:
    return _train_two(model, optimizer, x, y)

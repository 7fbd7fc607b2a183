"""What the calls are given by mistake is refused by name, and nothing is taken for something else.

Family: a misspelt argument that falls through to a default, or comes out as an attribute error inside a framework.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import optax
import pytest
import torch
from flax import nnx

from memopt import MemoptError, apply_policy, inspect_model

POLICY = {"version": 1}
X = torch.ones(2, 4)


def _torch_run() -> Any:
    return apply_policy(torch.nn.Linear(4, 4), POLICY)


def _nnx_run() -> Any:
    run = apply_policy(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), POLICY, example_inputs=(jnp.ones((2, 4)),))
    run.optimizer(optax.sgd(0.1))
    return run


@pytest.mark.parametrize(
    "call, code",
    [
        (lambda: _torch_run().check(X, loss=lambda m, x: m(x).mean(), reference="plan"), "check-unknown-reference"),
        (
            lambda: _nnx_run().check(jnp.ones((2, 4)), loss=lambda m, x: m(x).mean(), reference="x"),
            "check-unknown-reference",
        ),
        (lambda: apply_policy(torch.nn.Linear(4, 4), POLICY, optimizer=3), "not-an-optimizer"),
        (lambda: _torch_run().optimizer(3), "not-an-optimizer"),
        (lambda: _torch_run().optimizer(torch.optim.SGD([torch.nn.Parameter(X)], lr=0.1)), "not-an-optimizer"),
        (lambda: apply_policy(torch.nn.Linear(4, 4), POLICY, backend="jax"), "model-of-another-backend"),
        (lambda: inspect_model(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), backend="torch"), "model-of-another-backend"),
        (lambda: apply_policy(torch.nn.Linear, POLICY), "unknown-model"),
    ],
)
def test_a_mistaken_argument_is_named(call: Any, code: str) -> None:
    with pytest.raises(MemoptError) as error:
        call()
    assert [problem.code for problem in error.value.problems] == [code]


def test_the_right_arguments_still_do() -> None:
    for reference in ("auto", "plain", "recompute"):
        assert _torch_run().check(X, loss=lambda m, x: m(x).mean(), reference=reference).ok
        assert _nnx_run().check(jnp.ones((2, 4)), loss=lambda m, x: m(x).mean(), reference=reference).ok
    assert apply_policy(torch.nn.Linear(4, 4), POLICY, backend="torch").model is not None


def test_an_nnx_optimizer_made_before_is_re_pointed_and_steps_as_it_would_have() -> None:
    def trained(*, policy: dict[str, Any] | None) -> list[float]:
        model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)

        def step(model: Any, optimizer: Any, x: Any) -> Any:
            loss, gradients = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
            optimizer.update(model, gradients)
            return loss

        before = float(step(model, optimizer, jnp.ones((2, 4))))  # its state is no longer zero
        if policy is None:
            return [before, *(float(step(model, optimizer, jnp.ones((2, 4)))) for _ in range(3))]
        run = apply_policy(model, policy, optimizer=optimizer, example_inputs=(jnp.ones((2, 4)),))
        compiled = run.step(step)
        return [before, *(float(compiled(run.model, optimizer, jnp.ones((2, 4)))) for _ in range(3))]

    sharded = {"version": 1, "rules": [{"name": "s", "action": "shard", "match": {"role": "optimizer_state"}}]}
    assert trained(policy=sharded) == pytest.approx(trained(policy=None), rel=1e-5)


def test_an_optimizer_with_an_update_of_its_own_is_not_taken_for_a_plain_one() -> None:
    class Mine(nnx.Optimizer):
        def update(self, model: Any, grads: Any, /, **kwargs: Any) -> None:
            super().update(model, grads, **kwargs)

    model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    with pytest.raises(MemoptError, match=r"the update of a .*Mine is its own"):
        apply_policy(model, POLICY, optimizer=Mine(model, optax.sgd(0.1), wrt=nnx.Param))

"""Faults of neighbouring tools that raise no error on JAX: settings without effect, flags that turn into tracers,
copies."""

from __future__ import annotations

import warnings
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from memopt import MemoptError, apply_policy
from memopt.errors import MemoptWarning
from memopt_jax.compiled import offloaded_bytes, verify_donation
from memopt_jax.shardings import place
from memopt_jax.values import equations, is_region

jax.config.update("jax_num_cpu_devices", 2)

REST = {"name": "rest", "action": "recompute", "match": {"unit": "layers.*"}}
WIDTH, LAYERS = 8, 4


def policy(*rules: dict[str, Any]) -> dict[str, Any]:
    return {"version": 1, "rules": [*rules, REST]}


def batch(rows: int = 4) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).standard_normal((rows, WIDTH)), jnp.float32)


def stack_params() -> dict[str, jax.Array]:
    rng = np.random.default_rng(1)
    shape = (LAYERS, WIDTH, WIDTH)
    return {name: jnp.asarray(0.3 * rng.standard_normal(shape), jnp.float32) for name in ("up", "down")}


def layer(x: jax.Array, w: dict[str, jax.Array]) -> tuple[jax.Array, None]:
    return x + jnp.tanh(x @ w["up"]) @ w["down"], None


def loss_fn(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)


class Flagged(nn.Module):
    """A block whose behaviour hangs on a Python flag."""

    @nn.compact
    def __call__(self, x: jax.Array, deterministic: bool = False) -> jax.Array:
        h = nn.Dense(WIDTH, name="up")(x)
        if not isinstance(deterministic, bool):
            raise TypeError("the flag became a tracer")
        return x + (h if deterministic else 2.0 * h)


class FlaggedNet(nn.Module):
    """Passes the flag by position to one layer and by keyword to the other."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = Flagged(name="layers_0")(x, True)
        return Flagged(name="layers_1")(x, deterministic=False)


def test_a_bool_argument_stays_a_bool_by_position_and_by_keyword() -> None:
    """google/flax#3946, openpi#1021: recompute that counts arguments turns a flag into a tracer. Family: static
    arguments."""
    model, x = FlaggedNet(), batch()
    variables = model.init(jax.random.key(0), x)
    run = apply_policy(model, policy(), params=variables, example_inputs=x)

    def gradients(apply: Any) -> Any:
        return jax.jit(jax.grad(lambda v: (apply(v, x) ** 2).mean()))(variables)

    plain, ours = gradients(model.apply), gradients(run.model.apply)
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a == b).all()), plain, ours)))


def test_an_array_that_leaves_the_step_with_another_dtype_is_named() -> None:
    """jax-ml/jax#9675: donation that quietly fails doubles the state. Family: donation."""
    given = ({"w": jnp.ones((2, 2), jnp.bfloat16), "b": jnp.ones(2)}, {"m": jnp.ones(2)})
    returned = ({"w": jnp.ones((2, 2), jnp.float32), "b": jnp.ones(2)}, {"m": jnp.ones(3)})
    with pytest.raises(MemoptError) as caught:
        verify_donation(given, returned)
    assert [problem.path for problem in caught.value.problems] == ["[0]['w']", "[1]['m']"]
    verify_donation(given, given)


def test_naming_a_blocks_output_for_offload_moves_the_value_the_next_layer_receives() -> None:
    """jax-ml/jax#23869: a name on a scan's carry output changes nothing. Family: settings without effect."""
    run = apply_policy(
        loss_fn,
        policy({"name": "x", "action": "offload", "match": {"path": "layers.*.input"}}),
        params=stack_params(),
        example_inputs=batch(),
    )
    jaxpr = jax.make_jaxpr(jax.grad(run.model))(stack_params(), batch())
    assert offloaded_bytes(jaxpr.jaxpr) == LAYERS * batch().nbytes


def test_a_misspelt_value_is_an_error_and_not_a_policy_without_effect() -> None:
    """jax-ml/jax#23869, second half: a name that is not found is silent in JAX. Family: settings without effect."""
    with pytest.raises(MemoptError) as caught:
        apply_policy(
            loss_fn,
            policy({"name": "x", "action": "offload", "match": {"path": "layers.*.dot_genral"}}),
            params=stack_params(),
            example_inputs=batch(),
        )
    assert "dot_general" in str(caught.value)


def test_recompute_over_a_scan_saves_residuals_of_every_layer() -> None:
    """jax-ml/jax#27748: recompute that saves on one release and not on the next. Family: savings that are believed."""
    run = apply_policy(loss_fn, policy(), params=stack_params(), example_inputs=batch())

    def residual_bytes(fn: Any) -> int:
        traced = jax.make_jaxpr(jax.grad(fn))(stack_params(), batch())
        scans = [eqn for eqn in equations(traced.jaxpr) if eqn.primitive.name == "scan"]
        stacked = [var.aval for var in scans[0].outvars if var.aval.ndim == 3 and var.aval.shape[0] == LAYERS]
        return sum(aval.size * aval.dtype.itemsize for aval in stacked)

    assert residual_bytes(run.model) == LAYERS * batch().nbytes  # the layers' inputs alone
    assert residual_bytes(loss_fn) >= 2 * LAYERS * batch().nbytes


class Wide(nnx.Module):
    """A layer whose weights are far larger than its activations."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(WIDTH, 64 * WIDTH, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(64 * WIDTH, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(jnp.tanh(self.up(x)))


class WideNet(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.split_rngs(splits=LAYERS)(nnx.vmap(Wide, in_axes=0, out_axes=0))(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x: jax.Array, layer: Wide) -> jax.Array:
            return layer(x)

        return run(x, self.layers)


@pytest.mark.parametrize("rules", [[], [REST], [{"name": "s", "action": "shard", "match": {"role": "param"}}]])
def test_a_scan_over_layers_stacks_no_copies_of_read_only_weights(rules: list[dict[str, Any]]) -> None:
    """google/flax#4871, maxtext#4405: scanned nnx layers stack their weights as outputs. Family: hidden copies."""
    model = WideNet(nnx.Rngs(0))
    apply_policy(model, {"version": 1, "rules": rules}, example_inputs=batch())
    graph, state = nnx.split(model)
    traced = jax.make_jaxpr(jax.grad(lambda state: (nnx.merge(graph, state)(batch()) ** 2).mean()))(state)
    forward = next(eqn for eqn in equations(traced.jaxpr) if eqn.primitive.name == "scan")
    weights = {leaf.shape for leaf in jax.tree.leaves(state)}
    assert not [var for var in forward.outvars if var.aval.shape in weights]


def test_placing_arrays_a_second_time_moves_nothing() -> None:
    """marin-community/marin#3766: moving leaves that are in place costs programs and memory. Family: hidden copies."""
    rules = [{"name": "s", "action": "shard", "match": {"role": "param"}}]
    run = apply_policy(loss_fn, policy(*rules), params=stack_params(), example_inputs=batch())
    once = run.place_params(stack_params())
    twice = run.place_params(once)
    assert all(a is b for a, b in zip(jax.tree.leaves(once), jax.tree.leaves(twice), strict=True))
    mixed = {"array": once["up"], "text": "kept", "none": None, "number": 3}
    shardings = {"array": once["up"].sharding, "text": None, "none": None, "number": None}
    assert place(mixed, shardings) == mixed


def test_a_stack_scanned_once_per_micro_batch_is_under_the_policy_each_time() -> None:
    """Both scans share one body, and the second took the first one's place. Family: a policy dropped in silence."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return loss_fn(params, x[:4]) + loss_fn(params, x[4:])

    run = apply_policy(loss, {"version": 1, "rules": [REST]}, params=stack_params(), example_inputs=batch(8))
    assert {row.unit for row in run.plan.rows if row.unit} == {f"layers.{i}" for i in range(LAYERS)}
    traced = jax.make_jaxpr(jax.grad(run.model))(stack_params(), batch(8))
    assert sum(is_region(eqn) for eqn in equations(traced.jaxpr)) == 2
    ours, plain = (
        jax.jit(jax.grad(run.model))(stack_params(), batch(8)),
        jax.jit(jax.grad(loss))(stack_params(), batch(8)),
    )
    assert all(map(np.array_equal, jax.tree.leaves(ours), jax.tree.leaves(plain)))


def test_parameters_on_the_host_train_and_index_as_on_the_device() -> None:
    """jax-ml/jax#34825, #34041, maxtext@24d9f39b8: host operands meet device ones and tracing stops. Family: host
    leaves."""
    rule = {"name": "p", "action": "offload", "match": {"role": ["param", "optimizer_state"]}}

    @jax.custom_vjp
    def scaled(x: jax.Array) -> jax.Array:
        return 2.0 * x

    scaled.defvjp(lambda x: (2.0 * x, None), lambda _, gradient: (2.0 * gradient,))

    def loss(params: Any, x: jax.Array) -> jax.Array:
        halves = jnp.split(x, 2)  # two micro-batches, their gradients added up
        return sum(scaled(loss_fn(params, half)) for half in halves) / 2

    def train(rules: list[dict[str, Any]]) -> tuple[Any, Any]:
        rules = [*rules, REST]
        run = apply_policy(loss, {"version": 1, "rules": rules}, params=stack_params(), example_inputs=batch(8))
        optimizer = run.optimizer(optax.adamw(1e-2))

        def fn(params: Any, state: Any, x: jax.Array) -> Any:
            value, gradients = jax.value_and_grad(run.model)(params, x)
            params, state = optimizer.update_and_apply(gradients, state, params)
            return params, state, value

        step = run.step(fn)
        params, state = run.place_params(stack_params()), optimizer.init(stack_params())
        for _ in range(2):
            params, state, _ = step(params, state, batch(8))
        return params, state

    plain, _ = train([])
    ours, state = train([rule])
    for name in plain:
        np.testing.assert_allclose(np.asarray(ours[name]), np.asarray(plain[name]), rtol=1e-6, atol=1e-7)
        assert ours[name].sharding.memory_kind == "pinned_host"
        np.testing.assert_allclose(
            np.asarray(jax.device_get(ours[name])[1]), np.asarray(plain[name])[1], rtol=1e-6, atol=1e-7
        )
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state) if leaf.ndim == 0} == {"device"}


def test_an_optimizer_whose_state_cannot_be_cut_is_named_and_still_right() -> None:
    """AI-Hypercomputer/maxtext@7a18fc819: an offload flag accepted where it is not honoured. Family: accepted and
    ignored."""
    rule = {"name": "o", "action": "offload", "match": {"role": "optimizer_state"}}
    tx = optax.chain(optax.scale_by_adam(), optax.scale_by_trust_ratio(), optax.scale(-1e-2))

    def step_of(rules: list[dict[str, Any]]) -> Any:
        run = apply_policy(loss_fn, {"version": 1, "rules": rules}, params=stack_params(), example_inputs=batch())
        optimizer = run.optimizer(tx)

        def fn(params: Any, state: Any, x: jax.Array) -> Any:
            value, gradients = jax.value_and_grad(run.model)(params, x)
            return *optimizer.update_and_apply(gradients, state, params), value

        return run.step(fn)(run.place_params(stack_params()), optimizer.init(stack_params()), batch())

    plain, _, _ = step_of([])
    with pytest.warns(MemoptWarning, match="moved whole"):
        ours, state, _ = step_of([rule])
    assert any(leaf.sharding.memory_kind == "pinned_host" for leaf in jax.tree.leaves(state))
    for name in plain:
        np.testing.assert_allclose(np.asarray(ours[name]), np.asarray(plain[name]), rtol=1e-5, atol=1e-7)


def test_the_models_own_remat_around_a_unit_is_refused_with_the_way_out() -> None:
    """Two recomputations of one unit: the outer drops what the inner keeps, without an error. Family: order of
    wrappers."""

    class Rematted(WideNet):
        def __call__(self, x: jax.Array) -> jax.Array:
            @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            def run(x: jax.Array, layer: Wide) -> jax.Array:
                return nnx.remat(lambda layer, x: layer(x))(layer, x)

            return run(x, self.layers)

    model = Rematted(nnx.Rngs(0))
    with pytest.raises(MemoptError, match="user-remat-around-unit"):
        apply_policy(model, policy(), example_inputs=batch())


def test_a_tensor_no_device_count_divides_is_refused_by_name_axis_and_size() -> None:
    """Lightning-AI/lightning-thunder#248: an odd vocabulary stops sharding late. Family: uneven dimensions."""

    def odd(params: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(x @ params["head"]) * params["one"][0] * params["scalar"]

    params = {"head": jnp.ones((7, 13)), "one": jnp.ones(1), "scalar": jnp.float32(1)}
    rule = {"name": "s", "action": "shard", "match": {"role": "param"}}
    with pytest.raises(MemoptError) as caught:
        apply_policy(odd, {"version": 1, "rules": [rule]}, params=params, example_inputs=jnp.ones((2, 7)))
    text = str(caught.value)
    assert "uneven-dimension" in text
    assert all(part in text for part in ("head", "(7, 13)", "`fsdp` = 2"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        params["head"] = jnp.ones((8, 13))
        run = apply_policy(odd, {"version": 1, "rules": [rule]}, params=params, example_inputs=jnp.ones((2, 8)))
    placed = run.place_params(params)
    assert placed["head"].addressable_shards[0].data.shape == (4, 13)
    assert placed["one"].addressable_shards[0].data.shape == (1,)


class InnerRemat(WideNet):
    """A scanned stack whose layers drop their widest value themselves."""

    def __call__(self, x: jax.Array) -> jax.Array:
        def frugal(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
            return jnp.tanh(x @ up) @ down

        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x: jax.Array, layer: Frugal) -> jax.Array:
            return layer(x, jax.checkpoint(frugal))

        return run(x, self.layers)


class Frugal(Wide):
    def __call__(self, x: jax.Array, inner: Any = None) -> jax.Array:
        return x + inner(x, self.up.kernel[...], self.down.kernel[...])


def test_a_checkpoint_inside_a_unit_still_drops_its_values_when_the_unit_is_only_sharded() -> None:
    """A region that keeps everything would keep what the model's inner checkpoint drops. Family: order of wrappers."""

    class Net(InnerRemat):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.layers = nnx.split_rngs(splits=LAYERS)(nnx.vmap(Frugal, in_axes=0, out_axes=0))(rngs)

    def wide_residuals(rules: list[dict[str, Any]]) -> tuple[int, Any]:
        model = Net(nnx.Rngs(0))
        apply_policy(model, {"version": 1, "rules": rules}, example_inputs=batch())
        graph, state = nnx.split(model)
        gradient = jax.grad(lambda state: (nnx.merge(graph, state)(batch()) ** 2).mean())
        scans = [e for e in equations(jax.make_jaxpr(gradient)(state).jaxpr) if e.primitive.name == "scan"]
        return sum(var.aval.shape == (LAYERS, 4, 64 * WIDTH) for var in scans[0].outvars), jax.jit(gradient)(state)

    plain, gradients = wide_residuals([])
    sharded, ours = wide_residuals([{"name": "s", "action": "shard", "match": {"role": "param"}}])
    assert (plain, sharded) == (0, 0)
    for a, b in zip(jax.tree.leaves(gradients), jax.tree.leaves(ours), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-7)

"""Optimizer state on the host, whole or in part of the layers: the same numbers, and the bytes where the plan says."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh

from memopt import MemoptError, apply_policy, inspect_model, make_plan
from memopt_jax import lower
from memopt_jax.cut_state import CutArray

SHARD = {"name": "s", "action": "shard", "match": {"role": "param"}}
NOTHING: dict[str, Any] = {"version": 1, "rules": [SHARD]}


def offload(*, role: str = "optimizer_state", fraction: float = 1.0, **match: Any) -> dict[str, Any]:
    rule: dict[str, Any] = {"name": "o", "action": "offload", "match": {"role": role, **match}}
    return {"version": 1, "rules": [SHARD, rule | ({"fraction": fraction} if fraction < 1 else {})]}


PLACES = {
    "all": offload(),
    "first half": offload(fraction=0.5),
    "three quarters": offload(fraction=0.75),
    "one layer": offload(layers={"first": 1}),
    "last three": offload(layers={"last": 3}),
    "every second": offload(layers={"every": 2, "offset": 1}),
    "some parameters in some layers": offload(path="layers.*.mlp.up.kernel", layers={"first": 2}),
}
TRANSFORMATIONS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "adamw": lambda: optax.adamw(1e-2),
    "clipped adamw": lambda: optax.chain(
        optax.clip_by_global_norm(0.1), optax.adamw(optax.cosine_decay_schedule(1e-2, 9))
    ),
    "momentum": lambda: optax.sgd(1e-2, momentum=0.9, nesterov=True),
}


class Trained:
    """A model's state after some steps under a policy."""

    def __init__(self, run: Any, parameters: Any, state: Any, losses: list[float], resume: Callable[[], float]) -> None:
        self.run, self.state, self.losses, self.step = run, state, losses, resume
        self.parameters = {
            jax.tree_util.keystr(p): np.asarray(x) for p, x in jax.tree_util.tree_leaves_with_path(parameters)
        }

    def moments(self) -> dict[str, np.ndarray]:
        """Every array of the optimizer's state, whole."""
        leaves = jax.tree_util.tree_leaves_with_path(self.state(), is_leaf=lambda leaf: isinstance(leaf, CutArray))
        return {jax.tree_util.keystr(path): _whole(leaf) for path, leaf in leaves}

    def host_bytes(self) -> int:
        """Bytes of the state's arrays in pinned host memory, over all devices once."""
        leaves = jax.tree.leaves(self.state())
        return sum(leaf.nbytes for leaf in leaves if leaf.sharding.memory_kind == "pinned_host")


def _whole(leaf: Any) -> np.ndarray:
    if not isinstance(leaf, CutArray):
        return np.asarray(leaf)
    both = np.concatenate([np.asarray(leaf.host), np.asarray(leaf.device)])
    return both[np.argsort([*leaf.cut.host, *leaf.cut.device])]


def train_nnx(
    build: Any, policy: Any, inputs: jax.Array, tx: Any, mesh: Mesh | None = None, *, steps: int = 3
) -> Trained:
    model = build(nnx.Rngs(0))
    run = apply_policy(model, policy, example_inputs=inputs, mesh=mesh)
    optimizer = run.optimizer(tx)

    def fn(model: Any, optimizer: Any, batch: jax.Array) -> jax.Array:
        loss, gradients = nnx.value_and_grad(lambda model: (model(batch) ** 2).mean())(model)
        optimizer.update(model, gradients)
        return loss

    step = run.step(fn)
    losses = [float(step(model, optimizer, inputs)) for _ in range(steps)]
    return Trained(
        run, nnx.as_pure(nnx.state(model)), lambda: nnx.as_pure(optimizer.opt_state), losses,
        lambda: float(step(model, optimizer, inputs)),
    )  # fmt: skip


def train_linen(model: nn.Module, policy: Any, inputs: jax.Array, tx: Any, *, steps: int = 3) -> Trained:
    variables = model.init(jax.random.key(0), inputs)
    run = apply_policy(model, policy, params=variables, example_inputs=inputs)
    optimizer = run.optimizer(tx)

    def fn(params: Any, state: Any, batch: jax.Array) -> tuple[Any, Any, jax.Array]:
        loss, gradients = jax.value_and_grad(lambda v: jnp.square(run.model.apply(v, batch)).mean())(params)
        return *optimizer.update_and_apply(gradients, state, params), loss

    held = [run.place_params(variables), None]
    held[1] = optimizer.init(held[0])
    step = run.step(fn)

    def once() -> float:
        held[0], held[1], loss = step(held[0], held[1], inputs)
        return float(loss)

    losses = [once() for _ in range(steps)]
    return Trained(run, held[0], lambda: held[1], losses, once)


def planned_host_bytes(run: Any) -> int:
    return sum(row.global_nbytes for row in run.plan.rows_of("optimizer_state") if row.memory_kind == "pinned_host")


# Newer XLA for CPUs fuses arithmetic in a loop over layers otherwise than outside of one, and rounds by what it fuses.
TOLERANCE = 1e-6 if jax.__version_info__ >= (0, 11) else 0.0


def require_equal(ours: Trained, plain: Trained) -> None:
    np.testing.assert_allclose(ours.losses, plain.losses, rtol=TOLERANCE, atol=0)
    for name, value in plain.parameters.items():
        np.testing.assert_allclose(ours.parameters[name], value, rtol=0, atol=TOLERANCE, err_msg=name)
    theirs = plain.moments()
    for name, value in ours.moments().items():
        np.testing.assert_allclose(value, theirs[name], rtol=0, atol=TOLERANCE, err_msg=name)


@pytest.fixture(scope="module")
def plain(nnx_models: Mapping[str, Any], inputs: jax.Array) -> Callable[[str, str], Trained]:
    """The run with nothing offloaded, each form and transformation once."""
    known: dict[tuple[str, str], Trained] = {}

    def of(form: str, tx: str) -> Trained:
        if (form, tx) not in known:
            known[form, tx] = train_nnx(nnx_models[form], NOTHING, inputs, TRANSFORMATIONS[tx]())
        return known[form, tx]

    return of


@pytest.mark.parametrize(
    "form, where", [*(("scan", where) for where in PLACES), ("loop", "all"), ("loop", "first half")]
)
def test_training_is_the_not_offloaded_runs_to_the_bit(
    plain: Callable[..., Trained], nnx_models: Mapping[str, Any], inputs: jax.Array, form: str, where: str
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours = train_nnx(nnx_models[form], PLACES[where], inputs, TRANSFORMATIONS["clipped adamw"]())
    require_equal(ours, plain(form, "clipped adamw"))
    assert ours.host_bytes() == planned_host_bytes(ours.run) > 0
    cut = [
        leaf
        for leaf in jax.tree.leaves(ours.state(), is_leaf=lambda x: isinstance(x, CutArray))
        if isinstance(leaf, CutArray)
    ]
    assert bool(cut) is (form == "scan" and where != "all")


@pytest.mark.parametrize("tx", ["adamw", "momentum"])
def test_every_transformation_streams_a_fraction(
    plain: Callable[..., Trained], nnx_models: Mapping[str, Any], inputs: jax.Array, tx: str
) -> None:
    ours = train_nnx(nnx_models["scan"], PLACES["first half"], inputs, TRANSFORMATIONS[tx]())
    require_equal(ours, plain("scan", tx))
    scalars = [leaf for leaf in jax.tree.leaves(ours.state()) if leaf.ndim == 0]
    assert all(leaf.sharding.memory_kind == "device" for leaf in scalars)


@pytest.mark.parametrize("form", ["scan", "loop"])
def test_linen_keeps_the_same_state_in_parts(
    linen_models: Mapping[str, nn.Module], inputs: jax.Array, form: str
) -> None:
    tx = TRANSFORMATIONS["clipped adamw"]()
    ours = train_linen(linen_models[form], PLACES["first half"], inputs, tx)
    require_equal(ours, train_linen(linen_models[form], NOTHING, inputs, tx))
    assert ours.host_bytes() == planned_host_bytes(ours.run) > 0


def test_parameters_on_the_host_beside_a_fraction_of_the_state(
    plain: Callable[..., Trained], nnx_models: Mapping[str, Any], inputs: jax.Array
) -> None:
    weights = {"name": "w", "action": "offload", "match": {"role": "param", "path": "layers.**"}}
    policy = PLACES["first half"] | {"rules": [*PLACES["first half"]["rules"], weights]}
    require_equal(train_nnx(nnx_models["scan"], policy, inputs, TRANSFORMATIONS["adamw"]()), plain("scan", "adamw"))


def test_moved_whole_a_fraction_of_the_state_gives_the_same_numbers(
    plain: Callable[..., Trained], nnx_models: Mapping[str, Any], inputs: jax.Array
) -> None:
    for where in ("last three", "every second"):
        policy = PLACES[where] | {"backend_options": {"jax": {"optimizer": "whole"}}}
        ours = train_nnx(nnx_models["scan"], policy, inputs, TRANSFORMATIONS["adamw"]())
        require_equal(ours, plain("scan", "adamw"))
        assert ours.host_bytes() == planned_host_bytes(ours.run) > 0


@pytest.mark.parametrize("where", ["last three", "every second"])
def test_a_checkpoint_of_state_in_parts_is_the_plain_models(
    nnx_models: Mapping[str, Any], inputs: jax.Array, one_device: Mesh, tmp_path: Path, where: str
) -> None:
    tx = TRANSFORMATIONS["adamw"]()
    ours = train_nnx(nnx_models["scan"], PLACES[where], inputs, tx)
    ours.run.save(tmp_path / "one")
    saved, next_loss = ours.moments(), ours.step()
    others = {"none": {"version": 1}, "another cut": PLACES["three quarters"], "the same": PLACES[where]}
    for name, policy in others.items():
        again = train_nnx(nnx_models["scan"], policy, inputs, tx, one_device if name == "none" else None, steps=1)
        again.run.load(tmp_path / "one")
        assert all(np.array_equal(value, saved[key]) for key, value in again.moments().items()), name
        assert again.host_bytes() == planned_host_bytes(again.run)
        assert again.step() == pytest.approx(next_loss, rel=1e-6)
    ours.run.load(tmp_path / "one")
    assert ours.step() == next_loss


def test_linen_resumes_state_in_parts(linen_models: Mapping[str, nn.Module], inputs: jax.Array, tmp_path: Path) -> None:
    tx = TRANSFORMATIONS["adamw"]()
    ours = train_linen(linen_models["scan"], PLACES["first half"], inputs, tx)
    ours.run.save(tmp_path / "one", step=3)
    saved = ours.moments()
    again = train_linen(linen_models["scan"], PLACES["last three"], inputs, tx, steps=1)
    _, state, extra = again.run.load(tmp_path / "one", params=linen_models["scan"].init(jax.random.key(0), inputs))
    assert extra == {"step": 3}
    again.state = lambda: state
    assert all(np.array_equal(value, saved[key]) for key, value in again.moments().items())
    assert again.host_bytes() == planned_host_bytes(again.run)


def test_an_optimizer_made_before_is_cut_with_its_values(nnx_models: Mapping[str, Any], inputs: jax.Array) -> None:
    model = nnx_models["scan"](nnx.Rngs(0))
    before = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    state = jax.tree.map(lambda leaf: leaf + 1, nnx.state(before))
    nnx.update(before, state)
    run = apply_policy(model, PLACES["first half"], optimizer=before, example_inputs=inputs)
    cut = [
        x
        for x in jax.tree.leaves(nnx.state(run._optimizer), is_leaf=lambda x: isinstance(x, CutArray))
        if isinstance(x, CutArray)
    ]
    assert cut
    assert all((np.asarray(part) == 1).all() for leaf in cut for part in (leaf.host, leaf.device))


def test_a_fraction_and_checks_go_together(nnx_models: Mapping[str, Any], inputs: jax.Array) -> None:
    ours = train_nnx(nnx_models["scan"], PLACES["first half"], inputs, TRANSFORMATIONS["adamw"](), steps=1)
    result = ours.run.check(inputs, layout=True)
    assert result.ok
    figures = ours.run.figures()
    assert figures.host_bytes * 2 == planned_host_bytes(ours.run)  # two devices, everything divides


def test_layers_whose_state_is_split_differently_over_the_mesh_are_refused(
    nnx_models: Mapping[str, Any], inputs: jax.Array
) -> None:
    rule = {"name": "z", "action": "shard", "match": {"role": "optimizer_state", "layers": {"first": 2}}}
    with pytest.raises(MemoptError, match="stack-state-differs"):
        apply_policy(nnx_models["scan"](nnx.Rngs(0)), {"version": 1, "rules": [rule]}, example_inputs=inputs)


def test_lowered_shardings_refuse_to_place_all_layers_as_the_first(
    nnx_models: Mapping[str, Any], inputs: jax.Array
) -> None:
    spec = inspect_model(nnx_models["scan"](nnx.Rngs(0)), example_inputs=inputs)
    lowered = lower(make_plan(PLACES["first half"], spec, backend="jax", world_size=2))
    state = {"mu": {"layers": {"mlp": {"up": {"kernel": jax.ShapeDtypeStruct((4, 64, 128), jnp.float32)}}}}}
    with pytest.raises(MemoptError, match="layers-differ"):
        lowered.shardings(state)


def test_micro_batches_are_accumulated_by_optax_with_accumulators_laid_out_as_the_state(
    nnx_models: Mapping[str, Any], inputs: jax.Array
) -> None:
    def made() -> Any:
        return optax.MultiSteps(optax.adamw(1e-2), every_k_schedule=2)

    ours = train_nnx(nnx_models["scan"], NOTHING, inputs, made(), steps=2)
    state = ours.state()
    kernel = state.acc_grads["layers"]["mlp"]["up"]["kernel"]
    parameters: Any = nnx.as_pure(nnx.state(ours.run.model))
    assert kernel.sharding == parameters["layers"]["mlp"]["up"]["kernel"].sharding
    assert int(state.gradient_step) == 1
    once = train_nnx(nnx_models["scan"], NOTHING, inputs, optax.adamw(1e-2), steps=1)
    for name, value in once.parameters.items():
        np.testing.assert_allclose(ours.parameters[name], value, rtol=0, atol=1e-6)

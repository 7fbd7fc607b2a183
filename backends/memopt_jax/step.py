"""A workload's whole training step over a mesh, from shapes alone: what a compiler for another machine is given.

Forward, backward, the optimizer's update: the same treatments, layouts and update as `apply_policy`, with nothing
allocated. The mesh may have no devices (`jax.sharding.AbstractMesh`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from memopt.plan import Plan
from memopt.spec import ModelSpec
from memopt.workloads import Workload

from . import nnx_apply, workloads
from .applied import refuse_precision, update_of
from .nnx_inventory import inspect
from .optimizer import StatePlacement
from .placement import kept_in_use
from .shardings import AnyMesh, Layouts
from .treatments import treatments_of


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainStep:
    """A step that can be lowered.

    Attributes:
        fn: `(params, opt_state, batch) -> (params, opt_state, loss)`, pure.
        args: The three as trees of `jax.ShapeDtypeStruct` with shardings and memory kinds.
        out_shardings: Of the three results.
        donate_argnums: Of `args`.
        offloaded: Path -> planned host bytes of one device.
    """

    fn: Callable[[Any, Any, Any], tuple[Any, Any, Any]]
    args: tuple[Any, Any, Any]
    out_shardings: tuple[Any, Any, Any]
    donate_argnums: tuple[int, ...] = (0, 1)
    offloaded: Mapping[str, int] = field(default_factory=dict)


def inspect_workload(workload: Any) -> ModelSpec:
    """The inventory of a workload, activations included, from one abstract trace of its loss."""
    made = workload if isinstance(workload, Workload) else workloads.build(workload)
    model = _abstract_model(made)

    def call(module: Any) -> Any:
        return made.loss(module, jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), dict(made.batch)))

    spec = inspect(model, call)
    return replace(spec, optimizer_slots=_optimizer_slots(made.optimizer, nnx.state(model, nnx.Param)))


def build_step(workload: Any, plan: Plan, spec: ModelSpec, *, mesh: AnyMesh) -> TrainStep:
    """The step of a workload under a plan.

    Args:
        workload: A configuration or a `Workload` whose model is a `flax.nnx` module.
        plan: Lowered for the mesh's devices.
        spec: What `inspect_workload` gave.
        mesh: With or without devices.
    """
    refuse_precision(plan, spec)
    made = workload if isinstance(workload, Workload) else workloads.build(workload)
    model = _abstract_model(made)
    layouts = Layouts(plan, mesh, kept_in_use(spec))
    treatments = treatments_of(plan, spec, layouts)
    placement = StatePlacement.of(plan, spec, layouts)
    nnx_apply.configure_model(model, spec, treatments, layouts)
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    structure = jax.tree.structure(params)
    update = update_of(made.optimizer, plan, placement)

    def fn(held: Any, opt_state: Any, batch: Any) -> tuple[Any, Any, Any]:
        params, rest = held

        def loss_of(params: Any) -> jax.Array:
            return made.loss(nnx.merge(graph, params, rest), batch)

        loss, gradients = jax.value_and_grad(loss_of)(params)
        pure, opt_state = update(nnx.as_pure(gradients), opt_state, nnx.as_pure(params))
        return (jax.tree.unflatten(structure, jax.tree.leaves(pure)), rest), opt_state, loss

    pure = nnx.as_pure(params)
    opt_state = placement.cut(jax.eval_shape(made.optimizer.init, pure))
    state_shardings = placement.state_shardings(opt_state)
    param_shardings = jax.tree.unflatten(structure, jax.tree.leaves(placement.param_shardings(pure)))
    rest_shardings = jax.tree.map(lambda _: layouts.replicated("device"), rest)
    batch = dict(made.batch)
    held = (_shaped(params, param_shardings), _shaped(rest, rest_shardings))
    return TrainStep(
        fn=fn,
        args=(held, _shaped(opt_state, state_shardings), _shaped(batch, layouts.batch(batch))),
        out_shardings=((param_shardings, rest_shardings), state_shardings, None),
        offloaded=treatments.offloaded,
    )


def _abstract_model(workload: Workload) -> Any:
    """The workload's model with shapes for weights."""
    return nnx.eval_shape(lambda: workloads.built_model(workload))


def _shaped(tree: Any, shardings: Any) -> Any:
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree, shardings
    )


def _optimizer_slots(tx: Any, params: Any) -> tuple[str, ...]:
    """Names of the state tensors that every parameter has, from the transformation's own state."""
    pure = nnx.as_pure(params)
    num_params = len(jax.tree.leaves(pure))
    leaves = jax.tree_util.tree_flatten_with_path(jax.eval_shape(tx.init, pure))[0]
    fields: dict[str, int] = {}
    for path, leaf in leaves:
        named = [str(entry.name) for entry in path if hasattr(entry, "name")]
        if leaf.ndim and named:
            fields[named[-1]] = fields.get(named[-1], 0) + 1
    return tuple(name for name, count in fields.items() if count >= num_params)

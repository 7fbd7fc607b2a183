"""What `apply_policy` returns for a `flax.nnx` model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from memopt.applied import Check, Reference, known_reference
from memopt.errors import MemoptError
from memopt.plan import Plan
from memopt.spec import ModelSpec

from . import checkpoint, nnx_apply
from .applied import AppliedBase
from .checking import Gradients, compare
from .compiled import verify_no_user_remat
from .cut_state import is_cut
from .nnx_optimizer import PlacedOptimizer, adopt
from .optimizer import checkpoint_template, from_checkpoint, to_checkpoint, transformation_of
from .placement import leaf_path
from .remat import Static
from .step_calls import batch_of, require_step
from .treatments import without_residuals

StepFunction = Callable[..., Any]


class NnxApplied(AppliedBase):
    """A `flax.nnx` model under a policy; `.model` is the object that was passed, changed in place."""

    def __init__(
        self, model: nnx.Module, plan: Plan, spec: ModelSpec, *, mesh: Any, optimizer: Any, example_inputs: Any
    ) -> None:
        super().__init__(plan, spec, mesh)
        self.model = model
        shardings = nnx_apply.parameter_shardings(model, plan, spec, self.layouts)
        nnx_apply.configure_model(model, spec, self.treatments, self.layouts)
        nnx_apply.place_parameters(model, shardings)
        self._verify(nnx_apply.caller(example_inputs))
        self._step_fn: StepFunction | None = None
        self._optimizer: PlacedOptimizer | None = None
        if optimizer is not None:
            self._repoint(optimizer)

    def _verify(self, call: Callable[[Any], Any] | None) -> None:
        """Trace one call: what the model does beside the policy is refused before anything runs."""
        if call is None or not any(region.policy is not None for region in self.treatments.regions.values()):
            return
        graph, state = nnx.split(self.model)
        traced = jax.make_jaxpr(lambda state: Static.split(call(nnx.merge(graph, state)))[0])(state)
        verify_no_user_remat(traced.jaxpr)

    def _repoint(self, optimizer: Any) -> None:
        """Make an optimizer that was there before the policy the policy's: the same object, its values kept."""
        if not isinstance(optimizer, nnx.Optimizer):
            raise MemoptError.of(
                "not-an-optimizer",
                f"optimizer= takes an nnx.Optimizer, not a {type(optimizer).__name__}",
                hint="make it after apply_policy with run.optimizer(optax.adamw(1e-3))",
            )
        self._optimizer = adopt(optimizer, placement=self.placement, update=self.update_of(optimizer.tx))

    def optimizer(self, cls_or_tx: Any, params: Any = None, **kw: Any) -> PlacedOptimizer:
        """An `nnx.Optimizer` on the model's parameters, its state placed as the policy says.

        Args:
            cls_or_tx: An optax transformation, or a function that makes one from `kw`.
            params: Filter of the variables to train; `nnx.Param` when left out.
            kw: For `cls_or_tx`; `wrt` is the same as `params`.
        """
        wrt = kw.pop("wrt", nnx.Param if params is None else params)
        tx = transformation_of(cls_or_tx, kw)
        self._optimizer = PlacedOptimizer(self.model, tx, wrt=wrt, placement=self.placement, update=self.update_of(tx))
        return self._optimizer

    def step(self, fn: StepFunction) -> StepFunction:
        """`fn(model, optimizer, batch) -> aux` compiled with donation, memory kinds and compiler options.

        Model and optimizer are updated in place; the batch is split over the mesh. It may be several arguments, as in
        `fn(model, optimizer, x, y)`; all are traced, numbers too.

        Raises:
            MemoptError: `step-arguments`, here and where the step is called.
        """
        require_step(fn, "fn(model, optimizer, batch)")
        self._step_fn = fn
        graphs: list[Any] = []

        def pure(model_state: Any, optimizer_state: Any, batch: Any) -> tuple[Any, Any, Any]:
            model, optimizer = nnx.merge(graphs[-1], model_state, optimizer_state)
            aux = fn(model, optimizer, *batch)
            _, *states = nnx.split((model, optimizer), *_filters(optimizer))
            return states[0], states[1], aux

        compiled = self.compile_step(pure)

        def run(model: Any, optimizer: Any, /, *parts: Any, **named: Any) -> Any:
            batch = batch_of(fn, model, optimizer, parts, named)
            if not isinstance(optimizer, PlacedOptimizer):
                raise MemoptError.of(
                    "optimizer-not-placed",
                    f"the step was given a {type(optimizer).__name__} that the policy knows nothing of",
                    hint="use run.optimizer(optax.adamw(1e-3)), or pass it as apply_policy(..., optimizer=...)",
                )
            graph, first, second = nnx.split((model, optimizer), *_filters(optimizer))
            graphs.append(graph)
            self.before_step(batch)
            first, second, aux = compiled(self._on_mesh(first), self._on_mesh(second), batch)
            nnx.update((model, optimizer), first, second)
            del graphs[:-1]
            return aux

        return run

    def _on_mesh(self, state: Any) -> Any:
        """Arrays that were never placed (random-number state, counters) as replicated ones."""
        everywhere = self.layouts.replicated()
        return jax.tree.map(lambda leaf: leaf if leaf.committed else jax.device_put(leaf, everywhere), state)

    def check(
        self,
        *batch: Any,
        reference: Reference = "auto",
        layout: bool = False,
        loss: Callable[..., jax.Array] | None = None,
    ) -> Check:
        """Compare every gradient of one batch with the policy's residual and memory slots on and off.

        Nothing is updated, random-number state included.

        Args:
            batch: As for the step.
            reference: `plain` keeps everything, `recompute` recomputes every unit; `auto` takes `plain`.
            layout: Also compare with the unsharded model on one device.
            loss: `loss(model, batch)`; left out: that of the function given to `step`.

        Raises:
            MemoptError: `check-needs-a-step`.
        """
        fn = self._step_fn if loss is None else _step_of(loss, self._wrt)
        if fn is None or (loss is None and self._optimizer is None):
            raise MemoptError.of(
                "check-needs-a-step",
                "the check takes its loss from the training step, and no step or optimizer was made yet",
                hint="call run.optimizer(...) and run.step(fn) first, or give the loss: run.check(batch, loss=loss)",
            )
        asked = known_reference(reference)
        against = "plain" if asked == "auto" else asked
        ours = self._gradients(fn, batch, None)
        theirs = self._gradients(fn, batch, against)
        result = compare(ours, theirs, reference=against)
        if layout and result.ok:
            result = compare(ours, self._gradients(fn, batch, "unsharded"), reference=against, is_reordered=True)
        return result

    @property
    def _wrt(self) -> Any:
        return self._optimizer.wrt if self._optimizer is not None else nnx.Param

    def _gradients(self, fn: StepFunction, batch: tuple[Any, ...], reference: str | None) -> Gradients:
        """Loss and gradients of one batch, from the step function with a tap in the optimizer's place."""
        model, batch = self._reference_model(reference), self._reference_batch(batch, reference)
        graph, state = nnx.split(model)
        wrt = self._wrt

        def pure(state: Any, batch: Any) -> tuple[Any, Any]:
            model = nnx.merge(graph, state)
            tap = _Tap(wrt)
            aux = fn(model, tap, *batch)
            return Static.split(aux)[0], tap.taken()

        aux, gradients = self.run_to_compare(pure, state, batch, is_reference=reference is not None)
        paths, _ = jax.tree_util.tree_flatten_with_path(gradients)
        named = {".".join(str(getattr(k, "key", k)) for k in path): jax.device_get(leaf) for path, leaf in paths}
        return Gradients([jax.device_get(leaf) for leaf in aux], named)

    def _reference_model(self, reference: str | None) -> Any:
        graph, state = nnx.split(self.model)
        if reference is None:
            return nnx.merge(graph, state)
        if reference == "unsharded":
            state = jax.tree.map(lambda leaf: jax.device_put(leaf, self.layouts.device), state)
        copy = nnx.merge(graph, state)
        nnx_apply.restore_model(copy)
        if reference != "unsharded":
            treatments = without_residuals(self.treatments, recompute=reference == "recompute")
            nnx_apply.configure_model(copy, self.spec, treatments, self.layouts)
        return copy

    def _reference_batch(self, batch: Any, reference: str | None) -> Any:
        if reference == "unsharded":
            return jax.tree.map(lambda leaf: jax.device_put(leaf, self.layouts.device), batch)
        return self.place_batch(batch)

    def save(self, directory: str | Path, **extra: Any) -> None:
        """A sharded checkpoint of the model and of the optimizer made last; nothing is gathered.

        Args:
            directory: Must not exist.
            extra: Plain data to come back from `load`, such as the step.
        """
        parts = {part: _named(to_checkpoint(state)) for part, state in self._states().items()}
        checkpoint.save(directory, parts, extra)

    def load(self, directory: str | Path) -> dict[str, Any]:
        """Resume into the model and the optimizer, in place, laid out as this policy says; returns what was extra.

        The checkpoint may come from another mesh, another policy, or none.
        """
        states = self._states()
        templates = {part: _named(checkpoint_template(state)) for part, state in states.items()}
        restored, extra = checkpoint.load(directory, templates)
        for part, holder in self._holders().items():
            leaves, structure = jax.tree_util.tree_flatten_with_path(states[part], is_leaf=is_cut)
            values = [from_checkpoint(restored[part][_name(path)], leaf) for path, leaf in leaves]
            nnx.update(holder, structure.unflatten(values))
        return extra

    def _holders(self) -> dict[str, Any]:
        return {"params": self.model} | ({} if self._optimizer is None else {"optimizer": self._optimizer})

    def _states(self) -> dict[str, Any]:
        return {part: self._on_mesh(nnx.state(holder)) for part, holder in self._holders().items()}

    def figures(self) -> Any:
        """Bytes, FLOPs and collectives of the compiled step, measured on the executable."""
        if self._step is None or self._optimizer is None:
            raise MemoptError.of("no-step-yet", "no step has run, so nothing was measured", hint="run one step first")
        return self._step.figures(nnx.state(self.model), nnx.state(self._optimizer))


def _name(path: Any) -> str:
    return ".".join(leaf_path(path))


def _named(state: Any) -> dict[str, Any]:
    return {_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]}


def _filters(optimizer: Any) -> tuple[Any, Any]:
    """Split (model, optimizer) into the model's variables and the optimizer's."""
    from flax.nnx.training.optimizer import OptState

    del optimizer
    return (lambda path, value: not isinstance(value, OptState)), ...


def _step_of(loss: Callable[..., jax.Array], wrt: Any) -> StepFunction:
    """The step of a loss alone."""

    def step(model: Any, optimizer: Any, *batch: Any) -> jax.Array:
        value, gradients = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, wrt))(model, *batch)
        optimizer.update(model, gradients)
        return value

    return step


class _Tap:
    """Stands in for the optimizer: takes the gradients and updates nothing."""

    def __init__(self, wrt: Any) -> None:
        self.wrt = wrt
        self._gradients: Any = None

    def update(self, model: Any, grads: Any, /, **_: Any) -> None:
        """Keep the gradients."""
        del model
        self._gradients = nnx.as_pure(nnx.state(grads, self.wrt))

    def taken(self) -> Any:
        """The gradients of the one update.

        Raises:
            MemoptError: `step-without-update`.
        """
        if self._gradients is None:
            raise MemoptError.of(
                "step-without-update",
                "the step function never called optimizer.update(model, grads), so there are no gradients to compare",
                hint="call optimizer.update(model, grads) in the step function",
            )
        return self._gradients

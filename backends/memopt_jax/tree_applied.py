"""What `apply_policy` returns where parameters are a tree the user passes around: linen modules and plain functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import optax

from memopt.applied import Check, Reference, known_reference
from memopt.errors import MemoptError
from memopt.plan import Plan
from memopt.spec import ModelSpec

from . import checkpoint
from .applied import AppliedBase
from .checking import Gradients, compare
from .cut_state import is_cut
from .naming import is_traced
from .optimizer import checkpoint_template, from_checkpoint, to_checkpoint, transformation_of
from .placement import leaf_path
from .remat import Static
from .shardings import place
from .step_calls import batch_of, require_step

StepFunction = Callable[..., tuple[Any, Any, Any]]


class TreeOptimizer:
    """An optax transformation whose state rests where the plan says.

    `init` and `update` are optax's; `update_and_apply` is the fused form, which streaming needs.
    """

    def __init__(self, applied: TreeApplied, tx: optax.GradientTransformation) -> None:
        self._applied = applied
        self._tx = tx
        self._fused = applied.update_of(tx)
        self._tap: list[Any] | None = None

    def init(self, params: Any) -> Any:
        """The state for `params`, placed."""
        state = self._applied.placement.cut(self._tx.init(params))
        if any(is_traced(leaf) for leaf in jax.tree.leaves(state)):
            return state
        return place(state, self._applied.placement.state_shardings(state))

    def update_and_apply(self, gradients: Any, state: Any, params: Any) -> tuple[Any, Any]:
        """New parameters and new state."""
        if self._tap is not None:
            self._tap.append(gradients)
            return params, state
        return self._fused(gradients, state, params)

    def update(self, gradients: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        """optax's own form: updates and new state, for `optax.apply_updates`.

        Raises:
            MemoptError: `update-not-fused` where state or parameters rest on the host.
        """
        if self._tap is not None:
            self._tap.append(gradients)
            return jax.tree.map(jax.numpy.zeros_like, gradients), state
        if self._applied.placement.offloads_any:
            raise MemoptError.of(
                "update-not-fused",
                "optimizer state or parameters rest on the host; optax's two calls would bring all to the device",
                hint="params, opt_state = optimizer.update_and_apply(grads, opt_state, params)",
            )
        return self._tx.update(self._applied.placement.constrain_gradients(gradients), state, params)

    def tapped(self) -> _Tapped:
        """While open, updates are recorded and change nothing."""
        return _Tapped(self)


class _Tapped:
    def __init__(self, optimizer: TreeOptimizer) -> None:
        self._optimizer = optimizer

    def __enter__(self) -> list[Any]:
        self._optimizer._tap = []
        return self._optimizer._tap

    def __exit__(self, *_: object) -> None:
        self._optimizer._tap = None


class TreeApplied(AppliedBase):
    """A model whose parameters the user holds."""

    def __init__(self, plan: Plan, spec: ModelSpec, *, mesh: Any) -> None:
        super().__init__(plan, spec, mesh)
        self._step_fn: StepFunction | None = None
        self._optimizer: TreeOptimizer | None = None
        self._last: tuple[Any, Any] | None = None
        self._reference: str | None = None
        self._is_called = False

    def note_call(self) -> None:
        """The model is being called under the policy, or as a check's reference."""
        self._is_called = True

    def place_params(self, params: Any) -> Any:
        """The parameters where they rest between steps; those that are there already are not touched."""
        return place(params, self.placement.param_shardings(params))

    def optimizer(self, cls_or_tx: Any, params: Any = None, **kw: Any) -> TreeOptimizer:
        """The optimizer on the parameters, its state placed as the policy says.

        Args:
            cls_or_tx: An optax transformation, or a function that makes one from `kw`.
            params: Not needed: `init(params)` takes them.
            kw: For `cls_or_tx`.
        """
        del params
        self._optimizer = TreeOptimizer(self, transformation_of(cls_or_tx, kw))
        return self._optimizer

    def step(self, fn: StepFunction) -> StepFunction:
        """`fn(params, opt_state, batch) -> (params, opt_state, aux)` compiled with donation of the first two.

        The batch may be several arguments, as in `fn(params, opt_state, x, y)`; all are traced, numbers too.

        Raises:
            MemoptError: `step-arguments`, here and where the step is called.
        """
        require_step(fn, "fn(params, opt_state, batch)")
        self._step_fn = fn
        compiled = self.compile_step(lambda params, opt_state, batch: fn(params, opt_state, *batch))

        def run(params: Any, opt_state: Any, /, *parts: Any, **named: Any) -> tuple[Any, Any, Any]:
            batch = batch_of(fn, params, opt_state, parts, named)
            if self._optimizer is None and self.placement.offloads_any:
                raise MemoptError.of(
                    "optimizer-not-placed",
                    "optimizer state or parameters rest on the host, and no optimizer was made with run.optimizer",
                    hint="optimizer = run.optimizer(tx), and optimizer.update_and_apply(...) in the step",
                )
            params = self.place_params(params)
            opt_state = self.placement.cut(opt_state)
            opt_state = place(opt_state, self.placement.state_shardings(opt_state))
            self._last = (params, opt_state)
            self.before_step(batch)
            params, opt_state, aux = compiled(params, opt_state, batch)
            self._last = (params, opt_state)
            return params, opt_state, aux

        return run

    def check(
        self,
        *batch: Any,
        reference: Reference = "auto",
        layout: bool = False,
        state: Any = None,
        loss: Callable[..., jax.Array] | None = None,
    ) -> Check:
        """Compare every gradient of one batch with the policy's residual and memory slots on and off.

        Args:
            batch: As for the step.
            reference: `plain` keeps everything, `recompute` recomputes every unit; `auto` takes `plain`.
            layout: Also compare with the unsharded model on one device.
            state: (params, opt_state) to check with; those of the last step when left out.
            loss: `loss(params, batch)`; left out: that of the function given to `step`.

        Raises:
            MemoptError: `check-needs-a-step`, `check-without-model`.
        """
        state = self._last if state is None else state
        gradients_of = self._gradients_of_step() if loss is None else _gradients_of_loss(loss)
        if gradients_of is None or state is None:
            raise MemoptError.of(
                "check-needs-a-step",
                "the check takes its loss from the training step, and no step, optimizer or parameters were given yet",
                hint="call run.optimizer(...) and run.step(fn), or run.check(batch, loss=loss); before any step pass "
                "state=(params, opt_state) too",
            )
        asked = known_reference(reference)
        against = "plain" if asked == "auto" else asked
        ours = self._gradients(gradients_of, state, batch, None)
        result = compare(ours, self._gradients(gradients_of, state, batch, against), reference=against)
        if layout and result.ok:
            unsharded = self._gradients(gradients_of, state, batch, "unsharded")
            result = compare(ours, unsharded, reference=against, is_reordered=True)
        return result

    def _gradients_of_step(self) -> GradientsFunction | None:
        """Loss and gradients from the step function, updates recorded; None before there is one."""
        fn, optimizer = self._step_fn, self._optimizer
        if fn is None or optimizer is None:
            return None

        def pure(params: Any, opt_state: Any, batch: Any) -> tuple[Any, Any]:
            with optimizer.tapped() as taken:
                _, _, aux = fn(params, opt_state, *batch)
            if not taken:
                raise MemoptError.of(
                    "step-without-update",
                    "the step function never called the optimizer, so there are no gradients to compare",
                    hint="call optimizer.update_and_apply(grads, opt_state, params) in the step function",
                )
            return Static.split(aux)[0], taken[0]

        return pure

    def _gradients(
        self, gradients_of: GradientsFunction, state: tuple[Any, Any], batch: Any, reference: str | None
    ) -> Gradients:
        if reference == "unsharded":
            device = self.layouts.device
            state, batch = jax.tree.map(lambda leaf: jax.device_put(leaf, device), (state, batch))
        else:
            batch = self.place_batch(batch)

        def run(params: Any, opt_state: Any, batch: Any) -> tuple[Any, Any]:
            return gradients_of(params, opt_state, batch)  # a new function: jax would give it the other side's program

        self._reference, self._is_called = reference, False
        try:
            aux, gradients = self.run_to_compare(run, *state, batch, is_reference=reference is not None)
        finally:
            self._reference = None
        if not self._is_called:
            raise MemoptError.of(
                "check-without-model",
                "the policy's model was not called while the loss was traced, so there is nothing to compare",
                hint="call `run.model` in the loss: not the model given to apply_policy, nor a jax.jit of your own",
            )
        paths, _ = jax.tree_util.tree_flatten_with_path(gradients)
        named = {_dotted(path): jax.device_get(leaf) for path, leaf in paths}
        return Gradients([jax.device_get(leaf) for leaf in aux], named)

    def save(self, directory: str | Path, *, state: Any = None, **extra: Any) -> None:
        """A sharded checkpoint of parameters and optimizer state; nothing is gathered.

        Args:
            directory: Must not exist.
            state: (params, opt_state); those of the last step when left out.
            extra: Plain data to come back from `load`, such as the step.

        Raises:
            MemoptError: `no-step-yet`.
        """
        state = self._last if state is None else state
        if state is None:
            raise MemoptError.of(
                "no-step-yet", "no step has run, so there is nothing to save", hint="pass state=(params, opt_state)"
            )
        parts = {"params": _flat(state[0]), "optimizer": _flat(to_checkpoint(state[1]))}
        checkpoint.save(directory, parts, extra)

    def load(self, directory: str | Path, *, params: Any) -> tuple[Any, Any, dict[str, Any]]:
        """Resume, laid out as this policy says; the checkpoint may come from another mesh, another policy, or none.

        Args:
            directory: Where `save` wrote.
            params: The parameters' tree; shapes are enough.

        Returns:
            Parameters, optimizer state, and what was extra.

        Raises:
            MemoptError: `load-needs-an-optimizer`, `checkpoint-missing`, `checkpoint-mismatch`.
        """
        if self._optimizer is None:
            raise MemoptError.of(
                "load-needs-an-optimizer",
                "the optimizer's state cannot be laid out before the optimizer is made",
                hint="call run.optimizer(...) first",
            )
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)
        state = jax.eval_shape(self._optimizer.init, shapes)
        wanted = {
            "params": (shapes, self.placement.param_shardings(shapes)),
            "optimizer": (state, self.placement.state_shardings(state)),
        }
        placed = {part: place(tree, shardings) for part, (tree, shardings) in wanted.items()}
        templates = {part: _flat(checkpoint_template(tree)) for part, tree in placed.items()}
        restored, extra = checkpoint.load(directory, templates)

        def read(part: str) -> Any:
            leaves, structure = jax.tree.flatten(placed[part], is_leaf=is_cut)
            values = [restored[part][name] for name in templates[part]]
            return structure.unflatten([from_checkpoint(*pair) for pair in zip(values, leaves, strict=True)])

        params, opt_state = read("params"), read("optimizer")
        self._last = (params, opt_state)
        return params, opt_state, extra

    def figures(self) -> Any:
        """Bytes, FLOPs and collectives of the compiled step, measured on the executable."""
        if self._step is None or self._last is None:
            raise MemoptError.of("no-step-yet", "no step has run, so nothing was measured", hint="run one step first")
        return self._step.figures(*self._last)


GradientsFunction = Callable[[Any, Any, Any], tuple[Any, Any]]
"""(params, opt_state, parts of the batch) -> (loss, gradients)"""


def _gradients_of_loss(loss: Callable[..., jax.Array]) -> GradientsFunction:
    def pure(params: Any, opt_state: Any, batch: Any) -> tuple[Any, Any]:
        del opt_state
        value, gradients = jax.value_and_grad(loss)(params, *batch)
        return [value], gradients

    return pure


def _flat(tree: Any) -> dict[str, Any]:
    return {".".join(leaf_path(path)): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def _dotted(path: Any) -> str:
    keys = [str(getattr(entry, "key", getattr(entry, "idx", getattr(entry, "name", entry)))) for entry in path]
    return ".".join(keys[1:] if keys[:1] == ["params"] else keys)


def as_variables(params: Mapping[str, Any]) -> Mapping[str, Any]:
    """Variable collections: what `model.init` returns, or bare parameters put under `params`."""
    return params if "params" in params else {"params": params}

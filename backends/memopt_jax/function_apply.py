"""`apply_policy` on a plain function `loss_fn(params, batch)`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from memopt.errors import MemoptError
from memopt.plan import Plan
from memopt.spec import ModelSpec

from . import functions
from .remat import Region
from .rewrite import with_cut_scans
from .treatments import without_residuals
from .tree_applied import TreeApplied


def inspect(fn: Callable[..., Any], params: Any, example_inputs: Any) -> ModelSpec:
    """The inventory.

    Raises:
        MemoptError: `example-inputs-missing`.
    """
    if example_inputs is None:
        raise MemoptError.of(
            "example-inputs-missing",
            "a plain function has no structure but its program, and tracing it takes inputs",
            hint="pass example_inputs=batch; shapes made with jax.eval_shape or jax.ShapeDtypeStruct are enough",
        )
    return functions.inspect(fn, params, inputs_of(example_inputs))


def inputs_of(example_inputs: Any) -> tuple[Any, ...]:
    """What follows `params` in a call: a tuple is several arguments, anything else is one."""
    return example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)


class FunctionApplied(TreeApplied):
    """A function under a policy; `.model` is called like it: `run.model(params, batch)`."""

    def __init__(self, fn: Callable[..., Any], plan: Plan, spec: ModelSpec, *, mesh: Any, optimizer: Any) -> None:
        super().__init__(plan, spec, mesh=mesh)
        if plan.precision and plan.precision["compute"] != plan.precision["master"]:
            raise MemoptError.of(
                "precision-unsupported",
                "a plain function decides itself in which dtype it computes",
                hint="cast in the function, and leave `precision` out",
                path="precision.compute",
            )
        if optimizer is not None:
            raise MemoptError.of(
                "not-an-optimizer",
                "an optax transformation holds no parameters, so there is nothing to re-point",
                hint="leave optimizer= out and use run.optimizer(tx) after apply_policy",
            )
        self._rewritten = functions.PolicyFunction(fn, self._regions, self._active)
        self.model = self._call

    def _call(self, params: Any, *inputs: Any) -> Any:
        self.note_call()
        if self.treatments.cut and self._reference is None:
            return with_cut_scans(lambda args: self._rewritten(*args), (params, *inputs))
        return self._rewritten(params, *inputs)

    def _regions(self) -> Mapping[str, Region] | None:
        if self._reference == "unsharded":
            return None
        if self._reference is None:
            return self.treatments.regions
        return without_residuals(self.treatments, recompute=self._reference == "recompute").regions

    def _active(self) -> frozenset[str]:
        return self.treatments.active if self._reference is None else frozenset()

"""`apply_policy` on a `flax.linen` module: a wrapper that runs the module under the policy's interceptor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import flax.linen as nn

from memopt.errors import MemoptError
from memopt.plan import Plan
from memopt.spec import ModelSpec

from . import linen_inventory
from .inventory import as_arrays, canonical_path
from .linen_modules import LinenConfig, interceptor
from .rewrite import with_cut_scans
from .treatments import Template, without_residuals
from .tree_applied import TreeApplied, as_variables


def inspect(model: nn.Module, params: Mapping[str, Any], example_inputs: Any) -> ModelSpec:
    """The inventory; activations have shapes where example inputs are given."""
    variables = as_variables(params)
    if example_inputs is None:
        return linen_inventory.inspect(model, variables, None)
    if isinstance(example_inputs, Mapping):
        return linen_inventory.inspect(
            model, variables, lambda values: model.apply(values, **as_arrays(example_inputs))
        )
    inputs = tuple(example_inputs) if isinstance(example_inputs, tuple | list) else (example_inputs,)
    return linen_inventory.inspect(model, variables, lambda values: model.apply(values, *as_arrays(inputs)))


class LinenApplied(TreeApplied):
    """A linen module under a policy; `.model` is called like the module: `run.model.apply(variables, x)`."""

    def __init__(
        self, model: nn.Module, plan: Plan, spec: ModelSpec, *, params: Mapping[str, Any], mesh: Any, optimizer: Any
    ) -> None:
        super().__init__(plan, spec, mesh=mesh)
        if optimizer is not None:
            raise MemoptError.of(
                "not-an-optimizer",
                "an optax transformation holds no parameters, so there is nothing to re-point",
                hint="leave optimizer= out and use run.optimizer(tx) after apply_policy",
            )
        del params
        self.model = PolicyModule(model, self)

    def config(self) -> LinenConfig:
        """What the interceptor does now: the policy, or the reference a check compares with."""
        treatments = self.treatments
        if self._reference is not None:
            treatments = without_residuals(treatments, recompute=self._reference == "recompute")
        return LinenConfig(
            paths=_Labels(self.spec),
            active=treatments.active,
            regions=treatments.regions,
            batched=treatments.batched,
            constrain=self.layouts.constrain_batch,
            compute=treatments.compute,
        )

    @property
    def is_plain(self) -> bool:
        """Whether the module runs without any of the policy, for comparison with the unsharded model."""
        return self._reference == "unsharded"

    @property
    def cuts(self) -> bool:
        """Whether scans are cut now."""
        return self.treatments.cut and self._reference is None


class PolicyModule:
    """Stands in for a linen module; `apply` runs it under the policy, everything else is the module's own."""

    def __init__(self, module: nn.Module, applied: LinenApplied) -> None:
        self._module = module
        self._applied = applied

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def apply(self, variables: Any, *args: Any, **kwargs: Any) -> Any:
        """The module's `apply`, under the policy."""
        applied = self._applied
        applied.note_call()
        if applied.is_plain:
            return self._module.apply(variables, *args, **kwargs)

        def call(inputs: Any) -> Any:
            values, call_args, call_kwargs = inputs
            with nn.intercept_methods(interceptor(applied.config())):
                return self._module.apply(values, *call_args, **call_kwargs)

        if applied.cuts:
            return with_cut_scans(call, (variables, args, kwargs))
        return call((variables, args, kwargs))


class _Labels(dict[str, str]):
    """Raw module path -> label, worked out as asked for."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self._template = Template(spec)

    def __missing__(self, raw: str) -> str:
        self[raw] = self._template.marked(canonical_path(raw))
        return self[raw]

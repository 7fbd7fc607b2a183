"""What `apply_policy` returns on JAX, whatever the kind of model: layouts, treatments, report."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import jax

from memopt.applied import Check
from memopt.errors import MemoptError, MemoptWarning
from memopt.plan import Plan
from memopt.report import Report, rule_effects
from memopt.spec import ModelSpec

from .compiled import CompiledStep
from .compiler_options import PIPELINED, rounding_options
from .optimizer import StatePlacement, Update, whole_update
from .placement import kept_in_use
from .shardings import Layouts, make_mesh, place
from .streaming import streamed_update
from .treatments import Treatments, lost_when_pipelined, treatments_of


class AppliedBase:
    """Shared by the kinds of models.

    Attributes:
        model: The model to call.
        plan: What the policy means for it.
        spec: Its inventory.
        layouts: Shardings over the mesh.
        treatments: What is done to each module.
        placement: Where gradients and optimizer state rest.
    """

    model: Any

    def __init__(self, plan: Plan, spec: ModelSpec, mesh: Any) -> None:
        self.plan = plan
        self.spec = spec
        refuse_precision(plan, spec)
        self.layouts = Layouts(plan, make_mesh(plan, mesh), kept_in_use(spec))
        self.treatments: Treatments = treatments_of(plan, spec, self.layouts)
        warn_of_lost_offload(plan, self.treatments, platform=self.layouts.device.platform)
        self.placement = StatePlacement.of(plan, spec, self.layouts)
        self._is_checked = plan.options.get("check", "never") != "first_step"
        self._step: CompiledStep | None = None

    def update_of(self, tx: Any) -> Update:
        """The fused update-and-apply of an optax transformation."""
        return update_of(tx, self.plan, self.placement)

    def compile_step(self, fn: Callable[[Any, Any, Any], tuple[Any, Any, Any]]) -> CompiledStep:
        """The step as the policy has it compiled; what `check`, `figures` and `report` speak of from now on.

        Its third argument is the tuple of all that the user's step takes after its first two.
        """
        self._step = CompiledStep(
            fn,
            plan=self.plan,
            layouts=self.layouts,
            treatments=self.treatments,
            offloads=self.placement.offloads_any or bool(self.treatments.offloaded),
            check=lambda batch: require_ok(self.check(*batch)),
        )
        return self._step

    def run_to_compare(self, fn: Callable[..., Any], *args: Any, is_reference: bool) -> Any:
        """Run one side of a check: the policy's as its step is compiled, once there is one; rounding alike on both."""
        if not is_reference and self._step is not None:
            return self._step.run_as_compiled(fn, *args)
        return jax.jit(fn, compiler_options=rounding_options(self.layouts.device.platform))(*args)

    def place_batch(self, batch: Any) -> Any:
        """The batch split over the mesh."""
        return place(batch, self.layouts.batch(batch))

    def before_step(self, batch: tuple[Any, ...]) -> None:
        """The check of `check: first_step`, on the parts of a batch.

        Raises:
            MemoptError: `check-failed`.
        """
        if self._is_checked:
            return
        self._is_checked = True
        require_ok(self.check(*batch))

    def check(self, *batch: Any) -> Check:
        """Compare the gradients of one batch with the policy on and off."""
        raise NotImplementedError

    def figures(self) -> Any:
        """What the compiled step holds."""
        raise NotImplementedError

    def _step_time_s(self) -> float | None:
        return None if self._step is None else self._step.step_time_s

    def report(self) -> Report:
        """Planned and measured bytes by role, host traffic, step time; after at least one step.

        Raises:
            MemoptError: `no-step-yet`.
        """
        figures = self.figures()
        return Report(
            backend="jax",
            measured_peak_bytes=figures.peak_bytes,
            measured_by_role=dict(figures.by_role),
            host_bytes=figures.host_bytes,
            counted=figures.counted,
            collectives=dict(figures.collectives),
            step_time_s=self._step_time_s(),
            effects=rule_effects(self.plan),
            versions={name: version(name) for name in ("jax", "jaxlib", "flax", "optax")},
            notes=tuple(figures.notes),
        )


def update_of(tx: Any, plan: Plan, placement: StatePlacement) -> Update:
    """The fused update of an optax transformation under a plan: streamed where something rests on the host."""
    if placement.offloads_any and plan.options.get("optimizer", "stream") == "stream":
        return streamed_update(tx, placement)
    return whole_update(tx, placement)


def require_ok(check: Check) -> None:
    """Refuse to go on with gradients that differ.

    Raises:
        MemoptError: `check-failed`.
    """
    if check.ok:
        return
    raise MemoptError.of(
        "check-failed",
        f"with the policy on, the gradient of `{check.worst_tensor}` differs from the {check.reference} model's by "
        f"{check.max_grad_rel_diff:.3g} of its norm (loss by {check.loss_diff:.3g})",
        hint="do not train with it; report the policy, the versions of jax and jaxlib, and the device",
        path=check.worst_tensor,
    )


def warn_of_lost_offload(plan: Plan, treatments: Treatments, *, platform: str) -> None:
    """Warn, before anything is compiled, of offload that pipelined host transfers would undo."""
    if platform not in ("gpu", "cuda") or not plan.options.get("compiler_options", {}).get(PIPELINED):
        return
    lost = lost_when_pipelined(treatments)
    if lost:
        warnings.warn(
            f"{', '.join(f'`{unit}` ({nbytes} bytes)' for unit, nbytes in lost.items())} will stay on the "
            f"device: {PIPELINED} drops the transfers of a single layer beside a loop of others "
            "(offload-partly-without-effect); treat at least two neighbouring layers alike, or leave the option out",
            MemoptWarning,
            stacklevel=2,
        )


def refuse_precision(plan: Plan, spec: ModelSpec) -> None:
    """Dtypes that this backend cannot give are refused, not approximated.

    Raises:
        MemoptError: `precision-unsupported`.
    """
    precision = plan.precision
    if not precision:
        return
    compute, master = precision["compute"], precision["master"]
    other = [
        tensor.path
        for tensor in spec.tensors_of("param")
        if tensor.trainable and tensor.dtype in ("float32", "bfloat16", "float16") and tensor.dtype != master
    ]
    if other:
        raise MemoptError.of(
            "precision-unsupported",
            f"master: {master}, and {len(other)} parameters are held in another dtype, `{other[0]}` first",
            hint=f"build the model with {master} parameters; the policy casts them for use, not at rest",
            path="precision.master",
        )
    if precision["optimizer_state"] != master:
        raise MemoptError.of(
            "precision-unsupported",
            f"optimizer_state: {precision['optimizer_state']} beside master: {master}: optax keeps its state in the "
            "parameters' dtype",
            hint="use the same dtype, or give the transformation its own (optax.adamw(mu_dtype=...)) and leave it out",
            path="precision.optimizer_state",
        )
    if precision["reduce"] != compute and plan.world_size > 1:
        raise MemoptError.of(
            "precision-unsupported",
            f"reduce: {precision['reduce']} with compute: {compute}: XLA adds the gradients of the devices up in the "
            "dtype they are computed in",
            hint=f"reduce: {compute}",
            path="precision.reduce",
        )

"""A training step, compiled once per shape: donation, memory kinds, compiler options, and checks on the traced
program."""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib

from memopt.errors import MemoptError, MemoptWarning, Problem
from memopt.plan import Plan

from . import compiler_options, effect, offset_audit, preflight
from .measure import StepFigures, step_figures
from .remat import RegionPolicy, UnitPolicy
from .sent import sent_to_host, shards_of
from .shardings import Layouts, place
from .treatments import Treatments
from .user_code import tracing_step
from .values import equations, inner_jaxprs, is_checkpoint, is_region

_SKIPPED_STEPS = 1


@dataclass
class Executable:
    """One compiled step.

    Attributes:
        compiled: The executable.
        jaxpr: Its program.
        host_bytes: Bytes of offloaded residuals on one device, counted on the program.
        worked_around: Whether a faulty compiler's recording was switched off: the gradients must be checked first.
        is_checked: Whether they were.
        calls_s: When the latest calls were dispatched, by `time.perf_counter`. A device's queue is bounded, so in
            the long run the calls are as far apart as the steps are long.
    """

    compiled: Any
    jaxpr: Any
    host_bytes: int
    worked_around: bool = False
    is_checked: bool = False
    calls_s: deque[float] = field(default_factory=lambda: deque(maxlen=1000))


class CompiledStep:
    """`fn(first, second, batch) -> (first, second, aux)`, the first two donated and placed as they came."""

    def __init__(
        self,
        fn: Callable[[Any, Any, Any], tuple[Any, Any, Any]],
        *,
        plan: Plan,
        layouts: Layouts,
        treatments: Treatments,
        offloads: bool,
        check: Callable[[Any], None],
    ) -> None:
        """Args:
        fn: The step, pure.
        plan, layouts, treatments: Of the policy.
        offloads: Whether anything, state included, rests on the host.
        check: Raises unless the gradients of a batch are right; run before the first step of an executable that was
            compiled around a compiler's fault.
        """
        self._fn = fn
        self._plan = plan
        self._layouts = layouts
        self._treatments = treatments
        self._check = check
        self._offloads = offloads
        self._executables: dict[Any, Executable] = {}
        self.last: Executable | None = None

    def __call__(self, first: Any, second: Any, batch: Any) -> tuple[Any, Any, Any]:
        """Run one step; compiles at the first call with arguments of these shapes."""
        batch = self.place_batch(batch)
        executable = self.executable(first, second, batch)
        if executable.worked_around and not executable.is_checked:
            self._check(batch)
            executable.is_checked = True
        # The step is dispatched, not waited for: the host prepares the next one meanwhile.
        result = executable.compiled(first, second, batch)
        executable.calls_s.append(time.perf_counter())
        self.last = executable
        return result

    def place_batch(self, batch: Any) -> Any:
        """The batch split over the mesh; arrays that are split so already are not touched."""
        return place(batch, self._layouts.batch(batch))

    def executable(self, first: Any, second: Any, batch: Any) -> Executable:
        """The compiled step for arguments of these shapes."""
        leaves, structure = jax.tree.flatten((first, second, batch))
        known = (structure, tuple((jnp.shape(leaf), str(jnp.result_type(leaf))) for leaf in leaves))
        if known not in self._executables:
            self._executables[known] = self.compile(first, second, batch)
        return self._executables[known]

    def compile(self, first: Any, second: Any, batch: Any) -> Executable:
        """Trace, verify and compile for these arguments.

        Raises:
            MemoptError: `step-not-differentiable`, `step-not-traceable`, `donation-fails`, `user-remat-around-unit`,
                `offload-without-effect`, and for a faulty GPU compiler what the offset audit says.
        """
        shardings = jax.tree.map(lambda leaf: leaf.sharding, (first, second))
        jitted = jax.jit(self._fn, donate_argnums=(0, 1), out_shardings=(*shardings, None))
        with tracing_step(batch):
            shapes = jax.eval_shape(self._fn, first, second, batch)
        verify_donation((first, second), shapes[:2])
        traced = jitted.trace(first, second, batch)
        verify_program(traced.jaxpr.jaxpr, self._treatments)
        compiled, worked_around = self._compile(traced)
        host_bytes = offloaded_bytes(traced.jaxpr.jaxpr) // self._layouts.num_data
        return Executable(compiled, traced.jaxpr, host_bytes, worked_around)

    def run_as_compiled(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Run another function as the step is run: the same compiler options, audit and workaround; nothing donated.

        Rounding alone is stricter: two right programs differ where XLA rounds by what it fuses, in bfloat16 by a
        percent. Here both round as written.
        """
        compiled, _ = self._compile(jax.jit(fn).trace(*args), rounds_as_written=True)
        return compiled(*args)

    def _compile(self, traced: Any, *, rounds_as_written: bool = False) -> tuple[Any, bool]:
        """The executable, and whether it was compiled around the fault of a GPU compiler that the audit found.

        Raises:
            MemoptError: `unknown-compiler-option`; `offload-without-effect`; `wrong-recorded-offsets` when going around
                does not help.
        """
        device = self._layouts.device
        is_gpu = device.platform in ("gpu", "cuda")
        requested: Mapping[str, Any] = self._plan.options.get("compiler_options", {})
        options = compiler_options.options_for(device.platform, requested=requested, offloads=self._offloads)
        if rounds_as_written:
            options |= compiler_options.rounding_options(device.platform)
        if is_gpu and self._offloads and offset_audit.is_affected(jaxlib.__version__):
            options = offset_audit.workaround(options)  # known to fail: no need to compile it twice
        compiled = self._built(traced, options, device.platform)
        self._require_host(compiled.memory_analysis(), traced)
        if not is_gpu:
            return compiled, False
        verdict = offset_audit.audit(compiled.as_text(), compiler_options=options).verdict
        if verdict in ("right", "not_applicable", "worked_around"):
            return compiled, verdict == "worked_around"
        around = offset_audit.workaround(options)
        again = self._built(traced, around, device.platform)
        result = offset_audit.audit(again.as_text(), compiler_options=around)
        offset_audit.require_right(result)
        return again, True

    def _require_host(self, memory: Any, traced: Any) -> None:
        """The host must have room for what the executable keeps there, and the executable keep what the step sends."""
        platform = self._layouts.device.platform
        preflight.require_host_memory(
            memory.host_argument_size_in_bytes
            + memory.host_output_size_in_bytes
            - memory.host_alias_size_in_bytes
            + memory.host_temp_size_in_bytes,
            num_local_devices=jax.local_device_count(),
            platform=platform,
        )
        if platform == "cpu":  # there offload compiles to nothing, and is counted on the program
            return
        sent_bytes = offloaded_bytes(traced.jaxpr.jaxpr) // shards_of(self._plan)
        effect.require_effect(sent_bytes=sent_bytes, kept_bytes=memory.host_temp_size_in_bytes)
        effect.warn_if_partly(sent_bytes=sent_bytes, kept_bytes=memory.host_temp_size_in_bytes)

    def _built(self, traced: Any, options: Mapping[str, Any], platform: str) -> Any:
        try:
            return traced.lower().compile(compiler_options=dict(options) or None)
        except jax.errors.JaxRuntimeError as error:
            raise compiler_options.explained(error, options, platform) from error

    def figures(self, params: Any, optimizer_state: Any) -> StepFigures:
        """What the compiled step holds.

        Raises:
            MemoptError: `no-step-yet`.
        """
        if self.last is None:
            raise MemoptError.of("no-step-yet", "no step has run, so nothing was measured", hint="run one step first")
        counted = self.last.host_bytes if self._layouts.device.platform == "cpu" else None
        return step_figures(
            self.last.compiled,
            self.last.jaxpr,
            params=params,
            optimizer_state=optimizer_state,
            counted_host_bytes=counted,
        )

    @property
    def step_time_s(self) -> float | None:
        """Mean time from one step's dispatch to the next's, the first step left out; None before there are three.

        The mean, because dispatches come in bursts where the loop reads a value only now and then.
        """
        calls = [] if self.last is None else list(self.last.calls_s)[_SKIPPED_STEPS:]
        return (calls[-1] - calls[0]) / (len(calls) - 1) if len(calls) > 1 else None


def verify_donation(given: tuple[Any, Any], returned: tuple[Any, Any]) -> None:
    """Every donated array must come back with its shape and dtype, else its memory is not reused.

    Raises:
        MemoptError: `donation-fails`, one problem per array.
    """
    before, structure = jax.tree_util.tree_flatten_with_path(given)
    after, other = jax.tree_util.tree_flatten_with_path(returned)
    if structure != other:
        raise MemoptError.of(
            "step-changes-structure",
            "the step returns parameters or optimizer state of another structure than it was given",
            hint="return (params, opt_state, aux) with the same trees that came in",
        )
    problems = [
        Problem(
            "donation-fails",
            f"comes in as {old.dtype}{list(old.shape)} and leaves the step as {new.dtype}{list(new.shape)}, "
            "so its memory cannot be reused and both exist at once",
            hint="cast it back before returning it",
            path=jax.tree_util.keystr(path),
        )
        for (path, old), (_, new) in zip(before, after, strict=True)
        if (old.shape, old.dtype) != (new.shape, new.dtype)
    ]
    if problems:
        raise MemoptError(problems)


def verify_program(jaxpr: Any, treatments: Treatments) -> None:
    """What the policy asked for must be in the traced program.

    Raises:
        MemoptError: `user-remat-around-unit`, `offload-without-effect`.
    """
    verify_no_user_remat(jaxpr)
    _warn_if_no_unit_is_called(jaxpr, treatments)
    planned = sum(treatments.offloaded.values())
    if treatments.offloaded and offloaded_bytes(jaxpr) == 0:
        names = sorted(treatments.offloaded)
        raise MemoptError.of(
            "offload-without-effect",
            f"the plan sends {len(names)} values ({planned} bytes per device) to the host, and the step sends none",
            hint="the step must differentiate the model the policy was applied to, called through its `__call__`",
            path=names[0],
        )


def _warn_if_no_unit_is_called(jaxpr: Any, treatments: Treatments) -> None:
    """A step that calls another model than the policy's saves nothing; one that trains another part may be meant."""
    decided = [label for label, region in treatments.regions.items() if _decides(region.policy)]
    if not decided or treatments.offloaded or any(map(_decides_values, equations(jaxpr))):
        return
    problem = Problem(
        "policy-not-called",
        f"the step calls none of the units that the policy recomputes (`{decided[0]}` first): no memory is saved; call "
        "`run.model` in the loss",
    )
    warnings.warn(problem.render(), MemoptWarning, stacklevel=2)


def verify_no_user_remat(jaxpr: Any) -> None:
    """No unit is recomputed by the model as well.

    Raises:
        MemoptError: `user-remat-around-unit`.
    """
    twice = _enclosed_regions(jaxpr) | _filled_regions(jaxpr)
    if twice:
        raise user_remat_problem(sorted(twice)[0])


def _decides_values(eqn: Any) -> bool:
    """Whether an equation is a region that recomputes, keeps or offloads values, which the model's own remat may undo.

    A unit that is only sharded or cast may be recomputed by the model itself.
    """
    return is_region(eqn) and _decides(eqn.params.get("policy"))


def _decides(policy: RegionPolicy | None) -> bool:
    return policy is not None and not (isinstance(policy, UnitPolicy) and policy.is_passive)


def _filled_regions(jaxpr: Any) -> set[str]:
    """Units whose body is one checkpoint of the user's: all its matrix products lie in there."""
    found: set[str] = set()
    for eqn in equations(jaxpr):
        if not _decides_values(eqn) or eqn.params["differentiated"]:
            continue
        inside = [e for nested in inner_jaxprs(eqn) for e in equations(nested)]
        products = sum(e.primitive.name == "dot_general" for e in inside)
        for inner in (e for e in inside if is_checkpoint(e) and not is_region(e)):
            own = [e for nested in inner_jaxprs(inner) for e in equations(nested)]
            if products > 1 and sum(e.primitive.name == "dot_general" for e in own) == products:
                found.add(eqn.params["policy"].unit)
    return found


def user_remat_problem(unit: str) -> MemoptError:
    """Two recomputations of one unit: the outer one would drop what the inner one keeps."""
    return MemoptError.of(
        "user-remat-around-unit",
        f"`{unit}` is recomputed by the model's own remat as well as by the policy; "
        "the outer one would drop what the policy keeps or offloads",
        hint="take the remat (jax.checkpoint, nnx.remat, nn.remat) off this unit in the model and let the policy's "
        "`recompute` rule do it, or leave the unit out of the policy's rules",
        path=unit,
    )


def _enclosed_regions(jaxpr: Any) -> set[str]:
    """Units whose region lies inside a checkpoint that is not ours."""
    found: set[str] = set()
    for eqn in jaxpr.eqns:
        if is_checkpoint(eqn) and not is_region(eqn):
            inside = [
                e.params["policy"].unit for nested in inner_jaxprs(eqn) for e in equations(nested) if _decides_values(e)
            ]
            found.update(inside)
        for nested in inner_jaxprs(eqn):
            found |= _enclosed_regions(nested)
    return found


def offloaded_bytes(jaxpr: Any) -> int:
    """Bytes of residuals that a program sends to the host, over the whole mesh."""
    return sum(sent_to_host(jaxpr).values())

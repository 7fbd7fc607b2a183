"""The JAX backend: flax nnx and linen modules and plain functions, host offload, sharding, recompute."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from memopt.backend import Capabilities, Launch

from .accelerators import import_jax

if TYPE_CHECKING:
    from memopt.estimate import Measured
    from memopt.plan import Plan
    from memopt.spec import ModelSpec

    from .lowered import Lowered

_SUPPORTED = frozenset(
    {
        "recompute:activation",
        "offload:activation",
        "offload:param",
        "offload:optimizer_state",
        "shard:param",
        "shard:grad",
        "shard:optimizer_state",
        "shard:dimension",
        "fraction:activation",
        "fraction:optimizer_state",
        "layers:scan",
        "update_on:device",
        "name",
        "op:matmul",
        "op:attention",
        "op:topk",
        "op:random",
        "reshard_after_forward:false",
        "mesh:replicate",
        "mesh:custom",
        "precision",
    }
)
_MULTI_STEPS = (
    "wrap the optimizer, `run.optimizer(optax.MultiSteps(tx, every_k_schedule=4))`, and give each step one micro-batch"
)
_INSTEAD = {
    "offload:grad": "leave gradients on the device: they live from the backward pass to the update only",
    "fraction:param": "offload the parameters of whole stacks: a scanned stack's layers are one array",
    "update_on:host": "update_on: device, which streams the state layer by layer",
    "reshard_after_forward:int": "reshard_after_forward: true or false",
    "prefetch": "leave prefetch at 1: XLA's latency hiding scheduler decides how far ahead weights are gathered",
    "precision:float16": "bfloat16, which needs no loss scaling",
    "accumulate": _MULTI_STEPS,
    "accumulate:last": _MULTI_STEPS,
}


class JaxBackend:
    """What `memopt` calls; every method imports what it needs."""

    name = "jax"
    baselines = ("checkpoint", "checkpoint_dots")

    def options(self) -> type[Any]:
        """The model of `backend_options.jax`."""
        from .options import Options

        return Options

    def capabilities(self, options: Mapping[str, Any]) -> Capabilities:
        """The same under all options."""
        del options
        return Capabilities(_SUPPORTED, sharding="divisible", instead=_INSTEAD)

    def owns(self, model: Any) -> bool:
        """Flax modules, and functions defined where JAX is in use; imports nothing."""
        for name, kind in (("flax.nnx", "Module"), ("flax.linen", "Module")):
            module = sys.modules.get(name)
            if module is not None and isinstance(model, getattr(module, kind)):
                return True
        return callable(model) and not isinstance(model, type) and "jax" in sys.modules and _is_function(model)

    def world_size(self, mesh: Any = None) -> int:
        """Devices of the mesh, or of this job."""
        jax = import_jax()
        return int(mesh.size) if mesh is not None else jax.device_count()

    def inspect(self, model: Any, *, params: Any = None, example_inputs: Any = None) -> ModelSpec:
        """The inventory; allocates nothing."""
        import_jax()
        from .apply import inspect

        return inspect(model, params=params, example_inputs=example_inputs)

    def inspect_workload(self, workload: Any) -> ModelSpec:
        """The inventory of a workload, from one abstract trace of its loss."""
        import_jax()
        from .step import inspect_workload

        return inspect_workload(workload)

    def apply(
        self, model: Any, plan: Plan, spec: ModelSpec, *, optimizer: Any, params: Any, example_inputs: Any, mesh: Any
    ) -> Any:
        """Apply the plan."""
        import_jax()
        from .apply import apply

        return apply(model, plan, spec, optimizer=optimizer, params=params, example_inputs=example_inputs, mesh=mesh)

    def estimate(self, workload: Any, plan: Plan, spec: ModelSpec, *, target: Any, progress: Any = None) -> Measured:
        """Compile the step for the target and read its figures."""
        from .estimate import estimate

        return estimate(workload, plan, spec, target=target, progress=progress)

    def comparison_options(self, device: str) -> dict[str, Any]:
        """Compiler options of a comparison's rows on `cpu` or `gpu`, which its plans are made with too."""
        from .compiler_options import comparison_options

        return comparison_options(device)

    def launch(self, job_file: str, *, world_size: int) -> Launch:
        """How to start a comparison's worker."""
        from .launch import launch

        return launch(job_file, world_size=world_size)

    def train(self, job: Any, *, emit: Any) -> None:
        """Run one row of a comparison in this process."""
        import_jax()
        from .train import train

        train(job, emit=emit)

    def check(self, workload: Any, policy: Any, *, world_size: int = 1, seed: int = 0) -> Any:
        """`memopt check`: the gradients of one batch with the policy on and off."""
        import_jax()
        from .check_workload import check_workload

        return check_workload(workload, policy, world_size=world_size, seed=seed)

    def doctor(self) -> dict[str, Any]:
        """Versions, devices, and what can be planned here."""
        from .doctor import doctor

        return doctor()


def _is_function(model: Any) -> bool:
    import functools
    import types

    return isinstance(model, types.FunctionType | functools.partial | types.MethodType) or hasattr(model, "__wrapped__")


def lower(plan: Plan, *, mesh: Any = None) -> Lowered:
    """The pieces of a plan for frameworks that own their training loop; see `memopt_jax.lowered.Lowered`.

    Args:
        plan: From `memopt.make_plan`.
        mesh: The framework's own; all devices in the plan's order when left out.
    """
    from .lowered import Lowered

    return Lowered(plan, mesh=mesh)


BACKEND = JaxBackend()

"""What the policy layer sees of this backend. torch is imported inside the methods only."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from memopt.backend import INSTALL, Capabilities, Launch
from memopt.errors import MemoptError
from memopt.estimate import Measured
from memopt.plan import Plan
from memopt.spec import ModelSpec

_SHARED = frozenset(
    {
        "recompute:activation",
        "offload:activation",
        "offload:optimizer_state",
        "fraction:optimizer_state",
        "update_on:device",
        "update_on:host",
        "fraction:activation",
        "op:matmul",
        "op:attention",
        "op:topk",
        "op:random",
        "shard:param",
        "reshard_after_forward:false",
        "reshard_after_forward:int",
        "prefetch",
        "mesh:replicate",
        "precision",
        "precision:float16",
        "accumulate",
    }
)
_LAYER = _SHARED | {"shard:grad", "shard:optimizer_state", "accumulate:last"}
_FSDP2 = _SHARED | {"accumulate:last"}
_NOT_HERE = {
    "offload:param": "parameters can be sharded (`action: shard`), which leaves 1/N of them on each device",
    "offload:grad": "gradients can be sharded (`action: shard, match: {role: grad}`)",
    "shard:dimension": "write `axis: fsdp`: flat units split anywhere, evenly",
    "mesh:custom": "the mesh of the layer engine has the axes `replicate` and `fsdp`; a model that is sharded on other "
    "axes already runs with backend_options.torch.engine: fsdp2",
    "name": "name tensors by module path (`path: layers.*.mlp.up_proj`) or by `tensor:`; torch has no checkpoint_name",
    "layers:scan": "torch models have no scanned stacks",
}
_NOT_FSDP2 = {
    **_NOT_HERE,
    "shard:grad": "set backend_options.torch.engine: layer (the default); FSDP2 shards parameters, gradients and state "
    "together",
    "shard:optimizer_state": "set backend_options.torch.engine: layer (the default); FSDP2 shards parameters, "
    "gradients and state together",
}


class TorchBackend:
    """The backend registered as `torch`."""

    name = "torch"
    baselines = ("checkpoint", "fsdp2", "save_on_cpu")

    def options(self) -> type[Any]:
        """The pydantic model of `backend_options.torch`."""
        from .options import Options

        return Options

    def capabilities(self, options: Mapping[str, Any]) -> Capabilities:
        """What the chosen engine can do."""
        if options.get("engine", "layer") == "fsdp2":
            return Capabilities(_FSDP2, sharding="first", instead=_NOT_FSDP2)
        return Capabilities(_LAYER, sharding="flat", instead=_NOT_HERE)

    def owns(self, model: Any) -> bool:
        """Whether the model is a `torch.nn.Module`; torch is not imported to find out."""
        torch = sys.modules.get("torch")
        return torch is not None and isinstance(model, torch.nn.Module)

    def world_size(self, mesh: Any = None) -> int:
        """Ranks of the process group (or of the mesh); 1 without one.

        Raises:
            MemoptError: `process-group-missing` under torchrun with several ranks and no process group.
        """
        from .guards import world_size

        return world_size(mesh)

    def inspect(self, model: Any, *, params: Any = None, example_inputs: Any = None) -> ModelSpec:
        """The inventory of a module; with example inputs (keyword arguments, or a tuple) shapes of its values too."""
        from .inventory import inspect

        spec = inspect(model)
        if example_inputs is None:
            return spec
        from .shapes import called_with, shapes_of, with_shapes

        return with_shapes(spec, shapes_of(lambda: model, called_with, example_inputs))

    def inspect_workload(self, workload: Any) -> ModelSpec:
        """The inventory of a workload's model, built on the meta device.

        A described workload's batch is that of all ranks together; a `Workload`'s own batch is one rank's part.
        """
        import torch

        from .inventory import inspect
        from .shapes import shapes_of, with_shapes
        from .workloads import build, built_model

        is_described = not hasattr(workload, "loss")
        if is_described:
            workload = build(workload)
        with torch.device("meta"):
            spec = inspect(built_model(workload))
        spec = with_shapes(spec, shapes_of(workload.model, workload.loss, workload.batch))
        return replace(spec, batch="global" if is_described else "per_device")

    def apply(
        self, model: Any, plan: Plan, spec: ModelSpec, *, optimizer: Any, params: Any, example_inputs: Any, mesh: Any
    ) -> Any:
        """Applies a plan; see `memopt.apply_policy`."""
        from .apply import apply

        if params is not None:
            raise MemoptError.of(
                "params-of-a-module", "a torch module holds its own parameters", hint="leave `params` out"
            )
        return apply(model, plan, spec, optimizer=optimizer, mesh=mesh)

    def check(self, workload: Any, policy: Any, *, world_size: int = 1, seed: int = 0) -> Any:
        """`memopt check`: the policy on and off on one batch of a workload."""
        from .check_workload import check_workload

        return check_workload(workload, policy, world_size=world_size, seed=seed)

    def launch(self, job_file: str, *, world_size: int) -> Launch:
        """How a row of `compare` is started."""
        from .launch import launch

        return launch(job_file, world_size=world_size)

    def train(self, job: Any, *, emit: Any) -> None:
        """One row of `compare`, in this process."""
        from .train import train

        train(job, emit=emit)

    def estimate(self, workload: Any, plan: Plan, spec: ModelSpec, *, target: Any, progress: Any = None) -> Measured:
        """The measured part of `memopt plan`: a step traced on fake tensors."""
        from .plan import estimate

        return estimate(workload, plan, spec, target=target, progress=progress)

    def doctor(self) -> dict[str, Any]:
        """Versions, devices and process-group backends."""
        if importlib.util.find_spec("torch") is None:
            return {"installed": False, "install": INSTALL["torch"]}
        from .guards import doctor

        return doctor()


BACKEND = TorchBackend()

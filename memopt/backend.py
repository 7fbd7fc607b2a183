"""The protocol between the policy layer and a framework backend, and discovery through entry points."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, Protocol

from .errors import MemoptError, did_you_mean

if TYPE_CHECKING:
    from .applied import Check
    from .estimate import Measured
    from .plan import Plan
    from .policy import Policy
    from .spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start the workers of one `compare` row.

    Attributes:
        command: The program and its arguments; it ends up running `memopt.worker` in every rank.
        environment: Variables added to the caller's environment.
    """

    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend (with given options) can do.

    Attributes:
        supported: Feature names. Actions by role: `recompute:activation`, `offload:activation`, `offload:param`,
            `offload:grad`, `offload:optimizer_state`, `shard:param`, `shard:grad`, `shard:optimizer_state`; parts of
            them: `shard:dimension` (`axis: {fsdp: 0}`), `fraction:ROLE`, `layers:scan` (`layers:` on a scanned stack),
            `update_on:host`, `update_on:device`; selectors: `name`, `op:matmul`, `op:attention`, `op:topk`,
            `op:random`; settings: `reshard_after_forward:false`, `reshard_after_forward:int`, `prefetch`,
            `mesh:replicate`, `mesh:custom` (other axes), `precision`, `precision:float16`, `accumulate`,
            `accumulate:last`.
        sharding: How `axis: NAME` (`auto`) is meant. `flat`: units are flat buffers, borders cut parameters anywhere;
            `divisible`: the largest dimension that the axis divides, else the rule is refused; `first`: dimension 0,
            uneven allowed.
        instead: Feature -> one sentence: what the user can do instead on this backend. Shown when a rule is refused.
    """

    supported: frozenset[str]
    sharding: Literal["flat", "divisible", "first"] = "divisible"
    instead: Mapping[str, str] = field(default_factory=dict)


class Backend(Protocol):
    """What a backend package exports as `BACKEND`. Frameworks are imported inside the methods."""

    name: str

    def options(self) -> type[Any]:
        """The pydantic model of `backend_options.<name>` (frozen, strict, extra forbidden)."""
        ...

    def capabilities(self, options: Mapping[str, Any]) -> Capabilities:
        """What can be done under those options (an engine may differ)."""
        ...

    def owns(self, model: Any) -> bool:
        """Whether this backend handles that object; must not import its framework unless it is imported already."""
        ...

    def inspect(self, model: Any, *, params: Any = None, example_inputs: Any = None) -> ModelSpec:
        """The inventory; allocates nothing."""
        ...

    def apply(
        self, model: Any, plan: Plan, spec: ModelSpec, *, optimizer: Any, params: Any, example_inputs: Any, mesh: Any
    ) -> Any:
        """Apply the plan; returns an `Applied`."""
        ...

    def world_size(self, mesh: Any = None) -> int:
        """Devices (jax) or ranks (torch) of this process's job; what `apply_policy` plans for."""
        ...

    def inspect_workload(self, workload: Any) -> ModelSpec:
        """The inventory of a `Workload` or `WorkloadConfig`, activations included; allocates nothing."""
        ...

    def estimate(self, workload: Any, plan: Plan, spec: ModelSpec, *, target: Any, progress: Any = None) -> Measured:
        """The measured part of `memopt plan`, per device and step; `progress(line)` is told what takes long."""
        ...

    def launch(self, job_file: str, *, world_size: int) -> Launch:
        """How to run the job in `world_size` ranks or devices; imports no framework.

        Raises:
            MemoptError: `extra-missing` when the framework is not installed, with the install command.
        """
        ...

    def train(self, job: Any, *, emit: Any) -> None:
        """Run one row of `compare` in this process (a worker of its own); `emit(event)` for progress and the result."""
        ...

    def check(self, workload: Any, policy: Policy, *, world_size: int = 1, seed: int = 0) -> Check:
        """Build a workload's model with seeded weights, apply the policy and compare the gradients of one batch."""
        ...

    def doctor(self) -> dict[str, Any]:
        """Versions, devices, what can be planned here and what is missing."""
        ...


INSTALL = {"jax": "pip install 'memopt[jax]'", "torch": "pip install 'memopt[torch]'"}
FRAMEWORKS = {"jax": ("jax", "flax", "optax"), "torch": ("torch", "transformers")}
"""What each of our backends needs to be installed; a third party's backend looks after itself."""


def missing_frameworks(name: str) -> tuple[str, ...]:
    """Packages that the backend of that name needs and that are not installed; nothing is imported."""
    return tuple(package for package in FRAMEWORKS.get(name, ()) if find_spec(package) is None)


def require_frameworks(name: str) -> None:
    """Raise where the backend of that name cannot work here.

    Raises:
        MemoptError: `extra-missing`, with the install command.
    """
    missing = missing_frameworks(name)
    if missing:
        raise MemoptError.of("extra-missing", f"{' and '.join(missing)} not installed", hint=INSTALL[name])


@cache
def _registered() -> tuple[EntryPoint, ...]:
    """What is installed under our group; read once, as it means a look into every installed package."""
    return tuple(entry_points(group="memopt.backends"))


def backend_names() -> tuple[str, ...]:
    """Every registered backend, sorted; nothing is imported."""
    return tuple(sorted({entry.name for entry in _registered()}))


def load_backend(name: str) -> Backend:
    """The backend registered under `name`.

    Raises:
        MemoptError: `unknown-backend`.
    """
    for entry in _registered():
        if entry.name == name:
            return entry.load()
    known = backend_names()
    raise MemoptError.of(
        "unknown-backend",
        f"no backend is called `{name}`; there are {', '.join(known) or 'none'}",
        hint=did_you_mean(name, known),
    )


def backend_of(model: Any) -> Backend:
    """The backend that handles `model`.

    Raises:
        MemoptError: `unknown-model`.
    """
    for name in backend_names():
        backend = load_backend(name)
        if backend.owns(model):
            return backend
    raise MemoptError.of(
        "unknown-model",
        f"no backend handles a `{type(model).__module__}.{type(model).__qualname__}`",
        hint="pass a torch.nn.Module, a flax.nnx.Module, a flax.linen.Module with params=, "
        "or a JAX function loss_fn(params, batch) with params= and example_inputs=",
    )

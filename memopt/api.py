"""The public calls: policy, inventory, plan, apply. Frameworks are imported by the backends alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .backend import Backend, backend_names, backend_of, load_backend
from .errors import MemoptError
from .loading import load_policy, validate_options
from .lowering import make_plan as lower
from .plan import Plan
from .policy import Policy
from .spec import ModelSpec

PolicySource = str | Path | Mapping[str, Any] | Policy


def inspect_model(
    model: Any, *, backend: str | None = None, params: Any = None, example_inputs: Any = None
) -> ModelSpec:
    """Every tensor of a model by canonical path; allocates nothing.

    Args:
        model: A torch.nn.Module, flax.nnx.Module, flax.linen.Module, or a JAX function `loss_fn(params, batch)`.
        backend: Backend name; left out: follows from the type of the model.
        params: The parameters of a linen module or function (shapes are enough).
        example_inputs: Inputs of one call (shapes are enough); sizes of activations are unknown without.

    Raises:
        MemoptError: `unknown-backend`, `unknown-model`, or what the backend refuses.
    """
    return _backend_for(model, backend).inspect(model, params=params, example_inputs=example_inputs)


def make_plan(policy: PolicySource, spec: ModelSpec, *, backend: str | Backend, world_size: int = 1) -> Plan:
    """What the policy does to each tensor of the model, and by which rule; allocates nothing.

    Args:
        policy: A path, a mapping or a `Policy`.
        spec: From `inspect_model`.
        backend: Name of a registered backend, or the object itself.
        world_size: Devices in all.

    Raises:
        MemoptError: With every problem found.
    """
    loaded = load_policy(policy)
    chosen = load_backend(backend) if isinstance(backend, str) else backend
    return lower(loaded, spec, backend=chosen, world_size=world_size, options=validate_options(loaded, chosen))


def apply_policy(
    model: Any,
    policy: PolicySource,
    *,
    backend: str | None = None,
    optimizer: Any = None,
    params: Any = None,
    example_inputs: Any = None,
    mesh: Any = None,
) -> Any:
    """Apply a policy to a model: its tensors are sharded, offloaded and recomputed as the plan says.

    Everything that can be refused without the framework is refused before the framework is touched, and all at once.

    Args:
        model: As for `inspect_model`.
        policy: A path, a mapping or a `Policy`.
        backend: Backend name; left out: follows from the type of the model.
        optimizer: One made before; it is re-pointed to what is really trained.
        params: As for `inspect_model`.
        example_inputs: As for `inspect_model`.
        mesh: The framework's own mesh, where one exists already.

    Returns:
        `Applied`: `.model`, `.plan`, `.optimizer(...)`, `.step(...)`, `.check(...)`, `.report()`, `.save(...)`.

    Raises:
        MemoptError: With every problem found.
    """
    loaded = load_policy(policy)
    chosen = _backend_for(model, backend)
    options = validate_options(loaded, chosen)
    spec = chosen.inspect(model, params=params, example_inputs=example_inputs)
    plan = lower(loaded, spec, backend=chosen, world_size=chosen.world_size(mesh), options=options)
    return chosen.apply(model, plan, spec, optimizer=optimizer, params=params, example_inputs=example_inputs, mesh=mesh)


def _backend_for(model: Any, name: str | None) -> Backend:
    if name is None:
        return backend_of(model)
    chosen = load_backend(name)
    if chosen.owns(model):
        return chosen
    owners = [other for other in backend_names() if other != name and load_backend(other).owns(model)]
    if owners:
        raise MemoptError.of(
            "model-of-another-backend",
            f"`backend={name}` and a {type(model).__module__}.{type(model).__qualname__}, which is {owners[0]}'s",
            hint="leave `backend` out: it follows from the model",
        )
    return chosen

"""What `tune` may choose besides activations: how widely weights are sharded, and micro-batches."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import MemoptError
from ..policy import Policy
from ..spec import ModelSpec
from ..targets import Target
from ..workloads import WorkloadConfig

_ACTIVATION_SELECTORS = ("tensor", "op", "name")
# What people train large models with; written into the policy, where it can be changed. XLA adds gradients of devices
# up in the dtype they are computed in.
MIXED = {"compute": "bfloat16", "master": "float32", "reduce": "float32", "optimizer_state": "float32"}
REDUCE = {"jax": "bfloat16"}
# Written where something is offloaded. Without transfers across iterations, what the backward pass wants first has
# nothing to hide under; upstream they are opt-in, so the gradients are compared before the first step. XLA's own
# rematerialisation takes host bytes for device bytes and recomputes where memory is not short: the policy decides.
OFFLOAD_OPTIONS: Mapping[tuple[str, str], Mapping[str, Any]] = {
    ("jax", "gpu"): {
        "compiler_options": {
            "xla_gpu_enable_pipelined_host_offloading": True,
            "xla_disable_hlo_passes": "rematerialization",
        },
        "check": "first_step",
    }
}


@dataclass(frozen=True, slots=True)
class Layout:
    """One way to lay the model out.

    Attributes:
        fsdp: Devices weights are sharded over; the rest of the world are replicas.
        accumulate: Micro-batches; the workload's batch is divided by it.
        settings: `mesh`, `units`, `precision`, `accumulate` for the policy.
        rules: Its rules that are not about activations.
        backend_options: As in a policy.
        workload: With the micro-batch.
    """

    fsdp: int
    accumulate: int
    settings: Mapping[str, Any]
    rules: tuple[Mapping[str, Any], ...]
    backend_options: Mapping[str, Any]
    workload: Any

    @property
    def label(self) -> str:
        """`fsdp 64, 2 micro-batches`."""
        batches = f", {self.accumulate} micro-batches" if self.accumulate > 1 else ""
        return f"fsdp {self.fsdp}{batches}"


def layouts(
    *,
    base: Policy | None,
    workload: Any,
    target: Target,
    spec: ModelSpec,
    fsdp: Sequence[int] = (),
    accumulate: Sequence[int] = (),
) -> Iterator[Layout]:
    """Every layout the user allows; without a word from them the base policy's own, or all devices on `fsdp`.

    Args:
        base: A policy whose mesh, units, precision and rules about weights, gradients and state are kept.
        workload: What is trained.
        target: Gives the world's size.
        spec: The model, whose large parts outside the layers become units of their own.
        fsdp: Sizes of the `fsdp` axis to try.
        accumulate: Numbers of micro-batches to try.

    Raises:
        MemoptError: `tune-bad-fsdp` (does not divide the world), `tune-bad-accumulate` (does not divide the batch, or
            the workload's batch is not tune's to divide).
    """
    world = target.num_devices
    bad = [size for size in fsdp if size < 1 or world % size]
    if bad:
        raise MemoptError.of(
            "tune-bad-fsdp", f"a world of {world} devices cannot be cut into groups of {', '.join(map(str, bad))}"
        )
    for size in fsdp or (_own_fsdp(base, world),):
        for steps in accumulate or (base.accumulate.steps if base else 1,):
            rules = _kept_rules(base) if base is not None else _default_rules(size)
            yield Layout(
                fsdp=size,
                accumulate=steps,
                settings=_settings(base, target, spec, size, steps, chosen=bool(fsdp)),
                rules=rules,
                backend_options=_options(base),
                workload=micro_batch(workload, steps) if accumulate else workload,
            )


def micro_batch(workload: Any, steps: int) -> Any:
    """The workload with its batch divided, so that a step still eats the same tokens."""
    if steps == 1:
        return workload
    if not isinstance(workload, WorkloadConfig) or workload.batch % steps:
        why = (
            f"a batch of {workload.batch} cannot be cut into {steps} micro-batches"
            if isinstance(workload, WorkloadConfig)
            else f"the batch of `{workload.name}` is its own; tune can divide only a YAML workload's"
        )
        raise MemoptError.of("tune-bad-accumulate", why, hint="leave --accumulate out, or give divisors of the batch")
    return workload.model_copy(update={"batch": workload.batch // steps})


def _own_fsdp(base: Policy | None, world: int) -> int:
    if base is None or base.mesh is None:
        return world
    size = base.mesh.get("fsdp", 1)
    others = 1
    for axis, count in base.mesh.items():
        others *= count if axis != "fsdp" and count > 0 else 1
    return world // others if size == -1 else size


def _settings(
    base: Policy | None, target: Target, spec: ModelSpec, size: int, steps: int, *, chosen: bool
) -> dict[str, Any]:
    if base is None:
        settings: dict[str, Any] = {"units": default_units(spec)} if size > 1 else {}
        mixed = {**MIXED, "reduce": REDUCE.get(spec.backend, MIXED["reduce"])}
        settings |= {"precision": mixed} if target.kind != "cpu" else {}
    else:
        dumped = base.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
        settings = {key: dumped[key] for key in ("mesh", "units", "unit_defaults", "precision") if key in dumped}
    if (base is None or chosen) and size != target.num_devices:
        settings["mesh"] = {"replicate": target.num_devices // size, "fsdp": size}
    if steps > 1:
        reduce = base.accumulate.reduce if base else "each"
        settings["accumulate"] = {"steps": steps, "reduce": reduce}
    return settings


def default_units(spec: ModelSpec) -> list[Any]:
    """The layers, and each large module outside them by itself: nothing large is gathered for the whole step."""
    inside = tuple(f"{stack.path}." for stack in spec.stacks)
    sizes: dict[str, int] = {}
    for tensor in spec.tensors_of("param"):
        if not tensor.path.startswith(inside) and tensor.shape is not None:
            module = tensor.module or tensor.path.rsplit(".", 1)[0]
            sizes[module] = sizes.get(module, 0) + math.prod(tensor.shape)
    tied = {path.rsplit(".", 1)[0] for group in spec.ties for path in group}
    large = [module for module, size in sizes.items() if 20 * size > sum(sizes.values()) and module not in tied]
    return [*(f"{stack.path}.*" for stack in spec.stacks), *large]


def _default_rules(size: int) -> tuple[Mapping[str, Any], ...]:
    if size == 1:
        return ()
    return ({"name": "weights", "action": "shard", "match": {"role": "param"}, "axis": "fsdp"},)


def _kept_rules(base: Policy) -> tuple[Mapping[str, Any], ...]:
    """The base's rules about weights, gradients and state; those about activations are tune's to make."""
    dumped = base.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
    return tuple(_tidy(rule) for rule in dumped.get("rules", ()) if not _is_about_activations(rule))


def _tidy(value: Any) -> Any:
    """A list of one as the one itself, as a person writes selectors."""
    if isinstance(value, Mapping):
        return {key: _tidy(item) for key, item in value.items()}
    if isinstance(value, list) and len(value) == 1:
        return value[0]
    return value


def _is_about_activations(rule: Mapping[str, Any]) -> bool:
    match = rule.get("match", {})
    roles = match.get("role", ())
    roles = (roles,) if isinstance(roles, str) else roles
    if roles:
        return "activation" in roles
    is_input = any(str(path).endswith(".input") for path in match.get("path", ()))
    return rule["action"] == "recompute" or is_input or any(selector in match for selector in _ACTIVATION_SELECTORS)


def _options(base: Policy | None) -> Mapping[str, Any]:
    return dict(base.backend_options) if base is not None else {}

"""The policy: frozen, strict pydantic models of the YAML a user writes.

Only shapes and types are checked here; what depends on a model is checked by `lowering`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ByteSize, ConfigDict, Field

Role = Literal["param", "grad", "optimizer_state", "activation"]
Op = Literal["matmul", "attention", "topk", "random"]
TensorName = Literal[
    "layer_input", "q", "k", "v", "attn_out", "attn_stats", "o", "mlp_gate", "mlp_up", "mlp_act", "mlp_down",
    "router", "expert_in", "expert_out",
]  # fmt: skip
Dtype = Literal["float32", "bfloat16", "float16"]


def _as_tuple(value: Any) -> Any:
    """Every selector takes a value or a list."""
    if value is None or isinstance(value, tuple):
        return value
    return tuple(value) if isinstance(value, list) else (value,)


_many = BeforeValidator(_as_tuple)


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", validate_default=True)


class Layers(_Model):
    """Which layers of a stack: exactly one of `first`, `last`, `every` (with `offset`) or `index`.

    In YAML `layers: [0, 3]` is short for `layers: {index: [0, 3]}`.
    """

    first: Annotated[int, Field(ge=1)] | None = None
    last: Annotated[int, Field(ge=1)] | None = None
    every: Annotated[int, Field(ge=1)] | None = None
    offset: Annotated[int, Field(ge=0)] | None = None
    index: Annotated[tuple[int, ...], _many] | None = None
    of: str | None = None


class Match(_Model):
    """Selectors; all that are given must hold, each takes a value or a list (any of its values)."""

    role: Annotated[tuple[Role, ...], _many] | None = None
    path: Annotated[tuple[str, ...], _many] | None = None
    unit: Annotated[tuple[str, ...], _many] | None = None
    name: Annotated[tuple[str, ...], _many] | None = None
    tensor: Annotated[tuple[TensorName, ...], _many] | None = None
    op: Annotated[tuple[Op, ...], _many] | None = None
    layers: Layers | None = None
    min_bytes: ByteSize | None = None
    dtype: Annotated[tuple[str, ...], _many] | None = None
    trainable: bool | None = None


class _Rule(_Model):
    name: str
    match: Match
    optional: bool = False


class KeepRule(_Rule):
    """Leave the matched tensors where and as they are; fills every slot."""

    action: Literal["keep"]


class ShardRule(_Rule):
    """Split over mesh axes. `axis`: a mesh axis name, a list of them, or `{axis: dimension | "auto"}`."""

    action: Literal["shard"]
    axis: str | tuple[str, ...] | dict[str, int | Literal["auto"]] = "fsdp"


class OffloadRule(_Rule):
    """Hold in host memory between uses. `fraction` cuts along layers."""

    action: Literal["offload"]
    memory_kind: Literal["pinned_host"] = "pinned_host"
    fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    update_on: Literal["device", "host"] | None = None


class RecomputeRule(_Rule):
    """Drop after the forward pass and compute again in the backward pass."""

    action: Literal["recompute"]
    fraction: Annotated[float, Field(gt=0, le=1)] = 1.0


Rule = Annotated[KeepRule | ShardRule | OffloadRule | RecomputeRule, Field(discriminator="action")]


class Prefetch(_Model):
    """How many units are gathered ahead of the one in use."""

    forward: Annotated[int, Field(ge=0)] = 1
    backward: Annotated[int, Field(ge=0)] = 1


class UnitDefaults(_Model):
    """`reshard_after_forward`: free gathered parameters after forward (True), keep them (False), or keep them
    sharded over groups of that many ranks (int)."""

    reshard_after_forward: bool | Annotated[int, Field(ge=2)] = True
    prefetch: Prefetch = Prefetch()


class Unit(_Model):
    """One entry of `units`. With `group`, all matched modules together are a single unit."""

    match: Annotated[tuple[str, ...], _many]
    group: bool = False
    reshard_after_forward: bool | Annotated[int, Field(ge=2)] | None = None
    prefetch: Prefetch | None = None


class Precision(_Model):
    """Dtypes of compute (gathered weights, activations), master weights, gradient reduction and optimizer state."""

    compute: Dtype = "float32"
    master: Dtype = "float32"
    reduce: Dtype = "float32"
    optimizer_state: Dtype = "float32"


class Accumulate(_Model):
    """Micro-batches per optimizer step, and whether gradients are reduced at each or at the last."""

    steps: Annotated[int, Field(ge=1)] = 1
    reduce: Literal["each", "last"] = "each"


class Budget(_Model):
    """Bytes: `device` per device, `host` per node."""

    device: ByteSize | None = None
    host: ByteSize | None = None


class Policy(_Model):
    """A whole policy file."""

    version: Literal[1]
    mesh: dict[str, int] | None = None
    units: tuple[Unit, ...] | None = None
    unit_defaults: UnitDefaults = UnitDefaults()
    precision: Precision | None = None
    accumulate: Accumulate = Accumulate()
    budget: Budget | None = None
    rules: tuple[Rule, ...] = ()
    backend_options: dict[str, dict[str, Any]] = Field(default_factory=dict)

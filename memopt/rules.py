"""The rules of a policy: what they match and what they do, as frozen, strict pydantic models."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from .fields import Bytes, Fraction, Glob, Index, Many, StrictModel, as_tuple
from .paths import canonical, is_input_name

Role = Literal["param", "grad", "optimizer_state", "activation"]
Op = Literal["matmul", "attention", "topk", "random"]
TensorName = Literal[
    "layer_input", "q", "k", "v", "attn_out", "attn_stats", "o", "mlp_gate", "mlp_up", "mlp_act", "mlp_down",
    "router", "expert_in", "expert_out",
]  # fmt: skip
Dtype = Literal["float32", "bfloat16", "float16"]
DtypeName = Literal[
    "float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
    "float8_e8m0fnu", "float4_e2m1fn", "complex64", "complex128", "int64", "int32", "int16", "int8", "int4", "int2",
    "uint64", "uint32", "uint16", "uint8", "uint4", "uint2", "bool",
]  # fmt: skip


def _layers_form(value: Any) -> Any:
    """`layers: 3` and `layers: [0, 3]` are short for `layers: {index: ...}`."""
    if isinstance(value, int | list | tuple) and not isinstance(value, bool):
        return {"index": value}
    return value


class Layers(StrictModel):
    """Which layers of a stack: exactly one of `first`, `last`, `every` (with `offset`) or `index`.

    Attributes:
        first: The first so many layers.
        last: The last so many layers.
        every: Each n-th layer, starting at `offset`.
        offset: With `every`: the first layer taken, from 0.
        index: Layers by index, from 0. In YAML `layers: [0, 3]` is short for `layers: {index: [0, 3]}`.
        of: The stack (a path or glob), where the model has several.
    """

    first: Annotated[int, Field(ge=1)] | None = None
    last: Annotated[int, Field(ge=1)] | None = None
    every: Annotated[int, Field(ge=1)] | None = None
    offset: Index | None = None
    index: Many[Index] | None = None
    of: Glob | None = None

    @model_validator(mode="after")
    def _is_one_form(self) -> Layers:
        forms = [key for key in ("first", "last", "every", "index") if getattr(self, key) is not None]
        if len(forms) != 1:
            got = " and ".join(f"`{form}`" for form in forms) or "none of them"
            raise PydanticCustomError(
                "layers-form",
                "`layers` takes exactly one of `first`, `last`, `every` or a list of indices; got {got}",
                {"got": got, "hint": "split the rule in two, or write the indices as a list: `layers: [0, 1, 31]`"},
            )
        if self.offset is not None and self.every is None:
            raise PydanticCustomError("layers-form", "`offset` belongs to `every`", {"hint": "add `every: n`"})
        return self


class Match(StrictModel):
    """Selectors; all that are given must hold, each takes a value or a list (any of its values).

    Attributes:
        role: `param`, `grad`, `optimizer_state` or `activation`; left out: the roles the action can act on.
        path: Globs over canonical and raw paths. `*` stays within one part, `**` spans any number of parts.
        unit: Globs over unit names and their members' paths.
        name: Globs over the `checkpoint_name`s that the model's code gives its values.
        tensor: Neutral names of a transformer layer's values, by the model family's table.
        op: The kind of operation that made the value.
        layers: Layers of a stack.
        min_bytes: Tensors of at least so many bytes over the whole mesh; one of unknown size never matches.
        dtype: Dtype as held between steps.
        trainable: Whether the parameter is trained.
    """

    role: Many[Role] | None = None
    path: Many[Glob] | None = None
    unit: Many[Glob] | None = None
    name: Many[Glob] | None = None
    tensor: Many[TensorName] | None = None
    op: Many[Op] | None = None
    layers: Annotated[Layers, BeforeValidator(_layers_form, json_schema_input_type=Layers | int | list[int])] | None = (
        None
    )
    min_bytes: Bytes | None = None
    dtype: Many[DtypeName] | None = None
    trainable: bool | None = None

    @model_validator(mode="after")
    def _agrees_with_its_roles(self) -> Match:
        naming = [key for key in ("tensor", "op", "name") if getattr(self, key) is not None]
        if naming and self.role is not None and set(self.role) != {"activation"}:
            others = ", ".join(role for role in self.role if role != "activation")
            raise PydanticCustomError(
                "selectors-contradict",
                "`{selector}` selects activations, `role` asks for {others}",
                {
                    "selector": naming[0],
                    "others": others,
                    "drop": "role",
                    "hint": "leave `role` out, or select parameters by `path`",
                },
            )
        return self

    @model_validator(mode="after")
    def _says_each_path_once(self) -> Match:
        for key in ("path", "unit"):
            seen: dict[str, str] = {}
            for pattern in getattr(self, key) or ():
                twin = seen.setdefault(canonical(pattern), pattern)
                if twin != pattern:
                    raise PydanticCustomError(
                        "said-twice",
                        "`{one}` and `{other}` are two spellings of one pattern",
                        {
                            "one": twin,
                            "other": pattern,
                            "key": key,
                            "repeated": pattern,
                            "hint": "write the one without `model.`",
                        },
                    )
        return self

    @property
    def names_values(self) -> bool:
        """Whether it points at values by path, tensor, op or name (a rule that does not is a unit's own rule)."""
        return any(selector is not None for selector in (self.path, self.tensor, self.op, self.name))

    @property
    def names_activations(self) -> bool:
        """Whether its selectors can mean activations alone: by tensor, op, name or a path of an input."""
        by_input = self.path is not None and any(is_input_name(pattern) for pattern in self.path)
        return by_input or any(selector is not None for selector in (self.tensor, self.op, self.name))


class _Rule(StrictModel):
    """What every rule has.

    Attributes:
        name: Unique; the plan, `explain` and every message use it.
        match: Which tensors.
        optional: True where the rule may match nothing.
    """

    name: Glob
    match: Match
    optional: bool = False

    def _refuse_roles(self, action: str, roles: Iterable[str], hint: str) -> None:
        wrong = [role for role in self.match.role or () if role in roles]
        if wrong:
            raise PydanticCustomError(
                "role-for-action",
                "`{action}` cannot act on {roles}",
                {"action": action, "roles": ", ".join(wrong), "key": "match.role", "hint": hint},
            )


class KeepRule(_Rule):
    """Leave the matched tensors where and as they are; fills every slot."""

    action: Literal["keep"]


_Dimension = Annotated[int, Field(ge=0)] | Literal["auto"]
_AxisInput = str | list[str] | dict[str, _Dimension]
_Axis = str | tuple[str, ...] | dict[str, _Dimension]


def _axis(value: Any) -> Any:
    """One clear message instead of one for each form of the union."""
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list | tuple) and value and all(isinstance(entry, str) and entry for entry in value):
        return as_tuple(list(value))
    if isinstance(value, Mapping) and value and all(_is_dimension(entry) for entry in value.values()):
        return dict(value)
    raise PydanticCustomError(
        "axis-form",
        "`axis` takes a mesh axis, a list, or a mapping from axis to dimension (a number or `auto`); got {got}",
        {"got": repr(value), "hint": "for example `axis: fsdp` or `axis: {expert: 0, fsdp: auto}`"},
    )


def _is_dimension(value: Any) -> bool:
    return value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and value >= 0)


class ShardRule(_Rule):
    """Split over mesh axes. `axis`: a mesh axis name, a list of them, or `{axis: dimension | "auto"}`."""

    action: Literal["shard"]
    axis: Annotated[_Axis, BeforeValidator(_axis, json_schema_input_type=_AxisInput)] = "fsdp"

    @model_validator(mode="after")
    def _acts_on_state(self) -> ShardRule:
        hint = "activations follow the batch; shard param, grad or optimizer_state"
        self._refuse_roles("shard", ("activation",), hint)
        return self

    @property
    def axes(self) -> dict[str, int | Literal["auto"]]:
        """Mesh axis name -> tensor dimension or `auto`, in the order written."""
        if isinstance(self.axis, str):
            return {self.axis: "auto"}
        if isinstance(self.axis, tuple):
            return dict.fromkeys(self.axis, "auto")
        return dict(self.axis)


class OffloadRule(_Rule):
    """Hold in host memory between uses. `fraction` cuts along layers."""

    action: Literal["offload"]
    memory_kind: Literal["pinned_host"] = "pinned_host"
    fraction: Fraction = 1.0
    update_on: Literal["device", "host"] | None = None

    @model_validator(mode="after")
    def _updates_optimizer_state(self) -> OffloadRule:
        roles = self.match.role or (("activation",) if self.match.names_activations else None)
        if self.update_on is not None and roles is not None and "optimizer_state" not in roles:
            raise PydanticCustomError(
                "update-on-without-state",
                "`update_on` says where optimizer state is updated, and the rule offloads {roles}",
                {"roles": ", ".join(roles), "key": "update_on", "hint": "remove it, or match optimizer_state"},
            )
        return self


class RecomputeRule(_Rule):
    """Drop after the forward pass and compute again in the backward pass."""

    action: Literal["recompute"]
    fraction: Fraction = 1.0

    @model_validator(mode="after")
    def _acts_on_activations(self) -> RecomputeRule:
        hint = "only activations can be computed again; shard or offload the others"
        self._refuse_roles("recompute", ("param", "grad", "optimizer_state"), hint)
        return self


Rule = Annotated[KeepRule | ShardRule | OffloadRule | RecomputeRule, Field(discriminator="action")]

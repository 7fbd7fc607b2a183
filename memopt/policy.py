"""The policy: frozen, strict pydantic models of the YAML a user writes.

Only shapes and types are checked here; what depends on a model is checked by `memopt.lowering`. `memopt.loading` turns
a file into a `Policy` and every fault into a `Problem` with its place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    PrivateAttr,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError

from .paths import canonical

Role = Literal["param", "grad", "optimizer_state", "activation"]
Op = Literal["matmul", "attention", "topk", "random"]
TensorName = Literal[
    "layer_input", "q", "k", "v", "attn_out", "attn_stats", "o", "mlp_gate", "mlp_up", "mlp_act", "mlp_down",
    "router", "expert_in", "expert_out",
]  # fmt: skip
Dtype = Literal["float32", "bfloat16", "float16"]
DtypeName = Literal[
    "float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "complex64", "complex128", "int64",
    "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool",
]  # fmt: skip
T = TypeVar("T")


def _as_tuple(value: Any) -> Any:
    """Every selector takes a value or a list; a list that says one thing twice, or nothing, is refused."""
    if value is None or isinstance(value, tuple):
        return value
    if not isinstance(value, list):
        return (value,)
    if not value:
        text = "an empty list selects nothing"
        raise PydanticCustomError("empty-list", text, {"hint": "leave the key out to select everything"})
    repeated = next((entry for i, entry in enumerate(value) if entry in value[:i]), None)
    if repeated is not None:
        raise PydanticCustomError("said-twice", "`{value}` is listed twice", {"value": repeated, "hint": "remove one"})
    return tuple(value)


class _ValueOrList:
    """In the JSON Schema: a value, or a list of such values that says nothing twice."""

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        items = handler(schema)["items"]
        return {"anyOf": [items, {"type": "array", "items": items, "minItems": 1, "uniqueItems": True}]}


_Many = Annotated[tuple[T, ...], BeforeValidator(_as_tuple), _ValueOrList()]
_Glob = Annotated[str, Field(min_length=1)]
_Index = Annotated[int, Field(ge=0)]
_Fraction = Annotated[float, Field(gt=0, le=1)]
_Bytes = Annotated[ByteSize, Field(ge=0, json_schema_extra={"examples": ["70GiB", "512MiB"]})]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", validate_default=True)


def _layers_form(value: Any) -> Any:
    """`layers: 3` and `layers: [0, 3]` are short for `layers: {index: ...}`."""
    if isinstance(value, int | list | tuple) and not isinstance(value, bool):
        return {"index": value}
    return value


class Layers(_Model):
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
    offset: _Index | None = None
    index: _Many[_Index] | None = None
    of: _Glob | None = None

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


class Match(_Model):
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

    role: _Many[Role] | None = None
    path: _Many[_Glob] | None = None
    unit: _Many[_Glob] | None = None
    name: _Many[_Glob] | None = None
    tensor: _Many[TensorName] | None = None
    op: _Many[Op] | None = None
    layers: Annotated[Layers, BeforeValidator(_layers_form, json_schema_input_type=Layers | int | list[int])] | None = (
        None
    )
    min_bytes: _Bytes | None = None
    dtype: _Many[DtypeName] | None = None
    trainable: bool | None = None

    @model_validator(mode="after")
    def _agrees_with_its_roles(self) -> Match:
        naming = [key for key in ("tensor", "op", "name") if getattr(self, key) is not None]
        if naming and self.role is not None and set(self.role) != {"activation"}:
            others = ", ".join(role for role in self.role if role != "activation")
            raise PydanticCustomError(
                "selectors-contradict",
                "`{selector}` selects activations, `role` asks for {others}",
                {"selector": naming[0], "others": others, "hint": "leave `role` out, or select parameters by `path`"},
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
                        {"one": twin, "other": pattern, "key": key, "hint": "write the one without `model.`"},
                    )
        return self

    @property
    def names_values(self) -> bool:
        """Whether it points at values by path, tensor, op or name (a rule that does not is a unit's own rule)."""
        return any(selector is not None for selector in (self.path, self.tensor, self.op, self.name))


class _Rule(_Model):
    """What every rule has.

    Attributes:
        name: Unique; the plan, `explain` and every message use it.
        match: Which tensors.
        optional: True where the rule may match nothing.
    """

    name: _Glob
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
        return _as_tuple(list(value))
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
    fraction: _Fraction = 1.0
    update_on: Literal["device", "host"] | None = None

    @model_validator(mode="after")
    def _updates_optimizer_state(self) -> OffloadRule:
        if self.update_on is not None and self.match.role is not None and "optimizer_state" not in self.match.role:
            raise PydanticCustomError(
                "update-on-without-state",
                "`update_on` says where optimizer state is updated, and the rule offloads {roles}",
                {
                    "roles": ", ".join(self.match.role),
                    "key": "update_on",
                    "hint": "remove it, or match optimizer_state",
                },
            )
        return self


class RecomputeRule(_Rule):
    """Drop after the forward pass and compute again in the backward pass."""

    action: Literal["recompute"]
    fraction: _Fraction = 1.0

    @model_validator(mode="after")
    def _acts_on_activations(self) -> RecomputeRule:
        hint = "only activations can be computed again; shard or offload the others"
        self._refuse_roles("recompute", ("param", "grad", "optimizer_state"), hint)
        return self


Rule = Annotated[KeepRule | ShardRule | OffloadRule | RecomputeRule, Field(discriminator="action")]


class Prefetch(_Model):
    """How many units are gathered ahead of the one in use."""

    forward: Annotated[int, Field(ge=0)] = 1
    backward: Annotated[int, Field(ge=0)] = 1


def _reshard(value: Any) -> Any:
    if isinstance(value, bool) or value is None or (isinstance(value, int) and value >= 2):
        return value
    raise PydanticCustomError(
        "reshard-form",
        "`reshard_after_forward` takes true, false, or a group size of at least 2; got {got}",
        {"got": repr(value), "hint": "true frees gathered weights after forward, false keeps them"},
    )


Reshard = Annotated[bool | int, BeforeValidator(_reshard, json_schema_input_type=bool | Annotated[int, Field(ge=2)])]


class UnitDefaults(_Model):
    """`reshard_after_forward`: free gathered parameters after forward (True), keep them (False), or keep them
    sharded over groups of that many ranks (int)."""

    reshard_after_forward: Reshard = True
    prefetch: Prefetch = Prefetch()


class Unit(_Model):
    """One entry of `units`; a bare string is short for `match`. With `group`, all matched modules are a single unit."""

    match: _Many[_Glob]
    group: bool = False
    reshard_after_forward: Reshard | None = None
    prefetch: Prefetch | None = None


def _unit_form(value: Any) -> Any:
    return {"match": value} if isinstance(value, str) else value


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

    device: _Bytes | None = None
    host: _Bytes | None = None


@dataclass(frozen=True)
class Source:
    """Where a document came from; all sources compare equal, so that a policy equals its twin from another file.

    Attributes:
        file: The file, or None for a mapping.
        places: Path in the document, as (`rules`, 2, `match`) -> line and column, from 1.
    """

    file: str | None = None
    places: Mapping[tuple[str | int, ...], tuple[int, int]] = field(default_factory=dict)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Source)

    def __hash__(self) -> int:
        return 0

    def at(self, path: tuple[str | int, ...]) -> dict[str, Any]:
        """The `path`, `file`, `line` and `column` of a `Problem`; the nearest enclosing place where there is none."""
        known = path
        while known and known not in self.places:
            known = known[:-1]
        line, column = self.places.get(known, (None, None))
        dotted = ".".join(str(part) for part in path) or None
        return {"path": dotted, "file": self.file, "line": line, "column": column}


class Policy(_Model):
    """A whole policy file.

    Attributes:
        version: The format's version; 1.
        mesh: Axis name -> size, outer to inner; one may be -1, which takes what is left.
        units: What is gathered, recomputed and freed as a whole; left out: the repeated layers.
        unit_defaults: For units that say nothing else.
        precision: Left out: the model's own dtypes.
        accumulate: Gradient accumulation.
        budget: What `plan` and `tune` hold the policy to.
        rules: Read from the top; the first match wins for each slot of a tensor.
        backend_options: Per backend; each backend checks its own.
    """

    version: Literal[1]
    mesh: Annotated[dict[str, int], Field(min_length=1)] | None = None
    units: (
        Annotated[
            tuple[Annotated[Unit, BeforeValidator(_unit_form, json_schema_input_type=str | Unit)], ...],
            Field(min_length=1),
        ]
        | None
    ) = None
    unit_defaults: UnitDefaults = UnitDefaults()
    precision: Precision | None = None
    accumulate: Accumulate = Accumulate()
    budget: Budget | None = None
    rules: tuple[Rule, ...] = ()
    backend_options: dict[str, dict[str, Any]] = Field(default_factory=dict)

    _source: Source = PrivateAttr(default_factory=Source)

    @property
    def source(self) -> Source:
        """Where the policy was read from."""
        return self._source

    def with_source(self, source: Source) -> Policy:
        """The same policy, with its places."""
        copy = self.model_copy()
        copy._source = source
        return copy

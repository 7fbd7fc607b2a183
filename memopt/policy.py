"""The policy: frozen, strict pydantic models of the YAML a user writes.

Only shapes and types are checked here; what depends on a model is checked by `memopt.lowering`. `memopt.loading` turns
a file into a `Policy` and every fault into a `Problem` with its place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PrivateAttr
from pydantic_core import PydanticCustomError

from .fields import Bytes, Glob, Many, StrictModel
from .rules import Dtype, Rule
from .source import Source


class Prefetch(StrictModel):
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


class UnitDefaults(StrictModel):
    """`reshard_after_forward`: free gathered parameters after forward (True), keep them (False), or keep them
    sharded over groups of that many ranks (int)."""

    reshard_after_forward: Reshard = True
    prefetch: Prefetch = Prefetch()


class Unit(StrictModel):
    """One entry of `units`; a bare string is short for `match`. With `group`, all matched modules are a single unit."""

    match: Many[Glob]
    group: bool = False
    reshard_after_forward: Reshard | None = None
    prefetch: Prefetch | None = None


def _unit_form(value: Any) -> Any:
    return {"match": value} if isinstance(value, str) else value


class Precision(StrictModel):
    """Dtypes of compute (gathered weights, activations), master weights, gradient reduction and optimizer state."""

    compute: Dtype = "float32"
    master: Dtype = "float32"
    reduce: Dtype = "float32"
    optimizer_state: Dtype = "float32"


class Accumulate(StrictModel):
    """Micro-batches per optimizer step, and whether gradients are reduced at each or at the last."""

    steps: Annotated[int, Field(ge=1)] = 1
    reduce: Literal["each", "last"] = "each"


class Budget(StrictModel):
    """Bytes: `device` per device, `host` per node."""

    device: Bytes | None = None
    host: Bytes | None = None


class Policy(StrictModel):
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

    def with_backend_options(self, backend: str, options: Mapping[str, Mapping[str, Any]]) -> Policy:
        """The same policy with more options of one backend; what it sets itself stays.

        Args:
            backend: Backend name.
            options: Option -> what to add to it, such as `{"compiler_options": {...}}`.
        """
        own = self.backend_options.get(backend, {})
        added = {name: {**more, **own.get(name, {})} for name, more in options.items() if more}
        if not added:
            return self
        merged = {**self.backend_options, backend: {**own, **added}}
        return self.model_copy(update={"backend_options": merged}).with_source(self.source)

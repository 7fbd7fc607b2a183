"""The plan: what the policy means for one model on one backend. The only thing that passes from policy to backend.

Serialisable, diffable, independent of rank: the same policy and model give the same JSON on every rank.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from .plan_diff import PlanDiff

Residual = Literal["keep", "recompute", "offload"]
MemoryKind = Literal["device", "pinned_host"]


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One tensor and the rule that decided it.

    Attributes:
        path: Canonical path. `grad` and `optimizer_state` rows carry their parameter's path; values of a region that
            no selector reaches are one row `UNIT.<unnamed>`.
        role: `param`, `grad`, `optimizer_state`, `activation`, `buffer`.
        unit: Name of the unit it belongs to, or None.
        shape: Global shape (None where unknown).
        dtype: Dtype as held between steps (master dtype for parameters, state dtype for optimizer state).
        nbytes: Bytes per device, padding not included; None where unknown. All slots of the optimizer together.
        global_nbytes: Bytes over the whole mesh, counted once.
        layout: Mesh axis name -> tensor dimension it splits; empty when replicated. `-1`: the backend's flat unit.
        memory_kind: Where it lives between uses.
        residual: Activations only: what happens to it between forward and backward.
        rule: Name of the rule that decided the row (`None`: the default). With two decided slots, `layout`'s.
        rules: Slot (`layout`, `memory`, `residual`) -> rule name.
        losers: Rules that matched too but came later.
        aliases: Other names of the same value.
        update_on: Optimizer state: `device` or `host`.
        trainable: Of the parameter.
    """

    path: str
    role: str
    unit: str | None
    shape: tuple[int, ...] | None
    dtype: str | None
    nbytes: int | None
    global_nbytes: int | None
    layout: Mapping[str, int] = field(default_factory=dict)
    memory_kind: MemoryKind = "device"
    residual: Residual | None = None
    rule: str | None = None
    rules: Mapping[str, str] = field(default_factory=dict)
    losers: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    update_on: str | None = None
    trainable: bool = True
    tensor: str | None = None
    op: str | None = None
    checkpoint_name: str | None = None


@dataclass(frozen=True, slots=True)
class PlanUnit:
    """One unit: gathered, recomputed and freed as a whole.

    Attributes:
        name: The module path (`layers.3`), or the members joined by `+` for a group.
        members: Canonical module paths.
        reshard_after_forward: True, False, or a group size.
        prefetch_forward, prefetch_backward: Units gathered ahead.
        stack, index: The stack it is a layer of (`layers`, 3), or None.
        region: True where a rule recomputes or offloads activations of it.
        unnamed_residual: In a region, what happens to values no selector reaches.
        inferred: True when the policy did not write `units`.
    """

    name: str
    members: tuple[str, ...]
    reshard_after_forward: bool | int = True
    prefetch_forward: int = 1
    prefetch_backward: int = 1
    stack: str | None = None
    index: int | None = None
    region: bool = False
    unnamed_residual: Residual = "keep"
    inferred: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """The lowered policy.

    Attributes:
        backend: Backend name.
        world_size: Devices in all.
        mesh: (axis name, size) outer to inner; product is `world_size`.
        units: In model order.
        rows: In model order; `to_json` sorts by (path, role).
        precision: `compute`, `master`, `reduce`, `optimizer_state` dtype names, or empty when the policy has none
            (the model's own dtypes are kept).
        accumulate_steps, accumulate_reduce: Gradient accumulation.
        options: This backend's `backend_options`, validated by the backend's Options.
        budget: `device`, `host` bytes where given.
        warnings: Sentences for the user (e.g. a replicated parameter inside a sharded unit costs one all-reduce).
        family: The model family.
        rule_order: Names of all rules, top down: where two rows turn out to be one value, the earlier rule's holds.
    """

    backend: str
    world_size: int
    mesh: tuple[tuple[str, int], ...]
    units: tuple[PlanUnit, ...]
    rows: tuple[PlanRow, ...]
    precision: Mapping[str, str] = field(default_factory=dict)
    accumulate_steps: int = 1
    accumulate_reduce: Literal["each", "last"] = "each"
    options: Mapping[str, Any] = field(default_factory=dict)
    budget: Mapping[str, int] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    family: str | None = None
    rule_order: tuple[str, ...] = ()

    def rows_of(self, role: str) -> tuple[PlanRow, ...]:
        """Rows of one role, in model order."""
        return tuple(row for row in self.rows if row.role == role)

    def row(self, path: str, role: str) -> PlanRow:
        """The row of one tensor.

        Raises:
            KeyError: No such row.
        """
        named = [row for row in self.rows if row.role == role and (row.path == path or path in row.aliases)]
        if not named:
            raise KeyError((path, role))
        return next((row for row in named if row.path == path), named[0])

    def unit_of(self, name: str) -> PlanUnit:
        """The unit with that name.

        Raises:
            KeyError: No such unit.
        """
        for unit in self.units:
            if unit.name == name:
                return unit
        raise KeyError(name)

    def axis_size(self, axis: str) -> int:
        """Size of a mesh axis; 1 for an axis the mesh does not have."""
        return dict(self.mesh).get(axis, 1)

    def to_json(self, *, indent: int | None = None) -> str:
        """Sorted JSON, the same on every rank."""
        data = asdict(self)
        data["rows"] = sorted(data["rows"], key=lambda row: (row["path"], row["role"]))
        return json.dumps(data, indent=indent, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that `to_json` wrote; rows come sorted by (path, role)."""
        data = json.loads(text)
        data["mesh"] = tuple((axis, size) for axis, size in data["mesh"])
        data["units"] = tuple(PlanUnit(**{**unit, "members": tuple(unit["members"])}) for unit in data["units"])
        data["rows"] = tuple(_row(row) for row in data["rows"])
        return cls(**{**data, "warnings": tuple(data["warnings"]), "rule_order": tuple(data["rule_order"])})

    def diff(self, other: Plan) -> PlanDiff:
        """What changes from this plan to another: settings, units and rows, each with both values."""
        from .plan_diff import diff_plans

        return diff_plans(self, other)


def _row(data: Mapping[str, Any]) -> PlanRow:
    shape = data["shape"]
    fixed = {"shape": None if shape is None else tuple(shape), "losers": tuple(data["losers"])}
    return PlanRow(**{**data, **fixed, "aliases": tuple(data["aliases"])})

"""From the plan's rows to what each module does: region policies, marks, and how weights are made ready for use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from memopt.errors import MemoptError, Problem
from memopt.plan import Plan, PlanRow, PlanUnit, Residual
from memopt.spec import ModelSpec, StackSpec

from .naming import mark_name
from .remat import Region, StackPolicy, UnitPolicy
from .rewrite import runs_of
from .shardings import Layouts
from .weights import GATHERED, WEIGHT_PRIMITIVES, WeightPlan


@dataclass(frozen=True)
class Treatments:
    """What the backend does to a model.

    Attributes:
        regions: Module path (`*` for a scanned stack's index) -> its region.
        active: Paths whose values are marked.
        batched: Module paths whose outputs keep the batch split over the mesh.
        cut: Whether a scanned stack's layers are treated differently.
        compute: Dtype the weights and the floating inputs of units, and of the model, are cast to.
        split_experts: Modules whose experts lie split over the mesh's `expert` axis while they compute.
        offloaded: Path (indexed) -> planned host bytes of one device.
        alone: Units of scanned stacks that offload values and run outside of any loop, because no neighbour is treated
            alike or the stack has one layer.
    """

    regions: Mapping[str, Region]
    active: frozenset[str]
    batched: frozenset[str]
    cut: bool
    offloaded: Mapping[str, int]
    compute: str | None = None
    split_experts: frozenset[str] = frozenset()
    alone: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Scan:
    """One scan over layers: its own name, and where its layers stand in the stack they belong to."""

    name: str
    length: int
    stack: str
    first: int


class Template:
    """Paths of scanned stacks with and without the layer's index.

    Labels carry the scan's own name. Several scans may be one stack to the policy: its `layers.5` is then the label
    `moe_layers.*` and the index 2.
    """

    def __init__(self, spec: ModelSpec) -> None:
        self._scans = [scan for stack in spec.stacks if stack.kind == "scan" for scan in _scans_of(stack)]
        # Parameters of a function's stack may lie elsewhere in its tree: their raw path is an alias.
        self._raw = {alias: self.label(tensor.path) for tensor in spec.tensors_of("param") for alias in tensor.aliases}

    def split(self, path: str) -> tuple[str, int | None]:
        """`layers.3.mlp` of a scanned stack to (`layers.*.mlp`, 3); other paths stay.

        A path of which only the stack is known (`layers`) belongs to the stack's parent and stays too.
        """
        for scan in self._scans:
            if path.startswith(scan.stack + "."):
                index, _, rest = path[len(scan.stack) + 1 :].partition(".")
                number, bracket, tail = index.partition("[")
                if number.isdigit() and 0 <= int(number) - scan.first < scan.length:
                    label = f"{scan.name}.*" + (f"[{tail}" if bracket else "") + (f".{rest}" if rest else "")
                    return label, int(number) - scan.first
        return path, None

    def label(self, path: str) -> str:
        """The path with `*` for the index of a scanned stack."""
        return self.split(path)[0]

    def marked(self, path: str) -> str:
        """The label of a path that carries no index (`layers.mlp` to `layers.*.mlp`), or of a parameter's raw path."""
        if path in self._raw:
            return self._raw[path]
        name = next((s.name for s in self._scans if path == s.name or path.startswith(s.name + ".")), None)
        return path if name is None else f"{name}.*{path[len(name) :]}"

    def length(self, label: str) -> int | None:
        """Layers of the scan a label lies in, or None."""
        return next((scan.length for scan in self._scans if label.startswith(f"{scan.name}.*")), None)


def _scans_of(stack: StackSpec) -> Iterator[_Scan]:
    first = 0
    for name, length in stack.scans or ((stack.path, stack.length),):
        yield _Scan(name, length, stack.path, first)
        first += length


def treatments_of(plan: Plan, spec: ModelSpec, layouts: Layouts) -> Treatments:
    """Work out every region of a plan."""
    template = Template(spec)
    weights = _weights(plan, template, layouts)
    by_label = _units_by_label(plan, template)
    regions: dict[str, Region] = {}
    active: set[str] = set()
    alone: list[str] = []
    for label, units in by_label.items():
        length = template.length(label)
        policies = _policies(label, units, length, plan, template)
        alone += _alone(units, policies) if length is not None else []
        own_weights = _below(label, weights)
        active.update(name for policy in policies for name in _marked_paths(policy))
        policy: UnitPolicy | StackPolicy | None = policies[0]
        if len(set(policies)) > 1:
            policy = StackPolicy(label, tuple(policies))
        elif not units[0][1].region and not own_weights:
            policy = None
        if policy is not None:
            regions[label] = Region(
                policy, prevent_cse=length is None or length == 1, weights=tuple(own_weights.items())
            )
    claimed = tuple(regions)
    for label, plans in _by_module(weights).items():
        if not any(label == unit or label.startswith(unit + ".") for unit in claimed):
            regions[label] = Region(None, prevent_cse=True, weights=tuple(plans.items()))
    return Treatments(
        regions=regions,
        active=frozenset(active),
        batched=frozenset(_batched(plan, template, by_label)),
        cut=any(isinstance(region.policy, StackPolicy) for region in regions.values()),
        offloaded={
            row.path: row.nbytes or 0 for row in plan.rows if row.role == "activation" and row.residual == "offload"
        },
        compute=plan.precision.get("compute"),
        split_experts=_split_experts(plan, spec, template),
        alone=tuple(alone),
    )


def _alone(units: Sequence[tuple[int | None, PlanUnit]], policies: Sequence[UnitPolicy]) -> list[str]:
    names = {index: unit.name for index, unit in units}
    parts = [run for run in runs_of(policies) if run.stop - run.start == 1]
    return [names[part.start] for part in parts if part.start in names and policies[part.start].offloads]


def lost_when_pipelined(treatments: Treatments) -> dict[str, int]:
    """Unit -> planned host bytes that GPUs keep on the device if host transfers are pipelined across a loop's turns.

    Pipelining drops the transfers of what runs beside such a loop and in none itself (jaxlib 0.10.2, by compiling).
    """
    sent: dict[str, int] = {}
    for path, nbytes in treatments.offloaded.items():
        unit = next((unit for unit in treatments.alone if _is_within(path, unit)), "")
        sent[unit] = sent.get(unit, 0) + nbytes
    return {unit: nbytes for unit, nbytes in sent.items() if unit} if "" in sent else {}


def _split_experts(plan: Plan, spec: ModelSpec, template: Template) -> frozenset[str]:
    """Modules all of whose experts' weights the plan splits as the module computes with them."""
    layouts = {row.path: row.layout for row in plan.rows_of("param")}
    able: dict[str, bool] = {}
    for tensor in spec.tensors_of("param"):
        if tensor.split_in_use:
            layout = layouts.get(tensor.path, {})
            is_split = all(layout.get(axis) == dimension for axis, dimension in tensor.split_in_use.items())
            label = template.label(tensor.module)
            able[label] = able.get(label, True) and is_split
    return frozenset(label for label, is_split in able.items() if is_split)


def _units_by_label(plan: Plan, template: Template) -> dict[str, list[tuple[int | None, PlanUnit]]]:
    found: dict[str, list[tuple[int | None, PlanUnit]]] = {}
    for unit in plan.units:
        for member in unit.members:
            label, index = template.split(member)
            found.setdefault(label, []).append((index, unit))
    return found


def _policies(
    label: str, units: Sequence[tuple[int | None, PlanUnit]], length: int | None, plan: Plan, template: Template
) -> list[UnitPolicy]:
    """One policy per layer of a scanned stack; a single one elsewhere. Layers that are no unit keep everything."""
    rows = _rows_by_unit(plan)
    if length is None:
        return [_unit_policy(label, units[0][1], rows.get(units[0][1].name, ()), template)]
    policies = [UnitPolicy(label, unnamed="keep")] * length
    for index, unit in units:
        if index is not None:
            policies[index] = _unit_policy(label, unit, rows.get(unit.name, ()), template)
    return policies


def _rows_by_unit(plan: Plan) -> dict[str | None, list[PlanRow]]:
    rows: dict[str | None, list[PlanRow]] = {}
    for row in plan.rows:
        if row.role == "activation":
            rows.setdefault(row.unit, []).append(row)
    return rows


def _unit_policy(label: str, unit: PlanUnit, rows: Sequence[PlanRow], template: Template) -> UnitPolicy:
    unnamed: Residual = unit.unnamed_residual if unit.region else "keep"
    names: dict[str, Residual] = {}
    ops: dict[str, Residual] = {}
    for row in rows:
        residual = row.residual or "keep"
        inside = template.label(row.path)
        if not _is_within(inside, label) or (residual == unnamed and row.checkpoint_name is None):
            continue
        if row.path.endswith(">"):
            if row.op is not None:
                ops[row.op] = residual
            continue
        if residual == "recompute" and unnamed == "keep":
            raise _recompute_in_kept_unit(row, unit)
        names[mark_name(inside)] = residual
        if row.checkpoint_name is not None:
            if names.get(row.checkpoint_name, residual) != residual:
                raise MemoptError.of(
                    "name-used-twice",
                    f"`{row.checkpoint_name}` names several values of `{unit.name}`, and the rules differ for them",
                    hint="give the values different checkpoint_names, or the same rule",
                    path=row.path,
                )
            names[row.checkpoint_name] = residual
    if unit.reshard_after_forward is False:
        names[GATHERED] = "keep"
    return UnitPolicy(
        unit=label,
        names=tuple(sorted(names.items())),
        ops=tuple(sorted(ops.items())),
        unnamed=unnamed,
        never_kept=WEIGHT_PRIMITIVES if unnamed == "keep" else frozenset(),
    )


def _recompute_in_kept_unit(row: PlanRow, unit: PlanUnit) -> MemoptError:
    """JAX asks about equations: what a name stands for would be kept by the equation that made it, under another
    name."""
    return MemoptError.of(
        "recompute-in-kept-unit",
        f"rule `{row.rule}` recomputes `{row.path}` while everything else in `{unit.name}` is kept; on JAX the value "
        "would be kept all the same, by the operation that makes it",
        hint=f"recompute the unit and keep what is to stay: `{{name: stay, action: keep, match: {{path: ...}}}}`, then "
        f"`{{name: rest, action: recompute, match: {{unit: {unit.name}}}}}`",
        path=row.path,
    )


def _is_within(path: str, label: str) -> bool:
    return path == label or path.startswith((label + ".", label + "["))


def _marked_paths(policy: UnitPolicy) -> list[str]:
    from .naming import marked_path

    return [path for name, _ in policy.names if (path := marked_path(name)) is not None]


def _weights(plan: Plan, template: Template, layouts: Layouts) -> dict[str, WeightPlan]:
    """Parameter label -> how it is made ready; parameters that are used as they rest are left out."""
    dtype = plan.precision.get("compute")
    found: dict[str, WeightPlan] = {}
    rows: dict[str, PlanRow] = {}
    differing: dict[str, tuple[PlanRow, PlanRow]] = {}
    in_units = {template.label(member) for unit in plan.units for member in unit.members}
    for row in plan.rows_of("param"):
        label = template.label(row.path)
        gathers = bool(row.layout) and any(_is_within(label, unit) for unit in in_units)
        own = layouts.of_layer(row) if gathers else None
        plan_of_row = WeightPlan(
            fetch=row.memory_kind == "pinned_host",
            dtype=dtype if dtype not in (None, row.dtype) and _is_floating(row) else None,
            used=None if own is None else own.used,
            rests=None if own is None else own.rests,
        )
        first = rows.setdefault(label, row)
        if found.setdefault(label, plan_of_row) != plan_of_row:
            differing.setdefault(label, (first, row))
    if differing:
        raise MemoptError([_layers_differ(label, *pair) for label, pair in differing.items()])
    return {label: weight for label, weight in found.items() if weight != WeightPlan()}


def _layers_differ(label: str, first: PlanRow, other: PlanRow) -> Problem:
    by = [f"`{row.path}` by {f'rule `{row.rule}`' if row.rule else 'no rule'}" for row in (first, other)]
    return Problem(
        "stack-parameters-differ",
        f"`{label}` is one array for all layers of a scanned stack, and its layers are placed differently: "
        f"{by[0]}, {by[1]}",
        hint="give all layers of the stack the same shard and offload rules for parameters, "
        "or build the layers in a Python list",
        path=other.path,
    )


def _is_floating(row: PlanRow) -> bool:
    return row.dtype is not None and "float" in row.dtype


def _below(label: str, weights: Mapping[str, WeightPlan]) -> dict[str, WeightPlan]:
    return {path[len(label) + 1 :]: weight for path, weight in weights.items() if path.startswith(label + ".")}


def _by_module(weights: Mapping[str, WeightPlan]) -> dict[str, dict[str, WeightPlan]]:
    found: dict[str, dict[str, WeightPlan]] = {}
    for path, weight in weights.items():
        module, _, name = path.rpartition(".")
        found.setdefault(module, {})[name] = weight
    return found


def _batched(plan: Plan, template: Template, units: Mapping[str, Any]) -> set[str]:
    """Units, and modules outside units that hold sharded parameters: where the compiler might move the split off the
    batch."""
    sharded = {template.label(row.path.rpartition(".")[0]) for row in plan.rows_of("param") if row.layout}
    outside = {path for path in sharded if not any(_is_within(path, unit) for unit in units)}
    return outside | (set(units) if sharded else set())


def without_residuals(treatments: Treatments, *, recompute: bool) -> Treatments:
    """The same layout with nothing offloaded: everything recomputed, or everything kept.

    The reference of `Applied.check`: gathers and casts stay, as they belong to the layout.
    """
    regions = {}
    for label, region in treatments.regions.items():
        policy = region.policy
        if policy is not None:
            keeps = UnitPolicy(label, unnamed="keep", never_kept=WEIGHT_PRIMITIVES)
            policy = UnitPolicy(label) if recompute else (keeps if region.weights else None)
        regions[label] = replace(region, policy=policy)
    return replace(treatments, regions=regions, active=frozenset(), cut=False, offloaded={})

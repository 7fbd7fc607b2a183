"""Applying treatments to a `flax.nnx` model: instances are configured in place, parameters moved to where they rest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx

from memopt.plan import Plan
from memopt.spec import ModelSpec

from .inventory import as_arrays, canonical_path
from .models.experts import ExpertParallel
from .nnx_modules import ModuleConfig, configure, dotted, modules_of, restore
from .placement import EXPERT_AXIS, leaf_path
from .rewrite import with_cut_scans
from .shardings import Layouts, place
from .treatments import Template, Treatments


def configure_model(model: Any, spec: ModelSpec, treatments: Treatments, layouts: Layouts) -> None:
    """Give every module of the model its treatment, in place; modules without one stay what they are."""
    template = Template(spec)
    for raw, module in modules_of(model):
        label = template.marked(canonical_path(raw))
        config = ModuleConfig(
            path=label,
            active=_own(label, treatments.active),
            region=treatments.regions.get(label),
            constrain=layouts.constrain_batch if label in treatments.batched else None,
            compute=treatments.compute if not raw or label in treatments.regions else None,
            expert_parallel=_expert_parallel(module, label, treatments, layouts),
            root=with_cut_scans if not raw and treatments.cut else None,
        )
        if config != ModuleConfig(label, active=frozenset()):
            configure(module, config)


def _expert_parallel(module: Any, label: str, treatments: Treatments, layouts: Layouts) -> ExpertParallel | None:
    if not hasattr(module, "expert_parallel") or layouts.num_data == 1:
        return None
    is_split = label in treatments.split_experts and dict(layouts.mesh.shape)[EXPERT_AXIS] > 1
    axis = EXPERT_AXIS if is_split else None
    return ExpertParallel(layouts.mesh, layouts.data_axes, axis)


def _own(label: str, active: frozenset[str]) -> frozenset[str]:
    """The marks that are a module's own inputs and outputs."""
    names = (label, f"{label}.input")
    return frozenset(path for path in active if path in names or path.partition("[")[0] in names)


def restore_model(model: Any) -> None:
    """Undo `configure_model`."""
    for _, module in modules_of(model):
        restore(module)


def parameter_shardings(model: Any, plan: Plan, spec: ModelSpec, layouts: Layouts) -> Any:
    """A sharding for every array of the model's state, in its structure."""
    rows = rows_by_label(plan, spec, "param")
    template = Template(spec)
    state = nnx.state(model)

    def of(path: tuple[Any, ...], leaf: Any) -> Any:
        raw = dotted(leaf_path(path))
        row = rows.get(template.marked(canonical_path(raw)))
        if row is None or not hasattr(leaf, "shape"):
            return layouts.replicated()
        leading = leaf.ndim - len(row.shape or ())
        return layouts.sharding(row.layout, leaf.ndim, leading=leading, kind=row.memory_kind)

    return jax.tree_util.tree_map_with_path(of, state)


def rows_by_label(plan: Plan, spec: ModelSpec, role: str) -> Mapping[str, Any]:
    """Label of a parameter -> the row of its first layer."""
    template = Template(spec)
    found: dict[str, Any] = {}
    for row in plan.rows_of(role):
        found.setdefault(template.label(row.path), row)
    return found


def place_parameters(model: Any, shardings: Any) -> None:
    """Move the model's arrays to where they rest, in place; what is there already is not touched."""
    nnx.update(model, place(nnx.state(model), shardings))


def caller(example_inputs: Any) -> Callable[[Any], Any] | None:
    """A call on the example inputs: a tuple or list is positional, a mapping keywords, anything else one argument."""
    if example_inputs is None:
        return None
    if isinstance(example_inputs, Mapping):
        return lambda model: model(**as_arrays(example_inputs))
    if isinstance(example_inputs, tuple | list):
        return lambda model: model(*as_arrays(example_inputs))
    return lambda model: model(as_arrays(example_inputs))

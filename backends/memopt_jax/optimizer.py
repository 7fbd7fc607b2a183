"""The optimizer on what is really trained: state placed as the plan says, one fused update-and-apply.

Optax knows nothing of memory kinds, so its state is placed leaf by leaf: a leaf that has a parameter's path and shape
follows that parameter's `optimizer_state` row; scalars such as step counts stay on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import optax

from memopt.errors import MemoptError
from memopt.plan import Plan, PlanRow
from memopt.spec import ModelSpec

from .inventory import canonical_path
from .placement import leaf_path
from .shardings import Layouts
from .treatments import Template


def transformation_of(cls_or_tx: Any, options: Mapping[str, Any]) -> optax.GradientTransformation:
    """The optax transformation: passed as it is, or made by a factory such as `optax.adamw` from keyword arguments.

    Raises:
        MemoptError: `not-an-optimizer`.
    """
    if isinstance(cls_or_tx, optax.GradientTransformation | optax.GradientTransformationExtraArgs):
        if options:
            raise MemoptError.of(
                "not-an-optimizer",
                f"{sorted(options)} were given beside an optax transformation that is made already",
                hint="pass them to the function that makes it: optimizer(optax.adamw, learning_rate=1e-3)",
            )
        return cls_or_tx
    made = cls_or_tx(**options) if callable(cls_or_tx) else cls_or_tx
    if not isinstance(made, optax.GradientTransformation | optax.GradientTransformationExtraArgs):
        raise MemoptError.of(
            "not-an-optimizer",
            f"a {type(made).__module__}.{type(made).__qualname__} is no optax transformation",
            hint="pass optax.adamw(1e-3), or optax.adamw with its arguments as keywords",
        )
    return made


@dataclass(frozen=True)
class StatePlacement:
    """Where the leaves of parameters, gradients and optimizer state rest.

    Attributes:
        layouts: Shardings over the mesh.
        rows: Parameter label -> its `optimizer_state` row.
        param_rows: Parameter label -> its own row.
        grad_rows: Parameter label -> its `grad` row.
        template: Index-free labels.
    """

    layouts: Layouts
    rows: Mapping[str, PlanRow]
    param_rows: Mapping[str, PlanRow]
    grad_rows: Mapping[str, PlanRow]
    template: Template

    @classmethod
    def of(cls, plan: Plan, spec: ModelSpec, layouts: Layouts) -> StatePlacement:
        """Read it off the plan."""
        template = Template(spec)

        def first(role: str) -> dict[str, PlanRow]:
            found: dict[str, PlanRow] = {}
            for row in plan.rows_of(role):
                found.setdefault(template.label(row.path), row)
            return found

        return cls(layouts, first("optimizer_state"), first("param"), first("grad"), template)

    @property
    def offloads_any(self) -> bool:
        """Whether any parameter or optimizer state rests on the host."""
        return any(row.memory_kind == "pinned_host" for rows in (self.rows, self.param_rows) for row in rows.values())

    def param_shardings(self, params: Any) -> Any:
        """A sharding for every parameter of a tree."""
        return jax.tree_util.tree_map_with_path(lambda path, leaf: self._sharding(path, leaf, self.param_rows), params)

    def label_of(self, path: Sequence[Any], shape: tuple[int, ...], known: Mapping[str, Any]) -> str | None:
        """The parameter a leaf of the state belongs to: the longest end of its path that names one of the same
        shape."""
        keys = leaf_path(path)
        for start in range(len(keys)):
            label = self.template.marked(canonical_path(".".join(keys[start:])))
            if label in known and self._fits(known[label], label, shape):
                return label
        return None

    def _fits(self, row: PlanRow, label: str, shape: tuple[int, ...]) -> bool:
        length = self.template.length(label)
        return (*(() if length is None else (length,)), *(row.shape or ())) == tuple(shape)

    def state_shardings(self, state: Any) -> Any:
        """A sharding for every leaf of an optimizer state."""
        return jax.tree_util.tree_map_with_path(lambda path, leaf: self._sharding(path, leaf, self.rows), state)

    def constrain_gradients(self, gradients: Any) -> Any:
        """Gradients on the device and laid out as planned: reduce-scattered where they are sharded."""

        def constrain(path: Any, leaf: Any) -> Any:
            label = self.label_of(path, leaf.shape, self.grad_rows)
            if label is not None and self.param_rows[label].memory_kind == "pinned_host":
                leaf = jax.device_put(leaf, jax.memory.Space.Device)  # JAX leaves a gradient where its parameter rests
            if label is None or not self.grad_rows[label].layout:
                return leaf
            return jax.lax.with_sharding_constraint(leaf, self._sharding(path, leaf, self.grad_rows, on_device=True))

        return jax.tree_util.tree_map_with_path(constrain, gradients)

    def rests_on_host(self, path: Any, leaf: Any, rows: Mapping[str, PlanRow]) -> bool:
        """Whether a leaf, of the state or of the parameters, rests on the host."""
        label = self.label_of(path, leaf.shape, rows) if leaf.ndim else None
        return label is not None and rows[label].memory_kind == "pinned_host"

    def _sharding(self, path: Any, leaf: Any, rows: Mapping[str, PlanRow], *, on_device: bool = False) -> Any:
        label = self.label_of(path, leaf.shape, rows) if getattr(leaf, "ndim", 0) else None
        if label is None:
            return self.layouts.replicated()
        row = rows[label]
        leading = leaf.ndim - len(row.shape or ())
        kind = "device" if on_device else row.memory_kind
        return self.layouts.sharding(row.layout, leaf.ndim, leading=leading, kind=kind)


Update = Callable[[Any, Any, Any], tuple[Any, Any]]
"""(gradients, state, parameters) to (parameters, state)."""


def whole_update(tx: optax.GradientTransformation, placement: StatePlacement) -> Update:
    """The update with the whole state on the device while it runs; what rests on the host is fetched and sent back."""

    def move(tree: Any, reference: Any, space: Any, rows: Mapping[str, PlanRow]) -> Any:
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf, of: jax.device_put(leaf, space) if placement.rests_on_host(path, of, rows) else leaf,
            tree,
            reference,
        )

    def update(gradients: Any, state: Any, params: Any) -> tuple[Any, Any]:
        gradients = placement.constrain_gradients(gradients)
        device, host = jax.memory.Space.Device, jax.memory.Space.Host
        here = move(params, params, device, placement.param_rows)
        updates, new_state = tx.update(gradients, move(state, state, device, placement.rows), here)
        new_params = optax.apply_updates(here, updates)
        return move(new_params, params, host, placement.param_rows), move(new_state, state, host, placement.rows)

    return update

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

from .cut_state import Cut, CutArray, cut_array, cuts_of, in_parts, is_cut, joined, whole_on_host
from .inventory import canonical_path
from .placement import leaf_path
from .shardings import Layouts
from .treatments import Template


def transformation_of(cls_or_tx: Any, options: Mapping[str, Any]) -> optax.GradientTransformation:
    """The optax transformation: passed as it is, made by a factory such as `optax.adamw` from keyword arguments, or
    inside an `optax.MultiSteps`, whose accumulators are laid out as their parameters' state.

    Raises:
        MemoptError: `not-an-optimizer`.
    """
    if isinstance(cls_or_tx, optax.MultiSteps):
        cls_or_tx = cls_or_tx.gradient_transformation()
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
        cuts: Label of a scanned parameter -> which layers of its state rest on the host, where some do and some do not.
        lists: Paths of the layers kept in a Python list (`layers`).
    """

    layouts: Layouts
    rows: Mapping[str, PlanRow]
    param_rows: Mapping[str, PlanRow]
    grad_rows: Mapping[str, PlanRow]
    template: Template
    cuts: Mapping[str, Cut]
    lists: tuple[str, ...] = ()

    @classmethod
    def of(cls, plan: Plan, spec: ModelSpec, layouts: Layouts) -> StatePlacement:
        """Read it off the plan.

        Raises:
            MemoptError: `stack-state-differs`.
        """
        template = Template(spec)

        def first(role: str) -> dict[str, PlanRow]:
            found: dict[str, PlanRow] = {}
            for row in plan.rows_of(role):
                found.setdefault(template.label(row.path), row)
            return found

        cuts_of(plan.rows_of("grad"), template)  # gradients are never offloaded: only their layouts can differ
        cuts = cuts_of(plan.rows_of("optimizer_state"), template)
        lists = tuple(stack.path for stack in spec.stacks if stack.kind == "loop")
        return cls(layouts, first("optimizer_state"), first("param"), first("grad"), template, cuts, lists)

    @property
    def offloads_any(self) -> bool:
        """Whether any parameter or optimizer state rests on the host."""
        rows = (*self.rows.values(), *self.param_rows.values())
        return bool(self.cuts) or any(row.memory_kind == "pinned_host" for row in rows)

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

    def layer_of(self, label: str) -> str:
        """The layer of a Python list that a parameter lies in (`layers.3`); elsewhere the parameter itself."""
        inside = [path for path in self.lists if label.startswith(f"{path}.")]
        if not inside:
            return label
        path = min(inside, key=len)
        return f"{path}.{label[len(path) + 1 :].partition('.')[0]}"

    def _fits(self, row: PlanRow, label: str, shape: tuple[int, ...]) -> bool:
        length = self.template.length(label)
        return (*(() if length is None else (length,)), *(row.shape or ())) == tuple(shape)

    def state_shardings(self, state: Any) -> Any:
        """A sharding for every leaf of an optimizer state, cut or to be cut."""

        def of(path: Any, leaf: Any) -> Any:
            if not isinstance(leaf, CutArray):
                return self._sharding(path, leaf, self.rows)
            row = self.rows[self._required_label(path, leaf)]
            at = {kind: self._laid_out(row, leaf.ndim, kind) for kind in ("pinned_host", "device")}
            return CutArray(at["pinned_host"], at["device"], leaf.cut)

        return jax.tree_util.tree_map_with_path(of, state, is_leaf=is_cut)

    def cut(self, state: Any) -> Any:
        """An optimizer state with the arrays of which only some layers rest on the host in two parts."""

        def of(path: Any, leaf: Any) -> Any:
            cut = None if is_cut(leaf) else self._cut_of(path, leaf)
            return leaf if cut is None else cut_array(leaf, cut)

        return jax.tree_util.tree_map_with_path(of, state, is_leaf=is_cut) if self.cuts else state

    def _cut_of(self, path: Any, leaf: Any) -> Cut | None:
        label = self.label_of(path, leaf.shape, self.rows) if getattr(leaf, "ndim", 0) else None
        return None if label is None else self.cuts.get(label)

    def _required_label(self, path: Any, leaf: CutArray) -> str:
        label = self.label_of(path, leaf.shape, self.rows)
        if label is None:
            raise RuntimeError(f"{jax.tree_util.keystr(path)} is cut and belongs to no parameter")
        return label

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
        """Whether a leaf, of the state or of the parameters, rests on the host as a whole."""
        if is_cut(leaf):
            return False
        label = self.label_of(path, leaf.shape, rows) if leaf.ndim else None
        return label is not None and rows[label].memory_kind == "pinned_host"

    def _sharding(self, path: Any, leaf: Any, rows: Mapping[str, PlanRow], *, on_device: bool = False) -> Any:
        label = self.label_of(path, leaf.shape, rows) if getattr(leaf, "ndim", 0) else None
        if label is None:
            return self.layouts.replicated()
        return self._laid_out(rows[label], leaf.ndim, "device" if on_device else rows[label].memory_kind)

    def _laid_out(self, row: PlanRow, ndim: int, kind: str) -> Any:
        return self.layouts.sharding(row.layout, ndim, leading=ndim - len(row.shape or ()), kind=kind)


Update = Callable[[Any, Any, Any], tuple[Any, Any]]
"""(gradients, state, parameters) to (parameters, state)."""


def whole_update(tx: optax.GradientTransformation, placement: StatePlacement) -> Update:
    """The update with the whole state on the device while it runs; what rests on the host is fetched and sent back."""

    device, host = jax.memory.Space.Device, jax.memory.Space.Host

    def moved(tree: Any, rows: Mapping[str, PlanRow], space: Any) -> Any:
        def of(path: Any, leaf: Any) -> Any:
            return jax.device_put(leaf, space) if placement.rests_on_host(path, leaf, rows) else leaf

        return jax.tree_util.tree_map_with_path(of, tree, is_leaf=is_cut)

    def whole(leaf: Any) -> Any:
        return joined(jax.device_put(leaf.host, device), leaf.device, leaf.cut) if is_cut(leaf) else leaf

    def parted(leaf: Any) -> Any:
        return CutArray(jax.device_put(leaf.host, host), leaf.device, leaf.cut) if is_cut(leaf) else leaf

    def update(gradients: Any, state: Any, params: Any) -> tuple[Any, Any]:
        gradients = placement.constrain_gradients(gradients)
        here = moved(params, placement.param_rows, device)
        fetched = jax.tree.map(whole, moved(state, placement.rows, device), is_leaf=is_cut)
        updates, new_state = tx.update(gradients, fetched, here)
        new_params = optax.apply_updates(here, updates)
        sent = jax.tree.map(parted, placement.cut(new_state), is_leaf=is_cut)
        return moved(new_params, placement.param_rows, host), moved(sent, placement.rows, host)

    return update


def to_checkpoint(tree: Any) -> Any:
    """A tree of arrays with those that are cut made whole, in pinned host memory: checkpoints know of no policy."""
    return jax.tree.map(lambda leaf: whole_on_host(leaf) if is_cut(leaf) else leaf, tree, is_leaf=is_cut)


def checkpoint_template(tree: Any) -> Any:
    """The shapes and shardings a checkpoint's arrays are read into: cut ones whole, in pinned host memory."""

    def of(leaf: Any) -> Any:
        if not is_cut(leaf):
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.host.sharding)

    return jax.tree.map(of, tree, is_leaf=is_cut)


def from_checkpoint(read: Any, like: Any) -> Any:
    """An array as read, in parts where `like` is cut."""
    return in_parts(read, like.cut) if is_cut(like) else read

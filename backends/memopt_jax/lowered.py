"""The pieces of a plan by themselves, for frameworks that own their training loop.

Such a framework has its own `jax.checkpoint` around its layer, its own placement of parameters and its own jit; each
takes one piece.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import jax

from memopt.errors import MemoptError, did_you_mean
from memopt.plan import Plan, PlanRow, PlanUnit, Residual

from . import compiler_options
from .inventory import canonical_path
from .placement import leaf_path
from .remat import UnitPolicy
from .shardings import AnyMesh, Layouts, make_mesh


class Lowered:
    """A plan's checkpoint policies, shardings and compiler options.

    Example:
        >>> lowered = memopt_jax.lower(plan)  # doctest: +SKIP
        >>> policy = lowered.checkpoint_policy("layers.*")  # doctest: +SKIP
        >>> layer = jax.checkpoint(layer, policy=policy, prevent_cse=False)  # doctest: +SKIP
        >>> params = jax.device_put(params, lowered.shardings(params))  # doctest: +SKIP
    """

    def __init__(self, plan: Plan, *, mesh: AnyMesh | None = None) -> None:
        """Args:
        plan: From `memopt.make_plan`.
        mesh: The framework's own; all devices in the plan's order when left out.
        """
        self._plan = plan
        self._mesh = mesh

    def checkpoint_policy(self, unit: str) -> UnitPolicy:
        """The policy for `jax.checkpoint` around a unit's body; it sees the body's own `checkpoint_name`s.

        Args:
            unit: A unit's name, or `layers.*` for all layers of a stack.

        Raises:
            MemoptError: `unknown-unit`; `layers-differ` for `layers.*` where the rules treat layers differently;
                `not-lowerable` for a kept or offloaded value that has no `checkpoint_name`.
        """
        units = [each for each in self._plan.units if each.name == unit or f"{each.stack}.*" == unit]
        if not units:
            known = [name for each in self._plan.units for name in (each.name, f"{each.stack}.*")]
            raise MemoptError.of(
                "unknown-unit", f"the plan has no unit `{unit}`", hint=did_you_mean(unit, list(dict.fromkeys(known)))
            )
        policies = {self._policy(each, unit) for each in units}
        if len(policies) > 1:
            raise MemoptError.of(
                "layers-differ",
                f"the rules treat the layers of `{unit}` differently, and one scan body has one policy",
                hint="cut the scan and take each part's policy by a layer's name, or give all layers the same rules",
                path=unit,
            )
        return policies.pop()

    def _policy(self, unit: PlanUnit, name: str) -> UnitPolicy:
        unnamed: Residual = unit.unnamed_residual if unit.region else "keep"
        names: dict[str, Residual] = {}
        ops: dict[str, Residual] = {}
        for row in self._plan.rows_of("activation"):
            if row.unit != unit.name or row.residual is None:
                continue
            if row.checkpoint_name is not None:
                names[row.checkpoint_name] = row.residual
            elif row.path.endswith(">") and row.op is not None:
                ops[row.op] = row.residual
            elif row.residual != unnamed and row.rule is not None:
                raise MemoptError.of(
                    "not-lowerable",
                    f"rule `{row.rule}` wants to {row.residual} `{row.path}`, which has no checkpoint_name",
                    hint="name it in the layer: x = jax.ad_checkpoint.checkpoint_name(x, 'layer_input'), and select by "
                    "`name:`",
                    path=row.path,
                )
        return UnitPolicy(name, tuple(sorted(names.items())), tuple(sorted(ops.items())), unnamed)

    def shardings(self, tree: Any) -> Any:
        """A sharding, with its memory kind, for every leaf of a tree of parameters or of optimizer state.

        A leaf whose whole path is a parameter's is one; a leaf that ends in a parameter's path and has its shape is
        that parameter's optimizer state. Everything else, scalars included, is replicated on the device.

        Args:
            tree: Arrays or shapes, as a whole (`params`, `opt_state`).
        """
        return jax.tree_util.tree_map_with_path(self._sharding, tree)

    def _sharding(self, path: tuple[Any, ...], leaf: Any) -> Any:
        keys = list(leaf_path(path))
        keys = keys[1:] if keys[:1] == ["params"] else keys
        shape = tuple(getattr(leaf, "shape", ()))
        for start in range(len(keys)):
            name = canonical_path(".".join(keys[start:]))
            role = "param" if start == 0 else "optimizer_state"
            row = self._rows(role).get(name)
            self._require_one_place(role, name, row, shape)
            if row is not None and row.shape is not None and shape[len(shape) - len(row.shape) :] == row.shape:
                leading = len(shape) - len(row.shape)
                return self._layouts.sharding(row.layout, len(shape), leading=leading, kind=row.memory_kind)
        return self._layouts.replicated()

    def _require_one_place(self, role: str, name: str, row: PlanRow | None, shape: tuple[int, ...]) -> None:
        """Refuse to place an array of all layers by its first layer's row where the rows differ.

        Raises:
            MemoptError: `layers-differ`.
        """
        if row is None or row.shape is None or len(shape) == len(row.shape) or name not in self._differing[role]:
            return
        raise MemoptError.of(
            "layers-differ",
            f"`{name}` is one array for all layers, and the rules place the {role.replace('_', ' ')} of its layers "
            "differently",
            hint="give all layers the same rules, or keep the layers in a Python list; apply_policy keeps such state "
            "in two arrays",
            path=row.path,
        )

    @cached_property
    def _differing(self) -> Mapping[str, frozenset[str]]:
        """Role -> names without an index under which the rows of a stack's layers are placed differently."""
        stacks = {unit.stack for unit in self._plan.units if unit.stack is not None}
        found: dict[str, set[str]] = {"param": set(), "optimizer_state": set()}
        for role, names in found.items():
            first: dict[str, PlanRow] = {}
            for row in self._plan.rows_of(role):
                for name in _without_index(row.path, stacks):
                    other = first.setdefault(name, row)
                    if (row.memory_kind, row.layout) != (other.memory_kind, other.layout):
                        names.add(name)
        return {role: frozenset(names) for role, names in found.items()}

    @cached_property
    def _layouts(self) -> Layouts:
        return Layouts(self._plan, make_mesh(self._plan, self._mesh), {})

    def _rows(self, role: str) -> Mapping[str, PlanRow]:
        return self._by_role[role]

    @cached_property
    def _by_role(self) -> Mapping[str, Mapping[str, PlanRow]]:
        """Role -> path, with and without the index of a stack's layer -> row."""
        found: dict[str, dict[str, PlanRow]] = {"param": {}, "optimizer_state": {}}
        stacks = {unit.stack for unit in self._plan.units if unit.stack is not None}
        for role, rows in found.items():
            for row in self._plan.rows_of(role):
                names = [row.path, *row.aliases, *_without_index(row.path, stacks)]
                for name in names:
                    rows.setdefault(name, row)
        return found

    @property
    def compiler_options(self) -> dict[str, Any]:
        """For `jit(...).lower(...).compile(compiler_options=...)` or `jax.jit(compiler_options=...)`."""
        offloads = any(row.memory_kind == "pinned_host" for row in self._plan.rows)
        requested = self._plan.options.get("compiler_options", {})
        return dict(compiler_options.options_for(jax.default_backend(), requested=requested, offloads=offloads))


def _without_index(path: str, stacks: set[str]) -> list[str]:
    """`layers.3.mlp` as `layers.mlp`: a scanned stack holds one array for all layers."""
    for stack in stacks:
        if path.startswith(stack + "."):
            index, _, rest = path[len(stack) + 1 :].partition(".")
            if index.isdigit() and rest:
                return [f"{stack}.{rest}"]
    return []

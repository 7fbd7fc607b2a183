"""The optimizer's update one layer at a time, so that offloaded state of a layer or two is on the device.

An optax update is traced once and its program taken apart (`update_program.py`). Values of a scanned stack are made
inside a loop over the stacking axis, each layer's state fetched before and sent back after; the layers of a Python
list, and parameters outside all stacks, have their turn one after the other, each waiting for the last but one. What
needs whole arrays first (a global norm for clipping) is computed ahead, from the gradients, which are on the device
anyway. A transformation that mixes the elements of a stacked array, or needs norms of the state itself, cannot be cut:
it is named and its state is moved whole.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import Jaxpr, Literal

from memopt.errors import MemoptWarning

from .cut_state import PARTS, Cut, CutArray, Part, is_cut
from .optimizer import StatePlacement, Update, whole_update
from .placement import leaf_path
from .rewrite import bind
from .update_program import CannotStream, Group, Layer, Program, Stack, inlined, needed_ahead, needed_for, taken_apart


def streamed_update(tx: optax.GradientTransformation, placement: StatePlacement) -> Update:
    """The fused update, layer by layer where state rests on the host."""
    whole = whole_update(tx, placement)

    def update(gradients: Any, state: Any, params: Any) -> tuple[Any, Any]:
        gradients = placement.constrain_gradients(gradients)
        try:
            return _Streamed(tx, placement, gradients, state, params).run()
        except CannotStream as reason:
            warnings.warn(
                f"the optimizer's state is moved whole, not layer by layer: {reason}; "
                "this needs more device memory than no offload at all",
                MemoptWarning,
                stacklevel=2,
            )
            return whole(gradients, state, params)

    return update


class _Streamed:
    """One update, traced and taken apart."""

    def __init__(
        self, tx: optax.GradientTransformation, placement: StatePlacement, gradients: Any, state: Any, params: Any
    ) -> None:
        self._placement = placement
        trees = (gradients, state, params)
        self._inputs, _ = jax.tree_util.tree_flatten_with_path(trees, is_leaf=is_cut)

        def plain(gradients: Any, state: Any, params: Any) -> tuple[Any, Any]:
            updates, new_state = tx.update(gradients, state, params)
            return optax.apply_updates(params, updates), new_state

        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), trees, is_leaf=is_cut)
        closed, out = jax.make_jaxpr(plain, return_shape=True)(*shapes)
        flat = inlined(closed)
        self._jaxpr: Jaxpr = flat.jaxpr
        self._consts = flat.consts
        self._out_leaves, self._out_structure = jax.tree_util.tree_flatten_with_path(out)
        self._leaves = dict(zip(self._jaxpr.invars, (leaf for _, leaf in self._inputs), strict=True))
        own = {var: self._group(*each) for var, each in zip(self._jaxpr.invars, self._inputs, strict=True)}
        self._own: dict[Any, Group] = {var: group for var, group in own.items() if group is not None}
        self._hosted = {
            var for var, each in zip(self._jaxpr.invars, self._inputs, strict=True) if self._is_hosted(*each)
        }

    def _rows(self, path: Any) -> Mapping[str, Any]:
        place = self._placement
        return (place.grad_rows, place.rows, place.param_rows)[path[0].idx]

    def _is_hosted(self, path: Any, leaf: Any) -> bool:
        """Whether some of an input rests on the host."""
        return is_cut(leaf) or (path[0].idx > 0 and self._placement.rests_on_host(path[1:], leaf, self._rows(path)))

    def _group(self, path: Any, leaf: Any) -> Group | None:
        """The group of a leaf that belongs to a parameter which, or whose state, rests on the host."""
        place = self._placement
        label = place.label_of(path[1:], leaf.shape, self._rows(path)) if leaf.ndim else None
        if label is None:
            return None
        on_host = any(
            label in rows and rows[label].memory_kind == "pinned_host" for rows in (place.rows, place.param_rows)
        )
        if not on_host and label not in place.cuts:
            return None
        length = place.template.length(label)
        return Layer(place.layer_of(label)) if length is None else Stack(length, place.cuts.get(label))

    def run(self) -> tuple[Any, Any]:
        """New parameters and new state.

        Raises:
            CannotStream: With the reason.
        """
        jaxpr = self._jaxpr
        program = taken_apart(jaxpr, self._own, self._hosted)
        ahead = needed_ahead(jaxpr, program, self._hosted)
        env: dict[Any, Any] = {**dict(zip(jaxpr.constvars, self._consts, strict=True)), **self._leaves}
        for eqn in jaxpr.eqns:
            if all(var not in program.groups for var in eqn.outvars) or any(var in ahead for var in eqn.outvars):
                _evaluate(eqn, env)
        groups = {group: self._outputs(program, group) for group in dict.fromkeys(self._own.values())}
        layers = [group for group in groups if isinstance(group, Layer)]
        results = _Layers(jaxpr, env, program, self._hosted, self._rests_on_host).run({g: groups[g] for g in layers})
        for group, outputs in groups.items():
            if isinstance(group, Stack) and outputs:
                targets = {index: self._source(index) for index in outputs}
                results.update(_Loop(jaxpr, env, program, group, targets, self._hosted).run())
        for index, var in enumerate(jaxpr.outvars):
            if index not in results:
                results[index] = var.val if isinstance(var, Literal) else env[var]
        return self._out_structure.unflatten([results[index] for index in range(len(jaxpr.outvars))])

    def _outputs(self, program: Program, group: Group) -> list[int]:
        """Indices of the results that a group makes."""
        outvars = self._jaxpr.outvars
        return [i for i, v in enumerate(outvars) if not isinstance(v, Literal) and program.groups.get(v) == group]

    def _rests_on_host(self, index: int) -> bool:
        # (parameters, state) are outputs 0 and 1.
        path, leaf = self._out_leaves[index]
        rows = (self._placement.param_rows, self._placement.rows)[path[0].idx]
        return self._placement.rests_on_host(path[1:], leaf, rows)

    def _source(self, index: int) -> Any:
        """The input that a stacked result replaces: the same parameter, the same slot of the state.

        Raises:
            CannotStream: There is none.
        """
        # Outputs are (parameters, state); inputs (gradients, state, parameters).
        path, leaf = self._out_leaves[index]
        wanted = ((2, 1)[path[0].idx], leaf_path(path[1:]))
        for var, (source, _) in zip(self._jaxpr.invars, self._inputs, strict=True):
            if (source[0].idx, leaf_path(source[1:])) == wanted:
                return var
        raise CannotStream(f"a result of shape {leaf.shape} replaces no array of the state")


def _evaluate(eqn: Any, env: dict[Any, Any]) -> None:
    inputs = [atom.val if isinstance(atom, Literal) else env[atom] for atom in eqn.invars]
    env.update(zip(eqn.outvars, bind(eqn, inputs), strict=True))


@dataclass
class _Layers:
    """Layers of a Python list, and parameters outside all stacks, one after the other."""

    jaxpr: Jaxpr
    env: Mapping[Any, Any]
    program: Program
    hosted: set[Any]
    rests_on_host: Any

    def run(self, outputs: Mapping[Layer, Sequence[int]]) -> dict[int, Any]:
        """Index of a result -> its value.

        A layer's state is fetched when the update of the last layer but one has ended: two layers are on the device,
        one of them on its way.
        """
        results: dict[int, Any] = {}
        done: list[list[int]] = []
        for layer, indices in outputs.items():
            local = dict(self.env)
            inputs = [var for var in self.jaxpr.invars if self.program.groups.get(var) == layer and var in self.hosted]
            waits_for = done[-2] if len(done) > 1 else []
            held, ended = jax.lax.optimization_barrier(
                ([local[var] for var in inputs], [results[index] for index in waits_for])
            )
            results.update(zip(waits_for, ended, strict=True))
            local.update(zip(inputs, jax.device_put(held, jax.memory.Space.Device), strict=True))
            for eqn in self.jaxpr.eqns:
                if any(self.program.groups.get(var) == layer for var in eqn.outvars):
                    _evaluate(eqn, local)
            for index in indices:
                value = local[self.jaxpr.outvars[index]]
                is_hosted = self.rests_on_host(index)
                results[index] = jax.device_put(value, jax.memory.Space.Host) if is_hosted else value
            done.append(list(indices))
        return results


@dataclass
class _Loop:
    """Loops over the layers of the stacks of one group: those whose state rests on the host, then the others."""

    jaxpr: Jaxpr
    env: Mapping[Any, Any]
    program: Program
    group: Stack
    targets: Mapping[int, Any]
    hosted: set[Any]

    def run(self) -> dict[int, Any]:
        """Index of a result -> its stacked value, in two parts where its input is."""
        results = {index: self.env[var] for index, var in self.targets.items()}
        if self.group.cut is None:
            return self._over(tuple(range(self.group.length)), None, results)
        for part in PARTS:
            results = self._over(self.group.cut.layers(part), part, results)
        return results

    def _over(self, layers: Sequence[int], part: Part | None, results: Mapping[int, Any]) -> dict[int, Any]:
        order = list(self.targets)
        own = {self.targets[index]: place for place, index in enumerate(order)}
        needed = needed_for(self.jaxpr, {self.jaxpr.outvars[index] for index in order}, set(self.jaxpr.invars))
        reads = [var for var in self.jaxpr.invars if var in needed and self.program.groups.get(var) == self.group]
        steps = [e for e in self.jaxpr.eqns if any(v in needed and self._is_inner(v) for v in e.outvars)]

        def body(step: Any, buffers: list[Any]) -> list[Any]:
            local: dict[Any, Any] = {}
            for var in reads:
                whole = buffers[own[var]] if var in own else _part(self.env[var], part)
                value = jax.lax.dynamic_slice_in_dim(whole, self._at(step, var, layers), 1, 0)
                local[var] = jax.device_put(value, jax.memory.Space.Device) if self._fetches(var, part) else value
            for eqn in steps:
                local.update(zip(eqn.outvars, self._step(eqn, local), strict=True))
            out = []
            for index, buffer in zip(order, buffers, strict=True):
                var, new = self.targets[index], local[self.jaxpr.outvars[index]]
                new = jax.device_put(new, jax.memory.Space.Host) if self._fetches(var, part) else new
                out.append(jax.lax.dynamic_update_slice_in_dim(buffer, new, self._at(step, var, layers), 0))
            return out

        buffers = [_part(results[index], part) for index in order]
        made = jax.lax.fori_loop(0, len(layers), body, buffers)
        return {index: _with_part(results[index], part, value) for index, value in zip(order, made, strict=True)}

    def _is_inner(self, var: Any) -> bool:
        return var in self.program.spread or self.program.groups.get(var) == self.group

    def _at(self, step: Any, var: Any, layers: Sequence[int]) -> Any:
        """Where the step's layer lies in an array: counted in its part, or in the whole stack."""
        if is_cut(self.env[var]) or (layers[0] == 0 and layers[-1] == len(layers) - 1):
            return step
        if layers[-1] - layers[0] == len(layers) - 1:
            return step + layers[0]
        return jnp.asarray(layers)[step]

    def _fetches(self, var: Any, part: Part | None) -> bool:
        return part == "host" if is_cut(self.env[var]) else var in self.hosted

    def _step(self, eqn: Any, local: Mapping[Any, Any]) -> list[Any]:
        inputs = [a.val if isinstance(a, Literal) else local[a] if a in local else self.env[a] for a in eqn.invars]
        if eqn.primitive.name == "broadcast_in_dim":
            return [jnp.broadcast_to(inputs[0], (1, *eqn.outvars[0].aval.shape[1:]))]
        return bind(eqn, inputs)


def _part(array: Any, part: Part | None) -> Any:
    return array.part(part) if isinstance(array, CutArray) and part is not None else array


def _with_part(array: Any, part: Part | None, value: Any) -> Any:
    if not isinstance(array, CutArray):
        return value
    cut: Cut = array.cut
    return CutArray(value, array.device, cut) if part == "host" else CutArray(array.host, value, cut)

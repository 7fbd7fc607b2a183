"""The optimizer's update one layer at a time, so that offloaded state of one layer at most is on the device.

An optax update is an opaque function over whole trees; its program is not. It is traced once, and the equations that
act element by element on a stacked array are run inside a loop over the stacking axis, each layer's state fetched
before and sent back after. What needs whole arrays first (a global norm for clipping) is computed before the loop,
from the gradients, which are on the device anyway. A transformation that mixes the elements of an array, or needs
norms of the state itself, cannot be cut: it is named and its state is moved whole.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from memopt.errors import MemoptWarning

from .optimizer import StatePlacement, Update, whole_update
from .placement import leaf_path
from .rewrite import bind

_POINTWISE = frozenset({
    "add", "add_any", "sub", "mul", "div", "max", "min", "pow", "integer_pow", "sqrt", "rsqrt", "cbrt", "exp",
    "exp2", "log", "log1p", "expm1", "tanh", "logistic", "neg", "sign", "abs", "square", "select_n", "eq", "ne",
    "lt", "le", "gt", "ge", "and", "or", "not", "xor", "convert_element_type", "is_finite", "floor", "ceil",
    "round", "clamp", "erf", "copy", "copy_p", "stop_gradient", "real_p", "nextafter", "rem", "sin", "cos", "name",
    "reduce_precision",
})  # fmt: skip
"""Primitives that act element by element."""
_INLINED = frozenset({"jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call"})


class CannotStream(Exception):
    """Why an update cannot be cut along layers; handled by moving the state whole."""


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
    """One update, traced and cut."""

    def __init__(
        self, tx: optax.GradientTransformation, placement: StatePlacement, gradients: Any, state: Any, params: Any
    ) -> None:
        self._inputs, self._structure = jax.tree_util.tree_flatten_with_path((gradients, state, params))
        self._placement = placement

        def plain(gradients: Any, state: Any, params: Any) -> tuple[Any, Any]:
            updates, new_state = tx.update(gradients, state, params)
            return optax.apply_updates(params, updates), new_state

        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), (gradients, state, params))
        closed, out = jax.make_jaxpr(plain, return_shape=True)(*shapes)
        flat = _inlined(closed)
        self._jaxpr: Jaxpr = flat.jaxpr
        self._consts = flat.consts
        self._out_leaves, self._out_structure = jax.tree_util.tree_flatten_with_path(out)
        self._hosted = [self._is_hosted(path, leaf) for path, leaf in self._inputs]
        self._stacked = [self._is_stacked(path, leaf) for path, leaf in self._inputs]

    def _rows(self, path: Any) -> Mapping[str, Any]:
        place = self._placement
        return (place.grad_rows, place.rows, place.param_rows)[path[0].idx]

    def _is_hosted(self, path: Any, leaf: Any) -> bool:
        return path[0].idx > 0 and self._placement.rests_on_host(path[1:], leaf, self._rows(path))

    def _is_stacked(self, path: Any, leaf: Any) -> bool:
        """Whether a leaf belongs to a scanned stack some of whose state rests on the host."""
        rows = self._rows(path)
        label = self._placement.label_of(path[1:], leaf.shape, rows) if leaf.ndim else None
        if label is None or self._placement.template.length(label) is None:
            return False
        place = self._placement
        return any(label in r and r[label].memory_kind == "pinned_host" for r in (place.rows, place.param_rows))

    def run(self) -> tuple[Any, Any]:
        """New parameters and new state.

        Raises:
            CannotStream: With the reason.
        """
        jaxpr = self._jaxpr
        stacked = {v for v, is_stacked in zip(jaxpr.invars, self._stacked, strict=True) if is_stacked}
        hosted = {v for v, is_hosted in zip(jaxpr.invars, self._hosted, strict=True) if is_hosted}
        inside = _inside(jaxpr, stacked)
        ahead = _needed_ahead(jaxpr, inside, hosted & stacked, stacked)
        env: dict[Any, Any] = dict(zip(jaxpr.constvars, self._consts, strict=True))
        device = jax.memory.Space.Device
        for var, (_, leaf), is_hosted, is_stacked in zip(
            jaxpr.invars, self._inputs, self._hosted, self._stacked, strict=True
        ):
            env[var] = jax.device_put(leaf, device) if is_hosted and not is_stacked else leaf
        for eqn in jaxpr.eqns:
            if all(var not in inside for var in eqn.outvars) or any(var in ahead for var in eqn.outvars):
                outs = bind(eqn, [a.val if isinstance(a, Literal) else env[a] for a in eqn.invars])
                env.update(zip(eqn.outvars, outs, strict=True))
        results = self._loops(env, inside, stacked)
        return self._out_structure.unflatten(results)

    def _loops(self, env: dict[Any, Any], inside: Mapping[Any, int], stacked: set[Any]) -> list[Any]:
        """Every result: whole ones from `env`, stacked ones from one loop per stack length."""
        jaxpr = self._jaxpr
        targets = self._targets(stacked)
        values: dict[int, Any] = {
            index: (env[var] if not isinstance(var, Literal) else var.val)
            for index, var in enumerate(jaxpr.outvars)
            if index not in targets
        }
        for length in sorted({inside[jaxpr.outvars[index]] for index in targets}):
            own = {index: source for index, source in targets.items() if inside[jaxpr.outvars[index]] == length}
            values.update(
                _Loop(jaxpr, env, inside, length, own, dict(zip(jaxpr.invars, self._hosted, strict=True))).run()
            )
        for index, (path, leaf) in enumerate(self._out_leaves):
            # Results of whole leaves that rest on the host go back there; (parameters, state) are outputs 0 and 1.
            rows = (self._placement.param_rows, self._placement.rows)[path[0].idx]
            if index not in targets and self._placement.rests_on_host(path[1:], leaf, rows):
                values[index] = jax.device_put(values[index], jax.memory.Space.Host)
        return [values[index] for index in range(len(jaxpr.outvars))]

    def _targets(self, stacked: set[Any]) -> dict[int, Any]:
        """Index of a stacked result -> the input it replaces (the same parameter, the same slot of the state)."""
        # Outputs are (parameters, state); inputs (gradients, state, parameters).
        sources = {
            (path[0].idx, leaf_path(path[1:])): var
            for var, (path, _) in zip(self._jaxpr.invars, self._inputs, strict=True)
        }
        targets = {}
        for index, (path, _) in enumerate(self._out_leaves):
            source = sources.get(((2, 1)[path[0].idx], leaf_path(path[1:])))
            if source in stacked:
                targets[index] = source
        return targets


@dataclass
class _Loop:
    """A loop over the layers of the stacks of one length."""

    jaxpr: Jaxpr
    env: Mapping[Any, Any]
    inside: Mapping[Any, int]
    length: int
    targets: Mapping[int, Any]
    hosted: Mapping[Any, bool]

    def run(self) -> dict[int, Any]:
        """Index of a result -> its stacked value."""
        order = list(self.targets)
        buffers = [self.env[self.targets[index]] for index in order]
        reads = [var for var in self.jaxpr.invars if self.inside.get(var) == self.length]
        position = {self.targets[index]: place for place, index in enumerate(order)}

        def body(layer: Any, buffers: list[Any]) -> list[Any]:
            local: dict[Any, Any] = {}
            for var in reads:
                whole = buffers[position[var]] if var in position else self.env[var]
                local[var] = self._fetched(var, jax.lax.dynamic_slice_in_dim(whole, layer, 1, 0))
            self._evaluate(local)
            out = []
            for place, index in enumerate(order):
                new = local[self.jaxpr.outvars[index]]
                if self.hosted[self.targets[index]]:
                    new = jax.device_put(new, jax.memory.Space.Host)
                out.append(jax.lax.dynamic_update_slice_in_dim(buffers[place], new, layer, 0))
            return out

        return dict(zip(order, jax.lax.fori_loop(0, self.length, body, buffers), strict=True))

    def _fetched(self, var: Any, value: Any) -> Any:
        return jax.device_put(value, jax.memory.Space.Device) if self.hosted[var] else value

    def _evaluate(self, local: dict[Any, Any]) -> None:
        for eqn in self.jaxpr.eqns:
            if any(self.inside.get(var) == self.length for var in eqn.outvars):
                inputs = [self._input(atom, local) for atom in eqn.invars]
                if eqn.primitive.name == "broadcast_in_dim":
                    outs = [jnp.broadcast_to(inputs[0], (1, *_aval(eqn.outvars[0]).shape[1:]))]
                else:
                    outs = bind(eqn, inputs)
                local.update(zip(eqn.outvars, outs, strict=True))

    def _input(self, atom: Any, local: Mapping[Any, Any]) -> Any:
        if isinstance(atom, Literal):
            return atom.val
        if atom in local:
            return local[atom]
        return self.env[atom]


def _aval(atom: Any) -> Any:
    return atom.aval


def _inside(jaxpr: Jaxpr, stacked: set[Any]) -> dict[Any, int]:
    """Values that are made layer by layer -> the stack's length: stacked inputs and what is pointwise in them.

    Raises:
        CannotStream: A stacked value enters an equation that mixes its elements and is no full reduction.
    """
    inside = {var: _aval(var).shape[0] for var in stacked}
    for eqn in jaxpr.eqns:
        own = [atom for atom in eqn.invars if not isinstance(atom, Literal) and atom in inside]
        name = eqn.primitive.name
        if not own:
            if name == "broadcast_in_dim" and not _aval(eqn.invars[0]).shape and _aval(eqn.outvars[0]).ndim:
                # A scalar spread over a whole array: made layer by layer where a stacked value meets it.
                shape = _aval(eqn.outvars[0]).shape
                if any(_aval(var).shape == shape for var in stacked):
                    inside[eqn.outvars[0]] = shape[0]
            continue
        shapes = {_aval(atom).shape for atom in own}
        others = [a for a in eqn.invars if (isinstance(a, Literal) or a not in inside) and getattr(_aval(a), "ndim", 0)]
        if name in _POINTWISE and len(shapes) == 1 and not others:
            inside.update(dict.fromkeys(eqn.outvars, inside[own[0]]))
        elif not all(_aval(var).ndim == 0 for var in eqn.outvars):
            raise CannotStream(f"`{name}` mixes the elements of an array of shape {next(iter(shapes))}")
    return inside


def _needed_ahead(jaxpr: Jaxpr, inside: Mapping[Any, int], hosted: set[Any], stacked: set[Any]) -> set[Any]:
    """Layer-wise values that scalars depend on (norms): they are computed whole, before the loop.

    Raises:
        CannotStream: Such a value depends on state that rests on the host.
    """
    wanted: set[Any] = set()
    for eqn in reversed(jaxpr.eqns):
        is_scalar = all(var not in inside for var in eqn.outvars)
        if is_scalar or any(var in wanted for var in eqn.outvars):
            wanted |= {atom for atom in eqn.invars if not isinstance(atom, Literal) and atom in inside}
    blocked = wanted & hosted
    if blocked:
        raise CannotStream("a norm or sum over the optimizer's own state is needed before any layer can be updated")
    return wanted - stacked


def _inlined(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The program with nested calls put in line, so that every equation is a plain one."""
    return jax.make_jaxpr(lambda *args: _run(closed.jaxpr, closed.consts, args))(
        *[jax.ShapeDtypeStruct(_aval(var).shape, _aval(var).dtype) for var in closed.jaxpr.invars]
    )


def _run(jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    env: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
    for eqn in jaxpr.eqns:
        inputs = [atom.val if isinstance(atom, Literal) else env[atom] for atom in eqn.invars]
        inner = next((eqn.params[key] for key in ("jaxpr", "call_jaxpr") if key in eqn.params), None)
        if eqn.primitive.name in _INLINED and isinstance(inner, ClosedJaxpr):
            outs = _run(inner.jaxpr, inner.consts, inputs)
        else:
            outs = bind(eqn, inputs)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [atom.val if isinstance(atom, Literal) else env[atom] for atom in jaxpr.outvars]

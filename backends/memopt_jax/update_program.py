"""The program of an optimizer's update: which values belong to one layer alone, and which are needed before any layer.

An optax update is an opaque function over whole trees; its program is not. Values that depend on the arrays of one
layer only can be made when that layer's turn comes. In a scanned stack, whose layers are one array, those are the
values that are made element by element.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

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


@dataclass(frozen=True)
class Stack:
    """The layers of scanned stacks of one length, whose state rests alike (`cut` says where, None: as a whole)."""

    length: int
    cut: Any = None


@dataclass(frozen=True)
class Layer:
    """Arrays that are fetched and sent back together: a layer of a Python list, or a parameter outside all stacks."""

    name: str


Group = Stack | Layer


@dataclass(frozen=True)
class Program:
    """An update's program, taken apart.

    Attributes:
        groups: Values that are made when their group's turn comes.
        spread: Arrays that are made of scalars alone: any group makes the part of them it needs.
    """

    groups: Mapping[Any, Group]
    spread: frozenset[Any]


def taken_apart(jaxpr: Jaxpr, own: Mapping[Any, Group], hosted: set[Any]) -> Program:
    """The groups of all values: of the inputs in `own`, and of what depends on one group alone.

    Scalars are in a group only where they depend on what rests on the host; others (sums of gradients) are for all.

    Raises:
        CannotStream: An equation mixes groups, or the elements of a stacked array, and gives no scalars.
    """
    groups, spread, late = dict(own), set[Any](), set(hosted)
    for eqn in jaxpr.eqns:
        inputs = [atom for atom in eqn.invars if not isinstance(atom, Literal) and atom in groups]
        if not inputs:
            if _is_spread(eqn, spread):
                spread.update(eqn.outvars)
            continue
        group = groups[inputs[0]]
        is_one = len({groups[atom] for atom in inputs}) == 1
        is_scalar = all(_aval(var).ndim == 0 for var in eqn.outvars)
        is_late = any(not isinstance(atom, Literal) and atom in late for atom in eqn.invars)
        if is_late:
            late.update(eqn.outvars)
        if is_scalar and not is_late:
            continue
        if is_one and (isinstance(group, Layer) or _is_pointwise(eqn, inputs, spread)):
            groups.update(dict.fromkeys(eqn.outvars, group))
        elif not is_scalar:
            what = f"the elements of an array of shape {_aval(inputs[0]).shape}" if is_one else "different layers"
            raise CannotStream(f"`{eqn.primitive.name}` mixes {what}")
    return Program(groups, frozenset(spread))


def _is_pointwise(eqn: Any, inputs: Sequence[Any], spread: set[Any]) -> bool:
    """Whether an equation acts element by element on `inputs`, and all else it reads is spread or scalar."""
    shapes = {_aval(atom).shape for atom in inputs}
    others = [atom for atom in eqn.invars if getattr(_aval(atom), "ndim", 0) and not any(atom is own for own in inputs)]
    is_free = all(not isinstance(atom, Literal) and atom in spread for atom in others)
    return eqn.primitive.name in _POINTWISE and len(shapes) == 1 and is_free


def _is_spread(eqn: Any, spread: set[Any]) -> bool:
    """Whether an equation makes an array of scalars alone."""
    if not all(_aval(var).ndim for var in eqn.outvars):
        return False
    if eqn.primitive.name == "broadcast_in_dim":
        return not _aval(eqn.invars[0]).shape
    arrays = [atom for atom in eqn.invars if getattr(_aval(atom), "ndim", 0)]
    return bool(arrays) and _is_pointwise(eqn, arrays, spread) and all(atom in spread for atom in arrays)


def needed_ahead(jaxpr: Jaxpr, program: Program, hosted: set[Any]) -> set[Any]:
    """Values of groups that scalars of all depend on (norms): they are computed whole, before any group.

    Raises:
        CannotStream: Such a value depends on state that rests on the host.
    """
    wanted, groups = set[Any](), program.groups
    for eqn in reversed(jaxpr.eqns):
        is_outside = all(var not in groups for var in eqn.outvars)
        if is_outside or any(var in wanted for var in eqn.outvars):
            wanted |= {atom for atom in eqn.invars if not isinstance(atom, Literal) and atom in groups}
    if wanted & hosted:
        raise CannotStream("a norm or sum over the optimizer's own state is needed before any layer can be updated")
    return wanted


def needed_for(jaxpr: Jaxpr, targets: set[Any], known: set[Any]) -> set[Any]:
    """Every value that `targets` depend on, themselves included, back to those that are `known`."""
    needed = set(targets)
    for eqn in reversed(jaxpr.eqns):
        if any(var in needed and var not in known for var in eqn.outvars):
            needed |= {atom for atom in eqn.invars if not isinstance(atom, Literal)}
    return needed


def _aval(atom: Any) -> Any:
    return atom.aval


def inlined(closed: ClosedJaxpr) -> ClosedJaxpr:
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

"""Reading a traced program: which values carry which names, what made them, and in which scan.

Names of one value (a module's output, the next module's input, a user's `checkpoint_name`) are found by following
identities through nested programs; every call site is followed on its own, because JAX shares the inner program
between them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from .jaxprs import scan_counts
from .naming import marked_path, module_of
from .remat import RegionPolicy, StackPolicy, UnitPolicy, op_of

_PASS_OP = frozenset({"reshape", "transpose", "convert_element_type", "squeeze", "copy", "copy_p", "broadcast_in_dim"})


@dataclass(eq=False)
class Value:
    """One value of the program.

    Attributes:
        shape, dtype: As inside its innermost scan (no stacking axis).
        scans: Lengths of the scans around it, outermost first.
        names: The names it carries, in program order; a user's own name is prefixed by its module's path and `@`.
        op: `matmul`, `topk`, `random`, or None.
        reshaped: The value it is a reshape of: in memory the same, so it shares the names.
        covered: Whether a name is on it or on what it becomes by a bias, a cast or a change of shape.
        scope: Name stack of the equation that made it.
        constant: Whether it enters a scan's body as a constant, the same for all layers.
        source: The value it is a bias, a cast or a change of shape away from.
        spread: Whether it was broadcast to its shape.
        previous: For what a scan's body receives as carry: the value of the layer before (the body's output).
        initial: For the same: the value the first layer receives.
    """

    shape: tuple[int, ...]
    dtype: str
    scans: tuple[int, ...] = ()
    names: list[str] = field(default_factory=list)
    op: str | None = None
    reshaped: Value | None = None
    covered: bool = False
    source: Value | None = None
    spread: bool = False
    scope: str = ""
    constant: bool = False
    previous: Value | None = None
    initial: Value | None = None


@dataclass
class ScanSite:
    """One scan equation: its length and what the values entering its body are."""

    length: int
    depth: int
    num_consts: int = 0
    num_carry: int = 0
    xs: list[Value] = field(default_factory=list)
    inputs: list[Value] = field(default_factory=list)
    names: list[str] = field(default_factory=list)


@dataclass
class Program:
    """What was read: the values with names, the unnamed ones an `op:` selector reaches, and the scans."""

    named: list[Value] = field(default_factory=list)
    open_scans: list[ScanSite] = field(default_factory=list)
    unnamed_ops: list[Value] = field(default_factory=list)
    scans: list[ScanSite] = field(default_factory=list)
    inputs: list[Value] = field(default_factory=list)
    outputs: list[Value] = field(default_factory=list)


def inner_jaxprs(eqn: Any) -> Iterator[Jaxpr]:
    """The programs nested in an equation's parameters."""
    for value in eqn.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, ClosedJaxpr):
                yield item.jaxpr
            elif isinstance(item, Jaxpr):
                yield item


def equations(jaxpr: Jaxpr) -> Iterator[Any]:
    """Every equation of a program, nested ones included, outer before inner."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in inner_jaxprs(eqn):
            yield from equations(inner)


def is_region(eqn: Any) -> bool:
    """Whether an equation is a recomputed region of ours."""
    return isinstance(eqn.params.get("policy"), UnitPolicy | StackPolicy)


def is_checkpoint(eqn: Any) -> bool:
    """Whether an equation is a `jax.checkpoint`, ours or the user's."""
    return "policy" in eqn.params and "prevent_cse" in eqn.params


def region_policies(jaxpr: Jaxpr) -> list[RegionPolicy]:
    """The policies of every region in a program."""
    return [eqn.params["policy"] for eqn in equations(jaxpr) if is_region(eqn)]


def read(closed: ClosedJaxpr) -> Program:
    """Follow every value of a traced program."""
    program = Program()
    program.inputs = [_value(var) for var in closed.jaxpr.invars]
    consts = [_value(var) for var in closed.jaxpr.constvars]
    program.outputs = _walk(closed.jaxpr, consts, program.inputs, program, (), "")
    return program


def _value(var: Any, scans: tuple[int, ...] = ()) -> Value:
    aval = var.aval
    return Value(tuple(getattr(aval, "shape", ())), str(getattr(aval, "dtype", "")), scans)


def _walk(
    jaxpr: Jaxpr, consts: list[Value], args: list[Value], program: Program, scans: tuple[int, ...], scope: str
) -> list[Value]:
    env: dict[Any, Value] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    def get(atom: Any) -> Value:
        return _value(atom, scans) if isinstance(atom, Literal) else env[atom]

    for eqn in jaxpr.eqns:
        inputs = [get(atom) for atom in eqn.invars]
        # A nested program's name stacks are relative to the equation that calls it.
        here = "/".join(part for part in (scope, str(eqn.source_info.name_stack)) if part)
        outputs = _equation(eqn, inputs, program, scans, here)
        env.update(zip(eqn.outvars, outputs, strict=True))
    return [get(atom) for atom in jaxpr.outvars]


def _equation(eqn: Any, inputs: list[Value], program: Program, scans: tuple[int, ...], scope: str) -> list[Value]:
    primitive = eqn.primitive.name
    if primitive == "name":
        return [_name(inputs[0], eqn.params["name"], program, scans, scope)]
    if primitive == "scan":
        return _scan(eqn, inputs, program, scans, scope)
    inner = _called(eqn)
    if inner is not None and len(inner.jaxpr.invars) == len(inputs):
        consts = [_value(var, scans) for var in inner.jaxpr.constvars]
        outputs = _walk(inner.jaxpr, consts, inputs, program, scans, scope)
        if len(outputs) == len(eqn.outvars):
            return outputs
    elif inner is None:
        for nested in inner_jaxprs(eqn):  # branches and while bodies: their names count, their wiring is not followed
            args = [_value(var, scans) for var in nested.invars]
            _walk(nested, [_value(var, scans) for var in nested.constvars], args, program, scans, scope)
    outputs = [_value(var, scans) for var in eqn.outvars]
    _classify(eqn, inputs, outputs, program, scope)
    return outputs


def _called(eqn: Any) -> ClosedJaxpr | None:
    """The program an equation calls once with its own operands (jit, checkpoint, custom_vjp, custom_jvp, closed
    calls)."""
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        inner = eqn.params.get(key)
        if isinstance(inner, ClosedJaxpr):
            return inner
        if isinstance(inner, Jaxpr) and not inner.constvars:
            return ClosedJaxpr(inner, ())
    return None


def _name(value: Value, name: str, program: Program, scans: tuple[int, ...], scope: str) -> Value:
    value = value if value.reshaped is None else value.reshaped
    if value.scans != scans:
        # A constant of the body seen from inside: the name belongs to the copy in there.
        value = Value(value.shape, value.dtype, scans, op=value.op, scope=value.scope, constant=True)
    source: Value | None = value
    while source is not None and not source.covered:
        source.covered, source = True, source.source
    path = marked_path(name)
    value.names.append(path if path is not None else f"{module_of(scope)}@{name}")
    if value not in program.named:
        program.named.append(value)
    for site in program.open_scans:
        site.names.append(value.names[-1])
    return value


def _scan(eqn: Any, inputs: list[Value], program: Program, scans: tuple[int, ...], scope: str) -> list[Value]:
    length, (num_consts, num_carry) = eqn.params["length"], scan_counts(eqn)
    body = eqn.params["jaxpr"]
    inside = (*scans, length)
    fresh = [_value(var, inside) for var in body.jaxpr.invars]
    carries = fresh[num_consts : num_consts + num_carry]
    for carry, initial in zip(carries, inputs[num_consts : num_consts + num_carry], strict=True):
        carry.initial = initial
    xs = inputs[num_consts + num_carry :]
    site = ScanSite(length, len(inside), num_consts, num_carry, xs, inputs=inputs)
    program.scans.append(site)
    program.open_scans.append(site)
    args = [*inputs[:num_consts], *fresh[num_consts:]]
    outputs = _walk(body.jaxpr, [_value(v, inside) for v in body.jaxpr.constvars], args, program, inside, scope)
    program.open_scans.pop()
    for carry, output in zip(carries, outputs[:num_carry], strict=True):
        carry.previous = output
    results = [_value(var, scans) for var in eqn.outvars]
    for result, output in zip(results[:num_carry], outputs[:num_carry], strict=True):
        result.previous = output  # the last layer's output, for whoever names it afterwards
    return results


def _classify(eqn: Any, inputs: list[Value], outputs: list[Value], program: Program, scope: str) -> None:
    own = op_of(eqn.primitive.name, eqn.params)
    source = _source(eqn.primitive.name, inputs, outputs) if own is None else None
    for value in outputs:
        value.op, value.scope, value.source = own or (source.op if source else None), scope, source
        value.spread = eqn.primitive.name == "broadcast_in_dim"
        if eqn.primitive.name == "reshape" and not value.scans[len(inputs[0].scans) :]:
            value.reshaped = inputs[0].reshaped or inputs[0]
    if own is not None:
        program.unnamed_ops.extend(outputs)


def _source(primitive: str, inputs: list[Value], outputs: list[Value]) -> Value | None:
    """What an output is still the same value as, for a reader: before its bias, cast or change of shape."""
    if primitive in _PASS_OP and inputs:
        return inputs[0]
    if primitive == "add" and len(inputs) == 2:
        whole = [value for value in inputs if value.shape == outputs[0].shape and not value.spread]
        return whole[0] if len(whole) == 1 else None
    return None

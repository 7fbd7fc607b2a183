"""Running a traced program again with its scans cut where the layers of a stack are treated differently.

A scan over L layers with k different treatments becomes a chain of scans over runs of equal layers, or a scan over
groups of n layers where the treatment repeats with period n. No piece is a scan of length 1: XLA unrolls such a loop,
and then eliminates the recomputation as a common subexpression; a single layer runs on its own behind an optimisation
barrier.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from .inner_checkpoints import respected
from .jaxprs import scan_counts
from .remat import CUTTING, StackPolicy, Static
from .values import equations, inner_jaxprs

_MAX_PERIOD = 16


@dataclass(frozen=True)
class Run:
    """Consecutive layers that repeat with a period: `repeats` times the treatments of `period` layers from `start`."""

    start: int
    period: int
    repeats: int

    @property
    def stop(self) -> int:
        """One past the last layer."""
        return self.start + self.period * self.repeats


def runs_of(treatments: Sequence[Any]) -> list[Run]:
    """Cut a sequence of treatments into as few repeating runs as a greedy search finds.

    >>> [(run.start, run.period, run.repeats) for run in runs_of("aaabbb")]
    [(0, 1, 3), (3, 1, 3)]
    >>> [(run.start, run.period, run.repeats) for run in runs_of("ababa")]
    [(0, 2, 2), (4, 1, 1)]
    """
    runs, start = [], 0
    while start < len(treatments):
        run = max(
            (_longest(treatments, start, period) for period in range(1, _MAX_PERIOD + 1)),
            key=lambda run: (run.stop - run.start, -run.period),
        )
        runs.append(run)
        start = run.stop
    return runs


def _longest(treatments: Sequence[Any], start: int, period: int) -> Run:
    repeats = 1
    first = treatments[start : start + period]
    while treatments[start + repeats * period : start + (repeats + 1) * period] == first:
        repeats += 1
    if period > 1 and (repeats == 1 or len(first) < period):
        return Run(start, 1, 1)
    return Run(start, period, repeats)


def has_uncut_stack(jaxpr: Jaxpr) -> bool:
    """Whether a program holds a region whose layers differ."""
    return any(isinstance(eqn.params.get("policy"), StackPolicy) for eqn in equations(jaxpr))


def with_cut_scans(body: Callable[[Any], Any], arguments: Any) -> Any:
    """`body(arguments)` with its scans cut; arrays are traced, other Python values closed over."""
    arrays, rest = Static.split(arguments)
    static_out: list[Static] = []

    def traced(values: list[Any]) -> list[Any]:
        outputs, static = Static.split(body(rest.join(values)))
        static_out.append(static)
        return outputs

    token = CUTTING.set(True)
    try:
        closed = jax.make_jaxpr(traced)(arrays)
    finally:
        CUTTING.reset(token)
    return static_out[-1].join(run(closed, arrays))


def run(closed: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
    """Evaluate a traced program, cutting the scans that need it."""
    return _evaluate(closed.jaxpr, closed.consts, args, None)


def _evaluate(jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any], layer: _Layer | None) -> list[Any]:
    env: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
    for eqn in jaxpr.eqns:
        inputs = [atom.val if isinstance(atom, Literal) else env[atom] for atom in eqn.invars]
        with bind_context(eqn):
            outputs = _equation(eqn, inputs, layer)
        env.update(zip(eqn.outvars, outputs, strict=True))
    return [atom.val if isinstance(atom, Literal) else env[atom] for atom in jaxpr.outvars]


@contextlib.contextmanager
def bind_context(eqn: Any) -> Any:
    """The name stack and configuration under which an equation was traced."""
    scope = str(eqn.source_info.name_stack)
    with eqn.ctx.manager, jax.named_scope(scope) if scope else contextlib.nullcontext():
        yield


def bind(eqn: Any, inputs: Sequence[Any]) -> list[Any]:
    """Evaluate one equation as it stands."""
    outputs = eqn.primitive.bind(*inputs, **eqn.primitive.get_bind_params(eqn.params))
    return list(outputs) if eqn.primitive.multiple_results else [outputs]


@dataclass(frozen=True)
class _Layer:
    """Which layer of a stack a body is being run for."""

    index: int
    prevent_cse: bool


def _equation(eqn: Any, inputs: list[Any], layer: _Layer | None) -> list[Any]:
    policy = eqn.params.get("policy")
    if isinstance(policy, StackPolicy) and layer is not None:
        return _region(eqn, inputs, replace_policy=policy.layers[layer.index], prevent_cse=layer.prevent_cse)
    if not any(has_uncut_stack(inner) for inner in inner_jaxprs(eqn)):
        return bind(eqn, inputs)
    if eqn.primitive.name == "scan":
        return _scan(eqn, inputs)
    inner = eqn.params.get("jaxpr")
    if eqn.primitive.name in ("jit", "pjit", "closed_call") and isinstance(inner, ClosedJaxpr):
        return _evaluate(inner.jaxpr, inner.consts, inputs, layer)
    return bind(eqn, inputs)  # not reachable from here: differentiating the region says so


def _region(eqn: Any, inputs: list[Any], *, replace_policy: Any, prevent_cse: bool) -> list[Any]:
    jaxpr = eqn.params["jaxpr"]

    def body(values: list[Any]) -> list[Any]:
        return _evaluate(jaxpr, (), values, None)

    region = respected(body) if replace_policy.unnamed == "keep" else body
    return list(jax.checkpoint(region, policy=replace_policy, prevent_cse=prevent_cse)(list(inputs)))


def _scan(eqn: Any, inputs: list[Any]) -> list[Any]:
    num_consts, num_carry = scan_counts(eqn)
    body = eqn.params["jaxpr"]
    consts, carry, xs = (
        inputs[:num_consts],
        inputs[num_consts : num_consts + num_carry],
        inputs[num_consts + num_carry :],
    )

    def layer_step(layer: _Layer | None, carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
        outputs = _evaluate(body.jaxpr, body.consts, [*consts, *carry, *x], layer)
        return outputs[:num_carry], outputs[num_carry:]

    stacks = _own_stacks(body.jaxpr)
    length, reverse = eqn.params["length"], eqn.params["reverse"]
    if not stacks:
        carry, ys = jax.lax.scan(
            lambda c, x: layer_step(None, c, x), carry, xs, length=length, reverse=reverse, unroll=eqn.params["unroll"]
        )
        return [*carry, *ys]
    pieces: list[list[Any]] = []
    runs = runs_of(list(zip(*(policy.layers for policy in stacks), strict=True)))
    for piece in reversed(runs) if reverse else runs:
        carry, ys = _run_piece(piece, layer_step, carry, xs, reverse=reverse)
        pieces.append(ys)
    if reverse:
        pieces.reverse()
    return [*carry, *(jnp.concatenate(parts) if len(parts) > 1 else parts[0] for parts in zip(*pieces, strict=True))]  # pyright: ignore[reportGeneralTypeIssues]


def _own_stacks(jaxpr: Jaxpr) -> list[StackPolicy]:
    """The stacks whose layers are this body's iterations: those not inside a further scan."""
    found = []
    for eqn in jaxpr.eqns:
        policy = eqn.params.get("policy")
        if isinstance(policy, StackPolicy):
            found.append(policy)
        elif eqn.primitive.name != "scan":
            for inner in inner_jaxprs(eqn):
                found.extend(_own_stacks(inner))
    return found


def _run_piece(
    piece: Run, step: Callable[..., tuple[list[Any], list[Any]]], carry: list[Any], xs: list[Any], *, reverse: bool
) -> tuple[list[Any], list[Any]]:
    part = [jax.lax.slice_in_dim(x, piece.start, piece.stop) for x in xs]
    if piece.repeats == 1:
        layer = _Layer(piece.start, prevent_cse=True)
        carry, ys = step(layer, carry, [jnp.squeeze(x, 0) for x in part])
        return carry, [y[None] for y in ys]
    layers = [_Layer(piece.start + offset, prevent_cse=False) for offset in range(piece.period)]
    if piece.period == 1:
        return jax.lax.scan(lambda c, x: step(layers[0], c, x), carry, part, reverse=reverse)

    def group(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
        order = reversed(list(enumerate(layers))) if reverse else enumerate(layers)
        ys: dict[int, list[Any]] = {}
        for offset, layer in order:
            carry, ys[offset] = step(layer, carry, [value[offset] for value in x])
        return carry, [jnp.stack(values) for values in zip(*(ys[offset] for offset in sorted(ys)), strict=True)]

    grouped = [x.reshape(piece.repeats, piece.period, *x.shape[1:]) for x in part]
    carry, ys = jax.lax.scan(group, carry, grouped, reverse=reverse)
    return carry, [y.reshape(piece.repeats * piece.period, *y.shape[2:]) for y in ys]

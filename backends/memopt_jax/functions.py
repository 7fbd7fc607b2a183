"""A policy on a plain function `loss_fn(params, batch)`: its program is traced, rewritten and run in the function's
place.

Units are the scans over stacked parameters; a stack is called after the parameters' common path (`layers`), or
`layers` where they have none. Values are called after the name scopes they were made in, relative to the layer, and
the primitive that made them (`layers.3.attn.dot_general`, a second one in the same scope `...dot_general[1]`). A
Python loop leaves no trace of where a layer begins: such a function has no units.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from memopt.spec import ModelSpec, ModuleSpec, StackSpec, TensorSpec

from .inventory import Parameter, canonical_path, parameter_rows
from .jaxprs import scan_counts
from .naming import mark_name
from .placement import existing_sharding
from .remat import Region, op_of, run_region
from .rewrite import bind, bind_context
from .values import inner_jaxprs

_CALLS = frozenset({"jit", "pjit", "closed_call"})
_SAME_VALUE = frozenset({"convert_element_type", "copy", "copy_p", "sharding_constraint", "optimization_barrier"})
DEFAULT_STACK = "layers"


@dataclass(frozen=True)
class LayerScan:
    """One scan over stacked parameters.

    Attributes:
        order: Its place among the program's layer scans.
        path: Canonical path of the stack.
        length: How many layers.
        xs: Place among the scanned inputs -> index of the parameter.
        body: The layer's program.
        num_consts, num_carry: How the body's inputs are split.
    """

    order: int
    path: str
    length: int
    xs: Mapping[int, int]
    body: ClosedJaxpr
    num_consts: int
    num_carry: int


def layer_scans(closed: ClosedJaxpr, parameters: Sequence[str]) -> list[LayerScan]:
    """The scans over parameters; `parameters` are the raw paths of the program's first inputs.

    A stack that is scanned again (once per micro-batch, say) is the same stack there: one path, several scans.
    """
    found: list[LayerScan] = []
    used: Counter[str] = Counter()

    def visit(jaxpr: Jaxpr, sources: Mapping[Any, int]) -> None:
        known = dict(sources)
        for eqn in jaxpr.eqns:
            own = [None if isinstance(atom, Literal) else known.get(atom) for atom in eqn.invars]
            name = eqn.primitive.name
            if name == "scan":
                add(eqn, own)
            elif name in _CALLS:
                inner = eqn.params["jaxpr"].jaxpr
                visit(inner, {var: source for var, source in zip(inner.invars, own, strict=True) if source is not None})
            elif name in _SAME_VALUE and own[0] is not None:
                known[eqn.outvars[0]] = own[0]

    def add(eqn: Any, sources: Sequence[int | None]) -> None:
        num_consts, num_carry = scan_counts(eqn)
        xs = {i: source for i, source in enumerate(sources[num_consts + num_carry :]) if source is not None}
        if not xs:
            return
        again = next((scan.path for scan in found if set(scan.xs.values()) == set(xs.values())), None)
        name = again or new_name(_common_path([parameters[source] for source in xs.values()]) or DEFAULT_STACK)
        length = eqn.params["length"]
        found.append(LayerScan(len(found), name, length, xs, eqn.params["jaxpr"], num_consts, num_carry))

    def new_name(path: str) -> str:
        used[path] += 1
        return path if used[path] == 1 else f"{path}_{used[path] - 1}"

    visit(closed.jaxpr, dict(zip(closed.jaxpr.invars, range(len(parameters)), strict=False)))
    return found


def _first_uses(scans: Sequence[LayerScan]) -> list[LayerScan]:
    """One scan of each stack."""
    first: dict[str, LayerScan] = {}
    for scan in scans:
        first.setdefault(scan.path, scan)
    return list(first.values())


def _common_path(paths: Sequence[str]) -> str:
    parts = [path.split(".")[:-1] for path in paths]
    common = []
    for level in zip(*parts, strict=False):
        if len(set(level)) > 1:
            break
        common.append(level[0])
    return canonical_path(".".join(common)) if common else ""


def inspect(fn: Callable[..., Any], params: Any, inputs: tuple[Any, ...]) -> ModelSpec:
    """The inventory, from one abstract trace; parameters of a stack are called after it."""
    closed, raw, leaves = _traced(fn, params, inputs)
    scans = _first_uses(layer_scans(closed, raw))
    stack_of = {source: scan for scan in scans for source in scan.xs.values()}
    tensors: list[TensorSpec] = []
    for index, (path, leaf) in enumerate(zip(raw, leaves, strict=True)):
        sharding, sizes = existing_sharding(leaf)
        scan = stack_of.get(index)
        lengths = {} if scan is None else {scan.path: scan.length}
        parameter = Parameter(
            path, _stacked_path(path, scan), tuple(leaf.shape), str(leaf.dtype), sharding=sharding, axis_sizes=sizes
        )
        tensors.extend(parameter_rows(parameter, lengths))
    for scan in scans:
        for layer in range(scan.length):
            tensors.extend(_values(scan, layer))
    name = getattr(fn, "__name__", type(fn).__name__)
    layers = [
        ModuleSpec(f"{scan.path}.{i}", f"{scan.path}.{i}", "scan", 0) for scan in scans for i in range(scan.length)
    ]
    return ModelSpec(
        backend="jax",
        family=None,
        tensors=tuple(tensors),
        modules=(ModuleSpec("", "", name, 0), *layers),
        stacks=tuple(StackSpec(scan.path, scan.length, "scan", "scan") for scan in scans),
        batch="global",
    )


def _stacked_path(raw: str, scan: LayerScan | None) -> str:
    path = canonical_path(raw)
    if scan is None or path.startswith(scan.path + "."):
        return path
    return f"{scan.path}.{path}"


def _traced(fn: Callable[..., Any], params: Any, inputs: tuple[Any, ...]) -> tuple[ClosedJaxpr, list[str], list[Any]]:
    paths, _ = jax.tree_util.tree_flatten_with_path(params)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), (params, *inputs))
    closed = jax.make_jaxpr(fn)(*shapes)
    return closed, [raw_path(path) for path, _ in paths], [leaf for _, leaf in paths]


def raw_path(path: Sequence[Any]) -> str:
    """The dotted path of a parameter in its tree."""
    return ".".join(str(getattr(e, "key", getattr(e, "idx", getattr(e, "name", e)))) for e in path)


def _values(scan: LayerScan, layer: int) -> list[TensorSpec]:
    """The values of one layer: its carried inputs, and what an operation made."""
    prefix = f"{scan.path}.{layer}"
    rows = []
    for path, var in carried(scan):
        name = f"{prefix}.{path}"
        rows.append(TensorSpec(name, "activation", tuple(var.aval.shape), str(var.aval.dtype), module=prefix))
    for made in made_values(scan.body.jaxpr):
        name = f"{prefix}.{made.path}"
        rows.append(
            TensorSpec(
                name,
                "activation",
                made.shape,
                made.dtype,
                module=name.rpartition(".")[0],
                op=made.op,
                checkpoint_name=made.checkpoint_name,
            )
        )
    return rows


def carried(scan: LayerScan) -> list[tuple[str, Any]]:
    """`input`, `input[1]`, ... and the body's variables for what a layer receives from the one before; no scalars."""
    variables = scan.body.jaxpr.invars[scan.num_consts : scan.num_consts + scan.num_carry]
    arrays = [var for var in variables if getattr(var.aval, "ndim", 0)]
    return [("input" if i == 0 else f"input[{i}]", var) for i, var in enumerate(arrays)]


@dataclass(frozen=True)
class Made:
    """A value of a layer that a rule can name.

    Attributes:
        path: Relative to the layer.
        equation: Where in the body's equations, nested calls counted through (see `made_values`).
        shape, dtype: Of the value.
        op: Its `op:` class, or None.
        checkpoint_name: The name the user gave it, or None.
    """

    path: str
    equation: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    op: str | None
    checkpoint_name: str | None


def made_values(jaxpr: Jaxpr) -> list[Made]:
    """Matrix products, top-k, random draws and values with a `checkpoint_name`, in program order; calls are entered."""
    found: list[Made] = []
    seen: Counter[str] = Counter()

    def visit(jaxpr: Jaxpr, place: tuple[int, ...], scope: tuple[str, ...]) -> None:
        for index, eqn in enumerate(jaxpr.eqns):
            here = (*scope, *(part for part in str(eqn.source_info.name_stack).split("/") if part))
            name = eqn.primitive.name
            if name in _CALLS:
                visit(eqn.params["jaxpr"].jaxpr, (*place, index), here)
                continue
            op = op_of(name, eqn.params)
            user = eqn.params["name"] if name == "name" else None
            aval: Any = eqn.outvars[0].aval if eqn.outvars else None
            if (op is None and user is None) or not getattr(aval, "ndim", 0):
                continue
            path = ".".join((*(_clean(part) for part in here), user or name))
            seen[path] += 1
            numbered = path if seen[path] == 1 else f"{path}[{seen[path] - 1}]"
            found.append(Made(numbered, (*place, index), tuple(aval.shape), str(aval.dtype), op, user))

    visit(jaxpr, (), ())
    return found


def _clean(part: str) -> str:
    """A name scope as one part of a dotted path."""
    return part.replace(".", "_").replace("*", "_")


class PolicyFunction:
    """Stands in for the function: same call, same result, under the policy."""

    def __init__(
        self,
        fn: Callable[..., Any],
        regions: Callable[[], Mapping[str, Region] | None],
        active: Callable[[], frozenset[str]],
    ) -> None:
        self._fn = fn
        self._regions = regions
        self._active = active

    def __call__(self, params: Any, *inputs: Any) -> Any:
        """The function's result."""
        regions = self._regions()
        if regions is None:
            return self._fn(params, *inputs)
        leaves, _ = jax.tree.flatten((params, *inputs))
        paths, _ = jax.tree_util.tree_flatten_with_path(params)
        # Traced as if all were on the device: what rests on the host is fetched inside the layer, not by the function.
        shapes = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf)), (params, *inputs)
        )
        closed, shape = jax.make_jaxpr(self._fn, return_shape=True)(*shapes)
        scans = layer_scans(closed, [raw_path(path) for path, _ in paths])
        rewriter = _Rewriter(scans, regions, self._active(), [raw_path(path) for path, _ in paths])
        return jax.tree.structure(shape).unflatten(rewriter.run(closed, leaves))


class _Rewriter:
    """Runs a program with its layer scans' bodies as regions."""

    def __init__(
        self,
        scans: Sequence[LayerScan],
        regions: Mapping[str, Region],
        active: frozenset[str],
        parameters: Sequence[str],
    ) -> None:
        self._scans = {id(scan.body): scan for scan in scans}
        self._regions = regions
        self._active = active
        self._parameters = parameters

    def run(self, closed: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
        """The program's results."""
        own = dict(self._regions.get("", Region(None, prevent_cse=True)).weights)
        ready = [
            own[canonical_path(path)].use(arg) if canonical_path(path) in own else arg
            for path, arg in zip(self._parameters, args, strict=False)
        ]
        return self._program(closed.jaxpr, closed.consts, [*ready, *args[len(ready) :]])

    def _program(self, jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        env: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
        for eqn in jaxpr.eqns:
            inputs = [atom.val if isinstance(atom, Literal) else env[atom] for atom in eqn.invars]
            with bind_context(eqn):
                outputs = self._equation(eqn, inputs)
            env.update(zip(eqn.outvars, outputs, strict=True))
        return [atom.val if isinstance(atom, Literal) else env[atom] for atom in jaxpr.outvars]

    def _equation(self, eqn: Any, inputs: list[Any]) -> list[Any]:
        name = eqn.primitive.name
        if name == "scan" and id(eqn.params["jaxpr"]) in self._scans:
            scan = self._scans[id(eqn.params["jaxpr"])]
            region = self._regions.get(f"{scan.path}.*")
            if region is not None:
                return self._scan(eqn, inputs, scan, region)
        holds = any(id(e.params.get("jaxpr")) in self._scans for nested in inner_jaxprs(eqn) for e in _all(nested))
        if name in _CALLS and holds:
            return self._program(eqn.params["jaxpr"].jaxpr, eqn.params["jaxpr"].consts, inputs)
        return bind(eqn, inputs)

    def _scan(self, eqn: Any, inputs: list[Any], scan: LayerScan, region: Region) -> list[Any]:
        num_consts, num_carry = scan.num_consts, scan.num_carry
        consts, carry, xs = (
            inputs[:num_consts],
            inputs[num_consts : num_consts + num_carry],
            inputs[num_consts + num_carry :],
        )
        weights = dict(region.weights)
        plans = {place: weights.get(self._relative(scan, source)) for place, source in scan.xs.items()}
        names = {made.equation: f"{scan.path}.*.{made.path}" for made in made_values(scan.body.jaxpr)}
        carry_names = {var: f"{scan.path}.*.{path}" for path, var in carried(scan)}

        def body(arguments: Any) -> list[Any]:
            consts, carry, x = arguments
            x = [value if (plan := plans.get(place)) is None else plan.use(value) for place, value in enumerate(x)]
            variables = scan.body.jaxpr.invars[num_consts : num_consts + num_carry]
            carry = [self._marked(value, carry_names.get(var)) for var, value in zip(variables, carry, strict=True)]
            return self._layer(scan.body.jaxpr, scan.body.consts, [*consts, *carry, *x], names, ())

        def step(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
            out = run_region(body, (consts, carry, x), policy=region.policy, prevent_cse=region.prevent_cse)
            return out[:num_carry], out[num_carry:]

        reverse, length = eqn.params["reverse"], eqn.params["length"]
        carry, ys = jax.lax.scan(step, carry, xs, length=length, reverse=reverse, unroll=eqn.params["unroll"])
        return [*carry, *ys]

    def _relative(self, scan: LayerScan, source: int) -> str:
        return _stacked_path(self._parameters[source], scan).removeprefix(scan.path + ".")

    def _marked(self, value: Any, path: str | None) -> Any:
        return checkpoint_name(value, mark_name(path)) if path in self._active else value

    def _layer(
        self, jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any], names: Mapping[Any, str], place: tuple[int, ...]
    ) -> list[Any]:
        env: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
        for index, eqn in enumerate(jaxpr.eqns):
            inputs = [atom.val if isinstance(atom, Literal) else env[atom] for atom in eqn.invars]
            here = (*place, index)
            with bind_context(eqn):
                if eqn.primitive.name in _CALLS and any(other[: len(here)] == here for other in names):
                    inner = eqn.params["jaxpr"]
                    outputs = self._layer(inner.jaxpr, inner.consts, inputs, names, here)
                else:
                    outputs = bind(eqn, inputs)
                    outputs[:1] = [self._marked(value, names.get(here)) for value in outputs[:1]]
            env.update(zip(eqn.outvars, outputs, strict=True))
        return [atom.val if isinstance(atom, Literal) else env[atom] for atom in jaxpr.outvars]


def _all(jaxpr: Jaxpr) -> list[Any]:
    return [eqn for outer in jaxpr.eqns for eqn in (outer, *(e for inner in inner_jaxprs(outer) for e in _all(inner)))]

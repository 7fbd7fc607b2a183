"""Regions: a unit's body under `jax.checkpoint`, whose policy keeps, offloads or recomputes each named value.

JAX asks a checkpoint policy once per equation and caches the answer on (jaxpr, policy), so policies here are frozen
values. A scan's body is traced once for all layers: where layers differ, the region first carries a `StackPolicy`,
which `rewrite.py` resolves by cutting the scan; differentiating an unresolved one is an error, never a silent default.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
from jax.ad_checkpoint import Offloadable, Recompute, Saveable

from memopt.errors import MemoptError
from memopt.plan import Residual

from .naming import is_array
from .weights import WeightPlan

_PRIMITIVES: Mapping[str, str] = {
    "dot_general": "matmul",
    "conv_general_dilated": "matmul",
    "ragged_dot": "matmul",
    "ragged_dot_general": "matmul",
    "top_k": "topk",
    "approx_top_k": "topk",
    "random_bits": "random",
    "threefry2x32": "random",
    "random_gamma": "random",
    "rng_bit_generator": "random",
}


def op_of(primitive: str, params: Mapping[str, Any]) -> str | None:
    """The `op:` class of an equation, or None.

    A product with batch dimensions counts as attention: scores and weighted values are what such products are for.
    """
    op = _PRIMITIVES.get(primitive)
    if primitive == "dot_general" and params["dimension_numbers"][1][0]:
        return "attention"
    return op


CUTTING: ContextVar[bool] = ContextVar("memopt_cutting", default=False)
"""Whether the program being traced will have its scans cut."""

_TO_HOST = Offloadable(src="device", dst="pinned_host")


@dataclass(frozen=True)
class UnitPolicy:
    """What happens to each value of one unit's body between forward and backward.

    Attributes:
        unit: The unit, for messages; `layers.*` for a scanned stack.
        names: `checkpoint_name` -> residual.
        ops: `op:` class -> residual of its values that carry no name.
        unnamed: Residual of everything else.
        never_kept: Primitives whose results are computed again although `unnamed` is `keep`: those that make gathered,
            fetched or cast weights, and those of values the policy recomputes.
    """

    unit: str
    names: tuple[tuple[str, Residual], ...] = ()
    ops: tuple[tuple[str, Residual], ...] = ()
    unnamed: Residual = "recompute"
    never_kept: frozenset[str] = frozenset()

    @cached_property
    def _by_name(self) -> dict[str, Residual]:
        return dict(self.names)

    @cached_property
    def _by_op(self) -> dict[str, Residual]:
        return dict(self.ops)

    def __call__(self, prim: Any, *avals: Any, **params: Any) -> Any:
        """The residual of one equation, in the form `jax.checkpoint` takes."""
        return self.answer(self._residual(prim.name, params), avals)

    def _residual(self, primitive: str, params: Mapping[str, Any]) -> Residual:
        if primitive == "name":
            # A name that no rule decides is an identity: what it names has been asked about already.
            return self._by_name.get(params["name"], "recompute")
        by_op = self._by_op.get(op_of(primitive, params) or "") if self.ops else None
        if by_op is not None:
            return by_op
        if self.unnamed == "keep" and primitive in self.never_kept:
            return "recompute"
        return self.unnamed

    @staticmethod
    def answer(residual: Residual, avals: Sequence[Any]) -> Any:
        """JAX's word for a residual. Scalars are never worth a transfer: they stay on the device."""
        if residual == "offload":
            return _TO_HOST if any(getattr(aval, "ndim", 0) for aval in avals) else Saveable
        return Saveable if residual == "keep" else Recompute

    @property
    def is_passive(self) -> bool:
        """Whether the region only makes weights ready: it recomputes, names and offloads no value."""
        return self.unnamed == "keep" and not self.names and not self.ops

    @property
    def offloads(self) -> bool:
        """Whether any value goes to the host."""
        return any(residual == "offload" for _, residual in (*self.names, *self.ops))


@dataclass(frozen=True)
class StackPolicy:
    """The policies of the layers of a scanned stack where they differ; a placeholder until the scan is cut.

    Attributes:
        unit: `layers.*`.
        layers: One policy per layer, in scan order.
    """

    unit: str
    layers: tuple[UnitPolicy, ...]

    def __call__(self, prim: Any, *avals: Any, **params: Any) -> Any:
        """Raises unless the scan around this region is about to be cut.

        linen's scan asks once while the model is traced; that answer is thrown away with the placeholder.

        Raises:
            MemoptError: `scan-not-reached`.
        """
        if CUTTING.get():
            return Recompute
        raise MemoptError.of(
            "scan-not-reached",
            f"the layers of `{self.unit}` are treated differently, which needs its scan to be cut, "
            "but the model was not called through its `__call__`",
            hint="call the model object itself in the loss, or give every layer of the stack the same rules",
            path=self.unit,
        )

    @property
    def offloads(self) -> bool:
        """Whether any layer sends something to the host."""
        return any(layer.offloads for layer in self.layers)


RegionPolicy = UnitPolicy | StackPolicy


@dataclass(frozen=True)
class Region:
    """How a unit's body is run.

    Attributes:
        policy: The region's policy; None for a body that is not recomputed.
        prevent_cse: False inside a scan only.
        weights: Casts, gathers and fetches of the unit's parameters, by path relative to the unit.
    """

    policy: RegionPolicy | None
    prevent_cse: bool
    weights: tuple[tuple[str, WeightPlan], ...] = ()


@dataclass
class Static:
    """What of a call is not traced: put back around the traced part, so that flags stay Python values."""

    structure: Any
    values: list[Any] = field(default_factory=list)

    @classmethod
    def split(cls, tree: Any) -> tuple[list[Any], Static]:
        """The arrays of `tree`, and the rest."""
        leaves, structure = jax.tree.flatten(tree)
        arrays = [leaf for leaf in leaves if is_array(leaf)]
        return arrays, cls(structure, [_HOLE if is_array(leaf) else leaf for leaf in leaves])

    def join(self, arrays: Sequence[Any]) -> Any:
        """The tree with `arrays` in their places."""
        rest = iter(arrays)
        return self.structure.unflatten([next(rest) if value is _HOLE else value for value in self.values])


class _Hole:
    def __repr__(self) -> str:
        return "<array>"


_HOLE = _Hole()


def _for_policy(body: Callable[[list[Any]], list[Any]], policy: RegionPolicy) -> Callable[[list[Any]], list[Any]]:
    """A body whose inner checkpoints hold although the policy keeps what it does not name."""
    if not isinstance(policy, UnitPolicy) or policy.unnamed != "keep":
        return body
    from .inner_checkpoints import respected  # reads programs with the help of this module's policies

    return respected(body)


def run_region(body: Callable[..., Any], arguments: Any, *, policy: RegionPolicy | None, prevent_cse: bool) -> Any:
    """Call `body(arguments)` as a recomputed region.

    Arrays in `arguments` become the region's inputs; flags and other Python values are closed over, so a `bool`
    argument stays a `bool` wherever it stands in the signature. Outputs that are not arrays come back as they are.

    Args:
        body: The unit's body.
        arguments: Any pytree.
        policy: What to keep, offload and recompute; None calls `body` as it is.
        prevent_cse: False only inside a scan: outside one, common subexpression elimination would undo the recompute.
    """
    if policy is None:
        return body(arguments)
    arrays, rest = Static.split(arguments)
    static_out: list[Static] = []

    def traced(values: list[Any]) -> list[Any]:
        outputs, static = Static.split(body(rest.join(values)))
        static_out.append(static)
        return outputs

    outputs = jax.checkpoint(_for_policy(traced, policy), policy=policy, prevent_cse=prevent_cse)(arrays)
    if not static_out:
        raise RuntimeError("jax.checkpoint did not trace the region's body")
    return static_out[-1].join(outputs)

"""The pieces of a plan for frameworks that own their loop: what to pass to `fully_shard` and to checkpoint wrappers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from memopt.errors import MemoptError, did_you_mean
from memopt.plan import Plan, PlanUnit

from .placement import dtypes_of

ContextPair = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]

OPS: dict[str, tuple[Any, ...]] = {
    "matmul": (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default),
    "attention": (
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    ),
    "topk": (torch.ops.aten.topk.default,),
    "random": (torch.ops.aten.native_dropout.default, torch.ops.aten.bernoulli.p),
}
"""The operators that the policy's `op:` names stand for."""


class Lowered:
    """A plan as arguments of torch's own calls.

    Attributes:
        plan: The plan.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def units(self) -> tuple[str, ...]:
        """Names of the units, in the order to wrap them (the root last, by the caller)."""
        return tuple(unit.name for unit in self.plan.units)

    def members(self, unit: str) -> tuple[str, ...]:
        """Canonical module paths of a unit."""
        return self._unit(unit).members

    def fully_shard_kwargs(self, unit: str) -> dict[str, Any]:
        """Keyword arguments of `torch.distributed.fsdp.fully_shard` for a unit (the caller adds its `mesh`).

        Raises:
            MemoptError: `unknown-unit`; `unit-not-sharded` when the policy shards nothing of it.
        """
        found = self._unit(unit)
        rows = [row for row in self.plan.rows_of("param") if row.unit == unit]
        if rows and not any(row.layout for row in rows):
            raise MemoptError.of(
                "unit-not-sharded",
                f"the policy shards no parameter of `{unit}`",
                path=unit,
                hint="do not call fully_shard on it, or add a shard rule for its parameters",
            )
        dtypes = dtypes_of(self.plan)
        return {
            "reshard_after_forward": found.reshard_after_forward,
            "mp_policy": MixedPrecisionPolicy(param_dtype=dtypes.compute, reduce_dtype=dtypes.reduce),
        }

    def recomputes(self, unit: str) -> bool:
        """Whether to wrap the unit in a checkpoint at all.

        Raises:
            MemoptError: `unknown-unit`; `lower-needs-paths` where the policy offloads values of it, which a checkpoint
                cannot do.
        """
        found = self._unit(unit)
        if found.region:
            self._kept_ops(found)
        rows = self.plan.rows_of("activation")
        return found.region and any(row.unit == unit and row.residual == "recompute" for row in rows)

    def checkpoint_context_fn(self, unit: str) -> Callable[[], ContextPair]:
        """The `context_fn` of `torch.utils.checkpoint.checkpoint(..., use_reentrant=False)` for a unit.

        Values that the policy keeps by `op:` are kept; a policy that keeps some by path cannot be told to torch's own
        checkpoint, which sees operators and not modules, and is refused.

        Raises:
            MemoptError: `unknown-unit`, `lower-needs-paths`.
        """
        found = self._unit(unit)
        kept_ops = self._kept_ops(found)
        if self.recomputes(unit) and found.unnamed_residual != "recompute":
            raise MemoptError.of(
                "lower-needs-paths",
                f"the policy recomputes some values of `{unit}` and keeps the rest; torch's checkpoint recomputes all "
                "but the operators it is told to keep",
                path=unit,
                hint="use memopt.apply_policy, or add `{name: rest, action: recompute, match: {unit: ...}}`",
            )
        if not kept_ops:
            return lambda: (nullcontext(), nullcontext())

        def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            return CheckpointPolicy.MUST_SAVE if op in kept_ops else CheckpointPolicy.PREFER_RECOMPUTE

        return lambda: create_selective_checkpoint_contexts(policy)

    def _kept_ops(self, unit: PlanUnit) -> frozenset[Any]:
        kept: set[Any] = set()
        by_path = []
        own_inputs = {f"{member}.input" for member in unit.members}
        for row in self.plan.rows:
            decided = row.rules.get("residual")
            if row.role != "activation" or row.unit != unit.name or decided is None:
                continue
            op = row.path.removeprefix(f"{unit.name}.").strip("<>")
            if row.residual == "keep" and op in OPS:
                kept.update(OPS[op])
            elif row.residual == "offload" or (
                row.residual == "keep" and own_inputs.isdisjoint((row.path, *row.aliases))
            ):
                by_path.append(row)
        named = [row for row in by_path if row.op is None or not set(OPS[row.op]) & kept or row.residual == "offload"]
        if named:
            raise MemoptError.of(
                "lower-needs-paths",
                f"rule `{named[0].rules['residual']}` {'offloads' if named[0].residual == 'offload' else 'keeps'} "
                f"`{named[0].path}`; torch's checkpoint sees operators alone, and keeps them on the device",
                path=named[0].path,
                hint="use memopt.apply_policy, or keep what is to stay by `op:`",
            )
        return frozenset(kept)

    def _unit(self, name: str) -> PlanUnit:
        for unit in self.plan.units:
            if unit.name == name:
                return unit
        names = [unit.name for unit in self.plan.units]
        raise MemoptError.of(
            "unknown-unit", f"the plan has no unit `{name}`", hint=did_you_mean(name, names), path=name
        )


def lower(plan: Plan) -> Lowered:
    """The pieces of a plan, for a loop that does its own wrapping."""
    return Lowered(plan)

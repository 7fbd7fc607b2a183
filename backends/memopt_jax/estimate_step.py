"""Builds the step of an `estimate.Job` in the compiling process, and the same step with no policy to compare with."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from memopt.plan import Plan
from memopt.workloads import load_workload

from . import flops, sent
from .estimate import Job


def build(job: Job, mesh: Any) -> SimpleNamespace:
    """The step's fields; `plain_flops`, matrix products per device of the step that keeps everything; and how to tell
    what of the plan's offloads the traced step sends.
    """
    import jax

    from .step import build_step

    workload = load_workload(job.workload) if isinstance(job.workload, str) else job.workload
    step = build_step(workload, job.plan, job.spec, mesh=mesh)
    plain_flops = None
    if job.with_plain and any(unit.region for unit in job.plan.units):
        plain = build_step(workload, keeping_everything(job.plan), job.spec, mesh=mesh)
        plain_flops = flops.count(jax.jit(plain.fn).trace(*plain.args).jaxpr).total / mesh.size
    return SimpleNamespace(
        fn=step.fn,
        args=step.args,
        out_shardings=step.out_shardings,
        donate_argnums=step.donate_argnums,
        offloaded=dict(step.offloaded),
        plain_flops=plain_flops,
        shards=sent.shards_of(job.plan),
        named_in_vain=lambda found: sent.named_in_vain(job.plan, job.spec, found),
    )


def keeping_everything(plan: Plan) -> Plan:
    """The plan with the same layouts and no unit recomputed or offloaded."""
    units = tuple(replace(unit, region=False, unnamed_residual="keep") for unit in plan.units)
    rows = tuple(replace(row, residual="keep") if row.role == "activation" else row for row in plan.rows)
    return replace(plan, units=units, rows=rows)

"""Shipped policies on shipped workloads for targets that are not there: what the tables of `jax_aot_tables.py` compile.

One case is compiled in one process for all the compiler options asked for: tracing is paid once.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memopt.backend import load_backend
from memopt.loading import load_policy, validate_options
from memopt.lowering import make_plan
from memopt.plan import Plan
from memopt.planning import Setting, judged
from memopt.targets import Target, load_target
from memopt.workloads import WorkloadConfig, load_workload
from memopt_jax import aot, estimate, hlo, overlap
from memopt_jax.compiler_options import ASYNC_LIMIT, PIPELINED, SCHEDULER, options_for

ROOT = Path(__file__).parents[2]
GIB = 2**30
TIMEOUT_S = 3600
DOUBLE_BUFFERING = "xla_gpu_enable_while_loop_double_buffering"
OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "scheduler": {SCHEDULER: True},
    "scheduler, pipelined": {SCHEDULER: True, PIPELINED: True},
    "scheduler, double buffering": {SCHEDULER: True, DOUBLE_BUFFERING: True},
    "scheduler, limit 8": {SCHEDULER: True, ASYNC_LIMIT: 8},
    "scheduler, pipelined, limit 8": {SCHEDULER: True, PIPELINED: True, ASYNC_LIMIT: 8},
}


@dataclass(frozen=True)
class Work:
    """A workload on a target; `batch` sequences in all, one for each device."""

    workload: str
    target: str
    batch: int


WORKS = {
    "8b-gb200": Work("llama-3.1-8b", "gpu:gb200:4", 4),
    "8b-h100": Work("llama-3.1-8b", "gpu:h100:8", 8),
    "70b-gb200": Work("llama-3.1-70b", "gpu:gb200:64", 64),
    "405b-gb200": Work("llama-3.1-405b", "gpu:gb200:64", 64),
    "deepseek-gb200": Work("deepseek-v3", "gpu:gb200:256", 256),
    "tiny-v5e": Work("llama-tiny", "tpu:v5e:2x2", 8),
    "tiny-v6e": Work("llama-tiny", "tpu:v6e:2x2", 8),
}


@dataclass(frozen=True)
class Case:
    """A lowered policy on a work, ready to compile."""

    work: str
    policy: str
    config: Any
    plan: Plan
    spec: Any
    target: Target


def policy_file(policy: str) -> Path:
    """`offload-all` of `configs/policies/gpu`, or `deepseek/offload` of another folder beside it."""
    folder, _, name = policy.rpartition("/")
    return ROOT / "configs" / "policies" / (folder or "gpu") / f"{name}.yaml"


def workload_of(work: str) -> WorkloadConfig:
    """The shipped workload with the work's batch."""
    config = load_workload(str(ROOT / "configs" / "workloads" / f"{WORKS[work].workload}.yaml"))
    if not isinstance(config, WorkloadConfig):
        raise SystemExit(f"{WORKS[work].workload}.yaml describes no model")
    return config.model_copy(update={"batch": WORKS[work].batch})


def case(work: str, policy: str) -> Case:
    """Lowers a shipped policy for a work."""
    backend, target = load_backend("jax"), load_target(WORKS[work].target)
    config = workload_of(work)
    spec = backend.inspect_workload(config)
    rules = load_policy(policy_file(policy))
    options = validate_options(rules, backend)
    plan = make_plan(rules, spec, backend=backend, world_size=target.num_devices, options=options)
    return Case(work, policy, config, plan, spec, target)


def shipped_options(what: Case) -> dict[str, Any]:
    """What `memopt plan` compiles the policy with."""
    requested = what.plan.options.get("compiler_options")
    return options_for(what.target.kind, requested=requested, offloads=estimate.offloads_anything(what.plan))


def compiled(what: Case, variants: dict[str, dict[str, Any]]) -> dict[str, aot.CompiledStep]:
    """The step under each set of compiler options, by name; equal sets are compiled once."""
    different: list[dict[str, Any]] = []
    for options in variants.values():
        if options not in different:
            different.append(options)
    request = aot.Request(
        builder=estimate.BUILDER,
        payload=estimate.Job(workload=what.config, plan=what.plan, spec=what.spec),
        target=what.target,
        mesh=what.plan.mesh,
        keep_text=True,
        variants=tuple(different),
    )
    print(f"   {what.work} {what.policy}", file=sys.stderr)
    steps = aot.compile_step(request, timeout_s=TIMEOUT_S, progress=lambda text: print("  ", text, file=sys.stderr))
    return {name: steps[different.index(options)] for name, options in variants.items()}


def row(what: Case, step: aot.CompiledStep, options: str) -> dict[str, Any]:
    """One row of figures."""
    plain, written, made = step.plain_flops, step.jaxpr_flops or 0.0, step.compiled_flops or 0.0
    return {
        "work": what.work,
        "policy": what.policy,
        "options": options,
        "hbm_gib": round(step.device.total / GIB, 2),
        "host_gib": round(step.host.total / GIB, 2),
        "planned_host_gib": round(step.planned_host_bytes / GIB, 2),
        "host_bytes_off_plan": step.host.temp - step.planned_host_bytes if step.planned_host_bytes else 0,
        "recompute_written": round((written - plain) / written, 4) if plain else None,
        "recompute_compiled": round((made - plain) / made, 4) if plain else None,
        "pflop_per_device": round(made / 1e15, 3),
        **overlap_of(what.target, step),
        "estimate_s": estimate_s(what, step),
        "audit": step.audit.verdict,
        "audit_counts": step.audit.to_json()["counts"],
        "compile_s": round(step.compile_s, 1),
        "trace_s": round(step.trace_s, 1),
        "peak_rss_gib": round(step.peak_rss_bytes / GIB, 2),
    }


def estimate_s(what: Case, step: aot.CompiledStep) -> float | None:
    """The step's seconds as `memopt plan` estimates them."""
    setting = Setting(workload=what.config, backend=load_backend("jax"), target=what.target, spec=what.spec, budget={})
    return judged(what.policy, what.plan, estimate.to_measured(step, what.target), setting).time.estimate_s


def overlap_of(target: Target, step: aot.CompiledStep) -> dict[str, Any]:
    """Hidden and exposed, by the link alone and with the host's memory shared and collectives on the timeline; without
    seconds where the link's rate is not published.
    """
    synchronous = len(step.overlap.synchronous)
    if not step.link_is_known:
        return {"synchronous": synchronous}
    module = hlo.parse(step.text or "")
    simple = overlap.read(module, target, rates=overlap.rates_of(target, shared_dram=False, collectives=False))
    full = overlap.read(module, target)
    return {
        "hidden": round(simple.hidden_fraction, 4),
        "hidden_shared": round(full.hidden_fraction, 4),
        "exposed_of_step": round(simple.exposed_fraction, 4),
        "exposed_of_step_shared": round(full.exposed_fraction, 4),
        "step_s_model": round(full.step_s, 3),
        "collective_exposed_s": round(full.collective_exposed_s, 3),
        "synchronous": synchronous,
    }


def break_even_rate(step: aot.CompiledStep, target: Target, recompute_s: float) -> float | None:
    """The host link's rate, in bytes per second, above which the step is shorter than `recompute_s`; by bisection.

    None when it is longer at any rate.
    """
    module = hlo.parse(step.text or "")

    def step_s(rate: float) -> float:
        return overlap.read(module, target, rates=overlap.rates_of(target, host_link_bytes_per_s=rate)).step_s

    low, high = 1e8, 1e13
    if step_s(high) >= recompute_s:
        return None
    for _ in range(24):  # to a millionth
        middle = (low * high) ** 0.5
        low, high = (low, middle) if step_s(middle) <= recompute_s else (middle, high)
    return high

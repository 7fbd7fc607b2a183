"""Tables of docs/explanation/evidence-jax.md: what the compilers of GPUs and TPUs say about whole train steps.

    python tests/benchmarks/jax_aot_tables.py memory --out memory.json
    python tests/benchmarks/jax_aot_tables.py options --work 8b-gb200 --out options.json
    python tests/benchmarks/jax_aot_tables.py link --work 8b-gb200 --out link.json

No device is needed. Rows are printed as they come and written as JSON with the versions that made them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from memopt.backend import load_backend
from memopt.loading import load_policy, validate_options
from memopt.lowering import make_plan
from memopt.plan import Plan
from memopt.targets import Target, load_target
from memopt.workloads import load_workload
from memopt_jax import aot, estimate, hlo, overlap, topology
from memopt_jax.accelerators import import_jax
from memopt_jax.compiler_options import ASYNC_LIMIT, PIPELINED, SCHEDULER, options_for

ROOT = Path(__file__).parents[2]
GIB = 2**30
DOUBLE_BUFFERING = "xla_gpu_enable_while_loop_double_buffering"
THREE: dict[str, Any] = {SCHEDULER: True, PIPELINED: True, ASYNC_LIMIT: 8}
OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "scheduler": {SCHEDULER: True},
    "scheduler, pipelined": {SCHEDULER: True, PIPELINED: True},
    "scheduler, double buffering": {SCHEDULER: True, DOUBLE_BUFFERING: True},
    "scheduler, limit 8": {SCHEDULER: True, ASYNC_LIMIT: 8},
    "scheduler, pipelined, limit 8": THREE,
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
MEMORY_ROWS = {
    "8b-gb200": ("full-recompute", "offload-inputs", "offload-attention", "offload-all", "offload-optimizer"),
    "8b-h100": ("full-recompute", "offload-all"),
    "70b-gb200": ("full-recompute", "offload-all"),
    "405b-gb200": ("full-recompute", "offload-inputs", "offload-405b", "offload-all"),
    "deepseek-gb200": ("deepseek/full-recompute", "deepseek/offload"),
    "tiny-v5e": ("full-recompute", "offload-all"),
    "tiny-v6e": ("full-recompute", "offload-all"),
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


def case(work: str, policy: str) -> Case:
    """Lowers a shipped policy for a work."""
    described = WORKS[work]
    backend, target = load_backend("jax"), load_target(described.target)
    loaded = load_workload(str(ROOT / "configs" / "workloads" / f"{described.workload}.yaml"))
    config = loaded.model_copy(update={"batch": described.batch})  # type: ignore[union-attr]
    spec = backend.inspect_workload(config)
    folder, _, name = policy.rpartition("/")
    rules = load_policy(ROOT / "configs" / "policies" / (folder or "gpu") / f"{name}.yaml")
    plan = make_plan(
        rules,
        spec,
        backend=backend,
        world_size=target.num_devices,
        options=validate_options(rules, backend),
    )
    return Case(work, policy, config, plan, spec, target)


def shipped_options(what: Case) -> dict[str, Any]:
    """What `memopt plan` compiles the policy with."""
    requested = what.plan.options.get("compiler_options")
    return options_for(what.target.kind, requested=requested, offloads=estimate.offloads_anything(what.plan))


def compiled(what: Case, **changes: Any) -> tuple[aot.CompiledStep, ...]:
    """Compiles every variant in one process."""
    request = aot.Request(
        builder=estimate.BUILDER,
        payload=estimate.Job(workload=what.config, plan=what.plan, spec=what.spec),
        target=what.target,
        mesh=what.plan.mesh,
        keep_text=True,
    )
    return aot.compile_step(
        replace(request, **changes), timeout_s=3600, progress=lambda text: print("  ", text, file=sys.stderr)
    )


def _overlap(target: Target, step: aot.CompiledStep) -> dict[str, Any]:
    """Hidden and exposed; without seconds where the link's rate is not published."""
    synchronous = len(step.overlap.synchronous)
    if not step.link_is_known:
        return {"synchronous": synchronous}
    module = hlo.parse(step.text or "")
    simple = overlap.read(module, target, rates=overlap.rates_of(target, shared_dram=False, collectives=False))
    full = overlap.read(module, target)
    return {
        "hidden": round(simple.hidden_fraction, 4),
        "hidden_shared": round(full.hidden_fraction, 4),
        "exposed_of_step_shared": round(full.exposed_fraction, 4),
        "step_s_model": round(full.step_s, 3),
        "collective_exposed_s": round(full.collective_exposed_s, 3),
        "synchronous": synchronous,
    }


def row(what: Case, step: aot.CompiledStep, options: str) -> dict[str, Any]:
    """One row of figures; `simple` is the overlap with neither shared host memory nor collectives."""
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
        **_overlap(what.target, step),
        "audit": step.audit.verdict,
        "audit_counts": step.audit.to_json()["counts"],
        "compile_s": round(step.compile_s, 1),
        "trace_s": round(step.trace_s, 1),
        "peak_rss_gib": round(step.peak_rss_bytes / GIB, 2),
    }


def memory(works: list[str], policies: list[str]) -> list[dict[str, Any]]:
    """Each shipped policy as it is, with the options it comes with."""
    rows = []
    for work in works:
        for policy in MEMORY_ROWS[work]:
            if policies and policy not in policies:
                continue
            what = case(work, policy)
            (step,) = compiled(what, variants=(shipped_options(what),))
            rows.append(shown(row(what, step, "shipped")))
    return rows


def options(works: list[str], policies: list[str], names: list[str]) -> list[dict[str, Any]]:
    """Hidden share by compiler options."""
    rows, chosen = [], {name: OPTIONS[name] for name in names or OPTIONS}
    for work in works:
        for policy in policies or ["offload-inputs", "offload-attention", "offload-all"]:
            what = case(work, policy)
            steps = compiled(what, variants=tuple(chosen.values()))
            rows += [shown(row(what, step, name)) for name, step in zip(chosen, steps, strict=True)]
    return rows


def link(works: list[str], policies: list[str]) -> list[dict[str, Any]]:
    """The host link's rate below which full recompute's modelled step is shorter than the policy's."""
    rows = []
    for work in works:
        base = case(work, "full-recompute")
        (plain,) = compiled(base, variants=(shipped_options(base),))
        recompute_s = overlap.read(plain.text or "", base.target).step_s
        for policy in policies or ["offload-inputs", "offload-attention", "offload-all"]:
            what = case(work, policy)
            (step,) = compiled(what, variants=(shipped_options(what),))
            rate = break_even_rate(hlo.parse(step.text or ""), what.target, recompute_s)
            rows.append(shown({"work": work, "policy": policy, "full_recompute_step_s": round(recompute_s, 3),
                               "pays_above_gb_per_s": None if rate is None else round(rate / 1e9, 1)}))  # fmt: skip
    return rows


def break_even_rate(module: hlo.Module, target: Target, recompute_s: float) -> float | None:
    """By bisection; None when the policy's step is longer at any rate."""

    def step_s(rate: float) -> float:
        return overlap.read(module, target, rates=overlap.rates_of(target, host_link_bytes_per_s=rate)).step_s

    low, high = 1e8, 1e13
    if step_s(high) > recompute_s:
        return None
    for _ in range(40):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if step_s(middle) <= recompute_s else (middle, high)
    return high


def shown(made: dict[str, Any]) -> dict[str, Any]:
    """Prints a row when it is there."""
    print(json.dumps(made), flush=True)
    return made


def main() -> None:
    """Makes one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    tables: dict[str, Callable[..., list[dict[str, Any]]]] = {"memory": memory, "options": options, "link": link}
    parser.add_argument("table", choices=tables)
    parser.add_argument("--work", action="append", choices=WORKS)
    parser.add_argument("--policy", action="append")
    parser.add_argument("--option", action="append", choices=OPTIONS, help="rows of the options table; all without it")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    import_jax()
    began_s = time.monotonic()
    extra = (asked.option or [],) if asked.table == "options" else ()
    rows = tables[asked.table](asked.work or list(MEMORY_ROWS), asked.policy or [], *extra)
    document = {"versions": topology.versions(), "elapsed_s": round(time.monotonic() - began_s, 1), "rows": rows}
    if asked.out:
        asked.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Host offload on one GPU, measured in under eight minutes: step time, memory, link rates, the gradient check.

    python tests/benchmarks/gpu_jax.py --out docs/explanation/gpu-jax.json
    python tests/benchmarks/gpu_jax.py --tiny            # the same steps on any machine, in a minute

Date, device and versions are written beside the figures. Nothing is estimated here; compare it with `memopt plan`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import time
from pathlib import Path
from typing import Any

from memopt_jax.accelerators import import_jax

jax = import_jax()

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from flax import nnx  # noqa: E402

from memopt import apply_policy  # noqa: E402
from memopt.workloads import WorkloadConfig, load_workload  # noqa: E402
from memopt_jax import topology  # noqa: E402
from memopt_jax.compiler_options import PIPELINED  # noqa: E402
from memopt_jax.workloads import build  # noqa: E402

ROOT = Path(__file__).parents[2]
STEPS, WARMUP = 12, 3
PRECISION = {"compute": "bfloat16", "master": "float32", "reduce": "bfloat16", "optimizer_state": "float32"}
OFFLOAD = [
    {"name": "inputs", "action": "offload", "match": {"path": "layers.*.input"}},
    {"name": "attention", "action": "offload", "match": {"tensor": ["q", "k", "v", "attn_out", "attn_stats"]}},
    {"name": "rest", "action": "recompute", "match": {"unit": "layers.*"}},
]


def policies() -> dict[str, dict[str, Any]]:
    """What is compared: nothing, full recompute, offload without and with transfers across iterations."""
    plain: dict[str, Any] = {"version": 1, "units": ["layers.*"], "precision": PRECISION, "rules": []}
    recompute = {"name": "layers", "action": "recompute", "match": {"unit": "layers.*"}}
    pipelined = {"jax": {"compiler_options": {PIPELINED: True}}}
    return {
        "none": plain,
        "full recompute": {**plain, "rules": [recompute]},
        "offload": {**plain, "rules": OFFLOAD},
        "offload, pipelined": {**plain, "rules": OFFLOAD, "backend_options": pipelined},
    }


def workload(*, tiny: bool) -> WorkloadConfig:
    """About 1.4 billion parameters and 8192 tokens, or the tiny Llama."""
    config = load_workload(str(ROOT / "configs" / "workloads" / "llama-tiny.yaml"))
    if not isinstance(config, WorkloadConfig):
        raise SystemExit("llama-tiny.yaml describes no model")
    if tiny:
        return config
    sizes = {"layers": 16, "hidden": 2048, "intermediate": 8192, "heads": 16, "kv_heads": 8, "vocab": 32000}
    return config.model_copy(update={**sizes, "name": "llama-1b", "batch": 2, "sequence": 4096})


def row(name: str, policy: dict[str, Any], config: WorkloadConfig) -> dict[str, Any]:
    """Trains a few steps under one policy and checks its gradients."""
    described = build(config, seed=0)
    rng = np.random.default_rng(0)
    batch = {"tokens": jnp.asarray(rng.integers(0, config.vocab, (config.batch, config.sequence + 1)), jnp.int32)}
    run = apply_policy(described.model(), policy, example_inputs=(batch["tokens"][:, :-1], batch["tokens"][:, 1:]))
    optimizer = run.optimizer(described.optimizer)

    def fn(model: Any, optimizer: Any, batch: Any) -> jax.Array:
        loss, gradients = nnx.value_and_grad(described.loss)(model, batch)
        optimizer.update(model, gradients)
        return loss

    step = run.step(fn)
    losses, times_s = [], []
    for _ in range(STEPS):
        began_s = time.perf_counter()
        losses.append(float(step(run.model, optimizer, batch)))
        times_s.append(time.perf_counter() - began_s)
    check = run.check(batch)
    statistics_of_device = jax.devices()[0].memory_stats() or {}
    report = run.report()
    return {
        "policy": name,
        "step_s": statistics.median(times_s[WARMUP:]),
        "step_s_quartiles": statistics.quantiles(times_s[WARMUP:], n=4),
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "compiled_peak_bytes": report.measured_peak_bytes,
        "allocator_peak_bytes": statistics_of_device.get("peak_bytes_in_use"),
        "host_bytes": report.host_bytes,
        "check": {"ok": check.ok, "max_grad_rel_diff": check.max_grad_rel_diff, "worst": check.worst_tensor},
    }


def link_rates(num_bytes: int) -> dict[str, float]:
    """Bytes per second of one large copy in each direction, the best of five."""
    device = jax.devices()[0]
    spaces = {kind: jax.sharding.SingleDeviceSharding(device, memory_kind=kind) for kind in ("device", "pinned_host")}
    rates = {}
    for source, destination in (("pinned_host", "device"), ("device", "pinned_host")):
        array = jax.block_until_ready(jax.device_put(jnp.zeros(num_bytes // 4, jnp.float32), spaces[source]))
        best_s = float("inf")
        for _ in range(5):
            began_s = time.perf_counter()
            jax.block_until_ready(jax.device_put(array, spaces[destination]))
            best_s = min(best_s, time.perf_counter() - began_s)
        rates[f"{source} to {destination}"] = num_bytes / best_s
    return rates


def main() -> None:
    """Runs every policy and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--policy", action="append", choices=policies())
    asked = parser.parse_args()
    config = workload(tiny=asked.tiny)
    device = jax.devices()[0]
    document: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": f"{device.platform}: {device.device_kind}",
        "versions": topology.versions(),
        "workload": config.model_dump(mode="json"),
        "steps": STEPS,
        "warmup": WARMUP,
        "link_bytes_per_s": link_rates(2**24 if asked.tiny else 2**31),
        "rows": [],
    }
    for name, policy in policies().items():
        if not asked.policy or name in asked.policy:
            document["rows"].append(row(name, policy, config))
            print(json.dumps(document["rows"][-1]), flush=True)
            if asked.out:
                asked.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Host offload on one GPU, measured in under eight minutes: step time, memory, link rates, the gradient check.

    python tests/benchmarks/gpu_jax.py --out docs/explanation/gpu-jax.json
    python tests/benchmarks/gpu_jax.py --tiny            # the same steps on any machine, in a few minutes

Every policy runs in a process of its own: the allocator's peak never falls again within one, and a policy that does not
fit must not take the others with it. This process never starts JAX, which would take the GPU's memory from the others.
Rows that there is no time for are written as such; a row that is stopped in its check keeps the steps it has measured.
Nothing is estimated here; compare it with `memopt plan`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
BUDGET_S = 450.0  # of all rows together: below eight minutes with the start of the processes
ROW_S = 150.0  # of one row: three compilations (five with a faulty compiler's check), the steps and the check
STEPS, WARMUP = 12, 3
PRECISION = {"compute": "bfloat16", "master": "float32", "reduce": "bfloat16", "optimizer_state": "float32"}
PIPELINED = "xla_gpu_enable_pipelined_host_offloading"
OFFLOAD = [
    {"name": "inputs", "action": "offload", "match": {"path": "layers.*.input"}},
    {"name": "attention", "action": "offload", "match": {"tensor": ["q", "k", "v", "attn_out", "attn_stats"]}},
    {"name": "rest", "action": "recompute", "match": {"unit": "layers.*"}},
]
LINK = "link"


def policies() -> dict[str, dict[str, Any]]:
    """What is compared, the most telling first; keeping everything comes last, as it is the one that may not fit."""
    plain: dict[str, Any] = {"version": 1, "units": ["layers.*"], "precision": PRECISION, "rules": []}
    recompute = {"name": "layers", "action": "recompute", "match": {"unit": "layers.*"}}
    return {
        "full recompute": {**plain, "rules": [recompute]},
        "offload": {**plain, "rules": OFFLOAD},
        "offload, pipelined": {
            **plain,
            "rules": OFFLOAD,
            "backend_options": {"jax": {"compiler_options": {PIPELINED: True}}},
        },
        "none": plain,
    }


def workload(*, tiny: bool) -> Any:
    """About 0.6 billion parameters (10 GB of weights, gradients and state) and 16384 tokens, or the tiny Llama.

    Offload moves 2 GiB each way in a step of some 60 TFLOP: to be hidden on any link from 25 GB/s.
    """
    from memopt.workloads import WorkloadConfig, load_workload

    config = load_workload(str(ROOT / "configs" / "workloads" / "llama-tiny.yaml"))
    if not isinstance(config, WorkloadConfig):
        raise SystemExit("llama-tiny.yaml describes no model")
    if tiny:
        return config
    sizes = {"layers": 8, "hidden": 2048, "intermediate": 8192, "heads": 16, "kv_heads": 8, "vocab": 32000}
    return config.model_copy(update={**sizes, "name": "llama-0.6b", "batch": 4, "sequence": 4096})


def measured_row(name: str, *, tiny: bool) -> Iterator[dict[str, Any]]:
    """Trains a few steps under one policy and reads the allocator; then, again, with the gradients' check.

    Runs in a process of its own.
    """
    from memopt_jax.accelerators import import_jax

    jax = import_jax()
    import jax.numpy as jnp
    import numpy as np
    from flax import nnx

    from memopt import apply_policy
    from memopt_jax.workloads import build

    began_s = time.perf_counter()
    config = workload(tiny=tiny)
    described = build(config, seed=0)
    rng = np.random.default_rng(0)
    batch = {"tokens": jnp.asarray(rng.integers(0, config.vocab, (config.batch, config.sequence + 1)), jnp.int32)}
    inputs = (batch["tokens"][:, :-1], batch["tokens"][:, 1:])
    run = apply_policy(described.model(), policies()[name], example_inputs=inputs)
    optimizer = run.optimizer(described.optimizer)
    built_s = time.perf_counter() - began_s

    def fn(model: Any, optimizer: Any, batch: Any) -> Any:
        loss, gradients = nnx.value_and_grad(described.loss)(model, batch)
        optimizer.update(model, gradients)
        return loss

    step = run.step(fn)
    losses, times_s = [], []
    for _ in range(STEPS):
        began_s = time.perf_counter()
        losses.append(float(step(run.model, optimizer, batch)))
        times_s.append(time.perf_counter() - began_s)
    # Before the check, whose reference holds more than the policy does. (Where the compiler records wrong offsets the
    # first step has run a check already: the peak is then that one's.)
    allocator = jax.devices()[0].memory_stats() or {}
    report = run.report()
    row = {
        "policy": name,
        "ok": False,
        "reason": "stopped before its gradients were checked",
        "build_s": built_s,
        "step_s": statistics.median(times_s[WARMUP:]),
        "step_s_quartiles": statistics.quantiles(times_s[WARMUP:], n=4),
        "first_step_s": times_s[0],
        "losses": losses,
        "compiled_peak_bytes": report.measured_peak_bytes,
        "allocator_peak_bytes": allocator.get("peak_bytes_in_use"),
        "allocator_limit_bytes": allocator.get("bytes_limit"),
        "host_bytes": report.host_bytes,
        "host_bytes_counted": report.counted,
        "notes": list(report.notes),
        **_machine(jax),
    }
    yield row
    began_s = time.perf_counter()
    check = run.check(batch)
    checked = {
        "ok": check.ok,
        "reference": check.reference,
        "loss_diff": check.loss_diff,
        "max_grad_rel_diff": check.max_grad_rel_diff,
        "worst_tensor": check.worst_tensor,
        "seconds": time.perf_counter() - began_s,
    }
    reason = None if check.ok else f"gradients differ, most in {check.worst_tensor}"
    yield {**row, "ok": check.ok, "reason": reason, "check": checked}


def link_rates(*, tiny: bool) -> dict[str, Any]:
    """Bytes per second of large copies: each direction alone, and both at once; the best of five."""
    from memopt_jax.accelerators import import_jax

    jax = import_jax()
    import jax.numpy as jnp

    num_bytes = 2**24 if tiny else 2**30
    device = jax.devices()[0]
    spaces = {kind: jax.sharding.SingleDeviceSharding(device, memory_kind=kind) for kind in ("device", "pinned_host")}
    held = {
        kind: jax.block_until_ready(jax.device_put(jnp.zeros(num_bytes // 4, jnp.float32), space))
        for kind, space in spaces.items()
    }

    def best_s(*sources: str) -> float:
        taken = []
        for _ in range(5):
            began_s = time.perf_counter()
            others = [spaces["device" if source == "pinned_host" else "pinned_host"] for source in sources]
            moved = [jax.device_put(held[source], other) for source, other in zip(sources, others, strict=True)]
            jax.block_until_ready(moved)
            taken.append(time.perf_counter() - began_s)
        return min(taken)

    both_s = best_s("pinned_host", "device")
    return {
        "ok": True,
        "bytes": num_bytes,
        "to_device_bytes_per_s": num_bytes / best_s("pinned_host"),
        "to_host_bytes_per_s": num_bytes / best_s("device"),
        "both_ways_bytes_per_s_together": 2 * num_bytes / both_s,
        **_machine(jax),
    }


def _machine(jax: Any) -> dict[str, Any]:
    from memopt_jax import offset_audit, topology

    device, versions = jax.devices()[0], topology.versions()
    return {
        "device": f"{device.platform}: {device.device_kind}",
        "versions": versions,
        # Such a compiler records wrong offsets for offloaded values; steps are then compiled around it and checked.
        "compiler_records_wrong_offsets": device.platform == "gpu" and offset_audit.is_affected(versions["jaxlib"]),
    }


def in_own_process(name: str, *, tiny: bool, limit_s: float) -> dict[str, Any]:
    """One row, or why there is none: a crash, no memory, no time."""
    if limit_s < ROW_S / 5:
        return {"policy": name, "ok": False, "reason": "no time was left for it"}
    command = [sys.executable, __file__, "--row", name, *(["--tiny"] if tiny else [])]
    allowed_s = min(limit_s, ROW_S)
    try:
        done = subprocess.run(command, capture_output=True, timeout=allowed_s, check=False)
    except subprocess.TimeoutExpired as stopped:
        why = f"stopped after {allowed_s:.0f} s"
        return _last_row(stopped.stdout) or {"policy": name, "ok": False, "reason": why}
    row = _last_row(done.stdout)
    if row is not None and not done.returncode:
        return row
    words = (done.stderr or done.stdout).decode(errors="replace").strip().splitlines()[-8:]
    reason = f"exit code {done.returncode}: " + " | ".join(words)
    return {**(row or {"policy": name}), "ok": False, "reason": reason}


def _last_row(stdout: bytes | None) -> dict[str, Any] | None:
    """What a process said last, in so far as it said a row."""
    said = [line for line in (stdout or b"").decode(errors="replace").splitlines() if line.startswith("{")]
    return json.loads(said[-1]) if said else None


def main() -> None:
    """Runs every row and writes the figures; exit code 1 where a row has none, or where gradients differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--policy", action="append", choices=policies(), help="these only; all without it")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S)
    parser.add_argument("--row", choices=(LINK, *policies()), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.row is not None:
        rows = iter([link_rates(tiny=asked.tiny)]) if asked.row == LINK else measured_row(asked.row, tiny=asked.tiny)
        for row in rows:
            print(json.dumps(row), flush=True)
        return
    began_s = time.monotonic()
    document: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "workload": workload(tiny=asked.tiny).model_dump(mode="json"),
        "steps": STEPS,
        "warmup": WARMUP,
        "rows": [],
    }
    for name in (LINK, *(asked.policy or policies())):
        left_s = asked.budget_s - (time.monotonic() - began_s)
        row = in_own_process(name, tiny=asked.tiny, limit_s=left_s)
        document.update({key: row.pop(key) for key in ("device", "versions") if key in row})
        if name == LINK:
            document[LINK] = row
        else:
            document["rows"].append(row)
        document["elapsed_s"] = round(time.monotonic() - began_s, 1)
        print(json.dumps(row), flush=True)
        if asked.out:
            asked.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    sys.exit(0 if all(row["ok"] for row in (document[LINK], *document["rows"])) else 1)


if __name__ == "__main__":
    main()

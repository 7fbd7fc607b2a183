"""Planned memory of PyTorch training beside torchtitan's published H100 table; misses are printed as they are.

Run: `python tests/benchmarks/plan_published_memory.py [GPUS ...]`.

Published is the allocator's reserved peak (Llama 3.1 8B, local batch 2, sequence 8192, FSDP2, selective recompute per
operator). The eager rows should lie in the plan's band: live bytes to live bytes with the reserve.
"""

from __future__ import annotations

import sys
from typing import Any

from memopt.planning import PlanResult, plan_policy, prepare
from memopt.workloads import WorkloadConfig, load_workload

GIB = 2**30
# Selective recompute per operator keeps attention and every second product: q, v, gate and the down projection. Units
# as torchtitan wraps them: layers, embedding, and the last norm with the head.
POLICY: dict[str, Any] = {
    "version": 1,
    "units": ["layers.*", "embed_tokens", {"match": ["norm", "lm_head"], "group": True}],
    "precision": {
        "compute": "bfloat16",
        "master": "float32",
        "reduce": "float32",
        "optimizer_state": "float32",
    },
    "rules": [
        {"name": "weights", "action": "shard", "match": {"role": "param"}, "axis": "fsdp"},
        {"name": "attention", "action": "keep", "match": {"op": "attention"}},
        {"name": "products", "action": "keep", "match": {"tensor": ["q", "v", "mlp_gate", "mlp_down"]}},
        {"name": "rest", "action": "recompute", "match": {"unit": "layers.*"}},
    ],
    "backend_options": {"torch": {"engine": "fsdp2"}},
}
PUBLISHED = ((8, "eager", 82.4), (8, "compiled", 77.0), (128, "eager", 67.0), (128, "compiled", 62.0))  # GPUs, how, GiB


def plan(world_size: int) -> PlanResult:
    config = load_workload("configs/workloads/llama-3.1-8b.yaml")
    assert isinstance(config, WorkloadConfig)
    described = config.model_copy(update={"batch": 2 * world_size, "sequence": 8192})
    setting = prepare(workload=described, backend="torch", target="gpu:h100", world_size=world_size)
    return plan_policy(POLICY, setting, name="titan", progress=lambda text: print(text, file=sys.stderr))


def main() -> None:
    wanted = [int(text) for text in sys.argv[1:]] or [8, 128]
    print("| GPUs | | published GiB (reserved) | live GiB | with the reserve | |")
    print("|---|---|---|---|---|---|")
    for world_size in wanted:
        result = plan(world_size)
        low, high = (nbytes / GIB for nbytes in result.band_bytes)
        for gpus, how, published in PUBLISHED:
            if gpus == world_size:
                nearest = min(max(published, low), high)
                where = "inside" if nearest == published else f"band off by {nearest / published - 1:+.1%}"
                print(f"| {gpus} | {how} | {published} | {low:.1f} | {high:.1f} | {where} |", flush=True)
        roles = {role: round(nbytes / GIB, 2) for role, nbytes in result.measured.by_role.items()}
        print(f"{roles}, peak during {result.measured.peak_event}", file=sys.stderr)


if __name__ == "__main__":
    main()

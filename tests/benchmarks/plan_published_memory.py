"""Planned memory of PyTorch training beside torchtitan's published H100 table; misses are printed as they are.

Run: `python tests/benchmarks/plan_published_memory.py [GPUS ...]`.

Published is the allocator's reserved peak (Llama 3.1 8B, local batch 2, sequence 8192, FSDP2, selective recompute per
operator). The eager rows should lie in the plan's band: live bytes to live bytes with the reserve. Planned is a step
as that trainer of that date runs it (`titan_workload.py`): its own checkpoints, and embedding, last norm and head
gathered as one root. What a compiler fuses is not planned, and of the Float8 row its step in bfloat16 is: the casts to
Float8 are torchao's, made and dropped inside each product, and run under a compiler alone. The published tokens a
second are beside the interval of the same plan's step, uncalibrated.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from memopt.planning import PlanResult, plan_policy, prepare

sys.path.insert(0, str(Path(__file__).parent))

from titan_workload import titan

GIB = 2**30
POLICY: dict[str, Any] = {
    "version": 1,
    "units": [{"match": "layers.31", "reshard_after_forward": False}, "layers.*"],
    "precision": {
        "compute": "bfloat16",
        "master": "float32",
        "reduce": "float32",
        "optimizer_state": "float32",
    },
    "rules": [{"name": "weights", "action": "shard", "match": {"role": "param"}, "axis": "fsdp"}],
    "backend_options": {"torch": {"engine": "fsdp2"}},
}
# GPUs, how, GiB, tokens a second and GPU
PUBLISHED = (
    (8, "eager", 82.4, 5762),
    (8, "compiled", 77.0, 6667),
    (128, "eager", 67.0, 5605),
    (128, "compiled", 62.0, 6514),
    (-8, "compiled, Float8, full recompute, 1 x 32768", 83.9, 3890),
)


def plan(world_size: int) -> PlanResult:
    """The step at that many GPUs; -8: the long sequence of the Float8 row, in bfloat16."""
    step = titan(batch=2, sequence=8192) if world_size > 0 else titan(batch=1, sequence=32768, mode="full")
    setting = prepare(workload=step, backend="torch", target="gpu:h100", world_size=abs(world_size))
    return plan_policy(POLICY, setting, name="titan", progress=lambda text: print(text, file=sys.stderr))


def main() -> None:
    wanted = [int(text) for text in sys.argv[1:]] or [8, 128, -8]
    print(
        "| GPUs | | published GiB (reserved) | live GiB | with the reserve | replayed allocator: growing, fixed | |",
        end="",
    )
    print(" published step | planned step |")
    print("|---|---|---|---|---|---|---|---|---|")
    for world_size in wanted:
        result = plan(world_size)
        low, high = (nbytes / GIB for nbytes in result.band_bytes)
        held = result.measured.reserved_bytes
        growing, fixed = held["expandable_segments"] / GIB, held["default"] / GIB
        time = result.time
        for gpus, how, published, tokens_per_s in PUBLISHED:
            if gpus == world_size:
                nearest = min(max(published, low), high)
                where = "inside" if nearest == published else f"band off by {nearest / published - 1:+.1%}"
                where += f"; replay off by {growing / published - 1:+.1%}, {fixed / published - 1:+.1%}"
                tokens = 2 * 8192 if gpus > 0 else 32768
                step = f"{time.estimate_s:.2f} s ({time.low_s:.2f} to {time.high_s:.2f})"
                print(
                    f"| {abs(gpus)} | {how} | {published} | {low:.1f} | {high:.1f} | {growing:.1f}, {fixed:.1f} "
                    f"| {where} | {tokens / tokens_per_s:.2f} s | {step} |"
                )
        roles = {role: round(nbytes / GIB, 2) for role, nbytes in result.measured.by_role.items()}
        print(f"{roles}, peak during {result.measured.peak_event}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()

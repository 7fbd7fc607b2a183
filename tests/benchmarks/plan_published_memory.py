"""Planned memory of PyTorch training beside published and reference figures; misses are printed as they are.

Run: `python tests/benchmarks/plan_published_memory.py [titan | reference | large]`.

`titan`: torchtitan's H100 table (reserved peak of the allocator; Llama 3.1 8B, local batch 2, sequence 8192, selective
recompute per operator), which should lie in the plan's band for the eager rows. `reference`: 8B at world 8 and 70B at
world 256 with FSDP2, counted by an independent probe. `large`: 70B at world 256 and 405B at world 512: what planning
itself takes.
"""

from __future__ import annotations

import resource
import sys
import time
from typing import Any

from memopt.planning import PlanResult, plan_policy, prepare
from memopt.workloads import WorkloadConfig, load_workload

GIB = 2**30
MIXED = {"compute": "bfloat16", "master": "float32", "reduce": "float32", "optimizer_state": "float32"}
WEIGHTS = {"name": "weights", "action": "shard", "match": {"role": "param"}, "axis": "fsdp"}
REST = {"name": "rest", "action": "recompute", "match": {"unit": "layers.*"}}
# Selective recompute per operator keeps attention and every second product: q, v, gate and the down projection.
SELECTIVE = [
    {"name": "attention", "action": "keep", "match": {"op": "attention"}},
    {"name": "products", "action": "keep", "match": {"tensor": ["q", "v", "mlp_gate", "mlp_down"]}},
    REST,
]
ACTIVATIONS = {"none": [], "full": [REST], "selective": SELECTIVE}
# Engine of the rows; `units` as torchtitan wraps: layers, embedding, and the last norm with the head.
TITAN_UNITS = ["layers.*", "embed_tokens", {"match": ["norm", "lm_head"], "group": True}]
TITAN = (  # GPUs, compiled, published GiB
    (8, False, 82.4),
    (8, True, 77.0),
    (128, False, 67.0),
    (128, True, 62.0),
)
REFERENCE = (  # model, world, recompute, GiB per rank
    ("8b", 8, "full", 20.58),
    ("8b", 8, "none", 44.1),
    ("8b", 8, "selective", 27.4),
    ("70b", 256, "full", 22.8),
)


def workload(model: str, *, batch: int, sequence: int) -> WorkloadConfig:
    config = load_workload(f"configs/workloads/llama-3.1-{model}.yaml")
    assert isinstance(config, WorkloadConfig)
    return config.model_copy(update={"batch": batch, "sequence": sequence})


def plan(model: str, *, world: int, per_rank: int, sequence: int, recompute: str, units: list[Any]) -> PlanResult:
    described = workload(model, batch=per_rank * world, sequence=sequence)
    setting = prepare(workload=described, backend="torch", target="gpu:h100", world_size=world)
    policy = {
        "version": 1,
        "units": units,
        "precision": MIXED,
        "rules": [WEIGHTS, *ACTIVATIONS[recompute]],
        "backend_options": {"torch": {"engine": "fsdp2"}},
    }
    return plan_policy(policy, setting, name=f"{model}-{recompute}")


def titan() -> None:
    print("| GPUs | compiled | published GiB (reserved) | live GiB | with the reserve | |")
    print("|---|---|---|---|---|---|")
    found = {}
    for world, is_compiled, published in TITAN:
        if world not in found:
            found[world] = plan(
                "8b", world=world, per_rank=2, sequence=8192, recompute="selective", units=TITAN_UNITS
            ).band_bytes
        low, high = (nbytes / GIB for nbytes in found[world])
        where = (
            "inside"
            if low <= published <= high
            else f"off by {published / (low if published < low else high) - 1:+.1%}"
        )
        compiled = "yes" if is_compiled else "no"
        print(f"| {world} | {compiled} | {published} | {low:.1f} | {high:.1f} | {where} |", flush=True)


def reference() -> None:
    print("| model | world | recompute | reference GiB | planned | difference |")
    print("|---|---|---|---|---|---|")
    for model, world, recompute, expected in REFERENCE:
        result = plan(model, world=world, per_rank=1, sequence=4096, recompute=recompute, units=["layers.*"])
        planned = result.measured.peak_bytes / GIB
        difference = planned / expected - 1
        print(f"| {model} | {world} | {recompute} | {expected} | {planned:.2f} | {difference:+.1%} |", flush=True)


def large() -> None:
    print("| model | world | planned GiB | peak during | seconds | resident GiB of the planner |")
    print("|---|---|---|---|---|---|")
    for model, world in (("70b", 256), ("405b", 512)):
        started = time.monotonic()
        result = plan(model, world=world, per_rank=1, sequence=4096, recompute="full", units=["layers.*"])
        elapsed_s = time.monotonic() - started
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        planned = result.measured.peak_bytes / GIB
        event = result.measured.peak_event
        print(f"| {model} | {world} | {planned:.2f} | {event} | {elapsed_s:.0f} | {resident:.2f} |", flush=True)


def main() -> None:
    tables = {"titan": titan, "reference": reference, "large": large}
    for name in sys.argv[1:] or list(tables):
        tables[name]()


if __name__ == "__main__":
    main()

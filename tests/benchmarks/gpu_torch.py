"""The layer engine beside FSDP2 on one GPU, in under eight minutes: what CPU figures cannot say.

    python tests/benchmarks/gpu_torch.py --out docs/explanation/gpu-torch.json
    python tests/benchmarks/gpu_torch.py --tiny            # the same steps on any machine, in half a minute

Rank 0 of a pretended process group of eight: collectives move nothing, so step times hold computation, copies and the
host's work alone, and bytes are those of a real rank. Each row runs in a process of its own, for its allocator's sake.
Where there is no GPU, what only a GPU has is `not measured`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM

import memopt
from memopt_torch.testing import run_fake

WORLD = 8
NOT_MEASURED = "not measured"
SHARD = {"name": "shard", "action": "shard", "match": {"role": "param"}}
RECOMPUTE = {"name": "again", "action": "recompute", "match": {"unit": "layers.*"}}
INPUTS = {"name": "inputs", "action": "offload", "match": {"path": "layers.*.input"}}
PRODUCTS = {"name": "products", "action": "offload", "match": {"tensor": ["mlp_gate", "mlp_up", "o"]}}
SIZES = ("hidden_size", "num_hidden_layers", "vocab_size", "intermediate_size", "num_attention_heads",
         "num_key_value_heads")  # fmt: skip
COPIES = ("memcpy", "copy", "catarray", "split_with_sizes", "chunk_cat")


def policy(*rules: dict[str, Any], prefetch: int = 1) -> dict[str, Any]:
    ahead = {"prefetch": {"forward": prefetch, "backward": prefetch}}
    precision = {"compute": "bfloat16", "reduce": "float32"}
    return {"version": 1, "units": ["layers.*"], "unit_defaults": ahead, "precision": precision, "rules": list(rules)}


ROWS: dict[str, Any] = {
    "fsdp2": None,
    "layer": policy(SHARD),
    "layer, memory first": policy(SHARD, prefetch=0),
    "layer, recompute": policy(SHARD, RECOMPUTE),
    "layer, inputs offloaded, rest recomputed": policy(SHARD, INPUTS, RECOMPUTE),
    "layer, inputs and products offloaded, rest recomputed": policy(SHARD, INPUTS, PRODUCTS, RECOMPUTE),
}


def make_model(*, tiny: bool) -> Any:
    """About 1.2 billion parameters, or a few thousand."""
    torch.manual_seed(0)
    sizes = dict(zip(SIZES, (32, 3, 128, 64, 2, 2) if tiny else (2048, 16, 32000, 8192, 16, 8), strict=True))
    return LlamaForCausalLM(
        LlamaConfig(**sizes, use_cache=False, attn_implementation="sdpa", max_position_embeddings=4096)
    )


def shard_by_fsdp2(model: Any) -> None:
    """As its users do: one call a layer, embedding and head apart, the last two kept after forward."""
    mixed = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}
    fully_shard(model.model.embed_tokens, **mixed)
    for layer in model.model.layers:
        fully_shard(layer, **mixed)
    fully_shard([model.model.norm, model.lm_head], reshard_after_forward=False, **mixed)
    fully_shard(model, **mixed)


def measured(name: str, tiny: bool, steps: int) -> dict[str, Any]:
    """A row: step time, the allocator's figures over it, the time of copy kernels in one more step."""
    warnings.simplefilter("ignore")
    on_gpu = torch.cuda.is_available() and not tiny
    device = torch.device("cuda" if on_gpu else "cpu")
    with device:
        model = make_model(tiny=tiny)
    rules = ROWS[name]
    if rules is None:
        shard_by_fsdp2(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    else:
        optimizer = memopt.apply_policy(model, rules).optimizer(torch.optim.AdamW, lr=1e-4, fused=True)
    batch, sequence = (1, 16) if tiny else (2, 4096)
    tokens = torch.zeros(batch, sequence, dtype=torch.long, device=device)

    def step() -> float:
        began_s = time.perf_counter()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - began_s

    for _ in range(3):
        step()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    times_s = [step() for _ in range(steps)]
    low, median, high = statistics.quantiles(times_s, n=4)
    found: dict[str, Any] = {"step_s": median, "step_s_quartiles": [low, high]}
    return (
        found
        | (allocator() if on_gpu else dict.fromkeys(allocator_keys(), NOT_MEASURED))
        | {"copy_kernels_s": copy_kernels_s(step) if on_gpu else NOT_MEASURED}
    )


def allocator_keys() -> tuple[str, ...]:
    return ("allocated_peak_bytes", "reserved_peak_bytes", "num_alloc_retries", "num_ooms")


def allocator() -> dict[str, int]:
    """Peaks since the last reset, and how often the allocator had to give memory back and ask again."""
    stats = torch.cuda.memory_stats()
    values = (
        stats["allocated_bytes.all.peak"], stats["reserved_bytes.all.peak"], stats["num_alloc_retries"],
        stats["num_ooms"],
    )  # fmt: skip
    return dict(zip(allocator_keys(), values, strict=True))


def copy_kernels_s(step: Callable[[], Any]) -> float:
    """Seconds of device time in kernels that only move bytes."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        step()
    moved = (e for e in seen.key_averages() if any(word in e.key.lower() for word in COPIES))
    return sum(event.self_device_time_total for event in moved) / 1e6


def machine() -> dict[str, Any]:
    """What the figures were taken on."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"date": str(datetime.date.today()), "torch": torch.__version__, "cuda": torch.version.cuda, "gpu": gpu}


def run(*, tiny: bool, steps: int) -> dict[str, Any]:
    """Every row; one that fails says why and does not end the others."""
    rows: dict[str, Any] = {}
    for name in ROWS:
        began_s = time.perf_counter()
        try:
            rows[name] = run_fake(measured, WORLD, name, tiny, steps, timeout_s=75)
        except AssertionError as error:
            rows[name] = {"failed": str(error).strip().splitlines()[-1]}
        print(f"{name:55s} {rows[name]} ({time.perf_counter() - began_s:.0f} s)", file=sys.stderr)
    return {"machine": run_fake(machine, WORLD), "world": WORLD, "tiny": tiny, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    text = json.dumps(run(tiny=options.tiny, steps=options.steps), indent=1)
    if options.out is not None:
        options.out.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()

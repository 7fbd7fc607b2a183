"""The layer engine beside FSDP2 on one GPU, in under eight minutes: what CPU figures cannot say.

    python tests/benchmarks/gpu_torch.py --out docs/explanation/gpu-torch.json
    python tests/benchmarks/gpu_torch.py --tiny            # the same steps on any machine, in two minutes

Rank 0 of a pretended process group of eight: collectives move nothing, so step times hold computation, copies and the
host's work alone, and bytes are those of a real rank. Each row runs in a process of its own, for its allocator's sake;
this one never touches the GPU. Rows that there is no time for are written as such. Where there is no GPU, what only a
GPU has is `not measured`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import save_on_cpu
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

import memopt

WORLD = 8
BUDGET_S = 450.0  # of all rows together: below eight minutes with the start of the processes
ROW_S = 90.0
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
    "fsdp2": "plain",
    "fsdp2, recompute": "recompute",
    "fsdp2, save_on_cpu": "save_on_cpu",
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


def shard_by_fsdp2(model: Any, device: torch.device, *, recompute: bool) -> None:
    """As its users do: one call a layer, embedding and head apart, the last two kept after forward."""
    mixed = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}
    options: Any = {**mixed, "mesh": init_device_mesh(device.type, (WORLD,))}
    for layer in model.model.layers if recompute else ():
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    fully_shard(model.model.embed_tokens, **options)
    for layer in model.model.layers:
        fully_shard(layer, **options)
    fully_shard([model.model.norm, model.lm_head], reshard_after_forward=False, **options)
    fully_shard(model, **options)


def measured(name: str, tiny: bool, steps: int) -> dict[str, Any]:
    """A row: step time, the allocator's figures over it, the time of copy kernels in one more step."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    warnings.simplefilter("ignore")
    on_gpu = torch.cuda.is_available() and not tiny
    device = torch.device("cuda" if on_gpu else "cpu")
    if not dist.is_initialized():
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    with device:
        model = make_model(tiny=tiny)
    rules = ROWS[name]
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    if isinstance(rules, str):
        shard_by_fsdp2(model, device, recompute=rules == "recompute")
        if rules == "save_on_cpu":
            around = partial(save_on_cpu, pin_memory=on_gpu)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    else:
        optimizer = memopt.apply_policy(model, rules).optimizer(torch.optim.AdamW, lr=1e-4, fused=True)
    batch, sequence = (1, 16) if tiny else (2, 4096)
    tokens = torch.zeros(batch, sequence, dtype=torch.long, device=device)

    def step() -> float:
        began_s = time.perf_counter()
        with around():
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
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
    """Peaks since the last reset, and how often since the start the allocator had to give memory back and ask again."""
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


def in_own_process(name: str, *, tiny: bool, steps: int, limit_s: float) -> dict[str, Any]:
    """A row, or why there is none."""
    if limit_s < 10:
        return {"failed": "no time was left for this row"}
    command = [sys.executable, __file__, "--row", name, "--steps", str(steps), *(["--tiny"] if tiny else [])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return {"failed": f"stopped after {limit_s:.0f} s"}
    if done.returncode:
        return {"failed": (done.stderr.strip().splitlines() or ["it died"])[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def run(*, tiny: bool, steps: int) -> dict[str, Any]:
    """Every row; one that fails says why and does not end the others."""
    began_s = time.perf_counter()
    rows: dict[str, Any] = {}
    for name in ROWS:
        left_s = BUDGET_S - (time.perf_counter() - began_s)
        rows[name] = in_own_process(name, tiny=tiny, steps=steps, limit_s=min(left_s, ROW_S))
        print(f"{name:55s} {rows[name]}", file=sys.stderr)
    found = next((row.pop("machine") for row in rows.values() if "machine" in row), None)
    for row in rows.values():
        row.pop("machine", None)
    return {"machine": found, "world": WORLD, "tiny": tiny, "elapsed_s": time.perf_counter() - began_s, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--row", choices=ROWS, help="only this row, in this process")
    options = parser.parse_args()
    if options.row is not None:
        print(json.dumps(measured(options.row, options.tiny, options.steps) | {"machine": machine()}))
        return
    text = json.dumps(run(tiny=options.tiny, steps=options.steps), indent=1)
    if options.out is not None:
        options.out.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()

"""The layer engine against FSDP2 on the same work: step time, host overhead, copies, collectives, allocations, bytes.

    python tests/benchmarks/torch_engine.py time --hidden 256 --rounds 25
    python tests/benchmarks/torch_engine.py counts --world 8
    python tests/benchmarks/torch_engine.py memory --world 8

`time` runs two gloo ranks on this machine; every round steps each kind once, in shuffled order, and figures are medians
of ratios within a round. `counts` and `memory` run rank 0 of a fake process group, so that they say nothing about gloo.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

import memopt
from memopt_torch.measure import StepMeter
from memopt_torch.testing import run_fake, run_ranks

VOCAB = 2048
LAYERS = 8


def make_model(hidden: int) -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=hidden,
            num_hidden_layers=LAYERS,
            vocab_size=VOCAB,
            intermediate_size=hidden * 43 // 16,
            num_attention_heads=4,
            num_key_value_heads=4,
            use_cache=False,
            attn_implementation="eager",
            max_position_embeddings=512,
        )
    )


def shard_policy(*, prefetch: int = 1, **options: Any) -> dict[str, Any]:
    return {
        "version": 1,
        "unit_defaults": {"prefetch": {"forward": prefetch, "backward": prefetch}},
        "rules": [{"name": "shard", "action": "shard", "match": {"role": "param"}}],
        "backend_options": {"torch": options},
    }


POLICIES = {
    "layer_blocking": shard_policy(communication="blocking"),
    "layer_async": shard_policy(),
    "layer_two_slots": shard_policy(gradient_slots=2),
    "layer_memory_first": shard_policy(prefetch=0),
}
KINDS = ("fsdp2", "fsdp2_tuned", *POLICIES)


class Subject:
    """One way to train the same model.

    Args:
        kind: `plain`, `fsdp2`, `fsdp2_tuned` or a key of `POLICIES`.
    """

    def __init__(self, kind: str, hidden: int, *, fused: bool = False) -> None:
        self.kind = kind
        self.model = make_model(hidden)
        self.run: Any = None
        if kind == "fsdp2":
            self._fsdp2()
        elif kind == "fsdp2_tuned":
            self._fsdp2_tuned()
        elif kind != "plain":
            self.run = memopt.apply_policy(self.model, POLICIES[kind])
        how = {"fused": True} if fused else {"foreach": True}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, **how)

    def _fsdp2(self) -> None:
        base = self.model.model
        fully_shard(base.embed_tokens)
        for layer in base.layers:
            fully_shard(layer)
        fully_shard([base.norm, self.model.lm_head])
        fully_shard(self.model)

    def _fsdp2_tuned(self) -> None:
        """Last units kept, asynchronous gathers, explicit forward prefetch, no gather of the embedding in backward."""
        base = self.model.model
        layers = list(base.layers)
        fully_shard(base.embed_tokens)
        for layer in layers:
            fully_shard(layer, reshard_after_forward=layer is not layers[-1])
        fully_shard([base.norm, self.model.lm_head], reshard_after_forward=False)
        fully_shard(self.model)
        self.model._set_unshard_async_op(True)
        chain = [base.embed_tokens, *layers, base.norm]
        for current, following in itertools.pairwise(chain):
            current.set_modules_to_forward_prefetch([following])
        base.embed_tokens.set_unshard_in_backward(False)

    def forward_backward(self, tokens: torch.Tensor) -> torch.Tensor:
        loss = self.model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        return loss

    def step(self, tokens: torch.Tensor) -> None:
        self.forward_backward(tokens)
        self.optimizer.step()
        self.optimizer.zero_grad()


def tokens_of(number: int, rank: int, batch: int, sequence: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * number + rank)
    return torch.randint(0, VOCAB, (batch, sequence), generator=generator)


# ---------------------------------------------------------------------- time


def timed(hidden: int, batch: int, sequence: int, rounds: int, kinds: tuple[str, ...]) -> dict[str, Any]:
    rank = dist.get_rank()
    warnings.simplefilter("ignore")
    subjects = {kind: Subject(kind, hidden) for kind in kinds}
    for subject in subjects.values():
        for number in range(3):
            subject.step(tokens_of(number, rank, batch, sequence))
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    order = random.Random(0)
    for number in range(rounds):
        shuffled = list(kinds)
        order.shuffle(shuffled)
        for kind in shuffled:
            tokens = tokens_of(number, rank, batch, sequence)
            dist.barrier()
            started = time.perf_counter()
            subjects[kind].step(tokens)
            dist.barrier()
            seconds[kind].append(time.perf_counter() - started)
    return {kind: summary(seconds[kind], seconds["fsdp2"]) for kind in kinds}


def summary(own: list[float], reference: list[float]) -> dict[str, float]:
    ratios = [a / b for a, b in zip(own, reference, strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4)
    return {"step_ms": statistics.median(own) * 1e3, "ratio": median, "ratio_q1": low, "ratio_q3": high}


# ---------------------------------------------------------------------- counts


class OpCounter(TorchDispatchMode):
    """Operator calls and bytes written by copies, sharded wrappers looked through."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.copied_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name
        self.calls[name] += 1
        if name in ("aten::copy_", "aten::_foreach_copy_", "aten::cat", "fsdp::all_gather_copy_in",
                    "fsdp::split_with_sizes_copy", "fsdp::chunk_cat", "aten::split_with_sizes_copy"):  # fmt: skip
            self.copied_bytes += sum(t.nbytes for t in written(name, args, kwargs or {}, out))
        return out


def written(name: str, args: Any, kwargs: Any, out: Any) -> list[torch.Tensor]:
    if "out" in kwargs:
        return [t for t in torch.utils._pytree.tree_leaves(kwargs["out"]) if isinstance(t, torch.Tensor)]
    target = args[0] if name in ("aten::copy_", "aten::_foreach_copy_") else out
    found = [t for t in torch.utils._pytree.tree_leaves(target) if isinstance(t, torch.Tensor)]
    return found[:1] if name == "fsdp::all_gather_copy_in" else found


def counted(hidden: int, rounds: int) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    tokens = tokens_of(0, 0, 1, 8)
    subjects = {kind: Subject(kind, hidden) for kind in ("plain", *KINDS)}
    parameter_bytes = sum(p.numel() * 4 for p in subjects["plain"].model.parameters())
    for subject in subjects.values():
        for _ in range(3):
            subject.step(tokens)
    times: dict[str, list[float]] = {kind: [] for kind in subjects}
    order = random.Random(0)
    for _ in range(rounds):
        shuffled = list(subjects)
        order.shuffle(shuffled)
        for kind in shuffled:
            started = time.perf_counter()
            subjects[kind].forward_backward(tokens)
            times[kind].append(time.perf_counter() - started)
            subjects[kind].optimizer.zero_grad()
    units = LAYERS + 2
    found: dict[str, Any] = {}
    plain_calls = 0
    for kind, subject in subjects.items():
        with OpCounter() as counter:
            subject.forward_backward(tokens)
        subject.optimizer.zero_grad()
        total = sum(counter.calls.values())
        plain_calls = total if kind == "plain" else plain_calls
        over = statistics.median(a - b for a, b in zip(times[kind], times["plain"], strict=True))
        found[kind] = {
            "host_us_per_unit": over * 1e6 / units,
            "operator_calls_per_unit": (total - plain_calls) / units,
            "copied_over_parameter_bytes": counter.copied_bytes / parameter_bytes,
        }
    return found


# ---------------------------------------------------------------------- memory


def measured(hidden: int, batch: int, sequence: int, fused: bool) -> dict[str, Any]:
    """The whole step, and forward and backward alone (without the optimizer's temporaries)."""
    warnings.simplefilter("ignore")
    found = {}
    for kind in KINDS:
        subject = Subject(kind, hidden, fused=fused)
        tokens = tokens_of(0, 0, batch, sequence)
        for _ in range(2):
            subject.step(tokens)
        engine = subject.run.engine if subject.run is not None else None
        with StepMeter(subject.model, optimizers=(subject.optimizer,), engine=engine, batch=tokens) as inner:
            subject.forward_backward(tokens)
        subject.optimizer.step()
        subject.optimizer.zero_grad()
        with StepMeter(subject.model, optimizers=(subject.optimizer,), engine=engine, batch=tokens) as meter:
            subject.step(tokens)
        peak = meter.result().peak
        passes = inner.result().peak
        roles = dict(peak.by_role)
        found[kind] = {
            "peak_mib": peak.nbytes / 2**20,
            # What sharding cannot take away at this world size: shards and their optimizer state.
            "beyond_shards_mib": (peak.nbytes - roles["param"] - roles["optimizer_state"]) / 2**20,
            "beyond_shards_passes_mib": (passes.nbytes - passes.by_role["param"] - passes.by_role["optimizer_state"])
            / 2**20,
            "by_role_mib": {role: round(nbytes / 2**20, 2) for role, nbytes in roles.items()},
            "arena_mib": subject.run.engine.arena_plan.nbytes / 2**20 if engine is not None else None,
        }
        del subject
    return found


# ---------------------------------------------------------------------- command


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["time", "counts", "memory"])
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--batch", type=int, default=None)
    parser.add_argument("--sequence", type=int, default=None)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--world", type=int, default=8)
    parser.add_argument("--fused", action="store_true", help="memory: fused AdamW, which needs no temporaries")
    options = parser.parse_args()
    jobs: dict[str, Callable[[], Any]] = {
        "time": lambda: run_ranks(
            timed, 2, options.hidden, options.batch or 2, options.sequence or 64, options.rounds, KINDS, timeout_s=900
        )[0],
        "counts": lambda: run_fake(counted, options.world, options.hidden, options.rounds, timeout_s=900),
        "memory": lambda: run_fake(
            measured,
            options.world,
            options.hidden,
            options.batch or 1,
            options.sequence or 8,
            options.fused,
            timeout_s=900,
        ),
    }
    result = jobs[options.what]()
    for kind, figures in result.items():
        print(
            f"{kind:20s}", {k: round(v, 3) if isinstance(v, float) else v for k, v in figures.items()}, file=sys.stderr
        )
    print(json.dumps({"torch": torch.__version__, "options": vars(options), "result": result}))


if __name__ == "__main__":
    main()

"""Live bytes of one rank of eight for Llama 3 8B, bfloat16 compute and fp32 reduction: the layer engine and FSDP2.

    python tests/benchmarks/torch_engine_8b.py                                  # weights alone: 1 x 8 tokens
    python tests/benchmarks/torch_engine_8b.py --sequence 8192 --recompute      # as it is trained

Both run for real on fake tensors and a pretended process group, and the second step is metered: nothing is allocated.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import memopt
from memopt_torch.collectives import device_mesh
from memopt_torch.fake import fake_gaps
from memopt_torch.measure import StepMeter
from memopt_torch.trace import _fake_model, fake_world

WORLD = 8
KINDS: dict[str, dict[str, Any] | None] = {
    "fsdp2": None,
    "layer": {},
    "layer, memory first": {"unit_defaults": {"prefetch": {"forward": 0, "backward": 0}}},
}


def llama(layers: int) -> Any:
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=4096,
            num_hidden_layers=layers,
            vocab_size=128256,
            intermediate_size=14336,
            num_attention_heads=32,
            num_key_value_heads=8,
            use_cache=False,
            attn_implementation="sdpa",
            max_position_embeddings=8192,
        )
    )


def shard_by_fsdp2(model: Any, *, recompute: bool) -> None:
    if recompute:
        apply_activation_checkpointing(
            model, checkpoint_wrapper_fn=checkpoint_wrapper, check_fn=lambda m: isinstance(m, LlamaDecoderLayer)
        )
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    how: dict[str, Any] = {"mesh": device_mesh((("fsdp", WORLD),), "cpu"), "mp_policy": mixed}
    fully_shard(model.model.embed_tokens, **how)
    for layer in model.model.layers:
        fully_shard(layer, **how)
    fully_shard([model.model.norm, model.lm_head], **how)
    fully_shard(model, **how)


def apply_ours(model: Any, rest: dict[str, Any], *, recompute: bool) -> Any:
    rules = [{"name": "shard", "action": "shard", "match": {"role": "param"}}]
    if recompute:
        rules.append({"name": "again", "action": "recompute", "match": {"unit": "layers.*"}})
    precision = {"compute": "bfloat16", "reduce": "float32"}
    return memopt.apply_policy(
        model, {"version": 1, "units": ["layers.*"], "precision": precision, "rules": rules, **rest}
    )


def measured(kind: str, options: argparse.Namespace) -> dict[str, Any]:
    """The second step of one way to train; decimal GB."""
    rest = KINDS[kind]
    with fake_world(WORLD):
        model = _fake_model(SimpleNamespace(model=lambda: llama(options.layers)))
        with fake_gaps():
            engine = None
            if rest is None:
                shard_by_fsdp2(model, recompute=options.recompute)
            else:
                engine = apply_ours(model, rest, recompute=options.recompute).engine
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
            tokens = torch.zeros(options.batch, options.sequence, dtype=torch.long)

            def step() -> None:
                model(input_ids=tokens, labels=tokens).loss.backward()
                optimizer.step()
                optimizer.zero_grad()

            step()
            with StepMeter(model, optimizers=(optimizer,), engine=engine, batch=tokens) as meter:
                step()
    peak = meter.result().peak
    shards = peak.by_role["param"] + peak.by_role["optimizer_state"]
    found = {"total_gb": peak.nbytes / 1e9, "beyond_shards_gb": (peak.nbytes - shards) / 1e9}
    if engine is not None:
        found["arena_gb"] = engine.arena_plan.nbytes / 1e9
    return {**found, "by_role_gb": {role: nbytes / 1e9 for role, nbytes in peak.by_role.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--sequence", type=int, default=8)
    parser.add_argument("--recompute", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = {}
    for kind in KINDS:
        rows[kind] = measured(kind, options)
        print(f"{kind:22s}", {k: round(v, 3) for k, v in rows[kind].items() if isinstance(v, float)}, file=sys.stderr)
    print(json.dumps({"torch": torch.__version__, "options": vars(options), "rows": rows}))


if __name__ == "__main__":
    main()

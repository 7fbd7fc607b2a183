"""Planned against measured peak bytes on torch, cell by cell: real training steps on the CPU beside fake-tensor traces.

    python tests/benchmarks/plan_cells_torch.py [--only llama] [--ranks 2 4]

Every figure is live tensor bytes of the second step, counted by the same meter; the plan is made before anything runs.
Prints a Markdown table with the worst cell last, and exits 1 when a cell is off by more than 2%.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

import memopt
from memopt.errors import MemoptError
from memopt.lowering import make_plan
from memopt.workloads import Workload
from memopt_torch import BACKEND
from memopt_torch.measure import StepMeter
from memopt_torch.plan import estimate
from memopt_torch.testing import run_ranks

SHARD = {"name": "weights", "action": "shard", "match": {"role": "param"}}
LIMIT = 0.02


@dataclass(frozen=True)
class Cell:
    """One comparison."""

    family: str
    policy: str
    world_size: int
    planned: int
    measured: int

    @property
    def error(self) -> float:
        """Planned over measured, less one."""
        return self.planned / self.measured - 1


def models() -> dict[str, tuple[Callable[[], nn.Module], dict[str, torch.Tensor]]]:
    """Small Transformers models of each family and a batch; four layers where the family allows."""
    import transformers as tf

    tokens = torch.randint(0, 96, (4, 32), generator=torch.Generator().manual_seed(0))
    common = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    text = {**common, "intermediate_size": 128, "use_cache": False}
    causal = {"input_ids": tokens, "labels": tokens}
    auto = tf.AutoModelForCausalLM.from_config
    moe = {"num_local_experts": 4, "num_experts_per_tok": 2}
    deepseek = {
        "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 32,
        "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "num_key_value_heads": 4,
    }  # fmt: skip
    return {
        "llama": (partial(auto, tf.LlamaConfig(**text, num_key_value_heads=2)), causal),
        "mixtral": (partial(auto, tf.MixtralConfig(**text, num_key_value_heads=2, **moe)), causal),
        "t5": (
            partial(tf.T5ForConditionalGeneration, tf.T5Config(
                vocab_size=96, d_model=64, d_ff=128, d_kv=16, num_layers=4, num_heads=4, use_cache=False,
                decoder_start_token_id=0, dropout_rate=0.0,
            )),
            {"input_ids": tokens, "labels": tokens},
        ),
        "qwen3": (partial(auto, tf.Qwen3Config(**text, num_key_value_heads=2, head_dim=16)), causal),
        "deepseek": (partial(auto, tf.DeepseekV3Config(**text, **deepseek)), causal),
        "gpt2": (partial(auto, tf.GPT2Config(
            vocab_size=96, n_embd=64, n_layer=4, n_head=4, n_positions=64, use_cache=False
        )), causal),
        "bert": (partial(tf.BertForMaskedLM, tf.BertConfig(**common, intermediate_size=128)), causal),
        "vit": (
            partial(tf.ViTForImageClassification, tf.ViTConfig(
                hidden_size=64, num_hidden_layers=4, num_attention_heads=4, intermediate_size=128, image_size=32,
                patch_size=8, num_labels=4,
            )),
            {"pixel_values": torch.randn(4, 3, 32, 32), "labels": torch.zeros(4, dtype=torch.int64)},
        ),
    }  # fmt: skip


def units_of(model: nn.Module) -> list[str]:
    """The repeated layers, as a policy would name them."""
    return [f"{stack.path}.*" for stack in BACKEND.inspect(model).stacks[:2] if stack.length == 4]


def policies(units: list[str], *, thorough: bool, adapters: bool = False) -> dict[str, dict[str, Any]]:
    """Rules by the name of the cell."""
    whole = {"name": "rest", "action": "recompute", "match": {"unit": units}}
    state = {"name": "state", "action": "offload", "match": {"role": "optimizer_state"}}
    inputs = {"name": "inputs", "action": "offload", "match": {"path": [f"{unit}.input" for unit in units]}}
    products = {"name": "products", "action": "keep", "match": {"op": "matmul"}}
    found: dict[str, list[dict[str, Any]]] = {"none": [], "recompute": [whole]}
    if thorough:
        found |= {
            "selective": [products, whole],
            "offload": [inputs, whole],
            "offload all": [{"name": "all", "action": "offload", "match": {"role": "activation", "unit": units}}],
            "optimizer offload": [state],
            "optimizer offload, host": [{**state, "update_on": "host"}],
        }
    made = {name: {"version": 1, "units": units, "rules": rules} for name, rules in found.items()}
    if thorough:
        made["accumulation 4"] = {**made["none"], "accumulate": {"steps": 4}}
    return made


def sharded(units: list[str]) -> dict[str, dict[str, Any]]:
    """Policies that shard, alone and with recompute, on both engines."""
    whole = {"name": "rest", "action": "recompute", "match": {"unit": units}}
    base = {"version": 1, "units": units, "rules": [SHARD]}
    return {
        "shard, layer": base,
        "shard and recompute, layer": {**base, "rules": [SHARD, whole]},
        "memory first, layer": {**base, "unit_defaults": {"prefetch": {"forward": 0, "backward": 0}}},
        "groups of two, layer": {**base, "unit_defaults": {"reshard_after_forward": 2}},
        "shard, fsdp2": {**base, "backend_options": {"torch": {"engine": "fsdp2"}}},
        "shard and recompute, fsdp2": {
            **base, "rules": [SHARD, whole], "backend_options": {"torch": {"engine": "fsdp2"}}
        },
    }  # fmt: skip


def workload(name: str, build: Callable[[], nn.Module], batch: dict[str, torch.Tensor]) -> Workload:
    """AdamW on the model's own loss."""
    return Workload(
        name=name,
        model=build,
        loss=lambda model, batch: model(**batch).loss,
        batch=batch,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    )


def with_frozen_base(build: Callable[[], nn.Module]) -> nn.Module:
    """A frozen base with low-rank adapters beside its query and value projections."""
    model = build()
    model.requires_grad_(False)
    for module in list(model.modules()):
        for name in ("q_proj", "v_proj", "q", "v"):
            linear = getattr(module, name, None)
            if isinstance(linear, nn.Linear):
                setattr(module, name, Adapted(linear))
    return model


class Adapted(nn.Module):
    """A frozen linear layer and its low-rank correction."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 4, bias=False)
        self.up = nn.Linear(4, base.out_features, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.base(hidden) + self.up(self.down(hidden))


def measured(job: Workload, policy: dict[str, Any]) -> int:
    """Peak live bytes of the second real step; the largest rank's."""
    torch.manual_seed(0)
    model = job.model().train()
    run = memopt.apply_policy(model, policy)
    optimizer = run.optimizer(job.optimizer)
    batch = {name: tensor.clone() for name, tensor in job.batch.items()}

    def step() -> None:
        for _ in range(run.plan.accumulate_steps):
            job.loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with StepMeter(model, (optimizer,), engine=run.engine, batch=batch) as meter:
        step()
    return meter.result().peak.nbytes


def planned(job: Workload, policy: dict[str, Any], world_size: int) -> int:
    """Peak bytes of the plan."""
    loaded = memopt.load_policy(policy)
    spec = BACKEND.inspect_workload(job)
    plan = make_plan(loaded, spec, backend=BACKEND, world_size=world_size, options=_options(loaded))
    return estimate(job, plan, spec).peak_bytes


def _options(policy: memopt.Policy) -> dict[str, Any]:
    return BACKEND.options()(**policy.backend_options.get("torch", {})).model_dump()


def cells(only: str | None, ranks: list[int]) -> Iterator[Cell]:
    """Every cell, as it is made."""
    for family, (build, batch) in models().items():
        if only is not None and family != only:
            continue
        thorough = family in ("llama", "mixtral", "t5")
        with torch.device("meta"):
            units = units_of(build())
        job = workload(family, build, batch)
        for name, policy in policies(units, thorough=thorough).items():
            yield Cell(family, name, 1, planned(job, policy, 1), measured(job, policy))
        if thorough:
            frozen = workload(family, partial(with_frozen_base, build), batch)
            policy = policies(units, thorough=False)["recompute"]
            yield Cell(family, "adapters, recompute", 1, planned(frozen, policy, 1), measured(frozen, policy))
            for world_size in ranks:
                for name, policy in sharded(units).items():
                    real = max(run_ranks(measured, world_size, job, policy))
                    yield Cell(family, name, world_size, planned(job, policy, world_size), real)


def main() -> int:
    """Print the table; 1 when a cell is off by more than the limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only")
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found: list[Cell] = []
    print("| family | policy | ranks | planned | measured | error |\n|---|---|---|---|---|---|")
    try:
        for cell in cells(given.only, given.ranks):
            found.append(cell)
            print(
                f"| {cell.family} | {cell.policy} | {cell.world_size} | {cell.planned:,} | {cell.measured:,} "
                f"| {cell.error:+.2%} |",
                flush=True,
            )
    except MemoptError as error:
        print(error, file=sys.stderr)
        return 1
    worst = max(found, key=lambda cell: abs(cell.error))
    equal = sum(cell.planned == cell.measured for cell in found)
    print(f"\n{len(found)} cells, {equal} equal to the byte; worst: {worst.family}, {worst.policy}, {worst.error:+.2%}")
    return int(abs(worst.error) > LIMIT)


if __name__ == "__main__":
    sys.exit(main())

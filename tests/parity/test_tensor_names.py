"""The tables of neutral tensor names against the models they are for, Transformers' own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from memopt import inspect_model, make_plan

NUMBERS = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4,
}  # fmt: skip
ATTENTION = {"layer_input", "q", "k", "v", "attn_out", "attn_stats", "o"}
MLP = {"mlp_gate", "mlp_up", "mlp_act", "mlp_down"}
EXPERTS = {"router", "expert_in", "expert_out"}


def _moe(name: str, **numbers: Any) -> Callable[[], torch.nn.Module]:
    config = getattr(transformers, f"{name}Config")
    model = getattr(transformers, f"{name}ForCausalLM")
    return lambda: model(config(**NUMBERS, **numbers))


def _gpt2() -> torch.nn.Module:
    numbers = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**numbers))


def _t5() -> torch.nn.Module:
    numbers = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 64}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**numbers, feed_forward_proj="gated-gelu"))


MODELS: dict[str, tuple[Callable[[], torch.nn.Module], str, set[str]]] = {
    "Llama": (_moe("Llama"), "llama", ATTENTION | MLP),
    "Qwen3": (_moe("Qwen3"), "qwen", ATTENTION | MLP),
    "Qwen2Moe": (_moe("Qwen2Moe", num_experts=4), "qwen", ATTENTION | MLP | EXPERTS),
    "Mixtral": (_moe("Mixtral", num_local_experts=4), "mixtral", ATTENTION | EXPERTS),
    "DeepseekV3": (
        _moe("DeepseekV3", n_routed_experts=4, n_group=1, topk_group=1, first_k_dense_replace=1),
        "deepseek",
        ATTENTION - {"v"} | MLP | EXPERTS,
    ),
    "GPT2": (_gpt2, "gpt2", ATTENTION - {"v"} | MLP - {"mlp_gate"}),
    "T5": (_t5, "t5", ATTENTION | MLP),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_names_of_a_family_are_found_in_each_of_its_layers(name: str) -> None:
    build, family, expected = MODELS[name]
    with torch.device("meta"):
        model = build()
    spec = inspect_model(model)
    assert spec.family == family
    plan = make_plan({"version": 1}, spec, backend="torch")
    by_unit: dict[str | None, set[str]] = {unit.name: set() for unit in plan.units}
    for row in plan.rows_of("activation"):
        if row.tensor is not None and row.unit is not None:
            by_unit[row.unit].add(row.tensor)
    assert set().union(*by_unit.values()) >= expected
    common = set.intersection(*by_unit.values())
    assert common >= expected - MLP - EXPERTS  # a layer has a plain MLP or experts


def test_a_rule_by_tensor_takes_the_same_values_of_every_family() -> None:
    """One policy, written once, offloads the attention's output of each."""
    policy = {"version": 1, "rules": [{"name": "a", "action": "offload", "match": {"tensor": "attn_out"}}]}
    for build, _, _ in MODELS.values():
        with torch.device("meta"):
            model = build()
        plan = make_plan(policy, inspect_model(model), backend="torch")
        assert {row.unit for row in plan.rows if row.residual == "offload"} == {unit.name for unit in plan.units}

"""The neutral names of each family's values."""

from __future__ import annotations

from typing import get_args

import pytest

from memopt.rules import TensorName
from memopt.vocabulary import TABLES, family_of, tensor_name

EXPECTED = {
    ("llama", "layers.3.mlp.gate_proj"): "mlp_gate",
    ("llama", "layers.3.self_attn.q"): "q",
    ("llama", "layers.3.self_attn.q_proj"): None,
    ("llama", "layers.3.self_attn.v_proj"): "v",
    ("llama", "layers.3.input"): "layer_input",
    ("llama", "lm_head.input"): None,
    ("qwen", "layers.0.mlp.shared_expert.down_proj"): "mlp_down",
    ("qwen", "layers.0.mlp.gate"): "router",
    ("mixtral", "layers.1.block_sparse_moe.experts.7.w1"): "mlp_gate",
    ("mixtral", "layers.1.block_sparse_moe.experts.7.w3"): "mlp_up",
    ("mixtral", "layers.1.mlp.experts"): "expert_out",
    ("mixtral", "layers.1.mlp.experts.expert_in"): "expert_in",
    ("deepseek", "layers.5.mlp.shared_experts.up_proj"): "mlp_up",
    ("deepseek", "layers.5.self_attn.v"): "v",
    ("gpt2", "transformer.h.11.attn.q"): "q",
    ("gpt2", "transformer.h.11.mlp.c_fc"): "mlp_up",
    ("t5", "decoder.block.2.layer.1.EncDecAttention.q"): "q",
    ("t5", "encoder.block.2.layer.1.DenseReluDense.wi_0"): "mlp_gate",
    ("t5", "encoder.block.2.input"): "layer_input",
    (None, "layers.3.mlp.gate_proj"): None,
}


@pytest.mark.parametrize("key, expected", EXPECTED.items())
def test_each_family_names_its_values(key: tuple[str | None, str], expected: str | None) -> None:
    assert tensor_name(*key) == expected


def test_tables_use_names_of_the_policy_alone() -> None:
    assert {name for table in TABLES.values() for name in table} <= set(get_args(TensorName))


@pytest.mark.parametrize(
    "classes, family",
    [
        (["LlamaForCausalLM", "Linear"], "llama"),
        (["Linear", "Qwen3DecoderLayer"], "qwen"),
        (["MixtralSparseMoeBlock"], "mixtral"),
        (["DeepseekV3Attention"], "deepseek"),
        (["GPT2Block"], "gpt2"),
        (["T5Stack", "T5Block"], "t5"),
        (["MyBlock", "Linear"], None),
    ],
)
def test_the_family_follows_from_the_class_names(classes: list[str], family: str | None) -> None:
    assert family_of(classes) == family

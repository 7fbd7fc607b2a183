"""Sizes of named values from a workload's numbers."""

from __future__ import annotations

from dataclasses import replace

from memopt.workloads import load_workload
from memopt.workloads.sizes import value_widths, with_sizes


def test_sizes_equal_those_of_an_inventory_that_ran_the_model(sized_backend):
    config = load_workload("configs/workloads/llama-tiny.yaml")
    known = sized_backend().inspect_workload(config)
    stripped = replace(
        known,
        tensors=tuple(replace(t, shape=None, dtype=None) if t.role == "activation" else t for t in known.tensors),
        batch="per_device",
    )
    filled = with_sizes(stripped, config)
    assert filled.batch == "global"
    assert [t.shape for t in filled.tensors] == [t.shape for t in known.tensors]


def test_an_inventory_that_knows_sizes_is_left_alone(sized_backend):
    config = load_workload("configs/workloads/llama-tiny.yaml")
    known = sized_backend().inspect_workload(config)
    assert with_sizes(known, config) == known
    per_device = replace(known, batch="per_device")
    assert with_sizes(per_device, config) is per_device


def test_latent_attention_has_widths_of_its_own_and_experts_none():
    config = load_workload("configs/workloads/deepseek-v3.yaml")
    widths = value_widths(config)
    assert widths["q"] == config.heads * (config.mla.qk_nope_head_dim + config.mla.qk_rope_head_dim)
    assert widths["v"] == config.heads * config.mla.v_head_dim
    assert "mlp_gate" not in widths

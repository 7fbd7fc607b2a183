"""MaxText's offload recipes as policies: the same set of tensors goes to the host."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from memopt import make_plan
from memopt.backend import load_backend
from memopt.plan import Plan
from memopt.spec import ModelSpec
from memopt.workloads import load_workload

CONFIGS = Path(__file__).parents[3] / "configs"

# MaxText's checkpoint names (`nnx_decoders.py`, get_remat_policy) and what they are called here; names of variants that
# one model has not (a fused `qkv_proj`, a single `mlpwi`) are left out.
NEUTRAL = {
    "decoder_layer_input": "layer_input", "query_proj": "q", "key_proj": "k", "value_proj": "v", "out_proj": "o",
    "context": "attn_out", "mlpwi_0": "mlp_gate", "mlpwi_1": "mlp_up", "mlpwo": "mlp_down",
}  # fmt: skip


@cache
def _spec() -> ModelSpec:
    return load_backend("jax").inspect_workload(load_workload(str(CONFIGS / "workloads" / "llama-tiny.yaml")))


def lowered(recipe: str) -> Plan:
    policy = CONFIGS / "policies" / "maxtext" / f"{recipe}.yaml"
    return make_plan(policy, _spec(), backend="jax", world_size=1)


def tensors(plan: Plan, residual: str) -> set[str | None]:
    rows = [row for row in plan.rows_of("activation") if row.unit is not None and row.residual == residual]
    return {row.tensor for row in rows if row.tensor is not None}


@pytest.mark.parametrize(
    "recipe, offloaded, on_device",
    [
        (
            "minimal_offloaded",
            ("query_proj", "key_proj", "value_proj", "out_proj", "mlpwi_0", "mlpwi_1", "mlpwo"),
            ("decoder_layer_input",),
        ),
        ("qkv_proj_offloaded", ("query_proj", "key_proj", "value_proj"), ("decoder_layer_input",)),
        ("custom", ("decoder_layer_input", "query_proj", "key_proj", "value_proj"), ("out_proj", "context")),
        ("host_offload", (), ("decoder_layer_input",)),
    ],
)
def test_a_recipe_offloads_and_keeps_what_maxtext_does(
    recipe: str, offloaded: tuple[str, ...], on_device: tuple[str, ...]
) -> None:
    plan = lowered(recipe)
    assert tensors(plan, "offload") == {NEUTRAL[name] for name in offloaded}
    assert tensors(plan, "keep") == {NEUTRAL[name] for name in on_device}


def test_optimizer_state_and_layer_parameters_rest_on_the_host() -> None:
    plan = lowered("host_offload")
    assert {row.memory_kind for row in plan.rows_of("optimizer_state")} == {"pinned_host"}
    on_host = {row.path for row in plan.rows_of("param") if row.memory_kind == "pinned_host"}
    assert on_host == {row.path for row in plan.rows_of("param") if row.path.startswith("layers.")}

"""Bytes from a plan alone, and the type of a measurement."""

from __future__ import annotations

import pytest

from memopt.errors import MemoptError
from memopt.estimate import ROOT, Measured, planned_bytes, unit_whole_bytes
from memopt.loading import load_policy
from memopt.lowering import make_plan


@pytest.fixture
def plan_of(llama_spec, fake_backend):
    def make(policy, *, world_size=2, **spec):
        return make_plan(
            load_policy({"version": 1, **policy}), llama_spec(**spec), backend=fake_backend(), world_size=world_size
        )

    return make


SHARD = {"name": "weights", "action": "shard", "match": {"role": "param"}, "axis": "fsdp"}


def total(plan, role):
    return sum(row.nbytes for row in plan.rows_of(role))


def test_every_byte_of_a_plan_is_in_one_account(plan_of):
    plan = plan_of({"rules": [SHARD]})
    planned = planned_bytes(plan)
    for role in ("param", "grad", "optimizer_state"):
        assert planned.resident[role, "device"] == total(plan, role)
    assert sum(planned.saved.values()) == total(plan, "activation")


def test_offloaded_state_is_held_on_the_host(plan_of):
    rule = {"name": "adam", "action": "offload", "match": {"role": "optimizer_state"}}
    planned = planned_bytes(plan_of({"rules": [rule]}))
    assert ("optimizer_state", "device") not in planned.resident
    assert planned.resident["optimizer_state", "pinned_host"] > 0


def test_residuals_are_counted_apart(plan_of):
    rules = [
        {"name": "inputs", "action": "offload", "match": {"path": "layers.*.input"}},
        {"name": "rest", "action": "recompute", "match": {"unit": "layers.*"}},
    ]
    planned = planned_bytes(plan_of({"rules": rules}, world_size=1))
    assert planned.saved["offload"] == 4 * 2 * 4 * 8 * 4  # four layers' inputs: batch 2, sequence 4, hidden 8, float32
    assert planned.saved["recompute"] > planned.saved["offload"]


def test_two_neighbouring_units_are_whole_at_once(plan_of):
    plan = plan_of(
        {"rules": [SHARD], "units": ["layers.*", {"match": ["embed_tokens", "norm", "lm_head"], "group": True}]}
    )
    whole = unit_whole_bytes(plan)
    layer = whole["layers.0"]
    assert layer == sum(row.global_nbytes for row in plan.rows_of("param") if row.unit == "layers.0")
    assert planned_bytes(plan).gathered == max(2 * layer, layer + max(whole.values()))


def test_what_no_unit_names_stays_whole_through_the_step(plan_of):
    plan = plan_of({"rules": [SHARD]})
    root = unit_whole_bytes(plan)[ROOT]
    assert root == sum(row.global_nbytes for row in plan.rows_of("param") if row.unit is None)
    assert planned_bytes(plan).gathered == root + 2 * unit_whole_bytes(plan)["layers.0"]


def test_units_that_are_not_resharded_add_up(plan_of):
    plan = plan_of({"rules": [SHARD], "unit_defaults": {"reshard_after_forward": False}})
    assert planned_bytes(plan).gathered == sum(unit_whole_bytes(plan).values())


def test_units_resharded_over_groups_keep_a_part_of_each(plan_of):
    """From the forward pass to the backward pass a group of two holds every such layer, half of it a device."""
    part = plan_of({"rules": [SHARD], "unit_defaults": {"reshard_after_forward": 2}}, world_size=4)
    whole = plan_of({"rules": [SHARD]}, world_size=4)
    layers = [size for unit, size in unit_whole_bytes(part).items() if unit.startswith("layers.")]
    assert len(layers) == 4
    assert planned_bytes(part).gathered - planned_bytes(whole).gathered == sum(size // 2 for size in layers)


def test_weights_are_gathered_in_the_compute_dtype(plan_of):
    whole = unit_whole_bytes(plan_of({"rules": [SHARD]}))
    half = unit_whole_bytes(plan_of({"rules": [SHARD], "precision": {"compute": "bfloat16"}}))
    assert half["layers.0"] * 2 == whole["layers.0"]


@pytest.mark.parametrize(
    "figures, said",
    [
        ({"by_role": {}}, "0 bytes"),
        ({"by_role": {"weights": 3}}, "unknown role `weights`"),
        ({"by_role": {"param": 3, "temp": -1}}, "negative bytes for `temp`"),
        ({"by_role": {"param": 3}, "method": "guess"}, "unknown method `guess`"),
        ({"by_role": {"param": 3}, "host_bytes": -1}, "negative `host_bytes`"),
    ],
)
def test_a_measurement_that_cannot_be_right_is_refused(figures, said):
    with pytest.raises(MemoptError) as error:
        Measured(**{"method": "fake-trace", **figures}).check()
    assert error.value.problems[0].code == "bad-measurement"
    assert said in str(error.value)


def test_the_peak_is_the_sum_of_its_roles():
    assert Measured(method="xla-aot", by_role={"param": 3, "temp": 4}).check().peak_bytes == 7

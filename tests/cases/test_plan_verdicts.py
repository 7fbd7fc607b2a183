"""What people reported about plans of tools like this one: the rows that need no framework."""

from __future__ import annotations

import pytest

from memopt.errors import MemoptError
from memopt.estimate import Measured, planned_bytes
from memopt.loading import load_policy
from memopt.lowering import make_plan
from memopt.planning import judged, plan_policy, prepare
from memopt.targets import load_target
from memopt.verdicts import advice, capacity_of, verdicts

GIB = 2**30
SHARD = {"name": "weights", "action": "shard", "match": {"role": "param"}, "axis": "fsdp"}
LLAMA_8B = "configs/workloads/llama-3.1-8b.yaml"


@pytest.fixture
def plan_of(llama_spec, fake_backend):
    def make(policy, *, world_size=2, **spec):
        policy = load_policy({"version": 1, **policy})
        return make_plan(policy, llama_spec(**spec), backend=fake_backend(), world_size=world_size)

    return make


def fake_trace(**by_role):
    return Measured(method="fake-trace", by_role=by_role)


def test_pool_and_ram_are_told_apart_with_the_setting_to_change():
    """openxla/xla#20633, numpyro_forecast#99. Family: running out of a host pool that has a cap of its own reads like
    device memory, and nobody knows which setting to change.
    """
    target = load_target("gpu:h100:8")
    capacity = capacity_of(target, "jax", num_devices=8)

    def failing(host_gib):
        measured = Measured(method="xla-aot", by_role={"param": GIB}, host_bytes=host_gib * GIB)
        found = verdicts(measured, capacity, target=target, framework="jax", budget={})
        return {verdict.name: verdict.setting for verdict in found if verdict.fits is False}

    assert failing(4) == {}
    above_pool = failing(20)  # 160 GiB a node: the pool takes 64 GB, the node has 2 TB
    assert list(above_pool) == ["host pool"]
    assert "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB" in above_pool["host pool"]
    above_ram = failing(300)
    assert set(above_ram) == {"host pool", "host RAM"}
    assert "offload less" in above_ram["host RAM"]


def test_the_plan_says_what_sharding_can_save_when_activations_dominate(plan_of):
    """fairscale#1050. Family: sharding is turned on and saves nothing, because activations dominate."""
    plan = plan_of({"rules": []}, batch=4096)
    said = advice(plan, fake_trace(param=1000, grad=1000, optimizer_state=2000, activation=10**7), fits=None)
    (about,) = [text for text in said if "sharding does not touch" in text]
    assert "100% of the peak" in about
    assert "at most" in about
    assert "recompute or offload" in about


def test_a_single_unit_around_everything_is_flagged(plan_of):
    """fairscale#1050. Family: one unit wraps the model, so everything is gathered at once."""
    one_unit = {"rules": [SHARD], "units": [{"match": ["layers.*", "embed_tokens", "norm", "lm_head"], "group": True}]}
    plan = plan_of(one_unit)
    said = advice(plan, fake_trace(param=1000, gathered=5000), fits=None)
    assert any("wraps everything" in text and "gathered at once" in text for text in said)
    layered = advice(plan_of({"rules": [SHARD]}), fake_trace(param=1000, gathered=5000), fits=None)
    assert not any("wraps everything" in text for text in layered)


def test_embedding_and_head_left_in_the_root_count_whole(plan_of):
    """pytorch#131965. Family: what no unit names is gathered whole through the peak, and the estimate leaves it out."""
    vocab, hidden = 4096, 8
    root = planned_bytes(plan_of({"rules": [SHARD]}, vocab=vocab))
    units = ["layers.*", "embed_tokens", "lm_head"]
    apart = planned_bytes(plan_of({"rules": [SHARD], "units": units}, vocab=vocab))
    one = vocab * hidden * 4
    assert root.gathered >= 2 * one
    assert apart.gathered < root.gathered - one / 2


def test_gradients_of_frozen_weights_take_no_bytes(llama_spec, fake_backend):
    """litgpt#1417. Family: gradient and state bytes are counted as if frozen weights were trained."""
    from dataclasses import replace

    spec = llama_spec()
    frozen = tuple(
        replace(tensor, trainable=False) if tensor.role == "param" and "lm_head" not in tensor.path else tensor
        for tensor in spec.tensors
    )
    policy = load_policy({"version": 1, "rules": [SHARD]})
    plan = make_plan(policy, replace(spec, tensors=frozen), backend=fake_backend(), world_size=2)
    planned = planned_bytes(plan)
    head = next(row for row in plan.rows_of("param") if row.path == "lm_head.weight")
    assert planned.resident["grad", "device"] == head.nbytes
    assert planned.resident["optimizer_state", "device"] == 2 * head.nbytes


def test_deferred_reduction_adds_whole_gradients_to_the_plan(plan_of):
    """accelerate#2531, accelerate#3762. Family: skipping the reduction keeps whole gradients and runs out of memory."""
    each = planned_bytes(plan_of({"rules": [SHARD], "accumulate": {"steps": 4, "reduce": "each"}}, world_size=4))
    last = planned_bytes(plan_of({"rules": [SHARD], "accumulate": {"steps": 4, "reduce": "last"}}, world_size=4))
    assert each.full_grad == 0
    assert last.full_grad == last.resident["grad", "device"]
    assert last.resident["grad", "device"] > 3.9 * each.resident["grad", "device"]


def test_the_plan_lists_what_it_leaves_out_and_gives_a_band(sized_backend):
    """DeepSpeed#4527, DeepSpeed#5102, Megatron-LM#6782. Family: one bare number that was wrong by a factor."""
    setting = prepare(workload=LLAMA_8B, backend=sized_backend(), target="gpu:h100:8")
    data = plan_policy("configs/policies/shard.yaml", setting).to_json()
    low, high = data["device"]["band_bytes"]
    assert low == data["device"]["peak_bytes"] < high
    assert high - low == sum(part["bytes"] for part in data["device"]["reserve"])
    assert all(part["source"] for part in data["device"]["reserve"])
    assert data["left_out"]


def test_a_compiler_that_reports_zeros_is_unknown_never_zero_bytes():
    """jax#18954, jax#31292. Family: every field of the memory analysis is zero, and the tool prints 0 GB."""
    with pytest.raises(MemoptError) as error:
        Measured(method="xla-aot", by_role={"param": 0, "temp": 0}).check()
    assert error.value.problems[0].code == "bad-measurement"


def test_offload_has_a_least_time_from_its_bytes_and_the_link(sized_backend):
    """jax#28988, jax#21438, axlearn#867. Family: offload is turned on and the step takes several times as long."""
    setting = prepare(workload=LLAMA_8B, backend=sized_backend(), target="gpu:h100:8")
    data = plan_policy("configs/policies/offload.yaml", setting).to_json()
    moved = data["traffic"]["to_host_bytes"]
    assert moved > 0
    assert data["step_time"]["least_transfer_s"] == pytest.approx(moved / 55e9)
    assert data["step_time"]["low_s"] >= data["step_time"]["least_transfer_s"]


def test_recompute_that_saves_nothing_is_visible_side_by_side(sized_backend):
    """jax#27748, jax#13999, pytorch/xla#3455. Family: recompute saved memory on one release and not on a later one.

    A plan is of the installed versions, which it prints; saving nothing is said in words.
    """
    setting = prepare(workload=LLAMA_8B, backend=sized_backend(), target="gpu:h100:8")
    results = [plan_policy(f"configs/policies/{name}.yaml", setting) for name in ("none", "recompute")]
    assert results[1].measured.peak_bytes < results[0].measured.peak_bytes
    useless = judged("recompute", results[1].plan, results[0].measured, setting)
    assert any("recompute has no effect" in text for text in useless.advice)
    assert not any("recompute has no effect" in text for text in results[1].advice)
    assert all(result.to_json()["versions"] for result in results)


def test_a_mesh_smaller_than_the_world_prints_both_numbers_and_the_fix(sized_backend, tmp_path):
    """Bagel#309. Family: a mesh that is not the world's size fails late, on the second node, with an index error."""
    file = tmp_path / "mesh.yaml"
    file.write_text("version: 1\nmesh: {replicate: 1, fsdp: 2}\nrules: []\n", encoding="utf-8")
    for world_size in (3, 4):
        setting = prepare(workload=LLAMA_8B, backend=sized_backend(), target="gpu:h100", world_size=world_size)
        with pytest.raises(MemoptError) as error:
            plan_policy(file, setting)
        (problem,) = error.value.problems
        assert str(world_size) in problem.message
        assert "2" in problem.message
        assert problem.hint


def test_padding_of_odd_sizes_is_counted(llama_spec, fake_backend):
    """lightning-thunder#248. Family: a vocabulary that the devices do not divide stops sharding or is counted short."""
    policy = load_policy({"version": 1, "rules": [SHARD]})
    plan = make_plan(policy, llama_spec(vocab=13), backend=fake_backend(sharding="first"), world_size=2)
    row = next(row for row in plan.rows_of("param") if row.path == "lm_head.weight")
    assert row.nbytes == 7 * 8 * 4
    assert row.global_nbytes == 13 * 8 * 4

"""Verdicts: device, host pool and host RAM apart; advice that names what to change."""

from __future__ import annotations

import pytest

from memopt.estimate import Measured
from memopt.loading import load_policy
from memopt.lowering import make_plan
from memopt.targets import load_target
from memopt.verdicts import advice, capacity_of, verdicts

GIB = 2**30


def judge(measured, target="gpu:gb200:4", framework="jax", **budget):
    loaded = load_target(target)
    capacity = capacity_of(loaded, framework, num_devices=loaded.num_devices)
    return {v.name: v for v in verdicts(measured, capacity, target=loaded, framework=framework, budget=budget)}


def measured(device_gib, host_gib=0.0, **extra):
    return Measured(
        method="xla-aot", by_role={"param": round(device_gib * GIB)}, host_bytes=round(host_gib * GIB), **extra
    )


def test_fit_is_judged_against_what_the_framework_takes_by_default():
    """JAX preallocates 0.75 of a GPU: 168 GiB does not fit a GB200 of 184 without raising it."""
    device = judge(measured(168))["device"]
    assert device.fits is False
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION=0.93" in device.setting
    assert judge(measured(168), framework="torch")["device"].fits is True


def test_a_budget_replaces_the_default_limit():
    assert judge(measured(100), device=90 * GIB)["device"].fits is False
    assert judge(measured(80), device=90 * GIB)["device"].fits is True


def test_a_budget_above_the_device_does_not_make_it_larger():
    found = list(
        verdicts(
            measured(150),
            capacity_of(load_target("gpu:gb200"), "jax", num_devices=1),
            target=load_target("gpu:gb200"),
            framework="jax",
            budget={"device": 400 * GIB},
        )
    )
    assert [verdict.fits for verdict in found] == [True, False]


def pool_with(declared_gib, host_gib):
    loaded = load_target("gpu:gb200:4")
    capacity = capacity_of(loaded, "jax", num_devices=4)
    options = {"pinned_pool_gib": declared_gib}
    found = verdicts(measured(10, host_gib), capacity, target=loaded, framework="jax", budget={}, options=options)
    return next(verdict for verdict in found if verdict.name == "host pool")


def test_a_declared_pinned_pool_replaces_the_default_cap_and_says_what_to_set():
    enough = pool_with(130, host_gib=30)
    assert enough.fits is True
    assert "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=130" in enough.setting
    short = pool_with(100, host_gib=30)
    assert short.fits is False
    assert "raise `pinned_pool_gib` to 126" in short.setting


def test_pool_and_ram_are_two_verdicts_with_two_remedies():
    found = judge(measured(10, host_gib=30))  # 120 GiB a node: above the pool's 64 GB, far below 960 GB of RAM
    assert found["host pool"].fits is False
    assert "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=126" in found["host pool"].setting
    assert found["host RAM"].fits is True
    found = judge(measured(10, host_gib=335))
    assert found["host RAM"].fits is False
    assert "no setting adds memory" in found["host RAM"].setting


def test_host_memory_counts_every_rank_of_the_node():
    assert judge(measured(10, host_gib=1), target="gpu:h100:8")["host RAM"].needed_bytes == 8 * GIB
    assert judge(measured(10, host_gib=1), target="gpu:h100:2")["host RAM"].needed_bytes == 2 * GIB


def test_a_host_budget_is_per_node():
    found = judge(measured(10, host_gib=30), host=100 * GIB)
    assert found["host RAM"].fits is False
    assert found["host RAM"].over_bytes == 20 * GIB


def test_torch_has_no_pool_of_its_own():
    assert "host pool" not in judge(measured(10, host_gib=30), framework="torch")


def test_an_unpublished_host_is_unknown_not_fine():
    found = judge(measured(10, host_gib=3), target="tpu:v5e:2x2")
    assert found["host RAM"].fits in (None, True)
    if found["host RAM"].limit_bytes is None:
        assert found["host RAM"].fits is None


SHARD = {"name": "weights", "action": "shard", "match": {"role": "param"}, "axis": "fsdp"}


@pytest.fixture
def plan_of(llama_spec, fake_backend):
    def make(policy, *, world_size=2, **spec):
        return make_plan(
            load_policy({"version": 1, **policy}), llama_spec(**spec), backend=fake_backend(), world_size=world_size
        )

    return make


def figures(**by_role):
    return Measured(method="fake-trace", by_role=by_role)


def test_the_root_is_named_with_what_to_move_out_of_it(plan_of):
    plan = plan_of({"rules": [SHARD]}, vocab=1024)
    said = advice(plan, figures(param=40_000, gathered=70_000), fits=False)
    assert any("gathered whole in the root" in text and "`embed_tokens` and `lm_head`" in text for text in said)


def test_a_group_that_stays_gathered_is_named(plan_of):
    units = ["layers.*", {"match": ["norm", "lm_head"], "group": True, "reshard_after_forward": False}, "embed_tokens"]
    said = advice(plan_of({"rules": [SHARD], "units": units}, vocab=1024), figures(param=70_000), fits=False)
    assert any("unit `norm+lm_head` stays gathered" in text and "give `lm_head` its own unit" in text for text in said)


def test_deferred_reduction_is_priced(plan_of):
    plan = plan_of({"rules": [SHARD], "accumulate": {"steps": 4, "reduce": "last"}})
    assert any("keeps whole gradients" in text for text in advice(plan, figures(param=10_000), fits=True))


def test_the_largest_kept_tensor_is_offered_when_nothing_fits(plan_of):
    said = advice(plan_of({"rules": []}, world_size=1), figures(activation=5_000), fits=False)
    assert any("`tensor: mlp_gate` is kept in every layer" in text for text in said)

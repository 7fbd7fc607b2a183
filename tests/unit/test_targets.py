"""Targets: every accelerator loads, every constant has a source, and a wrong name is answered with the nearest."""

from __future__ import annotations

import pytest

from memopt.errors import MemoptError
from memopt.targets import load_target, target_names

GIB = 2**30


@pytest.mark.parametrize("name", target_names())
def test_every_listed_target_loads_and_every_constant_has_a_source(name: str) -> None:
    target = load_target(name)
    assert target.num_devices >= 1
    assert all(fact.source for fact in target.facts.values())
    assert set(target.assumed) <= set(target.facts)


def test_a_count_multiplies_devices_and_nodes() -> None:
    target = load_target("gpu:gb200:64")
    assert (target.num_devices, target.devices_per_node, target.num_nodes) == (64, 4, 16)
    assert target.host_bytes_per_node == 960 * 10**9
    assert target.with_devices(8).name == "gpu:gb200:8"


def test_jax_takes_three_quarters_of_a_gpu_and_torch_less_its_reserve() -> None:
    target = load_target("gpu:gb200")
    assert target.usable_bytes("jax") == 197897748480 * 3 // 4
    usable_bytes = target.usable_bytes("torch")
    assert usable_bytes is not None
    assert target.capacity_bytes is not None
    assert 197897748480 * 3 // 4 < usable_bytes < target.capacity_bytes
    assert sum(size for _, size, _ in target.reserve("torch")) + usable_bytes == target.capacity_bytes


def test_reserve_of_one_torch_process_has_no_collectives() -> None:
    assert "collectives" not in {what for what, _, _ in load_target("gpu:h100").reserve("torch")}
    assert "collectives" in {what for what, _, _ in load_target("gpu:h100:2").reserve("torch")}


def test_a_v7x_chip_is_two_devices_and_a_tpu_uses_what_its_compiler_allows() -> None:
    target = load_target("tpu:v7x:2x2x1")
    assert target.num_devices == 8
    assert target.usable_bytes("jax") == int(94.74 * GIB)
    assert load_target("tpu:v5e:2x2").host_link_bytes_per_s is None


def test_the_cpu_has_no_capacity_of_its_own() -> None:
    assert load_target("cpu").usable_bytes("jax") is None
    assert load_target("cpu:4").num_devices == 4


@pytest.mark.parametrize(
    "name, code, hint",
    [
        ("gpu:gb20", "unknown-target", "gpu:gb200"),
        ("gb200", "unknown-target", "gpu:gb200"),
        ("tpu:v5e", "bad-target", "tpu:v5e:2x2"),
        ("tpu:v5e:0x2", "bad-target", "tpu:NAME:TOPOLOGY"),
        ("gpu:h100:many", "bad-target", "gpu:NAME"),
        ("gpu:h100:0", "bad-target", "gpu:NAME"),
        ("gpu:h100:8:1", "unknown-target", "gpu:h100"),
    ],
)
def test_a_wrong_target_names_the_way_out(name: str, code: str, hint: str) -> None:
    with pytest.raises(MemoptError) as raised:
        load_target(name)
    (problem,) = raised.value.problems
    assert problem.code == code
    assert hint in (problem.hint or "")


def test_a_tpu_topology_fixes_the_number_of_devices() -> None:
    with pytest.raises(MemoptError, match="target-devices"):
        load_target("tpu:v5e:2x2").with_devices(8)

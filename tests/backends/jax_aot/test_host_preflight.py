"""Before a step that offloads runs: the pinned pool's cap and the host's memory are two verdicts with two remedies."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from memopt.errors import MemoptError
from memopt_jax import accelerators, doctor, offset_audit, preflight

GIB = 2**30


def test_above_the_pool_and_below_memory_is_the_pools_verdict_with_its_setting() -> None:
    found = preflight.problems(20 * GIB, num_local_devices=4, available_bytes=500 * GIB, pool_bytes=64 * GIB)
    assert [problem.code for problem in found] == ["host-pool-too-small"]
    assert "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=84" in (found[0].hint or "")


def test_above_memory_is_the_memorys_verdict_and_no_setting_is_offered() -> None:
    found = preflight.problems(200 * GIB, num_local_devices=4, available_bytes=500 * GIB, pool_bytes=64 * GIB)
    assert [problem.code for problem in found] == ["host-memory-too-small"]
    assert "XLA_PJRT" not in (found[0].hint or "")


def test_what_fits_both_has_no_problem() -> None:
    assert preflight.problems(8 * GIB, num_local_devices=8, available_bytes=65 * GIB, pool_bytes=64 * GIB) == ()
    assert preflight.problems(9 * GIB, num_local_devices=8, available_bytes=80 * GIB, pool_bytes=None) == ()


def test_the_pools_cap_follows_its_setting() -> None:
    assert preflight.pool_cap_bytes({}) == 64 * GIB
    assert preflight.pool_cap_bytes({preflight.POOL_SETTING: "200"}) == 200 * GIB


def test_a_step_that_cannot_be_held_is_refused_on_accelerators_only() -> None:
    far_too_much = 2**60
    with pytest.raises(MemoptError, match="host-memory-too-small"):
        preflight.require_host_memory(far_too_much, num_local_devices=1, platform="gpu")
    preflight.require_host_memory(far_too_much, num_local_devices=1, platform="cpu")
    preflight.require_host_memory(0, num_local_devices=1, platform="gpu")


def test_accelerators_are_told_by_their_drivers(tmp_path: Path) -> None:
    assert accelerators.present(tmp_path) == ()
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidiactl").touch()
    (tmp_path / "dev" / "accel0").touch()
    assert accelerators.present(tmp_path) == ("gpu", "tpu")


@pytest.mark.skipif(bool(accelerators.present()), reason="this machine has an accelerator")
def test_without_a_gpu_the_cuda_plugin_says_nothing() -> None:
    code = "from memopt_jax.accelerators import import_jax; print(import_jax().devices()[0].platform)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "cpu\n"
    assert done.stderr == ""


def test_the_doctor_names_what_can_be_planned_and_affected_versions() -> None:
    said = doctor.doctor()
    assert said["targets"]["gpu:gb200"]["ok"]
    assert said["targets"]["tpu:v5e:2x2"]["ok"]
    assert said["offset_audit"]["affected"] is offset_audit.is_affected(said["versions"]["jaxlib"])
    assert bool(said["advice"]) is said["offset_audit"]["affected"]


def test_the_doctor_says_how_to_get_a_missing_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    here = doctor.topology.versions()
    monkeypatch.setattr(doctor.topology, "versions", lambda: {k: v for k, v in here.items() if k != "libtpu"})
    said = doctor.doctor()
    assert not said["targets"]["tpu:v5e:2x2"]["ok"]
    assert "memopt[targets-tpu]" in said["targets"]["tpu:v5e:2x2"]["problems"][0]["hint"]
    assert said["targets"]["gpu:gb200"]["ok"]

"""Reports about worlds: a mesh that is not the job."""

from __future__ import annotations

import json

import pytest

from memopt import MemoptError, make_plan
from memopt.cli import main


@pytest.mark.parametrize("world", [4, 3])
def test_a_mesh_smaller_than_the_job_prints_both_numbers_and_the_fix(world, tmp_path, capsys) -> None:
    """Ranks that a mesh leaves out must not find that out by an index error on the second node.

    Family: mesh smaller than the world (Bagel#309).
    """
    file = tmp_path / "policy.yaml"
    file.write_text("version: 1\nmesh: {replicate: 1, fsdp: 2}\n")
    with pytest.raises(SystemExit) as ended:
        main(["validate", str(file), "--world-size", str(world), "--json"])
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert ended.value.code == 1
    assert "2 devices" in problem["message"]
    assert f"the world has {world}" in problem["message"]
    assert f"`fsdp: {world}`" in problem["hint"]


@pytest.mark.parametrize("world", [4, 3])
def test_a_mesh_smaller_than_the_job_has_no_plan(world, rules, llama_spec, fake_backend) -> None:
    """The same fault met by planning, before any process group (Bagel#309)."""
    with pytest.raises(MemoptError) as error:
        make_plan(rules(mesh={"replicate": 1, "fsdp": 2}), llama_spec(), backend=fake_backend(), world_size=world)
    assert [problem.code for problem in error.value.problems] == ["mesh-world"]


def test_an_offload_that_the_backend_does_not_honour_is_refused_by_name(
    rules, llama_spec, fake_backend, everything
) -> None:
    """An accepted setting that no code path honours is worse than an error.

    Family: optimizer-offload flag accepted where it did nothing (maxtext@7a18fc819).
    """
    backend = fake_backend(
        supported=everything - {"offload:optimizer_state"},
        instead={"offload:optimizer_state": "shard it instead: `{action: shard, match: {role: optimizer_state}}`"},
    )
    policy = rules({"name": "adam", "action": "offload", "match": {"role": "optimizer_state"}})
    with pytest.raises(MemoptError) as error:
        make_plan(policy, llama_spec(), backend=backend)
    (problem,) = error.value.problems
    assert problem.code == "unsupported-by-backend"
    assert "rule `adam`" in problem.message
    assert "fake backend" in problem.message
    assert problem.hint == "shard it instead: `{action: shard, match: {role: optimizer_state}}`"

"""A local Transformers model is a workload for every command, at any number of ranks.

Family: an example batch of a fixed size, which more ranks than sequences cannot share, and nothing to change it by.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import memopt
import memopt.workloads
from memopt.cli import main

TINY = {
    "llama": {
        "vocab_size": 300, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32,
    },
    "gpt2": {
        "vocab_size": 300, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32, "bos_token_id": 0,
        "eos_token_id": 1,
    },
}  # fmt: skip
POLICY = "version: 1\nrules:\n  - {name: state, action: shard, match: {role: [param, grad, optimizer_state]}}\n"


ADVICE_IGNORED = pytest.mark.filterwarnings("ignore::memopt.errors.MemoptWarning")
"""What the engine advises about so small a model is not asked here, and warnings are errors in tests."""


@pytest.fixture(params=sorted(TINY))
def reference(request, tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": request.param, **TINY[request.param]}))
    (tmp_path / "shard.yaml").write_text(POLICY)
    return f"hf:{tmp_path}"


def _run(capsys, *arguments: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    return int(stopped.value.code or 0), capsys.readouterr().out


@pytest.mark.parametrize("world_size", [1, 2, 8])
def test_each_rank_has_a_sequence_of_its_own(reference: str, world_size: int) -> None:
    from memopt_torch.workloads import build

    described = memopt.workloads.load_workload(reference)
    assert isinstance(described, memopt.workloads.HfWorkload)
    workload = build(described, world_size=world_size)
    assert workload.batch["tokens"].shape == (1, 33)


def test_two_ranks_check_a_policy(capsys, reference: str, tmp_path: Path) -> None:
    arguments = ("--workload", reference, "--backend", "torch", "--world-size", "2", "--json")
    code, out = _run(capsys, "check", str(tmp_path / "shard.yaml"), *arguments)
    assert (code, json.loads(out)["ok"]) == (0, True)


@ADVICE_IGNORED
def test_eight_devices_are_planned_for(capsys, reference: str, tmp_path: Path) -> None:
    arguments = ("--workload", reference, "--backend", "torch", "--target", "gpu:h100:8", "--json")
    code, out = _run(capsys, "plan", str(tmp_path / "shard.yaml"), *arguments)
    plan = json.loads(out)
    assert (code, plan["world_size"], plan["fits"]) == (0, 8, True)
    assert plan["device"]["by_role"]["activation"] > 0


@ADVICE_IGNORED
def test_a_policy_is_tuned_for_eight_devices(capsys, reference: str, tmp_path: Path) -> None:
    file = tmp_path / "tuned.yaml"
    arguments = ("--target", "gpu:h100:8", "--budget", "1GiB", "-o", str(file), "--points", "1", "--json")
    code, out = _run(capsys, "tune", "--workload", reference, "--backend", "torch", *arguments)
    assert code == 0, out
    assert memopt.load_policy(file).rules


def test_two_ranks_train_on_different_text(reference: str, tmp_path: Path) -> None:
    run = {
        "workload": reference, "policies": [str(tmp_path / "shard.yaml")], "backends": ["torch"], "steps": 3,
        "world": {"torch": 2},
    }  # fmt: skip
    comparison = memopt.compare(run)
    assert [(row.policy, row.ok, row.reason) for row in comparison.rows] == [
        ("none", True, None),
        ("shard", True, None),
    ]
    assert comparison.environment["workload"]["batch"] == 2
    assert comparison.row("torch", "shard").max_abs_diff_vs_plain == 0.0

"""What is wrong with a workload is said in the same words by every command, with the user's own line.

Family: a model of the other framework, or a fault in the user's code, that comes out as a framework's inner error.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from memopt.cli import main

SOURCE = """
import jax, optax, torch
from flax import linen, nnx
from memopt import Workload

BATCH = {"x": jax.numpy.ones((2, 4))}

class Torch(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(4, 4) for _ in range(2)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

class Nnx(nnx.Module):
    def __init__(self):
        self.up = nnx.Linear(4, 4, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.up(x)

def on_one_rank(model, batch):
    if torch.distributed.is_initialized() and torch.distributed.get_rank() == 1:
        raise KeyError("no such")  # line 27
    return model(batch["x"]).square().mean()

def torch_model():
    return Workload("mine", Torch, on_one_rank, {"x": torch.ones(2, 4)}, lambda p: torch.optim.SGD(p, lr=0.1))

def nnx_model():
    return Workload("mine", Nnx, lambda model, batch: model(batch["x"]).mean(), BATCH, optax.sgd(0.1))

def linen_model():
    return Workload("mine", lambda: linen.Dense(4), lambda model, batch: 0.0, BATCH, optax.sgd(0.1))
"""
POLICY = "version: 1\nrules:\n  - {name: state, action: shard, match: {role: [param, grad, optimizer_state]}}\n"


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """The policy and the workloads' file."""
    policy, mine = tmp_path / "shard.yaml", tmp_path / "mine.py"
    policy.write_text(POLICY, encoding="utf-8")
    mine.write_text(SOURCE, encoding="utf-8")
    return policy, mine


def _run(capsys, *arguments: object) -> tuple[int, list[dict[str, object]]]:
    with pytest.raises(SystemExit) as stopped:
        main([*(str(argument) for argument in arguments), "--json"])
    return int(stopped.value.code or 0), json.loads(capsys.readouterr().out).get("problems", [])


@pytest.mark.parametrize("command", ["validate", "explain", "check", "plan"])
@pytest.mark.parametrize(
    "function, backend, code",
    [
        ("torch_model", "jax", "workload-other-backend"),
        ("nnx_model", "torch", "workload-other-backend"),
        ("linen_model", "torch", "workload-other-backend"),
        ("linen_model", "jax", "workload-model-kind"),
    ],
)
def test_a_model_that_the_backend_does_not_build_is_named(capsys, files, command, function, backend, code) -> None:
    policy, mine = files
    target = ("--target", "cpu") if command == "plan" else ()
    exit_code, problems = _run(
        capsys, command, policy, "--workload", f"{mine}:{function}", "--backend", backend, *target
    )
    assert (exit_code, [problem["code"] for problem in problems]) == (1, [code])
    assert "`mine`" in str(problems[0]["message"])


@pytest.mark.parametrize("function", ["torch_model", "nnx_model"])
def test_without_a_backend_only_that_of_the_model_judges(capsys, files, function) -> None:
    policy, mine = files
    assert _run(capsys, "validate", policy, "--workload", f"{mine}:{function}") == (0, [])
    policy.write_text(POLICY.replace("role: [param, grad, optimizer_state]", "role: param, path: nowhere"))
    _, problems = _run(capsys, "validate", policy, "--workload", f"{mine}:{function}")
    assert [problem["code"] for problem in problems] == ["dead-rule"]


def test_a_fault_on_one_rank_of_a_check_names_the_users_line(capsys, files) -> None:
    policy, mine = files
    arguments = ("--workload", f"{mine}:torch_model", "--backend", "torch", "--world-size", "2")
    exit_code, (problem,) = _run(capsys, "check", policy, *arguments)
    assert (exit_code, problem["code"]) == (1, "workload-crashed")
    assert (problem["file"], problem["line"]) == (str(mine), 27)
    assert problem["message"] == "a step of `mine` raised KeyError: 'no such'"

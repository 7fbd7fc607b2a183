"""A run on gloo that trained to its end also ends: no deadlock, no abort in the process's last moments."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import memopt
from memopt_torch import interpreter_exit
from memopt_torch.testing import run_fake, run_ranks

POLICY = {
    "version": 1,
    "units": ["*"],
    "mesh": {"fsdp": 2},
    "rules": [{"name": "weights", "action": "shard", "match": {"role": "param"}}],
}

# The last step's loss is averaged, its tensor dropped, and the group destroyed while a gloo thread may still hold the
# work: of plain DDP's runs with these last lines about one in three never ended.
SCRIPT = """
import sys
import torch
import torch
import torch.distributed as dist
import memopt

dist.init_process_group("gloo")
model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(3)])
run = memopt.apply_policy(model, sys.argv[1])
optimizer = run.optimizer(torch.optim.SGD, lr=0.1)


def end():
    run.model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    for _ in range(20):
        dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()


end()
"""


def _threads() -> int:
    """Threads that run gloo's work in this process."""
    names = [task.joinpath("comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    return names.count("pt_gloo_runloop")


def _train_and_let_go(engine: str) -> tuple[int, int]:
    policy = {**POLICY, "backend_options": {"torch": {"engine": engine}}}
    model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(3)])
    run = memopt.apply_policy(model, policy)
    before = _threads()
    run.model(torch.ones(2, 8)).sum().backward()
    dist.destroy_process_group()
    del run, model
    gc.collect()
    return before, _threads()


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted in Linux's /proc")
@pytest.mark.parametrize("engine", ["layer", "fsdp2"])
def test_gloo_threads_outlive_the_model_and_the_destroyed_group(engine: str) -> None:
    for before, after in run_ranks(_train_and_let_go, 2, engine):
        assert before >= 2
        assert after == before


def _registered() -> tuple[bool, bool]:
    with mock.patch("atexit.register") as register:
        memopt.apply_policy(torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(3)]), POLICY)
    return mock.call(interpreter_exit.rest) in register.call_args_list, bool(interpreter_exit._kept)


def test_the_rest_at_exit_is_asked_for_with_gloo_alone() -> None:
    assert run_ranks(_registered, 2) == [(True, True), (True, True)]
    assert run_fake(_registered, 2) == (False, False)


def test_a_script_that_ends_right_after_an_all_reduce_ends(tmp_path: Path) -> None:
    script, policy = tmp_path / "train.py", tmp_path / "policy.yaml"
    script.write_text(SCRIPT, encoding="utf-8")
    policy.write_text(json.dumps(POLICY), encoding="utf-8")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, *torchrun, str(script), str(policy)],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr

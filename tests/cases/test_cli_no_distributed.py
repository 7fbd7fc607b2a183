"""Reports about builds of torch that cannot start a process group."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

CONFIGS = Path(__file__).parents[2] / "configs"
# A build as on Windows: no NCCL, and a store that dies at every launch.
BUILD = """
import torch, torch.distributed as dist
def dies(*arguments, **keywords):
    raise RuntimeError("use_libuv was requested but PyTorch was built without libuv support")
begin = dist.init_process_group
def init_process_group(backend=None, *arguments, store=None, **keywords):  # ranks that are not there need no launch
    return begin(backend, *arguments, store=store, **keywords) if backend == "fake" and store is not None else dies()
dist.init_process_group, dist.TCPStore, dist.FileStore = init_process_group, dies, dies
dist.is_nccl_available = lambda: False
"""
COMMANDS = """
import contextlib, io, json, sys
from memopt.cli import main
codes = []
for arguments in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()):
        try: main(arguments)
        except SystemExit as ended: codes.append(ended.code)
print(json.dumps(codes))
"""


def test_validating_explaining_planning_and_applying_to_one_process_launch_nothing() -> None:
    """What needs no other rank asks for none.

    Family: every launch dies in the store on Windows, NCCL is absent too (pytorch#148283).
    """
    policy = str(CONFIGS / "policies" / "shard.yaml")
    model = ["--workload", str(CONFIGS / "workloads" / "llama-tiny.yaml"), "--backend", "torch"]
    commands = [
        ["validate", policy, *model, "--world-size", "4"],
        ["explain", policy, *model, "--world-size", "4", "--json"],
        ["plan", policy, *model, "--target", "cpu", "--world-size", "4", "--json"],
        ["check", policy, *model],
    ]
    done = subprocess.run(
        [sys.executable, "-c", BUILD + COMMANDS, json.dumps(commands)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [0, 0, 0, 0]

"""The tutorial's scripts run as its pages say, and train as they do without a policy."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TUTORIAL = ROOT / "docs" / "tutorial"
# torch's own fault: a process group of gloo may deadlock when it is destructed (memopt_torch/interpreter_exit.py). A
# plain script has nothing against it; what it printed before is what counts here.
GRACE_S = 120
NONE = str(ROOT / "configs" / "policies" / "none.yaml")


def losses_of(command: list[str], *, may_hang_at_exit: bool = False, **environment: str) -> list[float]:
    """Runs a script and reads its `step N loss X` lines."""
    process = subprocess.Popen(
        [sys.executable, *command],
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "JAX_PLATFORMS": "cpu", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, err = process.communicate(timeout=GRACE_S if may_hang_at_exit else 240)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun ends its ranks, which are sessions of their own
        out, err = process.communicate(timeout=60)
        assert may_hang_at_exit, f"{command} did not end\n{out}\n{err}"
    else:
        assert process.returncode == 0, err
    return [float(loss) for loss in re.findall(r"^step \d+ loss (\S+)$", out, re.MULTILINE)]


def torchrun(script: str) -> list[str]:
    return ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(TUTORIAL / script)]


def test_a_ddp_script_with_its_ddp_line_replaced_by_three_trains_the_same_to_the_last_digit():
    plain = losses_of(torchrun("train_ddp.py"), may_hang_at_exit=True)
    assert len(plain) == 8
    assert plain[-1] < plain[0] - 0.5
    assert losses_of(torchrun("train_torch.py")) == plain


def test_the_torch_scripts_differ_in_the_ddp_line_alone():
    before = (TUTORIAL / "train_ddp.py").read_text(encoding="utf-8").splitlines()[1:]
    after = (TUTORIAL / "train_torch.py").read_text(encoding="utf-8").splitlines()[1:]
    assert [line.strip() for line in before if line not in after] == [
        "from torch.nn.parallel import DistributedDataParallel as DDP",
        "model = DDP(model)",
    ]
    added = [line.strip() for line in after if line.strip() and line not in before and "import" not in line]
    assert added == [
        'policy = Path(__file__).with_name("policy.yaml")',
        "run = memopt.apply_policy(model, policy, optimizer=optimizer)",
        "model = run.model",
    ]


@pytest.mark.parametrize("script", ["train_nnx.py", "train_linen.py"])
def test_a_flax_script_trains_the_same_with_the_policy_over_two_devices(script):
    two_devices = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    plain = losses_of([str(TUTORIAL / script), NONE], **two_devices)
    assert len(plain) == 8
    assert plain[-1] < plain[0] - 0.5
    assert losses_of([str(TUTORIAL / script)], **two_devices) == pytest.approx(plain, abs=1e-6)

"""Rows of a comparison on one CPU device, where XLA shares out a softmax by what each program keeps."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
TINY = str(ROOT / "configs/workloads/llama-tiny.yaml")
RECOMPUTE = str(ROOT / "configs/policies/recompute.yaml")


def memopt(*arguments: str):
    """The JSON document a command prints."""
    command = [sys.executable, "-m", "memopt", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    return json.loads(done.stdout)


def test_recomputed_layers_of_a_full_batch_give_the_plain_gradients_to_the_bit():
    check = memopt("check", RECOMPUTE, "--workload", TINY, "--backend", "jax")
    assert check == {
        "ok": True, "loss_diff": 0.0, "max_grad_rel_diff": 0.0, "worst_tensor": None, "reference": "plain"
    }  # fmt: skip


def test_a_row_equals_the_plain_run_to_the_bit_and_holds_what_was_planned(tmp_path):
    run = {
        "workload": TINY, "policies": [RECOMPUTE], "backends": ["jax"], "world": {"jax": 1}, "steps": 4, "seed": 0,
        "target": "cpu", "plan": True,
    }  # fmt: skip
    (tmp_path / "run.yaml").write_text(json.dumps(run), encoding="utf-8")
    plain, row = memopt("compare", str(tmp_path / "run.yaml"), "--out", str(tmp_path / "out"))["rows"]
    assert plain["policy"] == "none"
    assert row["ok"], row["reason"]
    assert row["losses"] == plain["losses"]
    assert abs(row["peak_planned_bytes"] - row["peak_measured_bytes"]) <= 64

"""The GPU benchmark runs to its end on any machine, tiny, and says what it could not measure."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from memopt_torch.testing import run_fake

FILE = Path(__file__).parents[2] / "benchmarks" / "gpu_torch.py"


def load() -> Any:
    spec = importlib.util.spec_from_file_location("gpu_torch", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", load().ROWS)
def test_a_row_runs_tiny_and_names_what_only_a_gpu_has(name: str) -> None:
    row = run_fake(load().measured, load().WORLD, name, True, 3)
    assert row["step_s"] > 0
    assert row["reserved_peak_bytes"] == row["copy_kernels_s"] == "not measured"


def test_rows_run_in_processes_of_their_own_and_one_that_fails_ends_none(monkeypatch: pytest.MonkeyPatch) -> None:
    module = load()
    monkeypatch.setattr(module, "ROWS", {"layer": module.ROWS["layer"], "unknown": {}})
    result = module.run(tiny=True, steps=2)
    assert result["rows"]["layer"]["step_s"] > 0
    assert "invalid choice" in result["rows"]["unknown"]["failed"]
    assert result["machine"]["gpu"] is None
    monkeypatch.setattr(module, "BUDGET_S", 0.0)
    assert module.run(tiny=True, steps=2)["rows"]["layer"] == {"failed": "no time was left for this row"}

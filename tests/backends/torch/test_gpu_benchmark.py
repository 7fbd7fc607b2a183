"""The GPU benchmark runs to its end on any machine, tiny, and says what it could not measure."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from memopt_torch.testing import run_fake  # noqa: F401  # forks: see the root conftest

FILE = Path(__file__).parents[2] / "benchmarks" / "gpu_torch.py"


def load() -> Any:
    spec = importlib.util.spec_from_file_location("gpu_torch", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_gpu_benchmark_runs_tiny_and_names_what_only_a_gpu_has() -> None:
    result = load().run(tiny=True, steps=3)
    assert set(result["rows"]) == set(load().ROWS)
    for name, row in result["rows"].items():
        assert "failed" not in row, (name, row)
        assert row["step_s"] > 0
        assert row["reserved_peak_bytes"] == row["copy_kernels_s"] == "not measured"

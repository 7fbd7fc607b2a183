"""The README's first command, as a newcomer types it: one policy file, two backends, the same training."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
POLICIES = ("none", "recompute", "shard", "offload")
BACKENDS = ("jax", "torch")


def readme_command() -> list[str]:
    """The comparison in the README, run by this interpreter."""
    (line,) = re.findall(r"^memopt compare .*$", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    return [sys.executable, "-m", "memopt", *line.split()[1:]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The folder the command leaves."""
    out = tmp_path_factory.mktemp("compare")
    done = subprocess.run(
        [*readme_command(), "--out", str(out)], cwd=ROOT, capture_output=True, text=True, check=False, timeout=900
    )
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def results(folder) -> dict[str, Any]:
    return json.loads((folder / "results.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def rows(results) -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["backend"], row["policy"]): row for row in results["rows"]}


@pytest.mark.timeout(900)
def test_every_policy_runs_on_both_backends(rows):
    assert set(rows) == {(backend, policy) for backend in BACKENDS for policy in POLICIES}
    assert {key: row["reason"] for key, row in rows.items() if not row["ok"]} == {}


def test_losses_fall_over_thirty_steps_of_real_text(rows):
    for row in rows.values():
        assert len(row["losses"]) == 30
        assert sum(row["losses"][-5:]) / 5 < row["losses"][0] - 1.5


def test_the_plain_runs_of_both_frameworks_agree_within_1e_4_at_every_step(rows):
    pairs = zip(rows["jax", "none"]["losses"], rows["torch", "none"]["losses"], strict=True)
    assert max(abs(a - b) for a, b in pairs) <= 1e-4


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("policy", ["recompute", "offload"])
def test_placement_and_recompute_leave_losses_equal_to_the_bit(rows, backend, policy):
    assert rows[backend, policy]["losses"] == rows[backend, "none"]["losses"]
    assert rows[backend, policy]["max_abs_diff_vs_plain"] == 0.0


@pytest.mark.parametrize("backend", BACKENDS)
def test_sharding_leaves_losses_within_rounding_of_the_plain_run(rows, backend):
    assert rows[backend, "shard"]["max_abs_diff_vs_plain"] <= 1e-5


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("policy", ["recompute", "shard", "offload"])
def test_every_policy_holds_less_on_the_device_than_plain(rows, backend, policy):
    assert rows[backend, policy]["peak_measured_bytes"] < rows[backend, "none"]["peak_measured_bytes"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_sharding_halves_parameters_and_state_at_two_ranks(rows, backend):
    plain, shard = rows[backend, "none"]["measured_by_role"], rows[backend, "shard"]["measured_by_role"]
    for role in ("param", "optimizer_state"):
        assert shard[role] == pytest.approx(plain[role] / 2, rel=0.01)


def test_both_backends_recompute_the_same_flops(rows):
    assert rows["jax", "recompute"]["recompute_flops"] == rows["torch", "recompute"]["recompute_flops"] > 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_offload_puts_bytes_on_the_host_and_no_other_policy_does(rows, backend):
    assert {policy for policy in POLICIES if rows[backend, policy]["host_bytes"]} == {"offload"}


def test_measured_bytes_by_role_add_up_to_the_peak(rows):
    for row in rows.values():
        assert sum(row["measured_by_role"].values()) == row["peak_measured_bytes"]


def test_the_page_is_one_file_that_fetches_nothing(folder):
    page = (folder / "index.html").read_text(encoding="utf-8")
    outside = re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//""", outside)
    assert page.count("Plotly.newPlot") == 4
    for policy in POLICIES:
        assert policy in outside

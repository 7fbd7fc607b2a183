"""What readers of comparisons elsewhere could not find out, and must find in ours."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from memopt.cli.compare import results_table
from memopt.comparing.environment import environment_facts
from memopt.comparing.jobs import Outcome
from memopt.comparing.page import comparison_page
from memopt.comparing.rows import Entry, Row, make_rows
from memopt.comparing.run import RunConfig
from memopt.workloads import WorkloadConfig

WORKLOAD = WorkloadConfig(
    name="tiny", layers=2, hidden=16, intermediate=24, heads=4, kv_heads=2, vocab=256, batch=2, sequence=8
)
RUN = RunConfig(workload="w.yaml", policies=("none.yaml", "offload.yaml"), steps=10, seed=5, world={"torch": 2})


def entry(policy: str, *, step_time_s: float, peak_bytes: int, **result: Any) -> Entry:
    figures = {
        "losses": [2.0, 1.0],
        "step_times_s": [step_time_s] * 3,
        "peak_measured_bytes": peak_bytes,
        "measured_by_role": {"param": peak_bytes},
        "attributed": False,
        "host_bytes": 512 if policy == "offload" else 0,
        "step_flops": 1e6,
        "collectives": {},
        "effects": [],
        "notes": [],
        **result,
    }
    outcome = Outcome(losses=(2.0, 1.0), result=figures)
    return Entry(
        backend="torch",
        policy=policy,
        outcome=outcome,
        world_size=2,
        elapsed_s=1.0,
        tokens_per_step=16,
        changes_precision=False,
    )


@pytest.fixture
def rows() -> tuple[Row, ...]:
    """Offload halves the device's bytes and doubles the step."""
    plain = entry("none", step_time_s=0.1, peak_bytes=4096)
    return make_rows([plain, entry("offload", step_time_s=0.2, peak_bytes=2048)], tolerance=1e-4)


def facts() -> dict[str, Any]:
    return environment_facts(RUN, WORKLOAD, warmup_steps=3, text={})


def test_what_offload_costs_in_time_stands_beside_what_it_saves_in_bytes(rows):
    """Family: a memory feature advertised by its bytes, its slowdown found out by users."""
    screen = io.StringIO()
    Console(file=screen, width=120).print(results_table(rows))
    (line,) = [line for line in screen.getvalue().splitlines() if "offload" in line]
    assert "2.00 KiB" in line
    assert "200 ms" in line
    page = comparison_page(rows, facts(), complete=True)
    assert "200 ms" in page
    assert "−50%" in page
    plain, offload = rows
    assert plain.step_time_s is not None
    assert offload.step_time_s == pytest.approx(2 * plain.step_time_s)


def test_a_comparison_says_what_it_was_measured_on_with_and_how_often(rows):
    """Family: published figures without backend, versions, device, shapes, warm-up, repeats or absolute values."""
    found = facts()
    assert found["versions"]["torch"]
    assert found["versions"]["jax"]
    assert found["python"]
    assert found["device"]["cpu"]
    assert found["device"]["num_cores"] >= 1
    assert (found["workload"]["hidden"], found["workload"]["batch"], found["workload"]["sequence"]) == (16, 2, 8)
    assert (found["num_warmup_steps"], found["num_timed_steps"], found["seed"]) == (3, 7, 5)
    assert found["world"] == {"jax": 1, "torch": 2}
    page = comparison_page(rows, found, complete=True)
    for fact in (found["versions"]["torch"], found["device"]["cpu"], "hidden 16", "3 warm-up, 7 timed", "100 ms"):
        assert fact in page


@pytest.mark.parametrize("reserved_bytes, is_fragmented", [(4200, False), (8192, True)])
def test_reserved_stands_beside_allocated_and_a_gap_names_the_setting_and_leaves_it_alone(
    reserved_bytes, is_fragmented
):
    """Family: memory lost to fragmentation, which a count of live bytes cannot show."""
    import os

    before = dict(os.environ)
    allocator = {"allocated_bytes": 4096, "reserved_bytes": reserved_bytes}
    rows = make_rows([entry("none", step_time_s=0.1, peak_bytes=4096, allocator=allocator)], tolerance=1e-4)
    assert rows[0].allocator == allocator
    assert any("expandable_segments" in note for note in rows[0].notes) == is_fragmented
    page = comparison_page(rows, facts(), complete=True)
    assert "4.00 KiB allocated" in page
    assert ("expandable_segments" in page) == is_fragmented
    assert dict(os.environ) == before

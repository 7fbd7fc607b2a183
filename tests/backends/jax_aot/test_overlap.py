"""The schedule reader: bytes, directions, what transfers hide under, and the playback behind it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from memopt.errors import MemoptError
from memopt.targets import load_target
from memopt_jax import hlo, overlap
from memopt_jax.playback import Playback, Rates

PROGRAMS = Path(__file__).parent / "programs"
LAYER_BYTES = 2048 * 1024 * 2
H100 = load_target("gpu:h100")


def program(name: str) -> str:
    return (PROGRAMS / f"{name}.hlo").read_text()


@pytest.mark.parametrize("name", ["h100_offload_jaxlib_0.10.2", "h100_pipelined_jaxlib_0.12.0.1"])
def test_every_offloaded_byte_crosses_the_link_once_each_way(name: str) -> None:
    report = overlap.read(program(name), H100)
    assert report.to_host_bytes == report.to_device_bytes == 12 * LAYER_BYTES
    assert report.synchronous == ()


def test_a_tpu_schedule_gives_the_same_bytes() -> None:
    target = load_target("tpu:v5e:2x2")
    rates = overlap.rates_of(target, host_link_bytes_per_s=15e9)
    report = overlap.read(program("v5e_offload_libtpu_0.0.52"), target, rates=rates)
    assert report.to_host_bytes == report.to_device_bytes == 12 * LAYER_BYTES
    assert report.num_unknown_loops == 0


def test_a_link_of_unknown_rate_gives_no_seconds() -> None:
    with pytest.raises(MemoptError, match="no-link-rate"):
        overlap.read(program("v5e_offload_libtpu_0.0.52"), load_target("tpu:v5e:2x2"))


def test_synchronous_transfers_are_exposed_whole() -> None:
    report = overlap.read(program("h100_synchronous_jaxlib_0.10.2"), H100)
    assert {item.direction for item in report.synchronous} == {"to_host", "to_device"}
    assert report.exposed_s == pytest.approx(sum(item.exposed_s for item in report.synchronous))
    assert report.exposed_s == pytest.approx(2 * 12 * LAYER_BYTES / 55e9)
    assert report.hidden_fraction == pytest.approx(0.0, abs=1e-9)


def test_pipelining_peels_the_first_and_last_transfers_and_they_are_told_apart() -> None:
    report = overlap.read(program("h100_pipelined_jaxlib_0.12.0.1"), H100)
    inside = [item for item in report.transfers if item.in_loop]
    outside = [item for item in report.transfers if not item.in_loop]
    assert {item.times for item in inside} == {11}
    assert {item.times for item in outside} == {1}
    assert report.exposed_outside_loops_s == pytest.approx(sum(item.exposed_s for item in outside))
    assert report.exposed_outside_loops_s > 0


def test_a_faster_link_exposes_less_and_an_endless_one_nothing() -> None:
    text = program("h100_pipelined_jaxlib_0.12.0.1")
    slow, fast, endless = (
        overlap.read(text, H100, rates=overlap.rates_of(H100, host_link_bytes_per_s=rate)) for rate in (1e9, 55e9, 1e18)
    )
    assert slow.exposed_s > fast.exposed_s > endless.exposed_s
    assert endless.exposed_s < 1e-9
    assert slow.compute_s == fast.compute_s


def test_playing_every_iteration_gives_what_the_steady_state_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    text = program("h100_offload_jaxlib_0.10.2")
    short = overlap.read(text, H100)
    monkeypatch.setattr(overlap, "_is_close", lambda before, after: False)
    whole = overlap.read(text, H100)
    assert whole.step_s == pytest.approx(short.step_s)
    assert whole.exposed_s == pytest.approx(short.exposed_s)
    assert [item.times for item in whole.transfers] == [item.times for item in short.transfers]
    assert [item.exposed_s for item in whole.transfers] == pytest.approx([item.exposed_s for item in short.transfers])


def test_text_that_is_not_scheduled_is_refused() -> None:
    text = program("h100_offload_jaxlib_0.10.2").replace("is_scheduled=true", "is_scheduled=false")
    with pytest.raises(MemoptError, match="not-scheduled"):
        overlap.read(text, H100)
    with pytest.raises(MemoptError, match="not-hlo"):
        hlo.parse("module @jit_f {}")


def test_memory_bound_operations_hide_transfers_where_they_are_counted() -> None:
    text = program("h100_offload_jaxlib_0.10.2")
    plain = overlap.read(text, H100)
    counted = overlap.read(text, H100, rates=overlap.rates_of(H100, memory_bound_ops=True))
    assert counted.compute_s > plain.compute_s
    assert counted.exposed_s <= plain.exposed_s


def test_both_directions_share_the_hosts_memory() -> None:
    rates = Rates(flops=1.0, host_link_bytes_per_s=10.0, host_dram_bytes_per_s=12.0)
    alone = Playback(rates)
    alone.wait(alone.start_transfer("a", "to_host", 100.0))
    assert alone.now_s == pytest.approx(10.0)
    both = Playback(rates)
    up, down = both.start_transfer("a", "to_host", 100.0), both.start_transfer("b", "to_device", 100.0)
    both.wait(up)
    both.wait(down)
    assert both.now_s == pytest.approx(100 / 6)
    assert both.totals.transfer_busy_s == pytest.approx(100 / 6), "a union, not a sum"
    assert both.totals.exposed_s == pytest.approx(100 / 6)


def test_transfers_of_one_direction_queue_and_compute_hides_them() -> None:
    play = Playback(Rates(flops=1.0, host_link_bytes_per_s=10.0))
    first, second = play.start_transfer("a", "to_host", 100.0), play.start_transfer("b", "to_host", 100.0)
    play.compute(15.0)
    assert play.wait(first) == 0.0
    assert play.wait(second) == pytest.approx(5.0)
    assert play.totals.exposed_by == {"b": pytest.approx(5.0)}
    assert play.wait(second) == 0.0, "a finished transfer is waited for at no cost"


def test_collectives_beyond_the_fabric_run_at_the_networks_rate() -> None:
    rates = overlap.rates_of(load_target("gpu:h100:16"))
    assert rates.collective_s(450e9, 8) == pytest.approx(1.0)
    assert rates.collective_s(450e9, 16) == pytest.approx(9.0)
    assert replace(rates, fabric_bytes_per_s=None, network_bytes_per_s=None).collective_s(1e9, 16) == 0.0


def test_hidden_fraction_of_a_transfer_is_its_compute_over_its_time() -> None:
    report = overlap.read(program("h100_offload_jaxlib_0.10.2"), H100)
    for item in report.transfers:
        assert item.transfer_s == pytest.approx(item.nbytes / 55e9)
        assert item.hidden_fraction == pytest.approx(min(1.0, item.compute_s / item.transfer_s))
    assert math.isclose(report.step_s, report.compute_s + report.exposed_s + report.collective_exposed_s, rel_tol=1e-9)

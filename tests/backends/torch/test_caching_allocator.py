"""The replay of torch's CUDA allocator, by hand-computed cases of its rules, and what it makes of a step."""

from __future__ import annotations

import pytest

from memopt_torch.caching_allocator import CachingAllocator
from memopt_torch.ledger import Ledger, Record
from memopt_torch.reserved import Place, allocations

MIB = 2**20


def reserved_mib(events: list[tuple[int, int]], *, is_expandable: bool, streams: dict[int, str] | None = None) -> float:
    allocator = CachingAllocator(is_expandable)
    allocator.play((key, round(change * MIB), (streams or {}).get(key)) for key, change in events)
    return allocator.reserved_bytes / MIB


@pytest.mark.parametrize(
    "size_mib, fixed, expandable",
    [(0.001, 2, 2), (1, 2, 2), (1.5, 20, 20), (9, 20, 20), (10, 10, 20), (30.5, 32, 40), (100, 100, 100)],
)
def test_a_request_takes_a_segment_of_its_class(size_mib: float, fixed: float, expandable: float) -> None:
    assert reserved_mib([(0, size_mib)], is_expandable=False) == fixed
    assert reserved_mib([(0, size_mib)], is_expandable=True) == expandable


def test_a_hole_serves_what_fits_in_it_and_nothing_larger() -> None:
    hole = [(0, 40), (1, 40), (0, -40)]
    assert reserved_mib([*hole, (2, 30), (3, 10)], is_expandable=False) == 80
    assert reserved_mib([*hole, (2, 50)], is_expandable=False) == 130


def test_an_expandable_segment_grows_from_the_free_memory_at_its_end() -> None:
    freed_at_the_end = [(0, 40), (1, 40), (1, -40), (2, 60)]
    assert reserved_mib(freed_at_the_end, is_expandable=True) == 100
    assert reserved_mib(freed_at_the_end, is_expandable=False) == 140


def test_free_neighbours_become_one_hole() -> None:
    events = [(0, 40), (1, 40), (2, 40), (0, -40), (1, -40), (3, 80)]
    assert reserved_mib(events, is_expandable=True) == 120
    assert reserved_mib(events, is_expandable=False) == 200  # segments of their own never merge


def test_the_smallest_hole_that_fits_is_taken() -> None:
    holes = [(0, 60), (1, 20), (2, 40), (3, 20), (0, -60), (2, -40)]
    assert reserved_mib([*holes, (4, 40), (5, 60)], is_expandable=True) == 140


def test_memory_freed_on_one_stream_serves_no_other() -> None:
    events = [(0, 40), (0, -40), (1, 40)]
    assert reserved_mib(events, is_expandable=True, streams={1: "reduce"}) == 80
    assert reserved_mib(events, is_expandable=True) == 40


def test_a_storage_resized_to_nothing_and_back_allocates_anew() -> None:
    assert reserved_mib([(0, 40), (0, -40), (1, 20), (0, 40)], is_expandable=True) == 60


def test_gradients_keep_their_streams_memory_while_the_loss_peaks_elsewhere() -> None:
    """Live bytes never exceed 100 MiB; what is reserved is the sum of both streams' own peaks."""
    ledger = Ledger()
    ledger.records = [Record(0, "start"), Record(0, "forward"), Record(0, "backward", stream=1)]
    ledger.events = [(0, 40 * MIB), (1, 60 * MIB), (1, -60 * MIB), (2, 40 * MIB), (2, -40 * MIB)]
    step = allocations(ledger, [(1, Place("forward")), (3, Place("backward"))])
    assert step.start_bytes == 40 * MIB
    assert max(ledger.timeline()) == 100 * MIB
    assert step.reserved_bytes(is_expandable=True) == 140 * MIB

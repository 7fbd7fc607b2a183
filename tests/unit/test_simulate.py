"""The event simulator: streams, waits, shared host memory."""

from __future__ import annotations

import pytest

from memopt.errors import MemoptError
from memopt.simulate import HostLink, simulate
from memopt.timeline import Task, TimelineBuilder, check_order


def run(tasks, seconds=None, **kwargs):
    check_order(tasks)
    return simulate(tasks, seconds or [task.seconds or 0.0 for task in tasks], **kwargs)


def test_one_stream_runs_in_list_order():
    done = run([Task("a", "compute", seconds=1.0), Task("b", "compute", seconds=2.0)])
    assert done.starts_s == (0.0, 1.0)
    assert done.makespan_s == 3.0


def test_a_transfer_hides_under_compute_that_does_not_need_it():
    tasks = [
        Task("forward", "compute", seconds=2.0),
        Task("out", "to_host", (0,), nbytes=3.0),
        Task("next", "compute", seconds=5.0),
        Task("uses", "compute", (1,), seconds=1.0),
    ]
    done = run(tasks, link=HostLink(1.0))
    assert done.makespan_s == 8.0
    assert done.exposed_s == 0.0
    assert done.hidden_fraction == 1.0


def test_a_transfer_that_compute_waits_for_is_exposed():
    tasks = [Task("in", "to_device", nbytes=3.0), Task("uses", "compute", (0,), seconds=1.0)]
    done = run(tasks, link=HostLink(1.0))
    assert done.makespan_s == 4.0
    assert done.waits_s == {"to_device": 3.0}
    assert done.hidden_fraction == 0.0


def test_a_transfer_that_outlives_the_step_is_exposed_too():
    done = run([Task("f", "compute", seconds=1.0), Task("out", "to_host", (0,), nbytes=2.0)], link=HostLink(1.0))
    assert done.waits_s == {"to_host": 2.0}


def test_both_directions_at_once_share_the_host_memory():
    both = [Task("out", "to_host", nbytes=4.0), Task("in", "to_device", nbytes=4.0)]
    assert run(both, link=HostLink(4.0)).makespan_s == 1.0
    assert run(both, link=HostLink(4.0, dram_bytes_per_s=4.0)).makespan_s == 2.0


def test_one_direction_speeds_up_when_the_other_ends():
    tasks = [Task("out", "to_host", nbytes=2.0), Task("in", "to_device", nbytes=6.0)]
    # 2 bytes each at rate 2 takes 1 s; the remaining 4 bytes then run at rate 4.
    assert run(tasks, link=HostLink(4.0, dram_bytes_per_s=4.0)).makespan_s == pytest.approx(2.0)


def test_host_compute_slows_transfers_down():
    tasks = [Task("adam", "host_compute", hbm_bytes=4.0), Task("in", "to_device", nbytes=2.0)]
    done = run(tasks, link=HostLink(4.0, dram_bytes_per_s=4.0))
    assert done.ends_s[1] == pytest.approx(1.0)
    assert done.ends_s[0] == pytest.approx(1.5)


def test_collectives_are_counted_apart_from_transfers():
    tasks = [Task("gather", "collective", seconds=2.0), Task("uses", "compute", (0,), seconds=1.0)]
    done = run(tasks)
    assert done.waits_s == {"collective": 2.0}
    assert done.exposed_s == 0.0
    assert done.hidden_fraction is None


def test_a_task_that_waits_for_a_later_one_is_refused():
    with pytest.raises(MemoptError) as error:
        check_order([Task("a", "compute", (1,)), Task("b", "compute")])
    assert error.value.problems[0].code == "bad-timeline"
    assert "task 0 `a` waits for task 1" in str(error.value)


def test_a_builder_leaves_out_absent_dependencies():
    build = TimelineBuilder()
    first = build.add("a", "compute", after=(None,), seconds=1.0)
    build.add("b", "compute", after=(first, first, None), seconds=1.0)
    assert build.done()[1].after == (0,)


def test_an_empty_step_takes_no_time():
    assert simulate([], []).makespan_s == 0.0

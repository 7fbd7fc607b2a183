"""A collective that stands still is told with unit, step and rank, on whatever the waits of a device do."""

from __future__ import annotations

import gc
import logging
import os
import tempfile
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import memopt
from memopt_torch.collectives import Collectives, Groups
from memopt_torch.saving import Saver
from memopt_torch.stalls import StallWatch
from memopt_torch.testing import run_ranks


class Marks:
    """Stands in for the events of a stream."""

    def __init__(self) -> None:
        self.done: list[bool] = []

    def __call__(self) -> Callable[[], bool]:
        number = len(self.done)
        self.done.append(False)
        return lambda: self.done[number]


def test_a_collective_that_does_not_finish_is_told_once_before_the_timeout(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    marks = Marks()
    watch = StallWatch(100.0, mark=marks, clock=lambda: now[0])
    watch.note("all_gather of unit `layers.1` in step 7 on rank 0")
    now[0] = 50.0
    watch.note("reduce_scatter of unit `layers.2` in step 7 on rank 0")
    with caplog.at_level(logging.ERROR, logger="memopt"):
        watch.look()
        assert caplog.messages == []
        now[0] = 91.0
        watch.look()
        watch.look()
        assert len(caplog.messages) == 1
        assert "all_gather of unit `layers.1` in step 7 on rank 0 has not finished for 91 s" in caplog.messages[0]
        marks.done[0] = True  # it went on after all; the next one is on time
        watch.look()
        now[0] = 150.0
        watch.look()
        assert len(caplog.messages) == 2
        assert "layers.2" in caplog.messages[1]


def test_a_watch_looks_by_itself_and_ends(caplog: pytest.LogCaptureFixture) -> None:
    watch = StallWatch(0.2, mark=Marks())
    watch.note("all_gather of unit `head` in step 1 on rank 0")
    with caplog.at_level(logging.ERROR, logger="memopt"):
        watch.start()
        deadline = time.monotonic() + 30
        while not caplog.messages and time.monotonic() < deadline:
            time.sleep(0.02)
        watch.stop()
    assert "unit `head`" in caplog.messages[0]


def test_collectives_are_watched_where_a_watch_is_given(tools: Any) -> None:
    def job() -> list[str]:
        noted: list[str] = []
        watch = StallWatch(60.0)
        watch.note = noted.append  # type: ignore[method-assign]
        run = memopt.apply_policy(tools.llama(), tools.policy(tools.shard()))
        collectives: Collectives = run.engine.collectives
        assert collectives.watch is None  # processors raise where they wait
        collectives.watch = watch
        tools.loss(run.model, tools.batch(0, tools.rank())).backward()
        return noted

    for rank, noted in enumerate(run_ranks(job, 2)):
        assert f"all_gather of unit `layers.1` in step 0 on rank {rank}" in noted
        assert f"reduce_scatter of unit `layers.1` in step 1 on rank {rank}" in noted


def restarted(timeout_s: float, folder: str) -> None:
    """The user's own process group, with a timeout of its own."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    store = dist.FileStore(os.path.join(folder, "again"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_s))


def seconds_of(group: Any) -> float:
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def test_every_group_waits_as_long_as_the_users_own(tools: Any) -> None:
    """Groups that torch makes for a mesh of two axes, or for a background save, wait half an hour by themselves."""

    def job() -> list[float]:
        policy = tools.policy(
            tools.shard(),
            mesh={"replicate": 2, "fsdp": 2},
            backend_options={"torch": {"engine": "fsdp2"}},
        )
        run = memopt.apply_policy(tools.llama(), policy)
        groups = [*run.engine.mesh.get_all_groups(), Saver()._background_group()]
        return [seconds_of(group) for group in groups]

    assert run_ranks(job, 4, timeout_s=57) == [[57.0, 57.0, 57.0]] * 4


def test_a_stalled_rank_of_a_mesh_of_two_axes_ends_within_the_users_timeout(tools: Any) -> None:
    def job(folder: str) -> str:
        restarted(4.0, folder)
        policy = tools.policy(
            tools.shard(), mesh={"replicate": 2, "fsdp": 2}, backend_options={"torch": {"engine": "fsdp2"}}
        )
        run = memopt.apply_policy(tools.llama(), policy)
        tools.loss(run.model, tools.batch(0, tools.rank())).backward()
        if dist.get_rank() == 3:
            time.sleep(20)
            os._exit(0)
        tools.loss(run.model, tools.batch(1, tools.rank())).backward()
        return "went on"

    with tempfile.TemporaryDirectory() as folder:
        answers = run_ranks(job, 4, folder, timeout_s=100, may_fail=True)
    assert answers[3] is None
    assert all(isinstance(answer, RuntimeError) for answer in answers[:3]), answers


def test_one_process_has_nothing_to_watch() -> None:
    assert Collectives(Groups()).watch is None


def test_a_watch_holds_no_tensor_of_a_collective(tools: Any) -> None:
    """NCCL's work holds its outputs: reduced gradients of many steps would pile up."""

    def job() -> list[bool]:
        policy = tools.policy(tools.shard(), unit_defaults={"prefetch": {"forward": 0, "backward": 0}})
        run = memopt.apply_policy(tools.llama(), policy)
        run.engine.collectives.watch = StallWatch(60.0, mark=Marks())
        tools.loss(run.model, tools.batch(0, tools.rank())).backward()
        grads = [weakref.ref(section.grad) for unit in run.engine.units for section in unit.sections]
        run.model.zero_grad()
        tools.loss(run.model, tools.batch(1, tools.rank()))
        gc.collect()
        return [grad() is None for grad in grads]

    for freed in run_ranks(job, 2):
        assert freed
        assert all(freed)

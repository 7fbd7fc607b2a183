"""Ranks for tests: a function run by several gloo processes on this machine, its results gathered.

Processes are forked, so a test may pass closures and pays no import twice. Nothing in the package uses this module.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

Result = TypeVar("Result")


class RankFailed(AssertionError):
    """A rank raised, or was gone before it answered."""


def run_ranks(
    function: Callable[..., Result],
    world_size: int,
    *args: Any,
    timeout_s: float = 120.0,
    may_fail: bool = False,
) -> list[Result]:
    """`function(*args)` in `world_size` processes with a gloo group; its results by rank.

    Args:
        function: May be a closure; what it returns is pickled.
        world_size: Number of processes.
        args: Passed on.
        timeout_s: For the group's collectives, and for all ranks together.
        may_fail: A rank that raises or dies gives its exception (or None when it was killed) instead of a result.

    Raises:
        RankFailed: With the traceback of the first rank that failed.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
        processes = [
            context.Process(
                target=_rank_main, args=(function, rank, world_size, store, timeout_s, sender, args), daemon=True
            )
            for rank, (_, sender) in enumerate(pipes)
        ]
        for process in processes:
            _start(process)
        for _, sender in pipes:
            sender.close()
        answers = [_answer(receiver, timeout_s) for receiver, _ in pipes]
        for process in processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
                process.join()
    return [_checked(rank, answer, may_fail) for rank, answer in enumerate(answers)]


def run_fake(function: Callable[..., Result], world_size: int, *args: Any, timeout_s: float = 120.0) -> Result:
    """`function(*args)` in one forked process that believes to be rank 0 of `world_size`: collectives do nothing, so
    counts and bytes are real and values are not."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_fake_main, args=(function, world_size, sender, args), daemon=True)
    _start(process)
    sender.close()
    answer = _answer(receiver, timeout_s)
    process.join(timeout=10)
    if process.is_alive():
        process.kill()
        process.join()
    return _checked(0, answer, may_fail=False)


def _start(process: Any) -> None:
    """Forks. Libraries with threads warn of it (JAX where a test has used it before); the child uses none of theirs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        process.start()


def _fake_main(function: Callable[..., Any], world_size: int, sender: Any, args: Any) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    _send(function, args, sender)


def _answer(receiver: Any, timeout_s: float) -> tuple[bool, Any, str] | None:
    if not receiver.poll(timeout_s):
        return None
    try:
        return pickle.loads(receiver.recv_bytes())
    except EOFError:
        return None


def _checked(rank: int, answer: tuple[bool, Any, str] | None, may_fail: bool) -> Any:
    if answer is None:
        if may_fail:
            return None
        raise RankFailed(f"rank {rank} died or did not answer")
    good, value, text = answer
    if not good and not may_fail:
        raise RankFailed(f"rank {rank} raised:\n{text}") from value
    return value


def _rank_main(
    function: Callable[..., Any], rank: int, world_size: int, store: str, timeout_s: float, sender: Any, args: Any
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    _send(function, args, sender)


def _send(function: Callable[..., Any], args: Any, sender: Any) -> None:
    """Runs and answers, then ends the process."""
    try:
        answer: tuple[bool, Any, str] = (True, function(*args), "")
    except BaseException as error:  # noqa: BLE001  # whatever it was (pytest's own are no Exceptions), the parent raises
        answer = (False, error, traceback.format_exc())
    try:
        data = pickle.dumps(answer)
    except Exception:  # noqa: BLE001  # exceptions of C++ origin may not pickle
        data = pickle.dumps((False, RuntimeError(answer[2]), answer[2]))
    sender.send_bytes(data)
    sender.close()
    os._exit(0)  # no interpreter shutdown in a fork: the parent's handlers are not the child's to run

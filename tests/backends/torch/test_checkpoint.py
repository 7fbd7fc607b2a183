"""Checkpoints: whole tensors by part; another world size, another policy, FSDP2, a plain model; whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st

import memopt
from memopt.errors import MemoptError, MemoptWarning
from memopt_torch.boxes import boxes_of
from memopt_torch.testing import run_ranks

STEPS = 3
MORE = 3


@given(
    shape=st.lists(st.integers(1, 5), min_size=0, max_size=4),
    cut=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
@settings(max_examples=200, deadline=None)
def test_boxes_cover_a_stretch_exactly_and_in_order(shape: list[int], cut: tuple[float, float]) -> None:
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    start, stop = sorted(round(part * whole.numel()) for part in cut)
    boxes = boxes_of(shape, start, stop)
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    seen: list[int] = []
    for box in boxes:
        part = whole[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))].reshape(-1).tolist()
        assert part == list(range(box.start, box.start + box.numel))
        seen += part
    assert seen == list(range(start, stop))


def trainer(tools: Any, policy: Any, *, zero: bool = False) -> tuple[Any, Any, Callable[[int], float]]:
    """A model under a policy and a step whose global batch is the same at every world size."""
    model = tools.llama(layers=2, hidden=28, intermediate=37, vocab=67)
    if zero:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
    run = memopt.apply_policy(model, policy)
    opt = run.optimizer(torch.optim.AdamW, lr=1e-3)
    return model, run, lambda number: one_step(tools, model, opt, number)


def one_step(tools: Any, model: Any, opt: Any, number: int) -> float:
    size = dist.get_world_size() if dist.is_initialized() else 1
    tokens = torch.cat([tools.batch(number, i, vocab=67)[:1] for i in range(8)])
    part = 8 // size
    loss = tools.loss(model, tokens[tools.rank() * part : (tools.rank() + 1) * part])
    loss.backward()
    opt.step()
    opt.zero_grad()
    total = loss.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(total)
    return total.item() / size


def save_job(tools: Any, policy: Any, folder: Path) -> list[float]:
    _, run, step = trainer(tools, policy)
    for number in range(STEPS):
        step(number)
    run.save(folder, step=STEPS, note="kept")
    return [step(number) for number in range(STEPS, STEPS + MORE)]


def load_job(tools: Any, policy: Any, folder: Path) -> list[float]:
    _, run, step = trainer(tools, policy, zero=True)
    extra = run.load(folder)
    assert extra == {"step": STEPS, "note": "kept"}
    return [step(number) for number in range(STEPS, STEPS + MORE)]


@pytest.fixture(scope="module")
def saved_at_four(tools: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    folder = tmp_path_factory.mktemp("four") / "checkpoint"
    policy = tools.policy(tools.shard(), tools.recompute())
    return folder, run_ranks(save_job, 4, tools, policy, folder)[0]


POLICIES: dict[str, Any] = {
    "shard": lambda t: t.policy(t.shard()),
    "none": lambda t: t.policy(),
    "zero1": lambda t: t.policy({"name": "s", "action": "shard", "match": {"role": "optimizer_state"}}),
    "norms_whole": lambda t: t.policy(t.keep_norms(), t.shard()),
    "fsdp2": lambda t: t.policy(t.shard(), backend_options={"torch": {"engine": "fsdp2"}}),
}


@pytest.mark.parametrize(
    "world,name",
    [(2, "shard"), (1, "shard"), (8, "shard"), (2, "none"), (2, "zero1"), (2, "norms_whole"), (2, "fsdp2")],
)
def test_resumes_at_another_world_size_and_under_another_policy(
    tools: Any, saved_at_four: tuple[Path, list[float]], world: int, name: str
) -> None:
    folder, expected = saved_at_four
    for losses in run_ranks(load_job, world, tools, POLICIES[name](tools), folder):
        assert losses == pytest.approx(expected, abs=2e-6)


def test_a_checkpoint_of_fsdp2_loads_into_the_layer_engine(tools: Any, tmp_path: Path) -> None:
    expected = run_ranks(save_job, 2, tools, POLICIES["fsdp2"](tools), tmp_path / "c")[0]
    for losses in run_ranks(load_job, 4, tools, POLICIES["shard"](tools), tmp_path / "c"):
        assert losses == pytest.approx(expected, abs=2e-6)


def test_keys_are_the_plain_models_and_a_plain_model_loads_them(
    tools: Any, saved_at_four: tuple[Path, list[float]]
) -> None:
    folder, _ = saved_at_four

    def job() -> bool:
        plain = tools.llama(layers=2, hidden=28, intermediate=37, vocab=67)
        saved = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        keys = {key.removeprefix("model.") for key in saved if key.startswith("model.")}
        assert keys == set(plain.state_dict())
        before = plain.model.norm.weight.detach().clone()
        target = {"model": plain.state_dict()}
        dcp.load(target, checkpoint_id=folder)
        return not torch.equal(before, plain.model.norm.weight)

    assert run_ranks(job, 1) == [True]


def test_repeated_saves_and_loads_never_abort(tools: Any, tmp_path: Path) -> None:
    policy = tools.policy(tools.shard())

    def job() -> bool:
        _, run, step = trainer(tools, policy)
        step(0)
        before = [p.detach().local.clone() for p in run.model.parameters()]
        for _ in range(20):
            run.save(tmp_path / "c", step=1)
            run.load(tmp_path / "c")
        return all(torch.equal(a, p.detach().local) for a, p in zip(before, run.model.parameters(), strict=True))

    assert run_ranks(job, 2) == [True, True]


def die_in_the_first_write() -> None:
    import torch.distributed.checkpoint.filesystem as filesystem

    original = torch.save

    def die(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)

    filesystem.torch.save = die


@pytest.mark.parametrize("victim", [0, 1])
def test_a_kill_in_mid_save_leaves_the_earlier_checkpoint_whole(tools: Any, tmp_path: Path, victim: int) -> None:
    policy = tools.policy(tools.shard())
    expected = run_ranks(save_job, 2, tools, policy, tmp_path / "c")[0]

    def killed() -> None:
        _, run, step = trainer(tools, policy)
        step(0)
        if dist.get_rank() == victim:
            die_in_the_first_write()
        run.save(tmp_path / "c", step=99)

    run_ranks(killed, 2, may_fail=True, timeout_s=20)
    for losses in run_ranks(load_job, 2, tools, policy, tmp_path / "c"):
        assert losses == pytest.approx(expected, abs=1e-6)
    run_ranks(save_job, 2, tools, policy, tmp_path / "c")  # what the killed save left is not in the way
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_a_checkpoint_set_aside_by_a_killed_rename_is_found(tools: Any, tmp_path: Path) -> None:
    policy = tools.policy(tools.shard())
    expected = run_ranks(save_job, 2, tools, policy, tmp_path / "c")[0]
    (tmp_path / "c").rename(tmp_path / "c.previous")
    for losses in run_ranks(load_job, 2, tools, policy, tmp_path / "c"):
        assert losses == pytest.approx(expected, abs=1e-6)


@contextmanager
def full_disk(*, rank: int) -> Iterator[None]:
    """One rank finds no space left for any item it writes."""
    import torch.distributed.checkpoint.filesystem as filesystem

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    original = filesystem._write_item
    filesystem._write_item = full if dist.get_rank() == rank else original
    try:
        yield
    finally:
        filesystem._write_item = original


def test_a_full_disk_is_one_error_and_keeps_the_earlier_checkpoint(tools: Any, tmp_path: Path) -> None:
    policy = tools.policy(tools.shard())

    def job() -> tuple[str, str, dict[str, Any]]:
        _, run, step = trainer(tools, policy)
        step(0)
        run.save(tmp_path / "c", step=1)
        with full_disk(rank=1), pytest.raises(MemoptError) as caught:
            run.save(tmp_path / "c", step=2)
        problem = caught.value.problems[0]
        return problem.code, problem.message, run.load(tmp_path / "c")

    for code, message, extra in run_ranks(job, 2):
        assert code == "checkpoint-write-failed"
        assert "No space left on device" in message
        assert extra == {"step": 1}


def test_a_checkpoint_of_another_model_is_refused_with_every_difference(tools: Any, tmp_path: Path) -> None:
    policy = tools.policy(tools.shard())
    run_ranks(save_job, 2, tools, policy, tmp_path / "c")

    def job() -> list[tuple[str, str | None]]:
        run = memopt.apply_policy(tools.llama(layers=3, hidden=32, vocab=67, intermediate=37), policy)
        before = [p.detach().local.clone() for p in run.model.parameters()]
        with pytest.raises(MemoptError) as caught:
            run.load(tmp_path / "c")
        assert all(torch.equal(a, p.detach().local) for a, p in zip(before, run.model.parameters(), strict=True))
        return [(problem.code, problem.path) for problem in caught.value.problems]

    for problems in run_ranks(job, 2):
        assert {code for code, _ in problems} == {"checkpoint-mismatch"}
        paths = {path for _, path in problems}
        assert "model.model.layers.2.mlp.up_proj.weight" in paths  # not in the checkpoint
        assert "model.model.norm.weight" in paths  # of another shape


def test_what_is_no_checkpoint_is_said(tools: Any, tmp_path: Path) -> None:
    run = memopt.apply_policy(tools.llama(layers=2), tools.policy())
    with pytest.raises(MemoptError) as caught:
        run.load(tmp_path)
    assert caught.value.problems[0].code == "no-checkpoint"


def test_extra_takes_plain_values_only(tools: Any, tmp_path: Path) -> None:
    run = memopt.apply_policy(tools.llama(layers=2), tools.policy())
    with pytest.raises(MemoptError) as caught:
        run.save(tmp_path / "c", model=torch.zeros(2))
    assert caught.value.problems[0].code == "checkpoint-extra"
    assert not (tmp_path / "c").exists()


def test_the_files_say_what_they_are(tools: Any, saved_at_four: tuple[Path, list[float]]) -> None:
    about = json.loads((saved_at_four[0] / "memopt.json").read_text())
    assert about["format"] == 1
    assert about["optimizers"][0]["groups"][0]["lr"] == 1e-3


def late_job(tools: Any, policy: Any, folder: Path) -> list[float]:
    """Loads before the optimizer is made."""
    model = tools.llama(layers=2, hidden=28, intermediate=37, vocab=67)
    run = memopt.apply_policy(model, policy)
    run.load(folder)
    opt = run.optimizer(torch.optim.AdamW, lr=0.5)  # the saved options come back with the state
    return [one_step(tools, model, opt, number) for number in range(STEPS, STEPS + MORE)]


@pytest.mark.parametrize("world,name", [(2, "shard"), (1, "none"), (2, "zero1")])
def test_an_optimizer_made_after_the_load_finds_its_state(
    tools: Any, saved_at_four: tuple[Path, list[float]], world: int, name: str
) -> None:
    folder, expected = saved_at_four
    for losses in run_ranks(late_job, world, tools, POLICIES[name](tools), folder):
        assert losses == pytest.approx(expected, abs=2e-6)


def test_an_optimizer_made_past_the_policy_is_told_that_state_was_waiting(
    tools: Any, saved_at_four: tuple[Path, list[float]]
) -> None:
    model = tools.llama(layers=2, hidden=28, intermediate=37, vocab=67)
    run = memopt.apply_policy(model, tools.policy())
    run.load(saved_at_four[0])
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tools.loss(model, tools.batch(0, 0)).backward()
    with pytest.warns(MemoptWarning, match="starts without it"):
        opt.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt.step()


def test_state_that_was_replaced_while_it_waited_is_refused(tools: Any, tmp_path: Path) -> None:
    first = memopt.apply_policy(tools.llama(layers=2), tools.policy())
    first.optimizer(torch.optim.AdamW, lr=1e-3)
    first.save(tmp_path / "c")
    second = memopt.apply_policy(tools.llama(layers=2), tools.policy())
    second.load(tmp_path / "c")
    first.save(tmp_path / "c")
    with pytest.raises(MemoptError) as caught:
        second.optimizer(torch.optim.AdamW, lr=1e-3)
    assert caught.value.problems[0].code == "checkpoint-changed"


def test_a_save_in_the_background_holds_the_values_of_its_moment(tools: Any, tmp_path: Path) -> None:
    policy = tools.policy(tools.shard())

    def job() -> tuple[bool, list[float]]:
        _, run, step = trainer(tools, policy)
        for number in range(STEPS):
            step(number)
        go_on = threading.Event()
        hold_writes(go_on)
        pending = run.save(tmp_path / "c", async_save=True, step=STEPS, note="kept")
        losses = [step(number) for number in range(STEPS, STEPS + MORE)]  # training goes on meanwhile
        early = pending.done() or (tmp_path / "c").exists()
        go_on.set()
        pending.wait()
        return early, losses

    results = run_ranks(job, 2)
    assert not any(early for early, _ in results)
    for losses in run_ranks(load_job, 2, tools, policy, tmp_path / "c"):
        assert losses == pytest.approx(results[0][1], abs=1e-6)


def hold_writes(go_on: threading.Event) -> None:
    """The disk is slow until `go_on` is set."""
    import torch.distributed.checkpoint.filesystem as filesystem

    original = filesystem._write_item

    def slow(*args: Any, **kwargs: Any) -> Any:
        assert go_on.wait(60)
        return original(*args, **kwargs)

    filesystem._write_item = slow


def test_saves_in_the_background_follow_each_other_and_the_last_one_counts(tools: Any, tmp_path: Path) -> None:
    policy = tools.policy(tools.shard())

    def job() -> dict[str, Any]:
        _, run, step = trainer(tools, policy)
        for number in range(6):
            step(number)
            run.save(tmp_path / "c", async_save=True, step=number)
        return run.load(tmp_path / "c")  # waits for the one under way

    assert run_ranks(job, 2) == [{"step": 5}, {"step": 5}]


@pytest.mark.parametrize("asked_by", ["wait", "save", "load"])
def test_what_goes_wrong_in_the_background_is_raised_once_by_whoever_asks_next(
    tools: Any, tmp_path: Path, asked_by: str
) -> None:
    policy = tools.policy(tools.shard())

    def job() -> tuple[str, dict[str, Any]]:
        _, run, step = trainer(tools, policy)
        step(0)
        run.save(tmp_path / "c", step=1)
        with full_disk(rank=1):
            pending = run.save(tmp_path / "c", async_save=True, step=2)
            ask = {
                "wait": pending.wait,
                "save": lambda: run.save(tmp_path / "c", step=3),
                "load": lambda: run.load(tmp_path / "c"),
            }[asked_by]
            with pytest.raises(MemoptError) as caught:
                ask()
        assert "No space left on device" in caught.value.problems[0].message
        return caught.value.problems[0].code, run.load(tmp_path / "c")

    assert run_ranks(job, 2) == [("checkpoint-write-failed", {"step": 1})] * 2


@pytest.mark.parametrize("victim", [0, 1])
def test_a_kill_while_saving_in_the_background_leaves_the_earlier_checkpoint(
    tools: Any, tmp_path: Path, victim: int
) -> None:
    policy = tools.policy(tools.shard())
    expected = run_ranks(save_job, 2, tools, policy, tmp_path / "c")[0]

    def killed() -> None:
        _, run, step = trainer(tools, policy)
        step(0)
        if dist.get_rank() == victim:
            die_in_the_first_write()
        run.save(tmp_path / "c", async_save=True, step=99).wait()

    run_ranks(killed, 2, may_fail=True, timeout_s=20)
    for losses in run_ranks(load_job, 2, tools, policy, tmp_path / "c"):
        assert losses == pytest.approx(expected, abs=1e-6)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # torch's own, from the thread
def test_an_async_save_in_one_process_needs_no_group(tools: Any, tmp_path: Path) -> None:
    run = memopt.apply_policy(tools.llama(layers=2), tools.policy())
    run.save(tmp_path / "c", async_save=True, step=4).wait()
    assert run.load(tmp_path / "c") == {"step": 4}

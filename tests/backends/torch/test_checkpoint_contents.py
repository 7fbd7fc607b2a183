"""What comes back from a checkpoint is what was saved: no state of another moment or optimizer, no half of a file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata

import memopt
from memopt.errors import MemoptError, MemoptWarning
from memopt_torch.optimizer_states import _state_tensor
from memopt_torch.testing import run_ranks

SHARD = {"name": "shard", "action": "shard", "match": {"role": "param"}}
STATE = {"name": "state", "action": "offload", "match": {"role": "optimizer_state"}, "memory_kind": "pinned_host"}
POLICIES = {
    "plain": [],
    "state offloaded": [{**STATE, "update_on": "device"}],
    "state updated on the host": [{**STATE, "update_on": "host"}],
}


class Counted(nn.Module):
    """Scales by the number of its calls, which is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale, self.num_calls = nn.Linear(6, 6), nn.Parameter(torch.tensor(0.5)), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        return (self.linear(x) * self.scale).tanh() / self.num_calls

    def get_extra_state(self) -> dict[str, Any]:
        return {"num_calls": self.num_calls, "table": torch.ones(2)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.num_calls = state["num_calls"]


def make(rules: Any = (), *, extra: bool = True) -> memopt.Applied:
    torch.manual_seed(0)
    model = nn.Sequential(Counted() if extra else nn.Linear(6, 6), nn.Linear(6, 2))
    return memopt.apply_policy(model, {"version": 1, "rules": list(rules)})


def steps(run: Any, optimizer: torch.optim.Optimizer, numbers: range) -> list[float]:
    losses = []
    for number in numbers:
        loss = run.model(torch.randn(4, 6, generator=torch.Generator().manual_seed(number))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def codes(call: Callable[[], Any]) -> list[str]:
    with pytest.raises(MemoptError) as caught:
        call()
    return [problem.code for problem in caught.value.problems]


@pytest.mark.parametrize("rules", POLICIES.values(), ids=POLICIES.keys())
@pytest.mark.parametrize("already", [0, 2])
def test_going_back_to_a_checkpoint_gives_the_same_steps_again(tmp_path: Path, rules: Any, already: int) -> None:
    run = make(rules)
    optimizer = run.optimizer(torch.optim.AdamW, lr=0.1)
    steps(run, optimizer, range(already))
    run.save(tmp_path / "c")
    first = steps(run, optimizer, range(3))
    run.load(tmp_path / "c")
    assert steps(run, optimizer, range(3)) == first


def test_extra_state_of_modules_comes_back_and_is_missed(tmp_path: Path) -> None:
    run = make()
    steps(run, run.optimizer(torch.optim.SGD, lr=0.1), range(3))
    run.save(tmp_path / "c")
    again = make()
    again.load(tmp_path / "c")
    assert again.model[0].num_calls == 3

    def without(run: Any) -> None:
        run.model[0].__class__ = type("Other", (nn.Module,), {"forward": Counted.forward})

    other = make()
    without(other)
    assert codes(lambda: other.load(tmp_path / "c")) == ["checkpoint-mismatch"]
    other.save(tmp_path / "without")
    assert codes(lambda: run.load(tmp_path / "without")) == ["checkpoint-mismatch"]


def test_an_optimizer_with_parameters_the_model_has_not_cannot_be_saved_and_says_so(tmp_path: Path) -> None:
    run, head = make(), nn.Linear(3, 3)
    run.optimizer(torch.optim.AdamW, [*run.model.parameters(), *head.parameters()], lr=0.1)
    assert codes(lambda: run.save(tmp_path / "c")) == ["checkpoint-parameter-unnamed"]
    assert not (tmp_path / "c").exists()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 3])


@pytest.mark.parametrize("pattern", ["*.distcp", ".metadata", "memopt.json"])
@pytest.mark.parametrize("damage", [cut, Path.unlink])
def test_a_damaged_checkpoint_is_one_error(tmp_path: Path, pattern: str, damage: Callable[[Path], None]) -> None:
    run = make()
    run.save(tmp_path / "c", step=1)
    damage(next((tmp_path / "c").glob(pattern)))
    if pattern == "memopt.json" and damage is Path.unlink:
        assert run.load(tmp_path / "c") == {}  # of another tool: weights alone
        return
    expected = "no-checkpoint" if pattern == ".metadata" and damage is Path.unlink else "checkpoint-unreadable"
    assert codes(lambda: run.load(tmp_path / "c")) == [expected]


def test_state_of_another_kind_of_optimizer_is_refused_and_that_of_a_near_one_taken(tmp_path: Path) -> None:
    run = make()
    steps(run, run.optimizer(torch.optim.AdamW, lr=0.1), range(2))
    run.save(tmp_path / "c")
    other = make()
    other.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
    assert codes(lambda: other.load(tmp_path / "c")) == ["checkpoint-groups"]
    near = make()
    optimizer = near.optimizer(torch.optim.Adam, lr=0.5)
    near.load(tmp_path / "c")
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert optimizer.state[near.model[0].scale]["step"] == 2


def test_an_optimizer_the_checkpoint_knows_nothing_of_keeps_its_state_and_says_so(tmp_path: Path) -> None:
    run = make()
    run.save(tmp_path / "c")
    optimizer = run.optimizer(torch.optim.AdamW, lr=0.1)
    run.load(tmp_path / "c")  # nothing gathered yet: nothing to tell
    steps(run, optimizer, range(1))
    with pytest.warns(MemoptWarning, match="was saved without the state of AdamW"):
        run.load(tmp_path / "c")


def test_the_kernels_of_an_update_are_those_of_the_optimizer_that_is_there(tmp_path: Path) -> None:
    run = make()
    steps(run, run.optimizer(torch.optim.AdamW, lr=0.1, fused=True), range(1))
    run.save(tmp_path / "c")
    again = make()
    optimizer = again.optimizer(torch.optim.AdamW, lr=0.5, foreach=True)
    again.load(tmp_path / "c")
    assert (optimizer.param_groups[0]["fused"], optimizer.param_groups[0]["foreach"]) == (None, True)


@pytest.mark.parametrize("on_device, device", [(True, "meta"), (False, "cpu")])
def test_step_counters_lie_where_the_kernel_reads_them(on_device: bool, device: str) -> None:
    """A fused kernel on a GPU reads them there; the others count on the CPU."""
    entry = TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size([]), [])
    parameter = torch.empty(3, device="meta")
    counter = _state_tensor(parameter, entry, is_counter=True, on_device=on_device)
    assert counter.device.type == device


def test_a_parameter_without_dimensions_resumes_on_two_ranks(tmp_path: Path) -> None:
    def first() -> list[float]:
        run = make([SHARD])
        optimizer = run.optimizer(torch.optim.AdamW, lr=0.1)
        steps(run, optimizer, range(2))
        run.save(tmp_path / "c")
        return steps(run, optimizer, range(2, 5))

    def again() -> list[float]:
        run = make([SHARD])
        optimizer = run.optimizer(torch.optim.AdamW, lr=0.5)
        run.load(tmp_path / "c")
        return steps(run, optimizer, range(2, 5))

    assert run_ranks(first, 2) == run_ranks(again, 2)


# Transformers' files.


def test_weight_files_of_an_earlier_save_do_not_outlive_it(tools: Any, tmp_path: Path) -> None:
    run = memopt.apply_policy(tools.llama(layers=2), tools.policy())
    for limits in ((2000, 10**9), (10**9, 2000)):
        for limit in limits:
            with torch.no_grad():
                for parameter in run.model.parameters():
                    parameter.add_(1)
            run.save_pretrained(tmp_path, max_file_bytes=limit)
        again = type(run.model).from_pretrained(tmp_path)  # with the configuration that was written beside
        assert all(torch.equal(a, b) for a, b in zip(again.parameters(), run.model.parameters(), strict=True))
        run.load_pretrained(tmp_path)


@pytest.mark.parametrize("pattern", ["model-00002-of-*.safetensors", "model.safetensors.index.json"])
@pytest.mark.parametrize("damage", [cut, Path.unlink])
def test_damaged_files_of_a_model_are_one_error(tools: Any, tmp_path: Path, pattern: str, damage: Any) -> None:
    run = memopt.apply_policy(tools.llama(layers=2), tools.policy())
    run.save_pretrained(tmp_path, max_file_bytes=5000)
    damage(next(tmp_path.glob(pattern)))
    if pattern.endswith("json") and damage is Path.unlink:
        run.load_pretrained(tmp_path)  # the files name their own tensors
    else:
        assert codes(lambda: run.load_pretrained(tmp_path)) == ["pretrained-unreadable"]


def test_a_failure_to_write_is_raised_on_every_rank_at_once(tools: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")

    def job() -> list[str]:
        run = memopt.apply_policy(tools.llama(layers=2), tools.policy(tools.keep_norms(), tools.shard()))
        found = codes(lambda: run.save_pretrained(tmp_path / "file", max_file_bytes=5000))
        run.save_pretrained(tmp_path / f"good{dist.get_rank() * 0}", max_file_bytes=5000)
        return found

    assert run_ranks(job, 2) == [["checkpoint-write-failed"]] * 2
    assert not list((tmp_path / "good0").glob("part-*"))

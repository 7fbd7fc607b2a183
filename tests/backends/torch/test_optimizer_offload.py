"""Optimizer state on the host: the same training, the state's bytes gone from the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import memopt
from memopt.errors import MemoptError
from memopt_torch.delayed_streams import DelayedStreams
from memopt_torch.measure import StepMeter
from memopt_torch.optimizer_offload import OptimizerOffload
from memopt_torch.testing import run_ranks

WIDTH, LAYERS = 32, 4
SHARD = {"name": "weights", "action": "shard", "match": {"role": "param"}}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(self.up(hidden).tanh())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return (hidden - 1).square().mean()


def state(update_on: str = "device", **extra: Any) -> dict[str, Any]:
    return {"name": "state", "action": "offload", "match": {"role": "optimizer_state"}, "update_on": update_on, **extra}


def policy(*rules: dict[str, Any], **offload: Any) -> dict[str, Any]:
    options = {"backend_options": {"torch": {"offload": offload}}} if offload else {}
    return {"version": 1, "units": ["layers.*"], "rules": [*rules], **options}


def trained(
    rules: list[dict[str, Any]], factory: Callable[..., torch.optim.Optimizer], *, num_steps: int = 4, **options: Any
) -> tuple[list[torch.Tensor], Any, torch.optim.Optimizer]:
    """Parameters after some steps, the run and the optimizer."""
    model = Model()
    run = memopt.apply_policy(model, policy(*rules))
    optimizer = run.optimizer(factory, lr=1e-2, **options)
    for offload in run.optimizer_offloads:
        offload.streams = DelayedStreams()
    for number in range(num_steps):
        optimizer.zero_grad()
        model(torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number))).backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()], run, optimizer


OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {}),
    "AdamW, fused": (torch.optim.AdamW, {"fused": True}),
    "AdamW, for-loop": (torch.optim.AdamW, {"foreach": False}),
    "Adam, amsgrad": (torch.optim.Adam, {"amsgrad": True}),
    "SGD": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "Adagrad": (torch.optim.Adagrad, {}),
    "RMSprop": (torch.optim.RMSprop, {"momentum": 0.5}),
}


@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize("factory, options", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_updated_on_the_device_it_trains_to_the_same_bits(
    factory: Any, options: dict[str, Any], fraction: float
) -> None:
    plain, _, _ = trained([], factory, **options)
    offloaded, run, _ = trained([state(fraction=fraction)], factory, **options)
    assert all(torch.equal(a, b) for a, b in zip(plain, offloaded))
    assert run.optimizer_offloads[0].to_device_bytes > 0
    assert run.optimizer_offloads[0].streams.faults == []


@pytest.mark.parametrize("factory, options", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_updated_on_the_host_it_stays_within_a_millionth(factory: Any, options: dict[str, Any]) -> None:
    plain, _, _ = trained([], factory, **options)
    offloaded, run, _ = trained([state("host")], factory, **options)
    assert max(float((a - b).abs().max()) for a, b in zip(plain, offloaded)) <= 1e-6
    assert run.optimizer_offloads[0].streams.faults == []


@pytest.mark.parametrize("update_on", ["device", "host"])
def test_state_bytes_are_on_the_host_between_steps(update_on: str) -> None:
    def peak(rules: list[dict[str, Any]]) -> tuple[int, int, int]:
        _, run, optimizer = trained(rules, torch.optim.AdamW, num_steps=2)
        with StepMeter(run.model, (optimizer,), engine=run.engine) as meter:
            run.model(torch.randn(4, WIDTH)).backward()
        found = meter.result().peak
        held = sum(offload.host_bytes() for offload in run.optimizer_offloads)
        return found.by_role["optimizer_state"], found.host_nbytes, held

    weights = sum(p.numel() * p.element_size() for p in Model().parameters())
    counters = 4 * len(list(Model().parameters()))
    assert peak([])[0] == 2 * weights + counters
    left, host, held = peak([state(update_on)])
    assert left == counters
    # On the host: two moments; to update there also gradients and parameters.
    assert host == held == (2 if update_on == "device" else 4) * weights


def test_no_more_than_three_buckets_are_on_the_device_at_once() -> None:
    _, run, optimizer = trained([state()], torch.optim.AdamW, num_steps=2)
    for offload in run.optimizer_offloads:
        offload.streams = type(offload)(optimizer, offload._buckets[0].members, update_on="device").streams
    run.model(torch.randn(4, WIDTH)).backward()
    with StepMeter(run.model, (optimizer,), engine=run.engine) as meter:
        optimizer.step()
    weights = sum(p.numel() * p.element_size() for p in run.model.parameters())
    resident = 2 * weights + 4 * len(list(run.model.parameters()))  # parameters, gradients, counters
    state_on_device = meter.result().peak.nbytes - resident
    assert state_on_device < 2 * weights  # less than all of the state, the update's own temporaries included


@pytest.mark.parametrize("update_on", ["device", "host"])
def test_sharded_and_offloaded_state_trains_like_ddp_to_the_bit_on_the_device(update_on: str) -> None:
    def on_rank(rules: list[dict[str, Any]]) -> list[torch.Tensor]:
        parameters, _, _ = trained(rules, torch.optim.AdamW, num_steps=3)
        return [p.local if hasattr(p, "local") else p for p in parameters]

    plain = run_ranks(on_rank, 2, [SHARD])
    offloaded = run_ranks(on_rank, 2, [SHARD, state(update_on)])
    for ours, theirs in zip(offloaded, plain):
        worst = max((float((a - b).abs().max()) for a, b in zip(ours, theirs) if a.numel()), default=0.0)
        assert worst <= (0.0 if update_on == "device" else 1e-6)


@pytest.mark.parametrize("by_data", [False, True])
def test_parameters_written_by_someone_else_between_steps_are_seen_by_the_host(by_data: bool) -> None:
    plain, offloaded = ([], [state("host")])
    ends = []
    for rules in (plain, offloaded):
        model = Model()
        run = memopt.apply_policy(model, policy(*rules))
        optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
        for number in range(3):
            optimizer.zero_grad()
            model(torch.ones(4, WIDTH)).backward()
            optimizer.step()
            if number == 1:
                with torch.no_grad():
                    for parameter in model.parameters():
                        (parameter.data if by_data else parameter).mul_(0.5)
                if by_data:
                    run.weights_changed()
        ends.append([p.detach().clone() for p in model.parameters()])
    assert max(float((a - b).abs().max()) for a, b in zip(*ends)) <= 1e-6


def test_a_state_dict_saved_and_loaded_resumes_the_same_training() -> None:
    whole, _, _ = trained([state()], torch.optim.AdamW, num_steps=4)
    model = Model()
    run = memopt.apply_policy(model, policy(state()))
    optimizer = run.optimizer(torch.optim.AdamW, lr=1e-2)
    for number in range(4):
        if number == 2:
            saved = optimizer.state_dict()
            optimizer = run.optimizer(torch.optim.AdamW, lr=1e-2)
            optimizer.load_state_dict(saved)
        optimizer.zero_grad()
        model(torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number))).backward()
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(whole, model.parameters()))


def test_a_closure_and_a_scheduler_work_and_hooks_run_once_a_step() -> None:
    def train(rules: list[dict[str, Any]]) -> tuple[list[float], int, Any]:
        model = Model()
        optimizer = memopt.apply_policy(model, policy(*rules)).optimizer(torch.optim.AdamW, lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        calls: list[int] = []
        optimizer.register_step_post_hook(lambda *_: calls.append(1))

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.ones(4, WIDTH))
            loss.backward()
            return loss

        losses = []
        for _ in range(3):
            losses.append(float(optimizer.step(closure).detach()))  # type: ignore[union-attr]
            scheduler.step()
        return losses, len(calls), optimizer.param_groups[0]

    expected, _, _ = train([])
    losses, num_calls, group = train([state()])
    assert losses == expected
    assert num_calls == 3
    assert group["lr"] == pytest.approx(1e-2 / 8)
    assert len(group["params"]) == len(list(Model().parameters()))


def test_groups_keep_their_members_and_options() -> None:
    def end(rules: list[dict[str, Any]]) -> list[torch.Tensor]:
        model = Model()
        run = memopt.apply_policy(model, policy(*rules))
        matrices = [p for p in model.parameters() if p.ndim > 1]
        others = [p for p in model.parameters() if p.ndim == 1]
        groups = [{"params": matrices, "weight_decay": 0.3}, {"params": others, "weight_decay": 0.0, "lr": 0.1}]
        optimizer = run.optimizer(torch.optim.AdamW, groups, lr=1e-2)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(4, WIDTH)).backward()
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(end([]), end([state()])))


def test_a_copy_used_before_it_is_ready_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, _, _ = trained([], torch.optim.AdamW)
    monkeypatch.setattr(DelayedStreams, "wait", lambda streams, ticket: None)
    offloaded, _, _ = trained([state()], torch.optim.AdamW)
    assert not all(torch.equal(a, b) for a, b in zip(plain, offloaded))


def test_different_places_of_update_in_one_optimizer_are_refused() -> None:
    first = {**state("host"), "name": "first", "match": {"role": "optimizer_state", "path": "layers.0.**"}}
    run = memopt.apply_policy(Model(), policy(first, state()))
    with pytest.raises(MemoptError, match="optimizer-updates-mixed"):
        run.optimizer(torch.optim.AdamW)


def test_a_step_that_fails_leaves_the_parameter_groups_whole() -> None:
    class Failing(torch.optim.AdamW):
        fails = True

        def step(self, closure: Any = None) -> Any:
            if self.fails and not all(p.grad is None for group in self.param_groups for p in group["params"]):
                raise RuntimeError("out of memory")
            return super().step(closure)

    model = Model()
    options = {"trusted_optimizers": ["Failing"]}
    half = {**state(), "match": {"role": "optimizer_state", "path": "layers.0.**"}}
    optimizer = memopt.apply_policy(model, policy(half, **options)).optimizer(Failing, lr=1e-2)
    model(torch.ones(4, WIDTH)).backward()
    with pytest.raises(RuntimeError, match="out of memory"):
        optimizer.step()
    assert len(optimizer.param_groups[0]["params"]) == len(list(model.parameters()))
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


def test_what_is_installed_can_be_taken_out() -> None:
    _, run, optimizer = trained([state()], torch.optim.AdamW, num_steps=1)
    (installed,) = run.optimizer_offloads
    assert isinstance(installed, OptimizerOffload)
    installed.remove()
    run.model(torch.ones(4, WIDTH)).backward()
    optimizer.step()


class _LateStreams:
    """As on a GPU: waiting for a copy to the host orders the device's work behind it, and not the CPU's."""

    def __init__(self) -> None:
        self._under_way: list[tuple[torch.Tensor, torch.Tensor]] = []

    def to_host(self, source: torch.Tensor, target: torch.Tensor, *, after: Any = None) -> Any:
        self._under_way.append((source.clone(), target))
        return self

    def to_device(self, source: torch.Tensor, target: torch.Tensor, *, after: Any = None) -> Any:
        self.synchronize()
        target.copy_(source)
        return self

    def wait(self, ticket: Any) -> None:
        """The CPU goes on."""

    def synchronize(self) -> None:
        for source, target in self._under_way:
            target.copy_(source)
        self._under_way.clear()


@pytest.mark.parametrize("read", ["state_dict", "save", "load"])
def test_state_that_the_cpu_reads_or_writes_after_a_step_has_arrived(read: str, tmp_path: Any) -> None:
    """Family: pinned memory read, or written, while a copy to it is under way."""

    def moments(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        return [
            s[k].detach().clone() for s in optimizer.state_dict()["state"].values() for k in ("exp_avg", "exp_avg_sq")
        ]

    expected = moments(trained([], torch.optim.AdamW)[2])
    _, run, optimizer = trained([state()], torch.optim.AdamW, num_steps=3)
    run.optimizer_offloads[0].streams = _LateStreams()
    run.save(tmp_path / "three")
    optimizer.zero_grad()
    run.model(torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(3))).backward()
    optimizer.step()
    if read == "save":
        run.save(tmp_path / "four")
        optimizer.zero_grad()
        run.model(torch.ones(4, WIDTH)).backward()
        optimizer.step()
        run.load(tmp_path / "four")
    if read == "load":
        run.load(tmp_path / "three")
        expected = moments(trained([], torch.optim.AdamW, num_steps=3)[2])
    assert all(torch.equal(a, b) for a, b in zip(moments(optimizer), expected, strict=True))

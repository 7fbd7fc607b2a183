"""Activation offload: bytes leave the device, come back as the views that were saved, and never too late."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memopt
from memopt.errors import MemoptError
from memopt_torch import parcels, streams
from memopt_torch.delayed_streams import DelayedStreams
from memopt_torch.host_pool import HostPool
from memopt_torch.measure import StepMeter
from memopt_torch.offload import OffloadSettings, Transfers

WIDTH, LAYERS = 32, 4
REST = {"name": "rest", "action": "recompute", "match": {"unit": "layers.*"}}
INPUTS = {"name": "inputs", "action": "offload", "match": {"path": "layers.*.input"}}
WIDE = {"name": "wide", "action": "offload", "match": {"path": ["layers.*.up", "layers.*.down.input"]}}
ALL = {"name": "all", "action": "offload", "match": {"role": "activation", "unit": "layers.*"}}
RULES = {
    "inputs": [INPUTS],
    "inputs, rest recomputed": [INPUTS, REST],
    "wide values": [WIDE],
    "wide values, rest recomputed": [INPUTS, WIDE, REST],
    "everything": [ALL],
    "every second layer": [{**WIDE, "match": {**WIDE["match"], "layers": {"every": 2}}}, REST],
}


class Block(nn.Module):
    """Saves plain tensors, a transposed one, slices at an offset and an expanded one; and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)
        self.scale = nn.Parameter(torch.ones(1, WIDTH))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        gate, value = self.up(hidden).tanh().chunk(2, dim=-1)
        mixed = gate * value
        mixed = mixed @ mixed.transpose(-1, -2) @ hidden.detach().mean(-2, keepdim=True).expand_as(mixed)
        return hidden + self.drop(self.down(mixed * self.scale).sin())


class Model(nn.Module):
    def __init__(self, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(block() for _ in range(LAYERS))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden.square().mean()


def batch() -> torch.Tensor:
    return torch.randn(2, 16, WIDTH, generator=torch.Generator().manual_seed(7))


def policy(*rules: dict[str, Any], **offload_options: Any) -> dict[str, Any]:
    options = {"backend_options": {"torch": {"offload": offload_options}}} if offload_options else {}
    return {"version": 1, "units": ["layers.*"], "rules": [*rules], **options}


def step(model: nn.Module, seed: int, inputs: torch.Tensor | None = None) -> list[torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(seed)
    loss = model(batch() if inputs is None else inputs)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def assert_equal_steps(plain: nn.Module, applied: nn.Module, *, num_steps: int = 2) -> None:
    for seed in range(num_steps):
        assert all(torch.equal(a, b) for a, b in zip(step(plain, seed), step(applied, seed), strict=True))


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES.keys())
def test_gradients_equal_the_plain_models_under_delayed_copies_twenty_times(rules: list[dict[str, Any]]) -> None:
    plain, applied = Model(), Model()
    run = memopt.apply_policy(applied, policy(*rules))
    run.regions.transfers.streams = late = DelayedStreams()
    assert_equal_steps(plain, applied, num_steps=20)
    assert run.regions.transfers.to_device_bytes > 0
    assert late.faults == []


@pytest.mark.parametrize(
    "options", [{"prefetch": 0}, {"prefetch": 3}, {"keep_last_unit": False}, {"synchronous": True}]
)
def test_every_setting_of_the_transfers_gives_the_same_gradients(options: dict[str, Any]) -> None:
    plain, applied = Model(), Model()
    run = memopt.apply_policy(applied, policy(INPUTS, WIDE, REST, **options))
    run.regions.transfers.streams = late = DelayedStreams()
    assert_equal_steps(plain, applied, num_steps=3)
    assert late.faults == []


def test_two_forwards_before_their_backwards_do_not_mix_up_values() -> None:
    plain, applied = Model(), Model()
    run = memopt.apply_policy(applied, policy(INPUTS, WIDE, REST))
    run.regions.transfers.streams = DelayedStreams()
    grads = []
    for model in (plain, applied):
        step(model, 0)
        model.zero_grad()
        torch.manual_seed(1)
        losses = [model(batch()), model(2 * batch())]
        for loss in losses:
            loss.backward()
        grads.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads))


@pytest.mark.parametrize("rules", [[WIDE], [INPUTS, WIDE, REST]], ids=["saved tensors", "recomputed"])
def test_batches_of_changing_length_are_offloaded_like_any(rules: list[dict[str, Any]]) -> None:
    plain, applied = Model(), Model()
    run = memopt.apply_policy(applied, policy(*rules))
    for seed, length in enumerate((16, 24, 8, 24)):
        inputs = torch.randn(2, length, WIDTH, generator=torch.Generator().manual_seed(seed))
        before = run.regions.transfers.to_host_bytes
        assert all(torch.equal(a, b) for a, b in zip(step(plain, seed, inputs), step(applied, seed, inputs)))
        sent = run.regions.transfers.to_host_bytes - before
        # Where the rest is recomputed, the input and the result of `up` (twice as wide) travel too.
        assert sent == (LAYERS - 1) * 2 * length * WIDTH * 4 * (1 if rules == [WIDE] else 4)


# Faults put in on purpose must be seen.


def test_a_value_used_before_its_copy_is_ready_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, applied = Model(), Model()
    run = memopt.apply_policy(applied, policy(WIDE))
    late = run.regions.transfers.streams = DelayedStreams()
    monkeypatch.setattr(late, "wait", lambda ticket: None)
    with pytest.raises(AssertionError):
        assert_equal_steps(plain, applied)


def test_a_source_freed_before_its_copy_is_done_is_seen() -> None:
    late = DelayedStreams()
    source, target = torch.ones(8), torch.zeros(8)
    ticket = late.to_host(source, target)
    del source
    late.wait(ticket)
    assert late.faults
    assert target.isnan().all()


def test_one_host_copy_shared_by_a_matrix_and_its_transpose_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parcels.Handle, "take", lambda handle: handle.parcel.base().view(handle.size))
    plain, applied = Model(), Model()
    memopt.apply_policy(applied, policy(ALL))
    with pytest.raises((AssertionError, RuntimeError)):
        assert_equal_steps(plain, applied)


# What leaves, and what must not.


def peak_and_host(rules: list[dict[str, Any]], **options: Any) -> tuple[int, int]:
    model = Model()
    run = memopt.apply_policy(model, policy(*rules, **options))
    inputs = torch.randn(32, 16, WIDTH)
    for seed in range(2):
        step(model, seed, inputs)
    with StepMeter(model, engine=run.engine) as meter:
        loss = model(inputs)
    del loss
    return meter.result().peak.nbytes, meter.result().peak.host_nbytes


def test_device_bytes_of_the_named_values_are_gone_after_the_forward_and_stand_on_the_host() -> None:
    plain, none = peak_and_host([])
    offloaded, host = peak_and_host([WIDE], prefetch=1)
    wide = 32 * 16 * WIDTH * 4  # what `down` takes; the result of `up` is not saved, tanh keeps its own
    assert none == 0
    assert host >= (LAYERS - 1) * wide
    # All layers but the last, which stays, and the one before, whose copy runs beside the last.
    assert plain - offloaded >= (LAYERS - 2) * wide


def test_weights_are_never_sent() -> None:
    model = Model()
    run = memopt.apply_policy(model, policy(ALL))
    sent: list[torch.Tensor] = []
    original = run.regions.transfers.send

    def send(tensor: torch.Tensor) -> Any:
        sent.append(tensor)
        return original(tensor)

    run.regions.transfers.send = send
    step(model, 0)
    step(model, 1)
    storages = {p.untyped_storage()._cdata for p in model.parameters()}
    assert sent
    assert not storages & {tensor.untyped_storage()._cdata for tensor in sent}


def test_the_last_unit_stays_on_the_device_unless_told_otherwise() -> None:
    def sent(**options: Any) -> int:
        model = Model()
        run = memopt.apply_policy(model, policy(WIDE, **options))
        step(model, 0)
        return run.regions.transfers.to_host_bytes

    assert sent(keep_last_unit=False) * (LAYERS - 1) == sent() * LAYERS


def test_without_keeping_the_last_unit_its_device_memory_is_free_after_the_model() -> None:
    def live_after_forward(**options: Any) -> int:
        model = Model()
        run = memopt.apply_policy(model, policy(WIDE, **options))
        inputs = torch.randn(32, 16, WIDTH)
        for seed in range(2):
            step(model, seed, inputs)
        with StepMeter(model, engine=run.engine) as meter:
            loss = model(inputs)
        del loss
        return meter.result().timeline[-1][0]

    assert live_after_forward() - live_after_forward(keep_last_unit=False) == 32 * 16 * WIDTH * 4


def test_bytes_travel_once_however_many_views_of_them_are_saved() -> None:
    transfers = Transfers(OffloadSettings())
    base = torch.randn(8, 8)
    with transfers.trip(object_with_a_weakref := Call()):
        handles = [transfers.send(view) for view in (base, base.t(), base.view(64), base)]
    with transfers.trip(Call()):
        pass
    assert transfers.to_host_bytes == 8 * 8 * 4
    assert object_with_a_weakref is not None
    for handle, view in zip(handles, (base, base.t(), base.view(64), base)):
        taken = handle.take()
        assert torch.equal(taken, view)
        assert taken.stride() == view.stride()


class Call:
    """Stands for one call of a unit."""


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "whole": lambda base: base,
    "transposed": lambda base: base.transpose(0, 1),
    "sliced at an offset": lambda base: base[2:5, 1:4],
    "every second column": lambda base: base[:, ::2],
    "expanded": lambda base: base[:1].expand(7, -1, -1),
    "fully expanded": lambda base: base[0, 0, 0].expand(3, 4),
    "permuted and sliced": lambda base: base.permute(2, 0, 1)[1:, :, 3:],
    "a diagonal": lambda base: base[0].diagonal(),
    "of another dtype": lambda base: base.to(torch.bfloat16)[1:],
    "of integers": lambda base: (base * 100).long().t_() if base.dim() == 2 else (base * 100).long()[..., 1],
    "of truth values": lambda base: (base > 0)[:, 1:],
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
def test_values_shape_and_strides_come_back(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    transfers = Transfers(OffloadSettings())
    transfers.streams = DelayedStreams()
    saved = view(torch.randn(6, 6, 8))
    expected, call = saved.clone(), Call()
    with transfers.trip(call):
        handle = transfers.send(saved)
    strides = saved.stride()
    del saved
    for _ in range(2):  # the next unit's forward sends it, the one after lets the device memory go
        with transfers.trip(Call()):
            pass
    transfers.arrive(call)
    taken = handle.take()
    assert torch.equal(taken, expected)
    assert (taken.stride(), taken.dtype) == (strides, expected.dtype)


def test_a_value_overwritten_in_place_after_its_unit_is_an_error_not_a_torn_copy() -> None:
    class Leaky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(WIDTH, WIDTH)
            self.seen: list[torch.Tensor] = []

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            for earlier in self.seen:
                earlier.detach().zero_()
            raised = self.up(hidden)
            self.seen.append(raised)
            return hidden + raised.sin()

    def shared() -> nn.Module:
        return block

    block = Leaky()
    model = nn.Module()
    model.layers = nn.ModuleList([block, copy.deepcopy(block)])
    model.layers[1].seen = block.seen
    run = memopt.apply_policy(model, policy({"name": "up", "action": "offload", "match": {"path": "layers.*.up"}}))
    assert run.plan.units
    with pytest.raises((MemoptError, RuntimeError), match=r"held-value-overwritten|modified by an inplace operation"):
        model.layers[1](model.layers[0](batch())).sum().backward()


# Host memory.


def test_the_pool_keeps_no_more_than_was_in_use_at_once() -> None:
    pool = HostPool()
    first = [pool.take(4096) for _ in range(4)]
    for chunk in first:
        pool.give(chunk)
    other = [pool.take(2048) for _ in range(8)]
    assert pool.total_bytes <= 4 * 4096
    assert pool.peak_bytes == 4 * 4096
    for chunk in other:
        pool.give(chunk)
    assert pool.used_bytes == 0


def test_buffers_are_used_again_step_after_step() -> None:
    model = Model()
    run = memopt.apply_policy(model, policy(INPUTS, WIDE, REST))
    step(model, 0)
    step(model, 1)
    held = run.regions.transfers.pool.total_bytes
    for seed in range(5):
        step(model, seed)
    assert run.regions.transfers.pool.total_bytes == held > 0
    assert run.regions.transfers.pool.used_bytes == 0


def test_a_pool_over_its_cap_is_told_with_both_figures() -> None:
    model = Model()
    memopt.apply_policy(model, policy(ALL, pinned_pool=1024))
    with pytest.raises(MemoptError, match=r"host-pool-full.*the cap is 1,024"):
        step(model, 0)


def test_streams_of_the_cpu_copy_on_the_spot() -> None:
    chosen = streams.streams_for(torch.device("cpu"))
    source, target = torch.ones(4), torch.zeros(4)
    chosen.wait(chosen.to_host(source, target))
    assert torch.equal(source, target)


def test_attention_saved_tensors_are_offloaded_by_op() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(WIDTH, WIDTH)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            heads = self.project(hidden).unflatten(-1, (4, -1)).transpose(1, 2)
            return hidden + F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2)

    plain, applied = Model(Attention), Model(Attention)
    run = memopt.apply_policy(applied, policy({"name": "attention", "action": "offload", "match": {"op": "attention"}}))
    assert_equal_steps(plain, applied)
    out_and_statistics = 2 * 16 * WIDTH * 4 + 2 * 4 * 16 * 4
    assert run.regions.transfers.to_host_bytes == 2 * (LAYERS - 1) * out_and_statistics

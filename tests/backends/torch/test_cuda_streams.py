"""The CUDA streams, on a pretended GPU: side streams run as late as their events allow, freed memory is watched."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import memopt
from memopt_torch import parcels
from memopt_torch.host_pool import HostPool
from memopt_torch.offload import OffloadSettings, Transfers
from memopt_torch.streams import CudaStreams

WIDTH, LAYERS = 16, 4
REST = {"name": "rest", "action": "recompute", "match": {"unit": "layers.*"}}
WIDE = {
    "name": "wide",
    "action": "offload",
    "match": {"path": ["layers.*.input", "layers.*.up", "layers.*.down.input"]},
}
STATE = {"name": "state", "action": "offload", "match": {"role": "optimizer_state"}, "memory_kind": "pinned_host"}


class Event:
    def __init__(self, stream: Stream, position: int) -> None:
        self.stream, self.position = stream, position  # of a computation: how many operators it has come to

    def synchronize(self) -> None:
        self.stream.run_to(self.position)


class Stream:
    """A queue; the one the computation runs on never has anything waiting."""

    def __init__(self, device: Any = None, *, is_compute: bool = False) -> None:
        self.queue: list[Callable[[], None]] = []
        self.num_done, self.is_compute = 0, is_compute
        self.num_operators = 0  # computed, or (of a side stream) those that it waits for

    def add(self, work: Callable[[], None]) -> None:
        if self.is_compute:
            work()
        else:
            self.queue.append(work)

    def wait_event(self, event: Event) -> None:
        if event.stream.is_compute:
            self.num_operators = event.position
        self.add(event.synchronize)

    def record_event(self) -> Event:
        return Event(self, self.num_operators if self.is_compute else len(self.queue))

    def run_to(self, position: int) -> None:
        while not self.is_compute and self.num_done < position:
            work = self.queue[self.num_done]
            self.num_done += 1
            work()


class Gpu(TorchDispatchMode):
    """`torch.cuda` as far as the streams use it. Copies on a side stream are put off; until then targets are poison."""

    def __init__(self) -> None:
        super().__init__()
        self.compute = self.current = Stream(is_compute=True)
        self.faults: list[str] = []
        self.num_copies = 0

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        @contextmanager
        def stream(chosen: Stream) -> Iterator[None]:
            before, self.current = self.current, chosen
            try:
                yield
            finally:
                self.current = before

        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "stream", stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self.current)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.current is self.compute:
            self.compute.num_operators += 1
            return func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default:
            self._put_off(*args, **(kwargs or {}))
            return args[0]
        assert func in (torch.ops.aten.detach.default, torch.ops.aten.view.dtype), func  # nothing is computed aside
        return func(*args, **(kwargs or {}))

    def _put_off(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> None:
        assert non_blocking
        self.num_copies += 1
        if self.current.num_operators < self.compute.num_operators:
            self.faults.append("a copy starts before what has been computed so far is done")
        ends = [_End(target), _End(source)]

        def copy() -> None:
            into, what = (end.tensor() for end in ends)
            if into is None or what is None:
                self.faults.append("memory of a copy was freed before it was done")
            else:
                into.copy_(what)

        self.current.add(copy)


class _End:
    """Where a copy reads or writes; it does not keep that memory alive."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._storage, self._dtype = weakref.ref(tensor.untyped_storage()), tensor.dtype
        self._form = (tensor.storage_offset(), tensor.size(), tensor.stride())

    def tensor(self) -> torch.Tensor | None:
        storage = self._storage()
        return None if storage is None else torch.empty(0, dtype=self._dtype).set_(storage, *self._form)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    made = Gpu()
    made.install(monkeypatch)
    yield made
    gc.collect()  # what is still under way ends on this GPU


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        gate, value = self.up(hidden).tanh().chunk(2, dim=-1)
        return hidden + self.down(gate * value).sin()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden.square().mean()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, *, num_steps: int = 4) -> list[torch.Tensor]:
    losses = []
    for seed in range(num_steps):
        loss = model(torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(seed)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *(parameter.detach() for parameter in model.parameters())]


def policy(*rules: dict[str, Any]) -> dict[str, Any]:
    return {"version": 1, "units": ["layers.*"], "rules": [*rules]}


def trained(gpu: Gpu, *rules: dict[str, Any]) -> list[torch.Tensor]:
    model = Model()
    run = memopt.apply_policy(model, policy(*rules))
    optimizer = run.optimizer(torch.optim.AdamW, lr=0.01, foreach=False)
    streams = CudaStreams(torch.device("cpu"))
    run.regions.transfers.streams = streams
    for offload in run.optimizer_offloads:
        offload.streams = streams
    with gpu:
        return train(model, optimizer)


def plain() -> list[torch.Tensor]:
    model = Model()
    return train(model, torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False))


@pytest.mark.parametrize(
    "rules",
    [[WIDE], [WIDE, REST], [{**STATE, "update_on": "device"}], [WIDE, REST, {**STATE, "update_on": "device"}]],
    ids=["saved tensors", "recomputed", "optimizer state", "both"],
)
def test_training_through_the_cuda_streams_is_exact_however_late_they_run(gpu: Gpu, rules: list[Any]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(trained(gpu, *rules), plain(), strict=True))
    assert gpu.num_copies > 0
    assert gpu.faults == []


def test_state_updated_on_the_host_waits_for_what_the_cpu_reads(gpu: Gpu) -> None:
    ours = trained(gpu, {**STATE, "update_on": "host"})
    assert all(torch.allclose(a, b, rtol=0, atol=1e-6) for a, b in zip(ours, plain(), strict=True))
    assert gpu.faults == []


def no_wait(streams: CudaStreams, ticket: Any) -> None:
    pass


def without_events(self: CudaStreams, stream: Any, source: torch.Tensor, target: torch.Tensor, after: Any) -> Any:
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)
        return stream.record_event()


@pytest.mark.parametrize(
    "rules", [[WIDE], [{**STATE, "update_on": "device"}]], ids=["saved tensors", "optimizer state"]
)
@pytest.mark.parametrize("fault", [("wait", no_wait), ("_copy", without_events)], ids=["no wait", "no order"])
def test_a_fault_in_the_order_is_seen(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, fault: tuple[str, Any], rules: list[Any]
) -> None:
    monkeypatch.setattr(CudaStreams, *fault)
    is_equal = all(torch.equal(a, b) for a, b in zip(trained(gpu, *rules), plain(), strict=True))
    assert gpu.faults or not is_equal


# What is sent where there is a GPU.


def test_tensors_on_the_cpu_beside_a_gpu_are_not_sent() -> None:
    transfers = Transfers(OffloadSettings(), device=torch.device("cuda"))
    assert not transfers.can_send(torch.ones(3))
    assert Transfers(OffloadSettings(), device=torch.device("cpu")).can_send(torch.ones(3))


def test_a_parcel_that_dies_under_way_gives_its_memory_back_only_after_its_last_copy(gpu: Gpu) -> None:
    transfers = Transfers(OffloadSettings())
    transfers.streams, transfers.pool = CudaStreams(torch.device("cpu")), HostPool()
    call = type("Call", (), {})()
    with gpu:
        with transfers.trip(call):
            handle = transfers.send(torch.ones(8))
        with transfers.trip(type("Call", (), {})()):  # the copy starts, and is settled
            pass
        handle.fetch()
        del handle, call
        assert transfers.pool.used_bytes == 0
    assert gpu.faults == []
    assert gpu.num_copies == 2


def test_extents_of_views_are_those_of_the_memory_they_look_into() -> None:
    base = torch.arange(12.0).view(3, 4)
    assert [parcels.extent_of(view) for view in (base, base.t(), base[:, 1], base[:1].expand(5, 4), base[0, 0])] == [
        12,
        12,
        9,
        4,
        1,
    ]

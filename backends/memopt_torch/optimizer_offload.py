"""Optimizer state in host memory between steps: all of it, or that of the parameters the policy names.

`update_on: device` brings the state of one bucket of parameters after another to the device, runs the optimizer's own
update on it and sends it back: the same kernels, so the same bits. `update_on: host` sends gradients instead, runs the
optimizer on the CPU (its fused form where it has one) and brings back the new parameters: half the traffic for Adam,
one more copy of the parameters in host memory, and rounding that differs in the last place.

Both work bucket by bucket with two buffers, so that one bucket travels while another is updated, and on any optimizer
that treats every parameter by itself.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from memopt.errors import MemoptError
from memopt.plan import Plan

from .measure import register_host_storage
from .offloadable import check_optimizer
from .state_buckets import Bucket, Member, buckets_of, is_moved, on_host, plain, wrapped
from .streams import Streams, Ticket, streams_for

UpdateOn = Literal["device", "host"]
_FUSED_ON_CPU = frozenset({"Adam", "AdamW", "SGD", "Adagrad"})


class OptimizerOffload:
    """Takes over the offloaded parameters of each `optimizer.step()`; the rest is the optimizer's own as before.

    Attributes:
        to_host_bytes, to_device_bytes: Copied since installation.
    """

    def __init__(self, optimizer: Optimizer, members: Sequence[Member], *, update_on: UpdateOn) -> None:
        self.optimizer = optimizer
        self.update_on = update_on
        self.to_host_bytes = 0
        self.to_device_bytes = 0
        device = members[0].local.device
        self.streams: Streams = streams_for(device)
        self._buckets = buckets_of(members)
        self._params: list[list[Any]] = []
        self._homes: dict[tuple[int, str], torch.Tensor] = {}
        self._last_left: Ticket | None = None
        optimizer._memopt_offload = self  # type: ignore[attr-defined]  # measurements find it there
        optimizer.step = types.MethodType(self._restoring(optimizer.step), optimizer)
        self._handles = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
            optimizer.register_state_dict_pre_hook(lambda _: self.settle()),
        ]

    def remove(self) -> None:
        """Leave the optimizer to itself; state stays where it is until it is used."""
        for handle in self._handles:
            handle.remove()

    def settle(self) -> None:
        """Returns when the state is in host memory: the CPU may read it, or write it (checkpoints do)."""
        self._synchronize(self._last_left)
        self._last_left = None

    def parameters_written(self) -> None:
        """What the host holds of the parameters is out of date."""
        for bucket in self._buckets:
            for member in bucket.members:
                member.version = -1

    def host_tensors(self) -> list[torch.Tensor]:
        """What is held in host memory now."""
        masters = [m.master.data for bucket in self._buckets for m in bucket.members if m.master is not None]
        return [*self._homes.values(), *masters]

    def host_bytes(self) -> int:
        """Bytes of host memory held now."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.host_tensors())

    # Around optimizer.step().

    def _restoring(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """`step`, with the parameter groups whole again however it ends."""

        @functools.wraps(step)
        def restoring(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            try:
                return step(*args, **kwargs)
            finally:
                self._restore()

        return restoring

    def _restore(self) -> None:
        for group, params in zip(self.optimizer.param_groups, self._params):
            group["params"] = params
        self._params = []

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            args, kwargs = args[:1], {"closure": lambda: loss}
        with torch.no_grad():
            for _ in self._updates():
                pass
        offloaded = {id(member.parameter) for bucket in self._buckets for member in bucket.members}
        self._params = [group["params"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["params"] = [parameter for parameter in group["params"] if id(parameter) not in offloaded]
        return args, kwargs

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._restore()

    def _updates(self) -> Iterator[None]:
        """One bucket after another; the next one's copies run beside the update of this one."""
        buckets = [
            Bucket([member for member in bucket.members if member.parameter.grad is not None])
            for bucket in self._buckets
        ]
        buckets = [bucket for bucket in buckets if bucket.members]
        fetch, update = (
            (self._fetch_state, self._update_on_device)
            if self.update_on == "device"
            else (self._send_gradients, self._update_on_host)
        )
        leaving: list[list[tuple[Any, Ticket]]] = []
        for place, bucket in enumerate(buckets):
            if place == 0:
                fetch(bucket)
            if len(leaving) > 1:
                self._let_go(leaving.pop(0))
            if place + 1 < len(buckets):
                fetch(buckets[place + 1])
            leaving.append(update(bucket))
            yield
        for left in leaving:
            self._let_go(left)

    def _let_go(self, left: list[tuple[Any, Ticket]]) -> None:
        """Device memory of copies to the host may be used again only when they are done."""
        for _, ticket in left:
            self.streams.wait(ticket)
            self._last_left = ticket  # of one stream: the last one done, all are
        left.clear()

    # update_on: device.

    def _fetch_state(self, bucket: Bucket) -> None:
        for member in bucket.members:
            for name, value in self.optimizer.state[member.parameter].items():
                if not is_moved(value):
                    continue
                source = plain(value)
                home = self._homes.get((id(member.parameter), name))
                if home is None or home is not source:
                    continue  # on the device already: made there, or loaded from a checkpoint
                target = torch.empty_like(source, device=member.local.device)
                bucket.arriving.append((member, name, target, self._to_device(source, target)))

    def _update_on_device(self, bucket: Bucket) -> list[tuple[Any, Ticket]]:
        for member, name, target, ticket in bucket.arriving:
            self.streams.wait(ticket)
            state = self.optimizer.state[member.parameter]
            state[name] = wrapped(target, state[name])
        bucket.arriving.clear()
        self._step([(member.group, member.parameter) for member in bucket.members])
        left: list[tuple[Any, Ticket]] = []
        for member in bucket.members:
            state = self.optimizer.state[member.parameter]
            for name, value in list(state.items()):
                if is_moved(value):
                    source = plain(value)
                    home = self._home(member, name, source)
                    left.append((source, self._to_host(source, home)))
                    state[name] = wrapped(home, value)
        return left

    # update_on: host.

    def _send_gradients(self, bucket: Bucket) -> None:
        for member in bucket.members:
            grad = member.parameter.grad
            assert grad is not None
            master = self._master(member)
            source = plain(grad)
            target = self._home(member, "grad", source)
            bucket.arriving.append((member, "grad", target, self._to_host(source, target)))
            if member.version != member.local._version:  # first step, or written by someone else since
                self._synchronize(self._to_host(member.local, master.data))

    def _update_on_host(self, bucket: Bucket) -> list[tuple[Any, Ticket]]:
        for _, _, _, ticket in bucket.arriving:
            self._synchronize(ticket)
        masters = []
        for member, _, grad, _ in bucket.arriving:
            master = self._master(member)
            if member.returning is not None:
                self._synchronize(member.returning)
            master.grad = grad
            state = self.optimizer.state.pop(member.parameter, {})
            self.optimizer.state[master] = {
                name: self._at_home(member, name, value) if is_moved(value) else _to_cpu(value)
                for name, value in state.items()
            }
            masters.append((member.group, master))
        self._step(masters, on_host=True)
        for member, *_ in bucket.arriving:
            master = self._master(member)
            master.grad = None
            state = self.optimizer.state.pop(master, {})
            self.optimizer.state[member.parameter] = {
                name: self._in_shape(member, name, value) if is_moved(value) else value for name, value in state.items()
            }
            member.returning = self._to_device(master.data, member.local)
            self.streams.wait(member.returning)
            member.version = member.local._version
        bucket.arriving.clear()
        return []

    def _master(self, member: Member) -> nn.Parameter:
        if member.master is None:
            member.master = nn.Parameter(on_host(member.local))
        return member.master

    def _at_home(self, member: Member, name: str, value: torch.Tensor) -> torch.Tensor:
        """A state tensor on the host, as a plain tensor."""
        source = plain(value)
        home = self._home(member, name, source)
        if home is not source:
            self._synchronize(self._to_host(source, home))
        return home

    def _in_shape(self, member: Member, name: str, value: torch.Tensor) -> torch.Tensor:
        """A state tensor the optimizer has on the host, registered and in the parameter's kind of wrapper."""
        key = (id(member.parameter), name)
        if self._homes.get(key) is not value:
            self._homes[key] = value  # it never travels: no need to be pinned
            register_host_storage(value)
        return wrapped(value, member.parameter)

    # Shared.

    def _step(self, updates: Sequence[tuple[int, nn.Parameter]], *, on_host: bool = False) -> None:
        """The optimizer's own update of these parameters alone; its hooks run once a step, not once a bucket."""
        groups = self.optimizer.param_groups
        chosen: dict[int, list[nn.Parameter]] = {}
        for group, parameter in updates:
            chosen.setdefault(group, []).append(parameter)
        extra = {}
        if on_host and type(self.optimizer).__name__ in _FUSED_ON_CPU:
            extra = {"fused": True, "foreach": False}
        self.optimizer.param_groups = [{**groups[group], **extra, "params": params} for group, params in chosen.items()]
        try:
            _bare_step(self.optimizer)()
        finally:
            self.optimizer.param_groups = groups

    def _home(self, member: Member, name: str, like: torch.Tensor) -> torch.Tensor:
        key = (id(member.parameter), name)
        home = self._homes.get(key)
        if home is None or home.shape != like.shape or home.dtype != like.dtype:
            home = self._homes[key] = on_host(like)
        return home

    def _to_host(self, source: torch.Tensor, target: torch.Tensor) -> Ticket:
        self.to_host_bytes += source.numel() * source.element_size()
        return self.streams.to_host(source, target)

    def _to_device(self, source: torch.Tensor, target: torch.Tensor) -> Ticket:
        self.to_device_bytes += source.numel() * source.element_size()
        return self.streams.to_device(source, target)

    def _synchronize(self, ticket: Ticket | None) -> None:
        """The CPU itself is about to read what a copy brings."""
        if ticket is None:
            return
        self.streams.wait(ticket)
        synchronize = getattr(ticket, "synchronize", None)
        if synchronize is not None:
            synchronize()


def _to_cpu(value: Any) -> Any:
    """Step counters of a checkpoint of fused GPU kernels lie on the GPU."""
    return value.cpu() if isinstance(value, torch.Tensor) else value


def _bare_step(optimizer: Optimizer) -> Callable[[], Any]:
    """`step` without the hooks and the profiling range torch puts around it."""
    step = type(optimizer).step
    bare = getattr(step, "__wrapped__", step)
    return lambda: bare(optimizer)


def install(optimizer: Optimizer, plan: Plan, paths: Mapping[nn.Parameter, str]) -> OptimizerOffload | None:
    """Keep the state the plan offloads in host memory; None where the optimizer holds none of those parameters.

    Args:
        optimizer: On the parameters that are really trained.
        plan: Its `optimizer_state` rows say which.
        paths: Parameter -> canonical path.

    Raises:
        MemoptError: `optimizer-not-offloadable`.
    """
    rows = {row.path: row for row in plan.rows_of("optimizer_state") if row.memory_kind == "pinned_host"}
    members = [
        Member(parameter, number)
        for number, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
        if paths.get(parameter) in rows and parameter.requires_grad
    ]
    if not members:
        return None
    check_optimizer(optimizer, plan)
    update_on = {rows[paths[member.parameter]].update_on or "device" for member in members}
    if len(update_on) > 1:
        raise MemoptError.of(
            "optimizer-updates-mixed",
            "some optimizer state is to be updated on the host and some on the device by one optimizer",
            hint="write the same `update_on` in every rule that offloads optimizer state",
        )
    return OptimizerOffload(optimizer, members, update_on=update_on.pop())  # type: ignore[arg-type]

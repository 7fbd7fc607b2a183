"""Send activations to host memory between forward and backward, and bring them back in time.

Two ways in: values a recomputed unit holds (`Transfers.send`), and tensors autograd saves in a unit that is not
recomputed (`SavedRegion`). A tensor's bytes travel once however many views of it are saved; each view comes back with
its own shape and strides. The copies of a unit start when the next one begins, so those of the last unit stay where
they are: the backward pass wants them at once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memopt.errors import MemoptError
from memopt.plan import Plan

from .host_pool import Chunk, HostPool
from .measure import is_wrapper_type, note_role
from .streams import Streams, Ticket, streams_for
from .values import IGNORED, Naming, Recording, Wanted, detached, name_inputs, said_of, storage_keys


@dataclass(frozen=True, slots=True)
class OffloadSettings:
    """`backend_options.torch.offload`.

    Attributes:
        prefetch: How many units' values are on their way back ahead of the one the backward pass is in.
        keep_last_unit: Leave the last unit's values on the device.
        synchronous: Copy on the compute stream.
        pinned_pool_bytes: Cap of the host buffers, or None.
    """

    prefetch: int = 1
    keep_last_unit: bool = True
    synchronous: bool = False
    pinned_pool_bytes: int | None = None


def settings_of(plan: Plan) -> OffloadSettings:
    """Read the settings off the plan's options."""
    given = plan.options.get("offload") or {}
    return OffloadSettings(
        prefetch=given.get("prefetch", 1),
        keep_last_unit=given.get("keep_last_unit", True),
        synchronous=given.get("synchronous", False),
        pinned_pool_bytes=given.get("pinned_pool"),
    )


def extent_of(tensor: torch.Tensor) -> int:
    """Elements from a tensor's first to its last in memory, gaps included (1 for a fully expanded one)."""
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))


@dataclass(eq=False)
class Parcel:
    """The bytes of one stretch of a storage, on their way to the host and back.

    `source` is there until the copy out has been waited for, `chunk` from the copy's start on.
    """

    transfers: Transfers
    source: torch.Tensor | None
    version: int
    chunk: Chunk | None = None
    ticket: Ticket | None = None
    _form: tuple[int, torch.dtype, torch.device] | None = None
    num_views: int = 0
    num_taken: int = 0
    _base: torch.Tensor | None = None
    _is_ready: bool = False

    def depart(self) -> None:
        """Start the copy to the host."""
        if self.chunk is not None or self.source is None:
            return
        self._check_unchanged()
        self.chunk = self.transfers.pool.take(self.source.numel() * self.source.element_size())
        weakref.finalize(self, _retire, self.chunk, self.transfers.pool, self.transfers.streams)
        target = self._host_view(self.source)
        self.ticket = self.transfers.streams.to_host(self.source, target, after=self.chunk.last)
        self.chunk.last = self.ticket
        self.transfers.to_host_bytes += self.source.numel() * self.source.element_size()

    def settle(self) -> None:
        """Let go of the device memory; the computation waits for the copy if need be."""
        if self.chunk is None or self.source is None:
            return
        self.transfers.streams.wait(self.ticket)
        self._check_unchanged()
        self._form = (self.source.numel(), self.source.dtype, self.source.device)
        self.source = None

    def fetch(self) -> None:
        """Start the copy back, unless the tensor never left or is back already."""
        if self.source is not None or self._base is not None:
            return
        assert self._form is not None
        assert self.chunk is not None
        numel, dtype, device = self._form
        self._base = torch.empty(numel, dtype=dtype, device=device)
        self.ticket = self.transfers.streams.to_device(self._host_view(self._base), self._base, after=self.chunk.last)
        self.chunk.last = self.ticket
        self._is_ready = False
        note_role(self._base, "activation")
        self.transfers.to_device_bytes += self._base.numel() * self._base.element_size()

    def base(self) -> torch.Tensor:
        """The stretch as a one-dimensional tensor, ready to use; let go when every view of it has been taken."""
        if self.source is not None:
            self._check_unchanged()
            return self.source
        self.fetch()
        base = self._base
        assert base is not None
        if not self._is_ready:
            self.transfers.streams.wait(self.ticket)
            self._is_ready = True
        self.num_taken += 1
        if self.num_taken >= self.num_views:  # a later backward pass through the same graph fetches it again
            self._base = None
        return base

    def _host_view(self, like: torch.Tensor) -> torch.Tensor:
        assert self.chunk is not None
        return self.chunk.data[: like.numel() * like.element_size()].view(like.dtype)

    def _check_unchanged(self) -> None:
        if self.source is not None and self.source._version != self.version:
            raise MemoptError.of(
                "held-value-overwritten",
                "a value offloaded for the backward pass was overwritten in place after the unit had run",
                hint="offload another value, or replace the in-place operator (`x += y` by `x = x + y`)",
            )


def _retire(chunk: Chunk, pool: HostPool, streams: Streams) -> None:
    """A parcel dies, perhaps under way: its memory may be used again only after its last copy."""
    streams.wait(chunk.last)
    pool.give(chunk)


@dataclass(eq=False)
class Handle:
    """One view of a parcel."""

    parcel: Parcel
    size: torch.Size
    stride: tuple[int, ...]

    def fetch(self) -> None:
        """Start bringing it back."""
        self.parcel.fetch()

    def take(self) -> torch.Tensor:
        """The tensor as it was saved: same values, shape and strides."""
        return self.parcel.base().as_strided(self.size, self.stride)


@dataclass(eq=False)
class _Trip:
    """The parcels of one call of a unit, in order."""

    parcels: list[Parcel] = field(default_factory=list)


class Transfers:
    """All copies of one model: what is pending, on its way, and wanted next.

    Attributes:
        streams, pool: How copies are made, and where to.
        to_host_bytes, to_device_bytes: Copied since the model was set up.
    """

    def __init__(self, settings: OffloadSettings, engine: Any = None) -> None:
        self.settings = settings
        self.engine = engine
        self.streams: Streams = streams_for(torch.device("cpu"))
        self.pool = HostPool(cap_bytes=settings.pinned_pool_bytes)
        self.to_host_bytes = 0
        self.to_device_bytes = 0
        self._device: torch.device | None = None
        self._trips: list[weakref.ref[_Trip]] = []
        self._by_call: weakref.WeakKeyDictionary[Any, _Trip] = weakref.WeakKeyDictionary()
        self._open: list[_Trip] = []
        self._known: dict[tuple[int, int, int, torch.dtype], weakref.ref[Parcel]] = {}

    # The forward pass: units begin, send, end.

    @contextmanager
    def trip(self, call: Any) -> Iterator[None]:
        """A unit's forward: what the units before it left to send starts now, and has this unit's time to be copied."""
        self._depart_finished()
        trip = self._by_call[call] = _Trip()
        self._open.append(trip)
        try:
            yield
        finally:
            self._open.remove(trip)
        for older in self._live_trips():
            for parcel in older.parcels:
                parcel.settle()
        self._trips.append(weakref.ref(trip))
        self._known = {key: known for key, known in self._known.items() if known() is not None}
        if not self.settings.keep_last_unit:
            self._depart_finished()

    def send(self, tensor: torch.Tensor) -> Any:
        """Put a tensor on its way; weights and tensors of other kinds than plain strided ones stay as they are."""
        if not self.can_send(tensor):
            return _Stays(detached(tensor))
        self._set_up(tensor.device)
        key = (tensor.untyped_storage()._cdata, int(tensor.storage_offset()), extent_of(tensor), tensor.dtype)
        known = self._known.get(key)
        parcel = known() if known is not None else None
        if parcel is None or parcel.source is None or parcel.source._version != parcel.version:
            flat = detached(tensor).as_strided((extent_of(tensor),), (1,), tensor.storage_offset())
            parcel = Parcel(self, flat, flat._version)
            self._known[key] = weakref.ref(parcel)
            self._open[-1].parcels.append(parcel)
        parcel.num_views += 1
        return Handle(parcel, tensor.size(), tensor.stride())

    def settle_all(self) -> None:
        """Let go of the device memory of everything on its way to the host."""
        for trip in self._live_trips():
            for parcel in trip.parcels:
                parcel.settle()

    def _depart_finished(self) -> None:
        for trip in self._live_trips():
            for parcel in trip.parcels:
                parcel.depart()

    def _live_trips(self) -> list[_Trip]:
        self._trips = [known for known in self._trips if known() is not None]
        return [trip for known in self._trips if (trip := known()) is not None]

    # The backward pass.

    def arrive(self, call: Any) -> None:
        """The backward pass has come to a unit: its values are wanted now, those of the units before it soon."""
        trip = self._by_call.get(call)
        if trip is None:
            return
        trips = self._live_trips()
        if trip not in trips:
            return
        place = trips.index(trip)
        ahead = [earlier for earlier in trips[:place] if earlier.parcels]
        first = max(len(ahead) - self.settings.prefetch, 0)
        for wanted in (trip, *reversed(ahead[first:])):
            for parcel in wanted.parcels:
                parcel.settle()
                parcel.fetch()
        self._trips = [known for known in self._trips if known() in trips[:place]]

    def can_send(self, tensor: torch.Tensor) -> bool:
        """Whether that tensor may leave the device."""
        if is_wrapper_type(type(tensor)) or tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
            return False
        is_weight = isinstance(tensor, nn.Parameter) or (self.engine is not None and self.engine.is_weight(tensor))
        return not is_weight and tensor.numel() > 0

    def _set_up(self, device: torch.device) -> None:
        if self._device is None and device.type != "cpu":
            self.streams = streams_for(device, synchronous=self.settings.synchronous)
            self.pool.pinned = True
        self._device = device

    @contextmanager
    def sending(self, wanted: set[int], call: Any) -> Iterator[None]:
        """Send the tensors with those identities when a checkpoint saves them as its inputs."""

        def pack(tensor: torch.Tensor) -> Any:
            return self.send(tensor) if id(tensor) in wanted else tensor

        def unpack(packed: Any) -> torch.Tensor:
            if isinstance(packed, torch.Tensor):
                return packed
            self.arrive(call)
            return packed.take()

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield


@dataclass(eq=False)
class _Stays:
    """A tensor that was to be sent and must not be."""

    tensor: torch.Tensor

    def fetch(self) -> None:
        """It never left."""

    def take(self) -> torch.Tensor:
        """The tensor itself."""
        return self.tensor


@dataclass(frozen=True, slots=True)
class _Pattern:
    """What autograd saves in one forward of a unit, in order, and which of it goes to the host."""

    forms: tuple[tuple[int, torch.dtype], ...]
    sent: frozenset[int]


class _Call:
    """One forward of a unit whose saved tensors are offloaded."""


class SavedRegion:
    """A unit that is not recomputed: of the tensors autograd saves, those the plan offloads go to the host.

    The first call is recorded to learn which saved tensor is which value; later calls go by the order of saving.
    """

    def __init__(
        self, module: nn.Module, path: str, wanted: Wanted, paths: Mapping[int, str], transfers: Transfers
    ) -> None:
        self._module, self._path, self._wanted, self._paths, self._transfers = module, path, wanted, paths, transfers
        self._patterns: dict[Any, _Pattern] = {}
        self.used: set[int] = set()

    def forward(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the module's own forward with its saved tensors watched."""
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        weights = tuple(weight.requires_grad for weight in self._module.parameters())
        key = (self._module.training, tuple(leaf.requires_grad for leaf in leaves), weights)
        call = _Call()
        with self._transfers.trip(call):
            pattern = self._patterns.get(key)
            if pattern is not None:
                return self._follow(original, args, kwargs, key=key, pattern=pattern, call=call)
            return self._learn(original, args, kwargs, key=key, call=call)

    def _follow(self, original: Any, args: Any, kwargs: Any, *, key: Any, pattern: _Pattern, call: _Call) -> Any:
        num_saved = 0
        is_followed = True

        def pack(tensor: torch.Tensor) -> Any:
            nonlocal num_saved, is_followed
            index, num_saved = num_saved, num_saved + 1
            is_followed = is_followed and _form(tensor) == pattern.forms[index : index + 1]
            return (
                self._transfers.send(tensor)
                if is_followed and index in pattern.sent
                else _Slot(tensor, tensor._version)
            )

        with torch.autograd.graph.saved_tensors_hooks(pack, self._unpack(call)):
            out = original(*args, **kwargs)
        if not is_followed or num_saved != len(pattern.forms):
            del self._patterns[key]  # another path through the forward: learn it next time
        return out

    def _learn(self, original: Any, args: Any, kwargs: Any, *, key: Any, call: _Call) -> Any:
        from .recompute import refuse_missing

        recording, saved = Recording(), list[_Slot]()
        name_inputs(recording, self._path, self._module, args, kwargs)
        naming = Naming(self._module, self._paths, recording)

        def pack(tensor: torch.Tensor) -> _Slot:
            recording.save(tensor)
            slot = _Slot(tensor, tensor._version)
            saved.append(slot)
            return slot

        unpack = self._unpack(call)
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, unpack)
        with naming, hooks, _Recorder(recording, naming):
            out = original(*args, **kwargs)
        refuse_missing(self._wanted, recording, naming, self._path)
        weights = set(storage_keys(list(self._module.parameters())))
        forms = tuple(form for slot in saved for form in _form(slot.held))
        sent = frozenset(
            index
            for index, slot in enumerate(saved)
            if self._is_sent(slot.held, recording) and not weights & set(storage_keys(slot.held))
        )
        for index in sent:
            saved[index].send(self._transfers)
        self._patterns[key] = _Pattern(forms, sent)
        recording.release()
        return out

    def _is_sent(self, tensor: torch.Tensor, recording: Recording) -> bool:
        number = recording.number_of(tensor)
        if number is None:
            return False
        if number not in recording.maker and not recording.names.get(number):
            return False  # made elsewhere and without a name here: weights, tables, masks
        rule, residual = said_of(number, recording, self._wanted, is_own=number in recording.maker)
        self.used.add(rule)
        return residual == "offload"

    def _unpack(self, call: _Call) -> Callable[[Any], torch.Tensor]:
        def unpack(packed: Any) -> torch.Tensor:
            held = packed.checked() if isinstance(packed, _Slot) else packed
            if isinstance(held, torch.Tensor):
                return held
            self._transfers.arrive(call)
            return held.take()

        return unpack


def _form(tensor: Any) -> tuple[tuple[int, torch.dtype], ...]:
    """What tells saved tensors apart; sizes may change from batch to batch."""
    return ((tensor.dim(), tensor.dtype),)


@dataclass(eq=False)
class _Slot:
    """A saved tensor that stays, or (of a recorded call) may be sent when the call is over.

    Under hooks autograd does not look whether a saved tensor was overwritten; this does.
    """

    held: Any
    version: int

    def checked(self) -> Any:
        """What is held.

        Raises:
            MemoptError: `held-value-overwritten`.
        """
        if isinstance(self.held, torch.Tensor) and self.held._version != self.version:
            raise MemoptError.of(
                "held-value-overwritten",
                f"a value of shape {list(self.held.shape)} that autograd keeps for the backward pass of an offloaded "
                "unit was overwritten in place after it had been saved",
                hint="replace the in-place operator (`x += y` by `x = x + y`)",
            )
        return self.held

    def send(self, transfers: Transfers) -> None:
        """Put it on its way, unless it has been overwritten since: then it stays, and the backward pass says so."""
        if self.held._version == self.version:
            self.held = transfers.send(self.held)


class _Recorder(TorchDispatchMode):
    """Writes a forward's operators into a recording."""

    def __init__(self, recording: Recording, naming: Naming) -> None:
        super().__init__()
        self._recording, self._naming = recording, naming

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func not in IGNORED:
            self._recording.add(func, args, kwargs or {}, out)
            self._naming.operator(func, args, out)
        return out

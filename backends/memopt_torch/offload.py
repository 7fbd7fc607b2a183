"""Send activations to host memory between forward and backward, and bring them back in time.

Two ways in: values a recomputed unit holds (`Transfers.send`), and tensors autograd saves in a unit that is not
recomputed (`SavedRegion`). The copies of a unit start when the next one begins, so those of the last unit stay where
they are: the backward pass wants them at once.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from memopt.errors import MemoptError
from memopt.plan import Plan

from .host_pool import HostPool
from .measure import is_wrapper_type
from .parcels import Handle, Parcel, extent_of
from .recording import detached
from .streams import Streams, streams_for


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


@dataclass(eq=False)
class _Trip:
    """The parcels of one call of a unit, in order."""

    parcels: list[Parcel] = field(default_factory=list)


class Transfers:
    """All copies of one model: what is pending, on its way, and wanted next.

    Args:
        settings: How to copy.
        engine: Anything with `is_weight(tensor)`.
        device: Where the model is: what lies elsewhere (counters on the CPU beside a GPU) has nothing to gain.

    Attributes:
        streams, pool: How copies are made, and where to.
        to_host_bytes, to_device_bytes: Copied since the model was set up.
    """

    def __init__(self, settings: OffloadSettings, engine: Any = None, *, device: torch.device | None = None) -> None:
        self.settings = settings
        self.engine = engine
        self._device = device if device is not None else torch.device("cpu")
        self._has_streams = self._device.type == "cpu"
        self.streams: Streams = streams_for(torch.device("cpu"), synchronous=settings.synchronous)
        self.pool = HostPool(cap_bytes=settings.pinned_pool_bytes)
        self.to_host_bytes = 0
        self.to_device_bytes = 0
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
        if tensor.device.type != self._device.type:
            return False
        is_weight = isinstance(tensor, nn.Parameter) or (self.engine is not None and self.engine.is_weight(tensor))
        return not is_weight and tensor.numel() > 0

    def _set_up(self, device: torch.device) -> None:
        """A GPU's streams and page-locked memory come with the first tensor that is sent from it."""
        if not self._has_streams:
            self.streams = streams_for(device, synchronous=self.settings.synchronous)
            self.pool.pinned = True
            self._has_streams = True

    @contextmanager
    def sending(self, wanted: set[int], call: Any) -> Iterator[None]:
        """Send the tensors with those identities when a checkpoint saves them as its inputs.

        The others stay. Under hooks autograd does not look whether they are overwritten: `_Input` does.
        """

        def pack(tensor: torch.Tensor) -> Any:
            return self.send(tensor) if id(tensor) in wanted else _Input(tensor, tensor._version)

        def unpack(packed: Any) -> torch.Tensor:
            if not isinstance(packed, _Input):
                self.arrive(call)
            return packed.take()

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield


@dataclass(eq=False)
class _Input:
    """An input that a checkpoint keeps for the recomputation."""

    tensor: torch.Tensor
    version: int

    def take(self) -> torch.Tensor:
        """The tensor itself.

        Raises:
            MemoptError: `held-value-overwritten`.
        """
        if self.tensor._version != self.version:
            raise MemoptError.of(
                "held-value-overwritten",
                f"an input of shape {list(self.tensor.shape)} was overwritten in place after the unit had run, and the "
                "unit is to be run again from it",
                hint="replace the in-place operator (`x += y` by `x = x + y`), or leave the unit out of the rule",
            )
        return self.tensor


@dataclass(eq=False)
class _Stays:
    """A tensor that was to be sent and must not be."""

    tensor: torch.Tensor

    def fetch(self) -> None:
        """It never left."""

    def take(self) -> torch.Tensor:
        """The tensor itself."""
        return self.tensor

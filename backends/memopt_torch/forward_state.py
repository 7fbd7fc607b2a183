"""What a unit's forward changes besides giving a result: buffers it updates, attributes it sets, generators it uses.

A recomputation starts from what they were before the forward, so that it computes the same; afterwards they are as the
forward left them, so that nothing happens twice.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from memopt.errors import MemoptError

from .recording import storage_keys, written

_ABSENT = object()
_LET_GO = object()


Place = tuple[nn.Module, str]
"""A module and the name of one of its buffers."""


@dataclass(frozen=True, slots=True)
class Changes:
    """What recorded forwards were seen to change.

    Attributes:
        buffers: Buffers written in place.
        generators: Generators of the model's own that it draws from.
    """

    buffers: tuple[Place, ...] = ()
    generators: tuple[torch.Generator, ...] = ()

    def before(self) -> Before:
        """Their values now, when a forward is about to begin."""
        return Before(
            {place: _copied(place[0]._buffers[place[1]]) for place in self.buffers},
            [],
            {generator: generator.get_state() for generator in self.generators},
        )


def _kept(value: Any) -> Any:
    """A value to come back to. One that autograd follows would keep all of an earlier step alive, so it is let go."""
    return _LET_GO if isinstance(value, torch.Tensor) and value.grad_fn is not None else value


def _copied(buffer: torch.Tensor | None) -> torch.Tensor | None:
    return None if buffer is None else buffer.detach().clone()


@dataclass(slots=True)
class Before:
    """Values from before one forward.

    Attributes:
        buffers: Copies of what is written in place.
        replaced: Dictionary, key and value of what is set anew.
        generators: States of generators.
    """

    buffers: dict[Place, torch.Tensor | None] = field(default_factory=dict)
    replaced: list[tuple[dict[str, Any], str, Any]] = field(default_factory=list)
    generators: Mapping[torch.Generator, torch.Tensor] = field(default_factory=dict)

    def take(self, other: Before) -> None:
        """The values of another, where they are known only after the forward."""
        self.buffers, self.replaced, self.generators = other.buffers, other.replaced, other.generators

    @contextmanager
    def again(self) -> Iterator[None]:
        """Around a recomputation."""
        buffers = [(module, name, module._buffers[name]) for module, name in self.buffers]
        replaced = [(holder, key, holder.get(key, _ABSENT)) for holder, key, _ in self.replaced]
        states = [(generator, generator.get_state()) for generator in self.generators]
        try:
            for holder, key, value in self.replaced:
                _put(holder, key, value)
            for (module, name), value in self.buffers.items():
                module._buffers[name] = _copied(value)  # a copy: another recomputation may follow
            for generator, state in self.generators.items():
                generator.set_state(state)
            yield
        finally:
            for module, name, buffer in buffers:
                module._buffers[name] = buffer
            for holder, key, value in replaced:
                _put(holder, key, value)
            for generator, state in states:
                generator.set_state(state)


def _put(holder: dict[str, Any], key: str, value: Any) -> None:
    if value is _ABSENT:
        holder.pop(key, None)
    elif value is not _LET_GO:
        holder[key] = value


class Attributes:
    """What the attributes of a module and those below it are, and which buffers they have, before one forward."""

    def __init__(self, module: nn.Module) -> None:
        self._holders = [
            (holder, dict(holder)) for inner in module.modules() for holder in (vars(inner), inner._buffers)
        ]

    def changed(self) -> list[tuple[dict[str, Any], str, Any]]:
        """Dictionary, key and earlier value of what has been set anew since."""
        return [
            (holder, key, _kept(before.get(key, _ABSENT)))
            for holder, before in self._holders
            if len(holder) != len(before) or not all(map(operator.is_, holder.values(), before.values()))
            for key in {**before, **holder}
            if holder.get(key, _ABSENT) is not before.get(key, _ABSENT)
        ]


class Watch:
    """Everything a module's forward could change, as it is before one call that is learnt from."""

    def __init__(self, module: nn.Module) -> None:
        self._attributes = Attributes(module)
        self._buffers = {place: (buffer, buffer._version, _copied(buffer)) for place, buffer in _buffers_of(module)}

    def changes(
        self, *, written: Iterable[torch.Tensor], generators: Mapping[torch.Generator, torch.Tensor]
    ) -> tuple[Changes, Before]:
        """What the forward has changed, and what it was.

        Args:
            written: Buffers it was seen to write to, whatever their version counters say.
            generators: Those it was seen to draw from, and their states before.
        """
        seen = {id(buffer) for buffer in written}
        buffers = {
            place: copied
            for place, (buffer, version, copied) in self._buffers.items()
            if id(buffer) in seen or buffer._version != version
        }
        return Changes(tuple(buffers), tuple(generators)), Before(buffers, self._attributes.changed(), generators)


class QuietBuffers:
    """Buffers that no forward so far has written: one that is about to be is copied first.

    Attributes:
        found: Those that were written after all.
    """

    def __init__(self, module: nn.Module, changes: Changes, before: Before) -> None:
        self.found: list[Place] = []
        self._before = before
        self._places = {
            key: place
            for place, buffer in _buffers_of(module)
            if place not in changes.buffers
            for key in storage_keys(buffer)
        }

    def __bool__(self) -> bool:
        return bool(self._places)

    def about_to_run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """An operator is next."""
        for key in storage_keys(written(func, args, kwargs)) if self._places else ():
            place = self._places.pop(key, None)
            if place is not None:
                self._before.buffers[place] = _copied(place[0]._buffers[place[1]])
                self.found.append(place)


class QuietVersions:
    """The same where operators are not seen: a write is noticed only when it is too late."""

    def __init__(self, module: nn.Module, changes: Changes) -> None:
        self._versions = [
            (place, buffer, buffer._version) for place, buffer in _buffers_of(module) if place not in changes.buffers
        ]

    def refuse_written(self, path: str) -> None:
        """The forward is over.

        Raises:
            MemoptError: `recompute-mismatch`.
        """
        for (_, name), buffer, version in self._versions:
            if buffer._version != version:
                raise MemoptError.of(
                    "recompute-mismatch",
                    f"the buffer `{name}` was written in this forward, and not in the one that was learnt from: it "
                    "cannot be run again from what was there",
                    path=path,
                    hint="leave the unit uncompiled, or take it out of the recompute rule",
                )


def _buffers_of(module: nn.Module) -> Iterator[tuple[Place, torch.Tensor]]:
    for inner in module.modules():
        for name, buffer in inner._buffers.items():
            if buffer is not None:
                yield (inner, name), buffer


def statistics_of(module: nn.Module) -> list[torch.Tensor]:
    """Running statistics of normalisations in training: written without their version counters showing it."""
    return [
        buffer
        for inner in module.modules()
        if isinstance(inner, nn.modules.batchnorm._NormBase) and inner.training
        for buffer in inner._buffers.values()
        if buffer is not None
    ]

"""One module whose activations are recomputed: a checkpoint around its `forward` that holds what the policy holds.

Module hooks (those that gather and free sharded weights among them) stay outside of it, so they run once and a
recomputation finds the weights gathered.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from memopt.errors import MemoptError, MemoptWarning

from .forward_state import Attributes, Before, Changes, Place, QuietBuffers, QuietVersions, Watch, statistics_of
from .naming import Naming, name_inputs, refuse_missing, tensor_inputs
from .offload import Transfers
from .own_checkpointing import refuse_outer_checkpoint, refuse_own_checkpointing
from .recording import Recording
from .replay import Call, Holding, Learning, Replaying
from .saved_region import SavedRegion
from .values import Decision, Wanted, decide

Mode = Literal["policy", "plain", "recompute"]


@dataclass
class Region:
    """One module of a unit whose activations are recomputed or offloaded.

    Attributes:
        module: The module; its `forward` is replaced while the region is installed.
        path: Its canonical path.
        wanted: What the plan says of the unit's values.
        paths: Identity of each module below -> canonical path.
        transfers: Copies to and from host memory, shared by all regions of the model.
        told: Warnings given already, shared by all regions.
        used: Numbers of the rules by which something is held.
        is_entered: It has been called.
        around: Entered around recomputations of a reference run.
    """

    module: nn.Module
    path: str
    wanted: Wanted
    paths: Mapping[int, str]
    transfers: Transfers
    told: set[str] = field(default_factory=set)
    used: set[int] = field(default_factory=set)
    mode: Mode = "policy"
    is_compiled: bool = False
    around: AbstractContextManager[Any] = field(default_factory=nullcontext)
    is_entered: bool = False
    before: Callable[[], None] = lambda: None
    _learnt: dict[Any, _Learnt] = field(default_factory=dict)
    _changes: dict[bool, Changes] = field(default_factory=dict)
    _written: dict[Place, None] = field(default_factory=dict)
    _saved: SavedRegion = field(init=False)
    _original: Callable[..., Any] = field(init=False)
    _had_own_forward: bool = field(init=False)

    def __post_init__(self) -> None:
        self._original = self.module.forward
        self._had_own_forward = "forward" in vars(self.module)
        self._saved = SavedRegion(self.module, self.path, self.wanted, self.paths, self.transfers)
        original = self._original

        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._forward(original, args, kwargs)

        forward.__wrapped__ = original  # type: ignore[attr-defined]  # inspect.signature follows it
        # Dynamo cannot trace a checkpoint with contexts of our own: in a model that is compiled whole, the region runs
        # as it is. `Applied.compile` compiles what is inside.
        self.module.forward = torch.compiler.disable(forward)

    def used_rules(self) -> set[int]:
        """Numbers of the rules by which anything of this region has been held so far."""
        return self.used | self._saved.used

    def remove(self) -> None:
        """Give the module its own forward back."""
        if self._had_own_forward:
            self.module.forward = self._original
        else:
            del self.module.forward

    def compile(self, options: dict[str, Any]) -> None:
        """Compiles what the region runs; the checkpoint stays around it."""
        self.remove()
        self.module.forward = torch.compile(self.module.forward, **options)
        self.__post_init__()
        self.is_compiled = True

    def _forward(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.is_entered = True
        if not torch.is_grad_enabled() or self.mode == "plain":
            return original(*args, **kwargs)
        if self.wanted.can_recompute or self.mode == "recompute":
            if not self.module.training and _has_cache(args, kwargs):
                return original(*args, **kwargs)  # generation: nothing will run backward through a growing cache
            args, kwargs = self._without_cache(args, kwargs)
        refuse_outer_checkpoint(self.path)
        refuse_own_checkpointing(self.module, self.path, is_deep=False)
        if self.mode == "recompute" or self.is_compiled:
            return self._whole(original, args, kwargs)
        self.before()
        if not self.wanted.can_recompute:
            return self._saved.forward(original, args, kwargs)
        return self._recomputed(original, args, kwargs)

    def _recomputed(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        key = self._key(args, kwargs)
        learnt = self._learnt.get(key)
        call = Call(self.path, learnt.decision if learnt else None, self.transfers.send)
        before = learnt.changes.before() if learnt else Before()
        quiet = QuietBuffers(self.module, learnt.changes if learnt else Changes(), before)
        attributes = Attributes(self.module)
        if learnt is None:
            watch, recording = Watch(self.module), Recording()
            name_inputs(recording, self.path, self.module, args, kwargs)
            naming = Naming(self.module, self.paths, recording)

            def learn() -> Decision:
                self._learnt[key] = self._learn(recording, naming, watch, before)
                return self._learnt[key].decision

            forward = Learning(call, naming, recording, learn)
        elif quiet or not learnt.decision.is_plain:
            forward = Holding(call, quiet)
        else:
            forward = nullcontext()
        again = _Again(call, self.transfers, before)
        with self.transfers.trip(call), self._inputs_sent(args, kwargs, call):
            out = _checkpointed(original, args, kwargs, contexts=(forward, again))
        before.replaced = attributes.changed()
        if learnt is not None and quiet.found:
            self._written.update(dict.fromkeys(quiet.found))
            self._learnt[key] = replace(learnt, changes=self._with_written(learnt.changes))
        if not call.is_followed:
            self._learnt.pop(key, None)
        return out

    def _with_written(self, changes: Changes) -> Changes:
        """What any forward so far has written counts, though not every one does."""
        return replace(changes, buffers=tuple({**dict.fromkeys(changes.buffers), **self._written}))

    def _whole(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Recompute everything, and learn nothing but what the forward changes."""
        changes = self._changes.get(self.module.training)
        watch, before = (Watch(self.module), Before()) if changes is None else (None, changes.before())
        attributes, quiet = Attributes(self.module), QuietVersions(self.module, changes or Changes())
        out = _checkpointed(original, args, kwargs, contexts=(nullcontext(), _Around(before, self.around)))
        if watch is None:
            quiet.refuse_written(self.path)
            before.replaced = attributes.changed()
        else:
            found, was = watch.changes(written=statistics_of(self.module), generators={})
            before.take(was)
            self._changes[self.module.training] = found
        return out

    def _without_cache(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A key-value cache would be updated a second time; training has no use for it (Transformers drops it too)."""
        if not _has_cache(args, kwargs):
            return args, kwargs
        text = "the key-value cache is not kept while training with recomputation; load the model with use_cache=False"
        if text not in self.told:
            self.told.add(text)
            warnings.warn(text, MemoptWarning, stacklevel=2)
        kept = {name: None if _is_cache(value) else value for name, value in kwargs.items()}
        if kept.get("use_cache"):
            kept["use_cache"] = False
        return tuple(None if _is_cache(value) else value for value in args), kept

    def _key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves, _ = tree_flatten((args, kwargs))
        needs = tuple(leaf.requires_grad for leaf in leaves if isinstance(leaf, torch.Tensor))
        if self.wanted.is_whole:
            return self.module.training, needs
        return self.module.training, needs, tuple(weight.requires_grad for weight in self.module.parameters())

    def _learn(self, recording: Recording, naming: Naming, watch: Watch, before: Before) -> _Learnt:
        refuse_missing(self.wanted, recording, naming, self.path)
        decision = decide(recording, self.wanted)
        self.used |= decision.rules
        for text in decision.warnings:
            if text not in self.told:
                self.told.add(text)
                warnings.warn(f"{self.path} (and others like it): {text}", MemoptWarning, stacklevel=2)
        changes, was = watch.changes(written=self._overwritten_buffers(recording), generators=recording.generators)
        before.take(was)
        return _Learnt(decision, self._with_written(changes))

    def _overwritten_buffers(self, recording: Recording) -> list[torch.Tensor]:
        """Buffers the forward updates (running statistics): a recomputation must update a copy."""
        numbers = {recording.number_of(buffer): buffer for buffer in self.module.buffers()}
        found = []
        for number, func in recording.external_writes().items():
            if number not in numbers:
                raise MemoptError.of(
                    "region-overwrites-input",
                    f"its forward overwrites a tensor it was given (`{func}`), so it cannot be run again from it",
                    path=self.path,
                    hint="use the operator's form that makes a new tensor, or leave this unit out of the rule",
                )
            found.append(numbers[number])
        return found

    @contextmanager
    def _inputs_sent(self, args: tuple[Any, ...], kwargs: dict[str, Any], call: Call) -> Iterator[None]:
        """The unit's own inputs are kept by the checkpoint; those the plan offloads go to the host from there."""
        said = self.wanted.residuals
        sent: set[int] = set()
        if self.wanted.can_hold and any(
            name.startswith(f"{self.path}.input") and said[name][1] == "offload" for name in said
        ):
            for index, tensor in enumerate(tensor_inputs(self.module, args, kwargs)):
                names = [f"{self.path}.input[{index}]", *([f"{self.path}.input"] if index == 0 else [])]
                rows = [said[name] for name in names if name in said]
                if rows and min(rows)[1] == "offload":
                    sent.add(id(tensor))
                    self.used.add(min(rows)[0])
        with self.transfers.sending(sent, call):
            yield


@dataclass(frozen=True, slots=True)
class _Learnt:
    """What one recorded forward taught: what to hold, and what it changes."""

    decision: Decision
    changes: Changes


def _checkpointed(
    original: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    contexts: tuple[AbstractContextManager[Any], AbstractContextManager[Any]] | None = None,
) -> Any:
    """Run under torch's non-reentrant checkpoint, every tensor argument (keywords too) passed as one it saves."""
    flat, tree = tree_flatten((args, kwargs))
    places = [place for place, leaf in enumerate(flat) if isinstance(leaf, torch.Tensor)]
    tensors = [flat[place] for place in places]
    for place in places:
        flat[place] = None  # this closure lives until the backward pass: it must not hold what the checkpoint holds
    given = [(args, kwargs)]

    def run(*tensors: torch.Tensor) -> Any:
        if given:  # the forward pass: lists and mappings it adds to are the caller's own
            own_args, own_kwargs = given.pop()
            return original(*own_args, **own_kwargs)
        leaves = list(flat)
        for place, tensor in zip(places, tensors):
            leaves[place] = tensor
        run_args, run_kwargs = tree_unflatten(leaves, tree)
        return original(*run_args, **run_kwargs)

    both = contexts or (nullcontext(), nullcontext())
    return checkpoint(run, *tensors, use_reentrant=False, context_fn=lambda: both)


class _Again:
    """Around a recomputation: values on the host are called back, state is as it was, held values are given back."""

    def __init__(self, call: Call, transfers: Transfers, before: Before) -> None:
        self._call, self._transfers, self._before = call, transfers, before
        self._stack = ExitStack()

    def __enter__(self) -> None:
        self._transfers.arrive(self._call)
        self._stack.enter_context(self._before.again())
        if self._call.decision is not None and not self._call.decision.is_plain:
            self._stack.enter_context(Replaying(self._call))

    def __exit__(self, *exc_info: Any) -> None:
        self._stack.__exit__(*exc_info)


class _Around:
    """Around a recomputation from which nothing is given back."""

    def __init__(self, before: Before, around: AbstractContextManager[Any]) -> None:
        self._before, self._around = before, around
        self._stack = ExitStack()

    def __enter__(self) -> None:
        self._stack.enter_context(self._before.again())
        self._stack.enter_context(self._around)

    def __exit__(self, *exc_info: Any) -> None:
        self._stack.__exit__(*exc_info)


def _is_cache(value: Any) -> bool:
    caches = sys.modules.get("transformers.cache_utils")
    return caches is not None and isinstance(value, caches.Cache)


def _has_cache(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    return any(_is_cache(value) for value in (*args, *kwargs.values()))

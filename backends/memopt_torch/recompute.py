"""Recompute a unit's activations in the backward pass: all of them, or all but the values the policy holds.

`install` puts a checkpoint around the `forward` of each unit whose activations a rule touches. Module hooks (those that
gather and free sharded weights among them) stay outside of it, so they run once and a recomputation finds the weights
gathered. Nothing else of the model changes: no module is wrapped or renamed.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from memopt.errors import MemoptError, MemoptWarning, Problem
from memopt.matching import canonical_paths
from memopt.plan import Plan

from .offload import SavedRegion, Transfers, settings_of
from .replay import Call, Holding, Learning, Replaying
from .values import Decision, Naming, Recording, Wanted, decide, name_inputs, tensor_inputs, wanted_of

Mode = Literal["policy", "plain", "recompute"]
_Buffers: TypeAlias = tuple[tuple[nn.Module, str], ...]


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
        _refuse_outer_checkpoint(self.path)
        refuse_own_checkpointing(self.module, self.path, is_deep=False)
        if self.mode == "recompute" or self.is_compiled:
            return _checkpointed(original, args, kwargs, contexts=(nullcontext(), self.around))
        self.before()
        if not self.wanted.can_recompute:
            return self._saved.forward(original, args, kwargs)
        return self._recomputed(original, args, kwargs)

    def _recomputed(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        key = self._key(args, kwargs)
        learnt = self._learnt.get(key)
        call = Call(self.path, learnt.decision if learnt else None, self.transfers.send)
        if learnt is None:
            recording = Recording()
            name_inputs(recording, self.path, self.module, args, kwargs)
            naming = Naming(self.module, self.paths, recording)

            def learn() -> Decision:
                self._learnt[key] = self._learn(recording, naming)
                return self._learnt[key].decision

            forward = Learning(call, naming, recording, learn)
        else:
            forward = nullcontext() if learnt.decision.is_plain else Holding(call)
        again = _Again(call, self.transfers, lambda: self._learnt[key].buffers if key in self._learnt else ())
        with self.transfers.trip(call), self._inputs_sent(args, kwargs, call):
            out = _checkpointed(original, args, kwargs, contexts=(forward, again))
        if not call.is_followed:
            self._learnt.pop(key, None)
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

    def _learn(self, recording: Recording, naming: Naming) -> _Learnt:
        refuse_missing(self.wanted, recording, naming, self.path)
        decision = decide(recording, self.wanted)
        self.used |= decision.rules
        for text in decision.warnings:
            if text not in self.told:
                self.told.add(text)
                warnings.warn(f"{self.path} (and others like it): {text}", MemoptWarning, stacklevel=2)
        return _Learnt(decision, self._overwritten_buffers(recording))

    def _overwritten_buffers(self, recording: Recording) -> _Buffers:
        """Buffers the forward updates (running statistics): a recomputation must update a copy."""
        numbers = {
            recording.number_of(buffer): (module, name)
            for module in self.module.modules()
            for name, buffer in module.named_buffers(recurse=False)
        }
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
        return tuple(found)

    @contextmanager
    def _inputs_sent(self, args: tuple[Any, ...], kwargs: dict[str, Any], call: Call) -> Iterator[None]:
        """The unit's own inputs are kept by the checkpoint; those the plan offloads go to the host from there."""
        said = self.wanted.residuals
        sent: set[int] = set()
        if any(name.startswith(f"{self.path}.input") and said[name][1] == "offload" for name in said):
            for index, tensor in enumerate(tensor_inputs(self.module, args, kwargs)):
                names = [f"{self.path}.input[{index}]", *([f"{self.path}.input"] if index == 0 else [])]
                rows = [said[name] for name in names if name in said]
                if rows and min(rows)[1] == "offload":
                    sent.add(id(tensor))
                    self.used.add(min(rows)[0])
        if not sent:
            yield
            return
        with self.transfers.sending(sent, call):
            yield


@dataclass(frozen=True, slots=True)
class _Learnt:
    """What one recorded forward taught: what to hold, and the buffers a recomputation must not touch."""

    decision: Decision
    buffers: _Buffers


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

    def run(*tensors: torch.Tensor) -> Any:
        leaves = list(flat)
        for place, tensor in zip(places, tensors):
            leaves[place] = tensor
        run_args, run_kwargs = tree_unflatten(leaves, tree)
        return original(*run_args, **run_kwargs)

    both = contexts or (nullcontext(), nullcontext())
    return checkpoint(run, *tensors, use_reentrant=False, context_fn=lambda: both)


class _Again:
    """Around a recomputation: values on the host are called back, buffers are protected, held values given back."""

    def __init__(self, call: Call, transfers: Transfers, buffers: Callable[[], _Buffers]) -> None:
        self._call, self._transfers, self._buffers = call, transfers, buffers
        self._stack = ExitStack()

    def __enter__(self) -> None:
        self._transfers.arrive(self._call)
        self._stack.enter_context(_own_buffers(self._buffers()))
        if self._call.decision is not None and not self._call.decision.is_plain:
            self._stack.enter_context(Replaying(self._call))

    def __exit__(self, *exc_info: Any) -> None:
        self._stack.__exit__(*exc_info)


@contextmanager
def _own_buffers(buffers: _Buffers) -> Iterator[None]:
    """Let a recomputation update copies: statistics have been updated once already."""
    originals = [(module, name, module._buffers[name]) for module, name in buffers]
    for module, name, buffer in originals:
        module._buffers[name] = buffer.clone() if buffer is not None else None
    try:
        yield
    finally:
        for module, name, buffer in originals:
            module._buffers[name] = buffer


def refuse_missing(wanted: Wanted, recording: Recording, naming: Naming, path: str) -> None:
    """Of the values a rule holds by name one at least must exist in the forward just recorded, if its modules ran.

    Raises:
        MemoptError: `value-not-found`, one problem a value; `own-checkpointing`.
    """
    if naming.checkpointed:
        raise _own_checkpointing(
            sorted(naming.checkpointed)[0], "the model calls this module in a checkpoint of its own"
        )
    seen = {name for names in recording.names.values() for name in names}
    found_something = {rule for name, rule in wanted.pseudo.items() if name in seen}
    problems = []
    for name, rule in wanted.pseudo.items():
        parent = name.rpartition(".")[0]
        if rule not in found_something and (parent == path or parent in naming.called):
            problems.append(
                Problem(
                    code="value-not-found",
                    message=f"rule `{rule}` holds `{name}`, but this model's forward makes no such value",
                    path=name,
                    hint="attention written out operator by operator has no statistics and may hide others: load the "
                    'model with attn_implementation="sdpa", or select a module\'s output with `path:`',
                )
            )
    if problems:
        raise MemoptError(problems)


def _is_cache(value: Any) -> bool:
    caches = sys.modules.get("transformers.cache_utils")
    return caches is not None and isinstance(value, caches.Cache)


def _has_cache(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    return any(_is_cache(value) for value in (*args, *kwargs.values()))


# A user's own checkpointing.


def _own_checkpointing(path: str, what: str) -> MemoptError:
    return MemoptError.of(
        "own-checkpointing",
        f"{what}; together with the policy's rule it would be recomputed twice and the rule's values lost",
        path=path,
        hint="turn it off (Transformers: `model.gradient_checkpointing_disable()`; torch: call the module itself "
        "instead of `checkpoint(module, ...)`) and let the policy recompute, or leave this unit out of the rules",
    )


def _refuse_outer_checkpoint(path: str) -> None:
    top = torch._C._autograd._top_saved_tensors_default_hooks(True)  # pyright: ignore[reportAttributeAccessIssue]
    is_in_checkpoint = top is not None and "_checkpoint_hook" in getattr(top[0], "__qualname__", "")
    if is_in_checkpoint or torch._C._current_graph_task_id() != -1:
        raise _own_checkpointing(path, "this unit is called inside a checkpoint of the model's own")


def refuse_own_checkpointing(module: nn.Module, path: str, *, is_deep: bool) -> None:
    """Refuse Transformers' gradient checkpointing and torch's checkpoint wrappers on a unit (`is_deep`: below it too).

    Raises:
        MemoptError: `own-checkpointing`.
    """
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

    for inner in module.modules() if is_deep else (module,):
        if getattr(inner, "gradient_checkpointing", False) is True:
            raise _own_checkpointing(path, f"gradient checkpointing is on in this `{type(inner).__name__}`")
        if isinstance(inner, CheckpointWrapper):
            raise _own_checkpointing(path, "this unit is, or contains, a module in torch's CheckpointWrapper")


@dataclass
class Regions:
    """The regions installed in one model.

    Attributes:
        regions: In the order of the plan's units.
        transfers: Copies to and from host memory.
    """

    model: nn.Module
    plan: Plan
    regions: tuple[Region, ...]
    transfers: Transfers

    def __post_init__(self) -> None:
        if not self.transfers.settings.keep_last_unit:
            # The last unit's copies have the head's time; what follows the model (the loss) finds the memory free.
            self.model.register_forward_hook(lambda *_: self.transfers.settle_all())

    def tell_of_idle_units(self) -> None:
        """A step is over: warns of units whose rules had nothing to act on, because nobody called them."""
        idle = [region.path for region in self.regions if not region.is_entered]
        if idle:
            warnings.warn(
                f"the first step never called {len(idle)} of {len(self.regions)} units that rules recompute or "
                f"offload (first: `{idle[0]}`), so nothing was done for them. A unit must be a module that is called "
                "itself: name the modules inside a container that the model walks through",
                MemoptWarning,
                stacklevel=2,
            )

    def remove(self) -> None:
        """Take all regions out again."""
        for region in self.regions:
            region.remove()

    @contextmanager
    def reference(self, mode: Mode, *, around: AbstractContextManager[Any] | None = None) -> Iterator[None]:
        """Run without the policy's residual slots: `plain` keeps everything, `recompute` recomputes every unit, each
        recomputation inside `around`."""
        extra: list[Region] = []
        if mode == "recompute":
            extra = _regions(self.model, self.plan, self.transfers, skip={id(region.module) for region in self.regions})
        for region in (*self.regions, *extra):
            region.mode, region.around = mode, around or nullcontext()
        try:
            yield
        finally:
            for region in extra:
                region.remove()
            for region in self.regions:
                region.mode, region.around = "policy", nullcontext()


def _regions(model: nn.Module, plan: Plan, transfers: Transfers, *, skip: set[int] | None = None) -> list[Region]:
    raw = dict(model.named_modules(remove_duplicate=False))
    canonical = canonical_paths(raw)
    by_path = {canonical[name]: module for name, module in raw.items()}
    paths = {id(module): canonical[name] for name, module in reversed(raw.items())}  # a shared module's first path
    found, told = [], set[str]()
    seen = set(skip or ())
    for unit in plan.units:
        for member in unit.members:
            module = by_path[member]
            if (unit.region or skip is not None) and id(module) not in seen:
                seen.add(id(module))
                refuse_own_checkpointing(module, member, is_deep=True)
                found.append(Region(module, member, wanted_of(plan, unit), paths, transfers, told))
    return found


def install(model: nn.Module, plan: Plan, engine: Any = None) -> Regions:
    """Recompute and offload the activations the plan says, unit by unit.

    Args:
        model: Its units' `forward` is replaced; modules, names and parameters stay.
        plan: Rows of role `activation` and units with `region` say what to do.
        engine: Anything with `is_weight(tensor)`: its gathered weights are never offloaded.

    Raises:
        MemoptError: `own-checkpointing`.
    """
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False) is True and any(unit.region for unit in plan.units):
            raise _own_checkpointing(type(module).__name__, "the model's own gradient checkpointing is on")
    transfers = Transfers(settings_of(plan), engine)
    regions = tuple(_regions(model, plan, transfers))
    if regions:
        regions[0].before = _Idle(plan, regions)
    return Regions(model, plan, regions, transfers)


class _Idle:
    """Tells, when the second step begins, of rules that have held nothing in the first."""

    def __init__(self, plan: Plan, regions: tuple[Region, ...]) -> None:
        order = {name: index for index, name in enumerate(plan.rule_order)}
        units = {unit.name for unit in plan.units if unit.region}
        self._rules = {
            row.rule: order.get(row.rule, len(order))
            for row in plan.rows_of("activation")
            if row.rule is not None and row.unit in units and row.residual in ("keep", "offload")
        }
        self._regions = regions
        self._num_calls = 0

    def __call__(self) -> None:
        self._num_calls += 1
        if self._num_calls != 2:
            return
        used = {number for region in self._regions for number in region.used_rules()}
        for rule, number in self._rules.items():
            if number not in used:
                warnings.warn(
                    f"rule `{rule}` has held nothing: autograd keeps none of the values it names for the backward "
                    "pass, and nothing is recomputed from them; take it out, or name the value that is saved instead",
                    MemoptWarning,
                    stacklevel=2,
                )

"""Names the values of a unit while its forward is recorded: modules' inputs and outputs, and what attention takes and
gives."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn
from torch.utils._pytree import tree_leaves

from memopt.errors import MemoptError, Problem

from .own_checkpointing import own_checkpointing
from .recording import Recording, op_kind
from .values import Wanted

_HERE = Path(__file__).parent
# Where a unit's own forward is called from: a checkpoint of the model's own lies between that and a module.
_CALLERS = (str(_HERE / "region.py"), str(_HERE / "saved_region.py"))
# What these projections take has a name of its own (Transformers' module names, all families).
_TAKES = {"down_proj": "act", "o_proj": "attn_out"}


class Naming:
    """Names storages while a recorded forward runs: hooks on the unit's modules, there for that one call."""

    def __init__(self, module: nn.Module, paths: Mapping[int, str], recording: Recording) -> None:
        self._module = module
        self._paths = paths
        self._recording = recording
        self._stack: list[str] = []
        self._num_products: dict[str, int] = {}
        self.called: set[str] = set()
        self.checkpointed: set[str] = set()
        self._handles: list[Any] = []

    def __enter__(self) -> Naming:
        for module in self._module.modules():
            path = self._paths.get(id(module))
            if path is None or module is self._module or isinstance(module, torch.jit.ScriptModule):
                continue  # scripted modules take no hooks: their values have no names
            self._handles.append(module.register_forward_pre_hook(self._before(path), with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._after(path), with_kwargs=True))
        self._stack.append(self._paths.get(id(self._module), ""))
        return self

    def __exit__(self, *_: Any) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._stack.clear()

    def _before(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._stack.append(path)
            self.called.add(path)
            if _is_in_checkpoint():
                self.checkpointed.add(path)
            name_inputs(self._recording, path, module, args, kwargs)

        return hook

    def _after(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self._stack.pop()
            name_output(self._recording, path, output)

        return hook

    def operator(self, func: Any, args: tuple[Any, ...], out: Any) -> None:
        """Name what an attention operator, or the two products of one written out, take and give."""
        if not self._stack:
            return
        path, kind = self._stack[-1], op_kind(func)
        if kind == "attention":
            self._attention(path, args, out)
        elif kind == "matmul" and func._overloadpacket.__name__ in ("bmm", "baddbmm"):
            turn = self._num_products.get(path, 0)
            self._num_products[path] = turn + 1
            if turn == 0:
                self._recording.name(f"{path}.q", args[0])
                self._recording.name(f"{path}.k", args[1])
            elif turn == 1:
                self._recording.name(f"{path}.attn_out", out)
        elif kind == "topk":
            self._recording.name(f"{path}.topk", out)

    def _attention(self, path: str, args: tuple[Any, ...], out: Any) -> None:
        for name, value in zip(("q", "k", "v"), args):
            self._recording.name(f"{path}.{name}", value)
        leaves = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        self._recording.name(f"{path}.attn_out", leaves[0])
        for leaf in leaves[1:]:
            if leaf.numel():
                self._recording.name(f"{path}.attn_stats", leaf)


def _is_in_checkpoint() -> bool:
    """Whether a checkpoint of the model's own lies between a module and the unit it is part of."""
    frame = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.startswith(_CALLERS):
        if frame.f_code.co_filename == torch.utils.checkpoint.__file__:
            return True
        frame = frame.f_back
    return False


def tensor_inputs(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """A module's tensor arguments in the order of its signature, keywords included.

    Where the arguments do not fit it (hooks may change them), or there is none to be read: in the order they are in.
    """
    try:
        values = tuple(inspect.signature(module.forward).bind(*args, **kwargs).arguments.values())
    except (TypeError, ValueError):
        values = (args, kwargs)
    for value in values:
        for leaf in tree_leaves(value):
            if isinstance(leaf, torch.Tensor):
                yield leaf


def name_inputs(
    recording: Recording, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """`PATH.input` is the first tensor argument, `PATH.input[i]` each of them; some have a name of their own too."""
    for index, tensor in enumerate(tensor_inputs(module, args, kwargs)):
        recording.name(f"{path}.input[{index}]", tensor)
        if index == 0:
            recording.name(f"{path}.input", tensor)
            parent, _, last = path.rpartition(".")
            if last in _TAKES:
                recording.name(f"{parent}.{_TAKES[last]}", tensor)


def name_output(recording: Recording, path: str, output: Any) -> None:
    """`PATH` is a module's output, or its first leaf; `PATH[i]` the leaves."""
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    for index, leaf in enumerate(leaves):
        recording.name(f"{path}[{index}]", leaf)
        if index == 0:
            recording.name(path, leaf)


def refuse_missing(wanted: Wanted, recording: Recording, naming: Naming, path: str) -> None:
    """Of the values a rule holds by name one at least must exist in the forward just recorded, if its modules ran.

    Raises:
        MemoptError: `value-not-found`, one problem a value; `own-checkpointing`.
    """
    if naming.checkpointed:
        raise own_checkpointing(
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

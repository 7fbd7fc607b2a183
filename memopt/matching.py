"""Names of tensors and the globs that select them.

A pattern sees canonical paths and raw ones; `*` stays within one part of a dotted path, `**` spans any number of parts,
none included. Only a pattern whose last part is `input` sees the inputs of modules.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache

from wcmatch import glob as wcglob

from .spec import TensorSpec

WRAPPERS = frozenset({"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"})
"""Parts that FSDP, checkpoint wrappers and torch.compile put into a module's path."""

_FLAGS = wcglob.GLOBSTAR | wcglob.FORCEUNIX | wcglob.DOTGLOB
_INPUT = re.compile(r"(^|\.)input(\[[^\]]*\])?$")


def canonical(raw: str) -> str:
    """The path without wrappers' parts, leading `module.` and one leading `model.`.

    >>> canonical("module.model.layers.3._checkpoint_wrapped_module.mlp.up_proj.weight")
    'layers.3.mlp.up_proj.weight'
    """
    parts = [part for part in raw.split(".") if part not in WRAPPERS]
    while len(parts) > 1 and parts[0] == "module":
        del parts[0]
    if len(parts) > 1 and parts[0] == "model":
        del parts[0]
    return ".".join(parts)


def canonical_paths(raw_paths: Iterable[str]) -> dict[str, str]:
    """Raw path -> canonical path; where two raw paths would share one canonical path, both keep their raw path.

    >>> canonical_paths(["model.norm", "norm", "model.head"])
    {'model.norm': 'model.norm', 'norm': 'norm', 'model.head': 'head'}
    """
    shortened = {raw: canonical(raw) for raw in raw_paths}
    shared = {path for path, count in Counter(shortened.values()).items() if count > 1}
    return {raw: raw if path in shared else path for raw, path in shortened.items()}


def is_input_name(name: str) -> bool:
    """Whether the name is `PATH.input` or `PATH.input[i]`."""
    return _INPUT.search(name) is not None


@lru_cache(maxsize=8192)
def _compiled(pattern: str) -> wcglob.WcMatcher:
    shapes = {re.sub(r"(\*\*\.)+\*\*", "**", shape) for shape in (pattern, canonical(pattern))}
    shapes |= {shape.removesuffix(".**") for shape in shapes}  # `a.**` selects `a` too
    escaped = [re.sub(r"([\\\[\]])", r"\\\1", shape).replace(".", "/") for shape in sorted(shapes)]
    return wcglob.compile(escaped, flags=_FLAGS)


@lru_cache(maxsize=1 << 17)
def matches(pattern: str, name: str) -> bool:
    """Whether a dotted glob selects a name.

    >>> matches("layers.*", "layers.3"), matches("layers.*", "layers.3.mlp"), matches("**.*norm.*", "norm.weight")
    (True, False, True)
    """
    if pattern == name:
        return True
    return bool(name) and _compiled(pattern).match(name.replace(".", "/"))


def any_matches(patterns: Iterable[str], names: Iterable[str]) -> bool:
    """Whether any pattern selects any name."""
    names = tuple(names)
    return any(matches(pattern, name) for pattern in patterns for name in names)


def selects(patterns: Iterable[str], tensor: TensorSpec) -> bool:
    """Whether any pattern selects the tensor by its path or an alias; inputs only by patterns that end in `input`."""
    return any(_selects_one(pattern, tensor) for pattern in patterns)


def _selects_one(pattern: str, tensor: TensorSpec) -> bool:
    sees_inputs = is_input_name(pattern)
    for name in (tensor.path, *tensor.aliases):
        is_input = tensor.role == "activation" and name != tensor.module and is_input_name(name)
        if (sees_inputs or not is_input) and matches(pattern, name):
            return True
    return False

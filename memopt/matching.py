"""Names of tensors and the globs that select them.

A pattern sees canonical paths and raw ones; `*` stays within one part of a dotted path, `**` spans any number of parts,
none included. Only a pattern whose last part is `input` sees the inputs of modules.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

from wcmatch import glob as wcglob

from .paths import WRAPPERS, canonical, canonical_paths, is_input_name
from .spec import TensorSpec

__all__ = ["WRAPPERS", "any_matches", "canonical", "canonical_paths", "is_input_name", "matches", "selects"]

_FLAGS = wcglob.GLOBSTAR | wcglob.FORCEUNIX | wcglob.DOTGLOB


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

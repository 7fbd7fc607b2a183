"""Paths of modules and tensors: what wrappers add to them, and which of them name inputs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

WRAPPERS = frozenset({"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"})
"""Parts that FSDP, checkpoint wrappers and torch.compile put into a module's path."""

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

"""Checkpoints with orbax: every device writes and reads its own shards, host arrays included; nothing is gathered.

A checkpoint is a flat mapping of the plain model's own dotted paths, so it does not know of policies: it can be
resumed on another mesh, under another policy, or with none. It appears under its name only when it is whole.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from memopt.errors import MemoptError, Problem

_EXTRA = "extra"


def save(directory: str | Path, parts: Mapping[str, Mapping[str, Any]], extra: Mapping[str, Any]) -> None:
    """Write one checkpoint; an existing one of that name is not touched.

    Args:
        directory: Must not exist.
        parts: Part (`params`, `optimizer`) -> dotted path -> array.
        extra: Whatever JSON can hold, such as the step.

    Raises:
        MemoptError: `checkpoint-exists`, `checkpoint-extra`.
    """
    path = Path(directory).absolute()
    if path.exists():
        raise MemoptError.of(
            "checkpoint-exists",
            f"`{path}` exists",
            hint="save under a new name, for example one with the step in it",
        )
    try:
        text = json.dumps(dict(extra)).encode()
    except TypeError as error:
        raise MemoptError.of(
            "checkpoint-extra",
            f"what is saved beside the arrays must be plain data: {error}",
            hint="pass numbers, strings, lists and dicts; convert arrays with .tolist()",
        ) from error
    tree = {part: {name: _data(leaf) for name, leaf in arrays.items()} for part, arrays in parts.items()}
    tree[_EXTRA] = {"json": np.frombuffer(text, np.uint8)}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)
        checkpointer.wait_until_finished()


def load(
    directory: str | Path, parts: Mapping[str, Mapping[str, Any]]
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Read one checkpoint into arrays placed as the templates say.

    Args:
        directory: Where `save` wrote.
        parts: Part -> dotted path -> an array or `ShapeDtypeStruct` with the sharding the result is to have.

    Returns:
        The arrays, and what was saved beside them.

    Raises:
        MemoptError: `checkpoint-missing`; `checkpoint-mismatch` with every array that differs.
    """
    path = Path(directory).absolute()
    if not path.is_dir():
        raise MemoptError.of("checkpoint-missing", f"there is no checkpoint at `{path}`", hint="check the path")
    with ocp.StandardCheckpointer() as checkpointer:
        stored = checkpointer.metadata(path).item_metadata.tree
        _verify(parts, stored)
        target = {part: {name: _template(leaf) for name, leaf in arrays.items()} for part, arrays in parts.items()}
        size = stored[_EXTRA]["json"].shape
        target[_EXTRA] = {"json": jax.ShapeDtypeStruct(size, np.uint8, sharding=_any_sharding(parts))}
        read = checkpointer.restore(path, target)
    extra = json.loads(np.asarray(read.pop(_EXTRA)["json"]).tobytes().decode())
    restored = {
        part: {name: _typed(value, parts[part][name]) for name, value in arrays.items()}
        for part, arrays in read.items()
    }
    return restored, extra


def _verify(parts: Mapping[str, Mapping[str, Any]], stored: Mapping[str, Any]) -> None:
    problems = []
    for part in sorted({*parts, *stored} - {_EXTRA}):
        wanted, found = parts.get(part, {}), stored.get(part) or {}
        for name in sorted({*wanted, *found}):
            fault = _fault(wanted.get(name), found.get(name))
            if fault:
                problems.append(
                    Problem(
                        "checkpoint-mismatch",
                        fault,
                        hint="load into the model and optimizer that were saved; make the optimizer before loading",
                        path=f"{part}: {name}",
                    )
                )
    if problems:
        raise MemoptError(problems)


def _fault(wanted: Any, found: Any) -> str | None:
    if wanted is None:
        return "is in the checkpoint and not in what it is loaded into"
    if found is None:
        return "is not in the checkpoint"
    shape = tuple(_data_shape(wanted).shape)
    if tuple(found.shape) != shape:
        return f"has shape {tuple(found.shape)} in the checkpoint, {shape} here"
    return None


def _any_sharding(parts: Mapping[str, Mapping[str, Any]]) -> Any:
    """Replicated over whatever mesh the arrays are on."""
    from jax.sharding import NamedSharding, PartitionSpec

    leaf = next(iter(next(iter(parts.values())).values()))
    sharding = leaf.sharding
    return NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else sharding


def _is_key(leaf: Any) -> bool:
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _data(leaf: Any) -> Any:
    """Random keys as the numbers behind them."""
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _data_shape(leaf: Any) -> Any:
    return jax.eval_shape(jax.random.key_data, leaf) if _is_key(leaf) else leaf


def _template(leaf: Any) -> Any:
    shaped = _data_shape(leaf)
    return jax.ShapeDtypeStruct(
        shaped.shape, shaped.dtype, sharding=_any_sharding({"": {"": leaf}}) if _is_key(leaf) else leaf.sharding
    )


def _typed(value: Any, like: Any) -> Any:
    return jax.random.wrap_key_data(value, impl=jax.random.key_impl(like)) if _is_key(like) else value

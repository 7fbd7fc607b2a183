"""Fixtures of the compile tests: the compiling process can import the toy step; results are shared by a session."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from memopt.targets import load_target
from memopt_jax import aot

HERE = Path(__file__).parent


@pytest.fixture(scope="session", autouse=True)
def _toy_step_is_importable() -> Iterator[None]:
    sys.path.insert(0, str(HERE))
    yield
    sys.path.remove(str(HERE))


@pytest.fixture(scope="session")
def compiled() -> Callable[..., tuple[aot.CompiledStep, ...]]:
    """`compiled(target, payload, variants=..., **request)`: compiles the toy step, each combination once."""
    known: dict[str, tuple[aot.CompiledStep, ...]] = {}

    def compile_toy(target: str, payload: dict[str, Any], **changes: Any) -> tuple[aot.CompiledStep, ...]:
        key = repr((target, payload, sorted(changes.items())))
        if key not in known:
            where = load_target(target)
            mesh = (("fsdp", where.num_devices),)
            request = aot.Request(builder="toy_step:build", payload=payload, target=where, mesh=mesh, **changes)
            known[key] = aot.compile_step(request)
        return known[key]

    return compile_toy

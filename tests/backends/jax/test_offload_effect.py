"""An accelerator's compiler that keeps in device memory what a step sends to the host: refused whole, told in part."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import optax
import pytest
from flax import nnx
from jax.ad_checkpoint import Saveable
from jax.sharding import Mesh

from memopt import apply_policy
from memopt.errors import MemoptError, MemoptWarning
from memopt_jax import remat
from memopt_jax.compiled import CompiledStep

POLICY = {
    "version": 1,
    "units": ["layers.*"],
    "rules": [
        {"name": "inputs", "action": "offload", "match": {"path": "layers.*.input"}},
        {"name": "rest", "action": "recompute", "match": {"unit": "layers.*"}},
    ],
}
SENT_BYTES = 4 * 4 * 8 * 64 * 4  # layers x batch x positions x width x float32


@dataclass(frozen=True)
class Executable:
    """What a TPU's compiler returned, as far as it is looked at."""

    host_bytes: int

    def memory_analysis(self) -> SimpleNamespace:
        fields = ("argument", "output", "alias", "temp")
        sizes = {f"{space}{name}_size_in_bytes": 0 for space in ("", "host_") for name in fields}
        return SimpleNamespace(**{**sizes, "host_temp_size_in_bytes": self.host_bytes})


@pytest.fixture
def compiled_step(
    nnx_models: Mapping[str, Callable[[nnx.Rngs], nnx.Module]],
    inputs: jax.Array,
    one_device: Mesh,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[[int], None]:
    """`compiled_step(host_bytes)` compiles a step for a device whose compiler keeps that much on the host."""
    run = apply_policy(nnx_models["scan"](nnx.Rngs(0)), POLICY, example_inputs=inputs, mesh=one_device)
    optimizer = run.optimizer(optax.sgd(0.1))

    def fn(model: Any, optimizer: Any, batch: Any) -> jax.Array:
        loss, gradients = nnx.value_and_grad(lambda model: (model(batch) ** 2).mean())(model)
        optimizer.update(model, gradients)
        return loss

    step = run.step(fn)

    def compile_it(host_bytes: int) -> None:
        monkeypatch.setattr(CompiledStep, "_built", lambda *_: Executable(host_bytes))
        monkeypatch.setattr(run._step, "_layouts", _Elsewhere(run.layouts, SimpleNamespace(platform="tpu")))
        with pytest.raises(TypeError, match="not callable"):  # the stand-in has no program to run
            step(run.model, optimizer, inputs)

    return compile_it


class _Elsewhere:
    """The layouts, on another device."""

    def __init__(self, layouts: Any, device: Any) -> None:
        self._layouts, self.device = layouts, device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layouts, name)


def test_all_of_an_offload_on_the_host_says_nothing(
    compiled_step: Callable[[int], None], recwarn: pytest.WarningsRecorder
) -> None:
    compiled_step(SENT_BYTES)
    assert not [warning for warning in recwarn if warning.category is MemoptWarning]


def test_a_part_of_an_offload_left_on_the_device_is_told_with_both_figures(
    compiled_step: Callable[[int], None],
) -> None:
    with pytest.warns(MemoptWarning, match=f"of {SENT_BYTES} bytes per device .* keeps {SENT_BYTES // 4} there"):
        compiled_step(SENT_BYTES // 4)


def test_an_offload_that_left_nothing_on_the_host_is_refused_before_a_step_runs(
    compiled_step: Callable[[int], None],
) -> None:
    with pytest.raises(MemoptError, match="offload-without-effect"):
        compiled_step(0)


def test_a_memory_kind_flipped_on_purpose_is_refused_before_a_step_runs(
    nnx_models: Mapping[str, Callable[[nnx.Rngs], nnx.Module]],
    inputs: jax.Array,
    one_device: Mesh,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remat, "_TO_HOST", Saveable)
    run = apply_policy(nnx_models["scan"](nnx.Rngs(0)), POLICY, example_inputs=inputs, mesh=one_device)
    optimizer = run.optimizer(optax.sgd(0.1))

    def fn(model: Any, optimizer: Any, batch: Any) -> jax.Array:
        loss, gradients = nnx.value_and_grad(lambda model: (model(batch) ** 2).mean())(model)
        optimizer.update(model, gradients)
        return loss

    with pytest.raises(MemoptError, match="offload-without-effect"):
        run.step(fn)(run.model, optimizer, inputs)

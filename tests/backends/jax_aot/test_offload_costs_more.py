"""Offload in a Python loop of layers may cost more of the device than it saves: the plan compiles both and says so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax
import pytest
from flax import nnx

from memopt import inspect_model, make_plan
from memopt.estimate import Measured
from memopt.plan import Plan
from memopt.targets import load_target
from memopt_jax import estimate
from memopt_jax.aot import CompiledStep, MemoryFigures
from memopt_jax.models.layers import stacked

WIDTH, HOST_BYTES = 16, 2 * 4 * 16 * 4
POLICY = {
    "version": 1,
    "units": ["layers.*"],
    "rules": [
        {"name": "inputs", "action": "offload", "match": {"path": "layers.*.input"}},
        {"name": "rest", "action": "recompute", "match": {"unit": "layers.*"}},
    ],
}


class Loop(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = layer(x)
        return x


class Scan(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = stacked(lambda keys: nnx.Linear(WIDTH, WIDTH, rngs=keys), 2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)


def estimated(
    model: Callable[[nnx.Rngs], nnx.Module], device_bytes: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> tuple[Measured, list[str]]:
    """The estimate where a compile takes `device_bytes` by what the layers' inputs do, and what was compiled."""
    spec = inspect_model(model(nnx.Rngs(0)), example_inputs=jax.numpy.ones((4, WIDTH)))
    plan = make_plan(POLICY, spec, backend="jax")
    seen: list[str] = []

    def compile_plan(workload: object, plan: Plan, *_: object, **__: object) -> CompiledStep:
        (residual,) = {row.residual for row in plan.rows_of("activation") if row.path.endswith(".input")}
        seen.append(str(residual))
        host_bytes = HOST_BYTES if residual == "offload" else 0
        return CompiledStep(
            target="gpu:h100",
            device=MemoryFigures(0, 0, 0, device_bytes[str(residual)]),
            host=MemoryFigures(0, 0, 0, host_bytes),
            planned_host_bytes=host_bytes,
            sent_host_bytes=host_bytes,
        )

    monkeypatch.setattr(estimate, "compile_plan", compile_plan)
    return estimate.estimate(None, plan, spec, target=load_target("gpu:h100")), seen


def test_both_figures_are_told_where_a_loops_offload_saves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    measured, seen = estimated(Loop, {"offload": 824, "keep": 778}, monkeypatch)
    assert seen == ["offload", "keep"]
    (said,) = measured.warnings
    assert "824 bytes with it, 778" in said
    assert measured.peak_bytes == 824


def test_a_loops_offload_that_saves_memory_is_no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    measured, seen = estimated(Loop, {"offload": 500, "keep": 778}, monkeypatch)
    assert seen == ["offload", "keep"]
    assert measured.warnings == ()


def test_a_scanned_stack_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    _, seen = estimated(Scan, {"offload": 824, "keep": 778}, monkeypatch)
    assert seen == ["offload"]


def test_the_plan_to_compare_with_differs_in_what_is_offloaded_alone() -> None:
    spec = inspect_model(Loop(nnx.Rngs(0)), example_inputs=jax.numpy.ones((4, WIDTH)))
    plan = make_plan(POLICY, spec, backend="jax")
    kept = estimate.with_values_kept(plan)
    assert {row.residual for row in kept.rows_of("activation")} == {"keep", "recompute"}
    back = [replace(row, residual=other.residual) for row, other in zip(kept.rows, plan.rows, strict=True)]
    assert back == list(plan.rows)

"""One row of a comparison on JAX: plain user code around `apply_policy`, in one process with all its devices."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from memopt.api import apply_policy
from memopt.errors import MemoptError
from memopt.loading import load_policy
from memopt.report import rule_effects
from memopt.workloads import Workload, load_workload

from .baselines import checkpoint_layers
from .compiler_options import comparison_options
from .measure import StepFigures, step_figures
from .workloads import build, built_model


@dataclass(frozen=True, slots=True)
class _Training:
    """A step that takes a batch and gives its loss, and the figures of the program behind it."""

    step: Callable[[Mapping[str, Any]], jax.Array]
    figures: Callable[[], StepFigures]
    applied: Any = None


def train(job: Any, *, emit: Callable[[Mapping[str, Any]], None]) -> None:
    """Trains the job's workload and emits its losses and figures.

    Args:
        job: A `memopt.comparing.jobs.Job`.
        emit: Takes the events of `memopt.worker`.

    Raises:
        MemoptError: What the policy, the workload or the backend refuses.
    """
    mesh = _mesh(job)
    workload = load_workload(job.workload)
    workload = workload if isinstance(workload, Workload) else build(workload, seed=job.seed)
    model = built_model(workload)
    batches = _batches(job, workload, mesh)
    if job.baseline is not None:
        checkpoint_layers(job.baseline, model, lambda called: workload.loss(called, batches(0)))
    training = _plain(workload, model, mesh) if job.policy is None else _applied(job, workload, model, batches(0))
    emit({"event": "stage", "text": "compiling"})
    losses, times_s = [], []
    for step in range(job.steps):
        started_s = time.perf_counter()
        losses.append(float(training.step(batches(step))))  # waits for the device
        if step >= job.warmup_steps:
            times_s.append(time.perf_counter() - started_s)
        emit({"event": "step", "step": step, "loss": losses[-1]})
    emit({"event": "result", "result": _result(training, losses, times_s)})


def _mesh(job: Any) -> Mesh:
    devices = jax.devices()
    if job.device == "gpu" and devices[0].platform != "gpu":
        raise MemoptError.of(
            "no-such-device",
            f"the run's target is a GPU and jax sees {devices[0].platform} here",
            hint="use target: cpu",
        )
    if len(devices) < job.world_size:
        raise MemoptError.of("no-such-device", f"world jax: {job.world_size}, and jax sees {len(devices)} devices")
    return Mesh(np.array(devices[: job.world_size]), ("data",))


def _batches(job: Any, workload: Workload, mesh: Mesh) -> Callable[[int], Mapping[str, Any]]:
    """Each step's batch, split over the devices."""
    split = NamedSharding(mesh, PartitionSpec("data"))
    if job.batches is None:
        for name, value in workload.batch.items():
            if isinstance(value, jax.ShapeDtypeStruct):
                raise MemoptError.of(
                    "workload-batch-has-no-values",
                    f"`{workload.name}`: `{name}` of its batch has a shape but no values to train on",
                    hint="give real arrays in the workload's `batch`",
                )
        own = jax.device_put(dict(workload.batch), split)
        return lambda step: own
    tokens = np.load(job.batches, mmap_mode="r")
    if tokens.shape[1] % job.world_size:
        raise MemoptError.of(
            "workload-batch-not-divisible",
            f"a batch of {tokens.shape[1]} sequences does not divide over {job.world_size} devices",
            hint=f"use a batch that is a multiple of {job.world_size}, or another world size",
            path="batch",
        )
    return lambda step: {"tokens": jax.device_put(np.asarray(tokens[step]), split)}


def _plain(workload: Workload, model: nnx.Module, mesh: Mesh) -> _Training:
    """As a user trains without memopt: everything on every device, the batch split, one jit that donates the state."""
    graph, state = nnx.split((model, nnx.Optimizer(model, workload.optimizer, wrt=nnx.Param)))
    state = jax.device_put(state, NamedSharding(mesh, PartitionSpec()))

    def step(state: Any, batch: Mapping[str, Any]) -> tuple[Any, jax.Array]:
        model, optimizer = nnx.merge(graph, state)
        loss, gradients = nnx.value_and_grad(workload.loss)(model, batch)
        optimizer.update(model, gradients)
        return nnx.state((model, optimizer)), loss

    traced: dict[str, Any] = {"state": state}
    options = comparison_options(mesh.devices.flat[0].platform)

    def run(batch: Mapping[str, Any]) -> jax.Array:
        if "compiled" not in traced:
            traced["traced"] = jax.jit(step, donate_argnums=0).trace(traced["state"], batch)
            traced["compiled"] = traced["traced"].lower().compile(compiler_options=options)
        traced["state"], loss = traced["compiled"](traced["state"], batch)
        return loss

    def figures() -> StepFigures:
        state = traced["state"]
        return step_figures(
            traced["compiled"],
            traced["traced"].jaxpr,
            params=state[0],
            optimizer_state=state[1],
        )

    return _Training(run, figures)


def _applied(job: Any, workload: Workload, model: nnx.Module, batch: Mapping[str, Any]) -> _Training:
    inputs: tuple[Any, ...] = tuple(batch.values())  # of a workload that brings its own batch
    if job.batches is not None:
        inputs = (batch["tokens"][:, :-1], batch["tokens"][:, 1:])
    options = {"compiler_options": comparison_options(jax.devices()[0].platform)}
    policy = load_policy(job.policy).with_backend_options("jax", options)
    applied = apply_policy(model, policy, example_inputs=inputs)
    optimizer = applied.optimizer(workload.optimizer)

    def fn(model: Any, optimizer: Any, batch: Mapping[str, Any]) -> jax.Array:
        loss, gradients = nnx.value_and_grad(workload.loss)(model, batch)
        optimizer.update(model, gradients)
        return loss

    step = applied.step(fn)
    return _Training(lambda batch: step(applied.model, optimizer, batch), applied.figures, applied)


def _result(training: _Training, losses: list[float], times_s: list[float]) -> dict[str, Any]:
    figures = training.figures()
    effects = () if training.applied is None else rule_effects(training.applied.plan)
    return {
        "losses": losses,
        "step_times_s": times_s,
        "peak_measured_bytes": figures.peak_bytes,
        "measured_by_role": dict(figures.by_role),
        "attributed": True,
        "host_bytes": figures.host_bytes,
        "step_flops": figures.step_flops,
        "collectives": dict(figures.collectives),
        "effects": [asdict(effect) for effect in effects],
        "notes": list(figures.notes),
    }

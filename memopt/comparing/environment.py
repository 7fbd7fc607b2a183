"""What a reader must know to judge the figures: versions, device, shapes, warm-up, repeats."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from ..processor import cpu_name
from ..workloads import HfWorkload, Workload, WorkloadConfig
from .run import RunConfig

PACKAGES = ("memopt", "torch", "transformers", "jax", "jaxlib", "flax", "optax", "numpy")


def environment_facts(
    run: RunConfig, workload: WorkloadConfig | Workload | HfWorkload, *, warmup_steps: int, text: Mapping[str, Any]
) -> dict[str, Any]:
    """Everything that does not depend on the rows; no framework is imported.

    Args:
        run: The comparison.
        workload: What it trains.
        warmup_steps: Steps at the start that are not timed.
        text: Files and bytes the batches were cut from.
    """
    return {
        "versions": {name: _version(name) for name in PACKAGES},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": {
            "kind": run.target,
            "cpu": cpu_name(),
            "num_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "memory_bytes": psutil.virtual_memory().total,
        },
        "workload": _described(workload, run),
        "dtype": "float32 unless a policy's precision says otherwise",
        "world": {name: run.world.get(name, 1) for name in run.backends},
        "num_steps": run.steps,
        "num_warmup_steps": warmup_steps,
        "num_timed_steps": run.steps - warmup_steps,
        "seed": run.seed,
        "text": dict(text),
        "tolerance": run.tolerance,
        "command": " ".join(Path(sys.argv[0]).name if index == 0 else part for index, part in enumerate(sys.argv)),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _described(workload: WorkloadConfig | Workload | HfWorkload, run: RunConfig) -> dict[str, Any]:
    if isinstance(workload, WorkloadConfig):
        return workload.model_dump(mode="json", exclude_none=True)
    if isinstance(workload, HfWorkload):
        return {
            "name": workload.name,
            "family": workload.model_type,
            "batch": workload.batch_per_rank * run.world.get("torch", 1),
            "sequence": workload.sequence,
        }
    return {"name": workload.name, "reference": workload.ref}

"""What this environment can do with JAX: versions, devices, targets that can be planned, and what is missing."""

from __future__ import annotations

from typing import Any

from memopt.targets import load_target, target_names

from . import offset_audit, topology
from .accelerators import import_jax, present


def doctor() -> dict[str, Any]:
    """Versions, devices, targets, and sentences on what to change; asks JAX for devices, compiles nothing.

    Raises:
        ModuleNotFoundError: JAX is not installed.
    """
    jax = import_jax()
    versions = topology.versions()
    targets = {}
    for name in target_names():
        problems = topology.missing(load_target(name))
        targets[name] = {"ok": not problems, "problems": [problem.to_json() for problem in problems]}
    return {
        "versions": versions,
        "accelerators": list(present()),
        "devices": [f"{device.platform}:{device.device_kind}" for device in jax.devices()],
        "targets": targets,
        "offset_audit": {
            "affected": offset_audit.is_affected(versions["jaxlib"]),
            "affected_versions": "jaxlib 0.10.2 and 0.11.0, on GPUs",
        },
        "advice": _advice(versions["jaxlib"]),
    }


def _advice(jaxlib: str) -> list[str]:
    advice = []
    if offset_audit.is_affected(jaxlib):
        advice.append(
            f"jaxlib {jaxlib} reads offloaded values from wrong offsets on GPUs; memopt works around it and checks the "
            "gradients first. On GPUs use jax >= 0.11.1, which needs Python >= 3.12 (docs/explanation/offset-audit.md)"
        )
    return advice

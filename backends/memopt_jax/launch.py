"""How a comparison's JAX process is started: one process with as many devices as it needs. Imports no jax."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path

from memopt.backend import INSTALL, Launch
from memopt.errors import MemoptError


def launch(job_file: str, *, world_size: int) -> Launch:
    """One process; on the CPU with `world_size` host devices.

    Raises:
        MemoptError: `extra-missing` without jax, flax or optax.
    """
    missing = [name for name in ("jax", "flax", "optax") if importlib.util.find_spec(name) is None]
    if missing:
        raise MemoptError.of("extra-missing", f"{', '.join(missing)} not installed", hint=INSTALL["jax"])
    environment = {}
    if json.loads(Path(job_file).read_text(encoding="utf-8"))["device"] == "cpu":
        flags = os.environ.get("XLA_FLAGS", "").split()
        kept = [flag for flag in flags if not flag.startswith("--xla_force_host_platform_device_count")]
        environment["XLA_FLAGS"] = " ".join([*kept, f"--xla_force_host_platform_device_count={world_size}"])
        environment["JAX_PLATFORMS"] = "cpu"
    return Launch(command=(sys.executable, "-m", "memopt.worker", job_file), environment=environment)

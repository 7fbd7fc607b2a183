"""Checks of the host before a step that offloads runs on a GPU: the pinned pool's cap, and the machine's memory.

Running out of the pool reads like running out of device memory, so it is told apart here, before anything is allocated.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping

import psutil

from memopt.errors import MemoptError, Problem
from memopt.targets import framework_fact

POOL_SETTING = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"  # read by XLA, once, when the client starts


def problems(
    host_bytes_per_device: int, *, num_local_devices: int, available_bytes: int, pool_bytes: int | None
) -> tuple[Problem, ...]:
    """What does not fit: the pool of this process, the memory of this machine.

    Args:
        host_bytes_per_device: Offloaded values, parameters and state of one device.
        num_local_devices: Devices of this process; they share the pool.
        available_bytes: Memory the machine can still give.
        pool_bytes: Cap of the pinned pool; None where there is none.
    """
    needed = host_bytes_per_device * num_local_devices
    found = []
    shown = f"{host_bytes_per_device} bytes for each of {num_local_devices} devices is {needed} bytes"
    if needed > available_bytes:
        found.append(
            Problem(
                code="host-memory-too-small",
                message=f"{shown} on the host, and {available_bytes} are available",
                hint="offload less, or use more hosts; no setting helps",
            )
        )
    elif pool_bytes is not None and needed > pool_bytes:
        wanted = math.ceil(needed * 1.05 / 2**30)
        found.append(
            Problem(
                code="host-pool-too-small",
                message=f"{shown} in JAX's pool of pinned host memory, which is capped at {pool_bytes}",
                hint=f"set {POOL_SETTING}={wanted} before JAX starts",
            )
        )
    return tuple(found)


def pool_cap_bytes(environ: Mapping[str, str] = os.environ) -> int:
    """The cap that XLA's GPU client takes in this environment."""
    setting = environ.get(POOL_SETTING, "")
    return int(setting) * 2**30 if setting.isdecimal() else int(framework_fact("jax_gpu_pinned_pool_bytes").value or 0)


def require_host_memory(host_bytes_per_device: int, *, num_local_devices: int, platform: str) -> None:
    """Refuses a step whose host bytes cannot be had on this machine; only GPUs have the pool.

    Raises:
        MemoptError: `host-memory-too-small` or `host-pool-too-small`.
    """
    if not host_bytes_per_device or platform == "cpu":
        return
    found = problems(
        host_bytes_per_device,
        num_local_devices=num_local_devices,
        available_bytes=psutil.virtual_memory().available,
        pool_bytes=pool_cap_bytes() if platform in ("gpu", "cuda") else None,
    )
    if found:
        raise MemoptError(found)

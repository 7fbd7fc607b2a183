"""Devices of a target that is not there: what its compiler needs, and which packages bring it.

A CUDA topology lists no memories, so a sharding over its devices loses `pinned_host` without a word and host arguments
would be compiled as device ones. A mesh of no devices keeps the kind; the devices are named when the program is
compiled (`aot_worker.py`).
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from memopt.errors import MemoptError, Problem
from memopt.targets import Target

INSTALL_GPU = "pip install 'memopt[targets-gpu]'"
INSTALL_TPU = "pip install 'memopt[targets-tpu]'"
_PLUGINS = (("jax-cuda13-plugin", "jax-cuda13-pjrt"), ("jax-cuda12-plugin", "jax-cuda12-pjrt"))
_ASSEMBLERS = ("nvidia-cuda-nvcc", "nvidia-cuda-nvcc-cu12")  # bring ptxas; nvidia-nvvm brings libdevice


def versions() -> dict[str, str]:
    """Versions of what takes part in a compile; absent packages are left out."""
    names = ("jax", "jaxlib", "flax", "optax", "libtpu", "nvidia-nvvm", *_ASSEMBLERS, *(n for p in _PLUGINS for n in p))
    return {name: found for name in names if (found := _version(name)) is not None}


def environment(target: Target, base: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process that compiles for `target`; it must be set before JAX is imported.

    The user's `XLA_FLAGS` are dropped: an unknown flag ends the process, and options belong to the policy.
    """
    env = dict(base)
    env.update(JAX_PLATFORMS="cpu", JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1", TF_CPP_MIN_LOG_LEVEL="2")
    env["XLA_FLAGS"] = ""
    if target.kind == "gpu":
        # Autotuning would time kernels on a device; without it XLA's default tilings are taken.
        env.update(CUDA_VISIBLE_DEVICES="-1", XLA_FLAGS="--xla_gpu_autotune_level=0")
    elif target.kind == "tpu":
        # libtpu would ask the cloud's metadata server which machine this is, and wait for it.
        env.update(TPU_SKIP_MDS_QUERY="1", TPU_WORKER_HOSTNAMES="localhost", TPU_WORKER_ID="0")
        env["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
    else:
        env["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={target.num_devices}"
    return env


def missing(target: Target) -> tuple[Problem, ...]:
    """What keeps this environment from compiling for `target`; nothing is imported."""
    found = versions()
    if "jax" not in found or "jaxlib" not in found:
        return (_missing(target, "jax", "pip install 'memopt[jax]'"),)
    if target.kind == "tpu":
        return () if "libtpu" in found else (_missing(target, "libtpu", INSTALL_TPU),)
    if target.kind == "cpu":
        return ()
    plugin, runtime = next((pair for pair in _PLUGINS if pair[0] in found), _PLUGINS[0])
    absent = [name for name in (plugin, runtime) if name not in found]
    if not any(name in found for name in _ASSEMBLERS) and shutil.which("ptxas") is None:
        absent.append("nvidia-cuda-nvcc")
    if "nvidia-nvvm" not in found and not _toolkit_has_libdevice() and "nvidia-cuda-nvcc-cu12" not in found:
        absent.append("nvidia-nvvm")
    if absent:
        return (_missing(target, ", ".join(absent), INSTALL_GPU),)
    jaxlib = found["jaxlib"]
    differing = {name: found[name] for name in (plugin, runtime) if found[name] != jaxlib}
    if differing:
        return (
            Problem(
                code="plugin-version-mismatch",
                message=f"jaxlib is {jaxlib} but "
                + ", ".join(f"{name} is {number}" for name, number in differing.items())
                + "; mixed versions compile wrong programs or crash",
                hint=f"pip install {plugin}=={jaxlib} {runtime}=={jaxlib}",
            ),
        )
    return ()


def require(target: Target) -> None:
    """Refuses a target this environment cannot compile for.

    Raises:
        MemoptError: `target-plugin-missing` or `plugin-version-mismatch`.
    """
    problems = missing(target)
    if problems:
        raise MemoptError(problems)


def devices(target: Target) -> tuple[Any, ...]:
    """The target's devices as JAX sees them; call it only in a process started with `environment`.

    Raises:
        MemoptError: `bad-target`, for a topology the compiler refuses.
    """
    import jax
    from jax.experimental import topologies

    if target.kind == "cpu":
        return tuple(jax.devices("cpu")[: target.num_devices])
    try:
        if target.kind == "gpu":
            described = topologies.get_topology_desc(
                platform="cuda", target_config=gpu_target_config(target), topology=gpu_topology(target)
            )
        else:
            shape = "x".join(str(size) for size in target.topology)
            described = topologies.get_topology_desc(f"{target.xla['topology']}:{shape}", "tpu")
    except (RuntimeError, ValueError, NotImplementedError) as error:  # XLA's status, by kind of status
        raise MemoptError.of(
            "bad-target",
            f"the compiler refuses `{target.name}`: {str(error).splitlines()[0]}",
            hint="`memopt targets` lists one topology of each that works",
        ) from error
    return tuple(described.devices)


def gpu_topology(target: Target) -> str:
    """`partitions x hosts x devices per host`.

    Raises:
        MemoptError: `bad-target`, when the count is no whole number of nodes.
    """
    per_node = target.devices_per_node
    if target.num_devices <= per_node:
        return f"1x1x{target.num_devices}"
    if target.num_devices % per_node:
        raise MemoptError.of(
            "bad-target",
            f"`{target.name}`: {target.num_devices} devices are no whole number of nodes of {per_node}",
            hint=f"take a multiple of {per_node}",
        )
    return f"1x{target.num_devices // per_node}x{per_node}"


def gpu_target_config(target: Target) -> str:
    """XLA's `GpuTargetConfigProto` for the target, as text."""
    xla = target.xla
    major, minor = xla["compute_capability"]
    extension = f" feature_extension: {xla['feature_extension']}" if xla["feature_extension"] else ""
    numbers = (
        "threads_per_block_limit", "threads_per_warp", "shared_memory_per_block", "shared_memory_per_core",
        "threads_per_core_limit", "core_count", "fpus_per_core", "block_dim_limit_x", "block_dim_limit_y",
        "block_dim_limit_z", "memory_bandwidth", "l2_cache_size", "clock_rate_ghz", "device_memory_size",
        "shared_memory_per_block_optin", "registers_per_core_limit", "registers_per_block_limit",
    )  # fmt: skip
    body = " ".join(f"{name}: {xla[name]}" for name in numbers)
    dnn_major, dnn_minor = xla["dnn_version"]
    run_major, run_minor, run_patch = xla["runtime_version"]
    return (
        f"gpu_device_info {{ {body} cuda_compute_capability {{ major: {major} minor: {minor}{extension} }} }} "
        f'platform_name: "{xla["platform_name"]}" dnn_version_info {{ major: {dnn_major} minor: {dnn_minor} }} '
        f"runtime_version {{ major: {run_major} minor: {run_minor} patch: {run_patch} }} "
        f'device_description_str: "{target.description}"'
    )


def _missing(target: Target, what: str, command: str) -> Problem:
    return Problem(
        code="target-plugin-missing",
        message=f"compiling for `{target.name}` needs {what}, which is not installed here",
        hint=f"{command} (no device and no driver are needed)",
    )


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _toolkit_has_libdevice() -> bool:
    ptxas = shutil.which("ptxas")
    return ptxas is not None and (Path(ptxas).resolve().parent.parent / "nvvm" / "libdevice").is_dir()

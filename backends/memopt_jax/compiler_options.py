"""Compiler options per compile: what is set unasked, what a policy adds, and errors that name the nearest.

Options are given to `.compile(compiler_options=...)`, never through `XLA_FLAGS`: an unknown flag there ends the
process, here it raises. The list of options is read from the compiler's own library when an unknown one is met.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any

from memopt.errors import MemoptError, did_you_mean

SCHEDULER = "xla_gpu_enable_latency_hiding_scheduler"
ASYNC_LIMIT = "xla_gpu_experimental_parallel_async_compute_limit"
PIPELINED = "xla_gpu_enable_pipelined_host_offloading"
YNNPACK = "xla_cpu_experimental_ynn_fusion_type"

_PLATFORM_PREFIX = {"gpu": "xla_gpu_", "tpu": "xla_tpu_", "cpu": "xla_cpu_"}
_LIBRARIES = {
    "gpu": (("jax-cuda13-plugin", "xla_cuda_plugin.so"), ("jax-cuda13-pjrt", "xla_cuda_plugin.so"),
            ("jax-cuda12-pjrt", "xla_cuda_plugin.so")),
    "tpu": (("libtpu", "libtpu.so"),),
    "cpu": (("jaxlib", "libjax_common.so"), ("jaxlib", "_jax.so")),
}  # fmt: skip
_UNKNOWN = re.compile(r"No such compile option: '([^']+)'")
_BAD_VALUE = re.compile(r"While setting option (\w+), (.*)")


def options_for(platform: str, *, requested: Mapping[str, Any] | None = None, offloads: bool = False) -> dict[str, Any]:
    """The options to compile with.

    On a GPU the latency hiding scheduler is asked for (later versions leave it off), and eight asynchronous copies at a
    time where something is offloaded: without it the copies of one layer wait for each other. Pipelined host offloading
    (`xla_gpu_enable_pipelined_host_offloading`, transfers across iterations) hides more and is the policy's choice:
    combine it with the gradient check. What the policy asks for wins; options of other platforms are left out.

    Args:
        platform: `gpu`, `tpu` or `cpu`.
        requested: The policy's `backend_options.jax.compiler_options`.
        offloads: Whether anything is held on the host.

    >>> options_for("gpu", offloads=True)[ASYNC_LIMIT]
    8
    >>> options_for("cpu", requested={PIPELINED: True})
    {}
    """
    options: dict[str, Any] = {}
    if platform == "gpu":
        options[SCHEDULER] = True
        if offloads:
            options[ASYNC_LIMIT] = 8
    foreign = tuple(prefix for kind, prefix in _PLATFORM_PREFIX.items() if kind != platform)
    options.update({key: value for key, value in (requested or {}).items() if not key.startswith(foreign)})
    return options


@cache
def rounding_options(platform: str) -> dict[str, Any]:
    """Options under which two programs of one meaning round alike, whatever each of them keeps; they cost speed.

    In dtypes below float32 XLA keeps more bits than are written wherever it fuses, and what it fuses depends on what is
    kept. On a CPU the order of a sum, and what is factored out of it, depend on that too, in the last bits of float32:
    there each operation is compiled by itself, as it is written. A TPU's compiler has no such options.

    Args:
        platform: `gpu`, `tpu` or `cpu`.
    """
    if platform == "tpu":
        return {}
    if platform == "cpu":
        return comparison_options(platform) | {"xla_disable_hlo_passes": "algsimp,fusion,cpu-instruction-fusion"}
    return {"xla_allow_excess_precision": False}


@cache
def comparison_options(platform: str) -> dict[str, Any]:
    """What the rows of a comparison are compiled with, the plain one too, beside the options of a policy.

    On a CPU XLA hands sums, and what it can fuse with them, to YNNPACK, whose exponential is not XLA's: which of the
    two a softmax gets depends on what the program keeps. Rows there are compiled with YNNPACK for matrix products
    alone. Elsewhere speed is what is compared, and nothing is added.
    """
    if platform != "cpu":
        return {}
    options: dict[str, Any] = {"xla_allow_excess_precision": False}
    if YNNPACK in known_options("cpu"):
        options[YNNPACK] = "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"
    return options


def explained(error: Exception, options: Mapping[str, Any], platform: str) -> MemoptError:
    """The error to raise for a compiler's refusal: of an option, with the nearest that exists, or of the program."""
    message = str(error)
    unknown = _UNKNOWN.search(message)
    if unknown is not None:
        name = unknown.group(1)
        return MemoptError.of(
            "unknown-compiler-option",
            f"the {platform} compiler has no option `{name}`",
            hint=nearest_option(name, platform) or "options are named as in XLA's debug options, `xla_gpu_...`",
            path=f"backend_options.jax.compiler_options.{name}",
        )
    bad = _BAD_VALUE.search(message)
    if bad is not None:
        return MemoptError.of(
            "bad-compiler-option",
            f"the {platform} compiler refuses `{bad.group(1)}: {options.get(bad.group(1))!r}`: {bad.group(2)}",
            hint="give numbers and true or false without quotes",
            path=f"backend_options.jax.compiler_options.{bad.group(1)}",
        )
    lines = message.splitlines() or [type(error).__name__]
    return MemoptError.of(
        "compile-failed",
        f"the {platform} compiler refuses the step: {lines[0]}",
        hint="; ".join(lines[1:3])
        or "the step compiles on no machine of that kind either: look at the operation it names",
    )


def nearest_option(name: str, platform: str) -> str | None:
    """A hint with the options nearest to `name`, out of those in the compiler's library; None without either."""
    stem = _PLATFORM_PREFIX.get(platform, "xla_")
    known = known_options(platform)
    return did_you_mean(name, known) or did_you_mean(stem + name.removeprefix("xla_"), known)


def known_options(platform: str) -> tuple[str, ...]:
    """Every word in the compiler's library that looks like an option of the platform, sorted; empty without one."""
    library = _library(platform)
    if library is None:
        return ()
    pattern = re.compile(rb"xla_[a-z0-9_]{4,80}")
    with library.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
        words = {found.group(0).decode("ascii") for found in pattern.finditer(content)}
    foreign = tuple(prefix for kind, prefix in _PLATFORM_PREFIX.items() if kind != platform)
    return tuple(sorted(word for word in words if not word.startswith(foreign)))


def _library(platform: str) -> Path | None:
    for package, name in _LIBRARIES.get(platform, ()):
        try:
            listed = files(package) or []
        except PackageNotFoundError:
            continue
        for file in listed:
            if file.name == name:
                return Path(str(file.locate()))
    return None

"""`backend_options.jax` of a policy."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

CompilerValue = bool | int | float | str


class Options(BaseModel):
    """What only the JAX backend understands.

    Attributes:
        compiler_options: Given to the compiler of each step; XLA's own names, e.g.
            `xla_gpu_enable_pipelined_host_offloading`. Unknown names are an error that names the nearest.
        check: `first_step` compares the gradients with the policy on and off before the first step, and refuses to go
            on when they differ.
        optimizer: How offloaded optimizer state is updated: `stream` moves it layer by layer, `whole` all at once.
        pinned_pool_gib: GiB of pinned host memory that each process is started with
            (`XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB`, 64 where it is not set). It sets nothing: `memopt plan` judges the
            policy by it, and a process whose pool is too small is refused before the first step.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    compiler_options: dict[str, CompilerValue] = Field(default_factory=dict)
    check: Literal["never", "first_step"] = "never"
    optimizer: Literal["stream", "whole"] = "stream"
    pinned_pool_gib: int | None = Field(default=None, ge=1)

"""One batch with values, for a workload whose batch is only described."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .config import WorkloadConfig


def example_tokens(workload: WorkloadConfig, *, seed: int) -> np.ndarray:
    """Random token ids `[batch, sequence + 1]` int32, the same for the same seed on every backend."""
    shape = (workload.batch, workload.sequence + 1)
    return np.random.default_rng(seed).integers(0, workload.vocab, shape, dtype=np.int32)


def example_values(shape: Sequence[int], dtype: str, *, seed: int) -> np.ndarray:
    """Values for an array of which only shape and dtype are known: standard normal, or 0 and 1 where it counts."""
    rng = np.random.default_rng(seed)
    if dtype.startswith(("int", "uint", "bool")):
        return rng.integers(0, 2, tuple(shape)).astype(dtype)
    return rng.standard_normal(tuple(shape)).astype(np.float32)

"""Rotary frequencies in numpy, Llama 3.1's stretching included, for models that do not bring their own."""

from __future__ import annotations

import math

import numpy as np

from .config import RopeScaling, WorkloadConfig


def inverse_frequencies(config: WorkloadConfig) -> np.ndarray:
    """Angle per position of each pair of a head's numbers.

    Returns:
        float32 `[rotated / 2]`, where `rotated` is the head's size (llama) or `mla.qk_rope_head_dim` (deepseek_v3).
    """
    rotated = config.size_per_head if config.mla is None else config.mla.qk_rope_head_dim
    exponents = np.arange(0, rotated, 2, dtype=np.int64).astype(np.float32) / np.float32(rotated)
    frequencies = (np.float32(1.0) / np.float32(config.rope_theta) ** exponents).astype(np.float32)
    return frequencies if config.rope_scaling is None else _stretched(frequencies, config.rope_scaling)


def _stretched(frequencies: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Low frequencies are divided by `factor`, high ones stay, those between are blended.

    As in Transformers' `modeling_rope_utils._compute_llama3_parameters`.
    """
    wavelengths = 2 * math.pi / frequencies
    longest = scaling.original_sequence / scaling.low_freq_factor
    shortest = scaling.original_sequence / scaling.high_freq_factor
    share = (scaling.original_sequence / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - share) * frequencies / scaling.factor + share * frequencies
    slowed = np.where(wavelengths > longest, frequencies / scaling.factor, frequencies)
    between = (wavelengths >= shortest) & (wavelengths <= longest)
    return np.where(between, blended, slowed).astype(np.float32)

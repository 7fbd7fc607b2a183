"""Comparing the gradients of one batch with the policy on and off: what catches faults that raise no error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from memopt.applied import Check

_TOLERANCES = {"float64": 1e-10, "float32": 1e-5, "bfloat16": 2e-2, "float16": 5e-3}
"""Largest difference over the norm that rounding in another order explains, by dtype."""

_FLOOR = 1e-3
"""A gradient is compared over its own norm, but at least over this share of what a tensor of its size has on average:
the gradient of a key's bias under softmax, say, is zero but for rounding."""

_REORDERED = 10.0
"""Sums over devices run in another order than sums over one batch; the tolerance is this much wider for those."""


@dataclass(frozen=True)
class Gradients:
    """Of one batch: what the step returned beside them (the loss first), and every gradient by its path."""

    aux: Sequence[Any]
    by_path: Mapping[str, Any]


def compare(
    ours: Gradients, theirs: Gradients, *, reference: Literal["plain", "recompute"], is_reordered: bool = False
) -> Check:
    """Every gradient against its reference, over the reference's norm."""
    worst, worst_path, ok = 0.0, None, True
    widen = _REORDERED if is_reordered else 1.0
    average = _average(theirs.by_path)
    for path, theirs_leaf in theirs.by_path.items():
        reference_leaf = np.asarray(theirs_leaf)
        own, plain = np.asarray(ours.by_path[path], np.float64), np.asarray(reference_leaf, np.float64)
        difference = _relative(own, plain, floor=_FLOOR * average * plain.size**0.5)
        ok = ok and difference <= widen * _TOLERANCES.get(str(reference_leaf.dtype), 1e-5)
        if difference > worst or not np.isfinite(difference):
            worst, worst_path = difference, path
    loss_diff = _loss_difference(ours.aux, theirs.aux)
    scale = max(1.0, abs(_first(theirs.aux)))
    return Check(ok and loss_diff <= widen * 1e-5 * scale, loss_diff, worst, worst_path, reference)


def _average(gradients: Mapping[str, Any]) -> float:
    """Root mean square over all elements of all gradients."""
    total = sum(float(np.sum(np.square(np.nan_to_num(np.asarray(leaf, np.float64))))) for leaf in gradients.values())
    return (total / max(1, sum(np.size(leaf) for leaf in gradients.values()))) ** 0.5


def _relative(own: Any, plain: Any, *, floor: float) -> float:
    """Norm of the difference over the norm; infinite where one side has a NaN that the other has not."""
    if not np.array_equal(np.isfinite(own), np.isfinite(plain)):
        return float("inf")
    own, plain = np.nan_to_num(own, posinf=0, neginf=0), np.nan_to_num(plain, posinf=0, neginf=0)
    difference = float(np.linalg.norm(own - plain))
    if difference == 0.0:
        return 0.0
    norm = max(float(np.linalg.norm(plain)), floor)
    return difference / norm if norm > 0 else float("inf")


def _first(aux: Sequence[Any]) -> float:
    return float(np.asarray(aux[0]).astype(np.float64).mean()) if aux else 0.0


def _loss_difference(ours: Sequence[Any], theirs: Sequence[Any]) -> float:
    return abs(_first(ours) - _first(theirs))

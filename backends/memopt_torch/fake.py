"""What fake tensors need to stand in for real ones, and what is said where they cannot."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch._subclasses import fake_tensor

from memopt.errors import MemoptError

READS_VALUES = (fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException)
NO_FAKE = (fake_tensor.UnsupportedOperatorException, fake_tensor.UnsupportedFakeTensorException)


@contextmanager
def fake_gaps() -> Iterator[None]:
    """Fill the known gaps between a fake step and a real one."""
    with _one_sequence_a_row(), _grouped_products():
        yield


@contextmanager
def _one_sequence_a_row() -> Iterator[None]:
    """Transformers asks the values of position ids whether rows hold several packed sequences; fake ones cannot tell.

    Under fake tensors it would take them to be packed and keep a mask of S × S that no real step has (+7% bytes).
    """
    module = sys.modules.get("transformers.masking_utils")
    original = getattr(module, "find_packed_sequence_indices", None)
    if module is None or original is None:
        yield
        return
    module.find_packed_sequence_indices = lambda *args, **kwargs: None  # type: ignore[attr-defined]
    try:
        yield
    finally:
        module.find_packed_sequence_indices = original  # type: ignore[attr-defined]


@contextmanager
def _grouped_products() -> Iterator[None]:
    """torch's shape function of grouped products (experts) refuses every dtype but bfloat16, as its CUDA kernel does.

    The CPU kernel takes float32 too, and results have the same shape.
    """
    from torch import _meta_registrations as meta

    original = meta._meta_grouped_mm_common

    def common(mat_a: torch.Tensor, mat_b: torch.Tensor, scale_a: Any, scale_b: Any, **kwargs: Any) -> torch.Tensor:
        if scale_a is None and mat_a.dtype is not torch.bfloat16:
            return meta._create_grouped_mm_output_tensor(mat_a, mat_b, kwargs.get("offs"), kwargs.get("out_dtype"))
        return original(mat_a, mat_b, scale_a, scale_b, **kwargs)

    meta._meta_grouped_mm_common = common
    try:
        yield
    finally:
        meta._meta_grouped_mm_common = original


@contextmanager
def told_where(name: str) -> Iterator[None]:
    """What fake tensors cannot do, told with the place in the user's code."""
    try:
        yield
    except READS_VALUES as error:
        raise MemoptError.of(
            "trace-reads-values",
            f"the model reads a tensor's values while it is planned ({_operator(error)}), and planning has none",
            path=_place(error) or name,
            hint="give an example input that settles it: a number in the workload's `batch`, not a tensor "
            "(only shapes are planned); or compute on tensors there (torch.where, masks); or run the step for real and "
            "read its peak from `memopt compare`",
        ) from error
    except (*NO_FAKE, RuntimeError) as error:
        if not lacks_fake(error):
            raise
        raise MemoptError.of(
            "trace-operator-unknown",
            f"an operator cannot run on fake tensors: {error}",
            path=_place(error) or name,
            hint="register its shapes: torch.library.register_fake (https://docs.pytorch.org/docs/stable/library.html)",
        ) from error


def lacks_fake(error: BaseException) -> bool:
    """Whether an operator has no fake kernel; `torch.library.custom_op` says so with a bare RuntimeError."""
    return isinstance(error, NO_FAKE) or "no fake impl registered" in str(error)


def _operator(error: BaseException) -> str:
    return str(getattr(error, "func", error))


def _place(error: BaseException) -> str | None:
    """The innermost line of the traceback that is neither torch's nor ours."""
    ours, torchs = Path(__file__).parent, Path(torch.__file__).parent
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if ours not in path.parents and torchs not in path.parents and path.suffix == ".py" and path.exists():
            return f"{path}:{frame.lineno}"
    return None

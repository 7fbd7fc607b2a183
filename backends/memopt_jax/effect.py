"""Whether offload had its effect: what a step sends to the host against what the compiled program keeps there.

A compiler may keep a value in device memory that the program sends away - a loop of one layer, which it unrolls, is
such a case - and says nothing of it. The step is right and the memory is not saved. Less on the host than was sent is
therefore told, and nothing at all is refused.
"""

from __future__ import annotations

import warnings

from memopt.errors import MemoptError, MemoptWarning, Problem


def require_effect(*, sent_bytes: int, kept_bytes: int) -> None:
    """Refuses a program in which an offload had no effect at all.

    Args:
        sent_bytes: Bytes of values that the step, or its plan, sends to the host for one device.
        kept_bytes: Bytes the compiled program holds there.

    Raises:
        MemoptError: `offload-without-effect`.
    """
    if not sent_bytes or kept_bytes:
        return
    raise MemoptError.of(
        "offload-without-effect",
        f"the plan sends {sent_bytes} bytes per device to the host, the compiled program keeps 0 there",
        hint="name the layer's input (`layers.*.input`) or a value inside the layer rather than the layer's output: "
        "what a scan carries out is not offloaded; layers that are cut off one by one lose theirs too",
    )


def partly_without_effect(*, sent_bytes: int, kept_bytes: int) -> str | None:
    """A sentence on what of an offload had no effect; None where all of it had, or there was none.

    Args:
        sent_bytes: Bytes of values that the traced step sends to the host for one device.
        kept_bytes: Bytes of temporaries the compiled program holds there; layouts may be padded, so more is fine.

    >>> partly_without_effect(sent_bytes=400, kept_bytes=300)[:54]
    '[offload-partly-without-effect] of 400 bytes per devic'
    >>> partly_without_effect(sent_bytes=400, kept_bytes=512) is None
    True
    """
    if kept_bytes >= sent_bytes:
        return None
    return Problem(
        "offload-partly-without-effect",
        f"of {sent_bytes} bytes per device that the step sends to the host the compiled program keeps {kept_bytes} "
        f"there; {sent_bytes - kept_bytes} stay on the device, or were sent twice and are kept once",
    ).render()


def costs_more(*, offloaded_bytes: int, kept_bytes: int) -> str | None:
    """A sentence where a step takes no less of the device than the same step with its offloaded values kept there.

    Args:
        offloaded_bytes: Device bytes of the step as it is.
        kept_bytes: Device bytes with the same values kept on the device.

    >>> costs_more(offloaded_bytes=824, kept_bytes=778)[:60]
    '[offload-costs-more] offload costs more device memory than i'
    >>> costs_more(offloaded_bytes=600, kept_bytes=778) is None
    True
    """
    if offloaded_bytes < kept_bytes:
        return None
    return Problem(
        "offload-costs-more",
        f"offload costs more device memory than it saves: {offloaded_bytes} bytes with it, {kept_bytes} with the same "
        "values kept on the device",
    ).render()


def warn_if_partly(*, sent_bytes: int, kept_bytes: int) -> None:
    """Warns, before the first step, of an offload that the compiled program leaves out in part."""
    sentence = partly_without_effect(sent_bytes=sent_bytes, kept_bytes=kept_bytes)
    if sentence is not None:
        warnings.warn(sentence, MemoptWarning, stacklevel=3)

"""What `apply_policy` returns: one face for both backends. Each backend has its own class of this shape."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast, get_args, runtime_checkable

from .errors import MemoptError, did_you_mean

if TYPE_CHECKING:
    from .plan import Plan
    from .report import Report

Reference = Literal["auto", "plain", "recompute"]


def known_reference(reference: str) -> Reference:
    """The reference of a check.

    Raises:
        MemoptError: `check-unknown-reference`.
    """
    known = get_args(Reference)
    if reference in known:
        return cast(Reference, reference)
    raise MemoptError.of(
        "check-unknown-reference",
        f"`reference={reference!r}` is none of {', '.join(f'`{name}`' for name in known)}",
        hint=did_you_mean(str(reference), known),
    )


@dataclass(frozen=True, slots=True)
class Check:
    """One batch with the policy's residual and memory slots on and off: are the gradients the same?

    Attributes:
        ok: Whether every gradient agrees within the tolerance of its dtype.
        loss_diff: Absolute difference of the losses.
        max_grad_rel_diff: Largest difference of a gradient over its norm.
        worst_tensor: Canonical path of the parameter where that is, or None where all are equal.
        reference: What the policy was compared with.
    """

    ok: bool
    loss_diff: float
    max_grad_rel_diff: float
    worst_tensor: str | None
    reference: Literal["plain", "recompute"]

    def to_json(self) -> dict[str, Any]:
        """The fields as plain data."""
        return asdict(self)


@runtime_checkable
class Applied(Protocol):
    """A model under a policy.

    Attributes:
        model: The model to call: the same object for torch and nnx, a wrapper for linen modules and functions.
        plan: What the policy means for it.
    """

    model: Any
    plan: Plan

    def optimizer(self, cls_or_tx: Any, params: Any = None, **kw: Any) -> Any:
        """The optimizer on what is really trained, its state placed as the policy says."""
        ...

    def step(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """The step with donation, memory kinds and compiler options (JAX), or as it is (torch: hooks do the work)."""
        ...

    def check(self, batch: Any, *, reference: Reference = "auto", layout: bool = False) -> Check:
        """Compare every gradient of one batch with the policy on and off; everything is restored after."""
        ...

    def report(self) -> Report:
        """Planned and measured bytes by role, host traffic, step time."""
        ...

    def save(self, directory: Any, **extra: Any) -> None:
        """A sharded checkpoint; nothing is gathered."""
        ...

    def load(self, directory: Any) -> Any:
        """Resume, at another world size or under another policy too."""
        ...

"""What the user's model or step raises while it is traced, as one problem that says what it was traced on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax.errors import FlaxError

from memopt.errors import MemoptError
from memopt.guarding import raised

_NO_GRADIENT = (
    "grad requires real- or complex-valued",
    "grad requires real-valued",
    "Gradient only defined for scalar",
)


@contextlib.contextmanager
def calling_on_examples(example_inputs: Any) -> Iterator[None]:
    """Around the abstract call of a model on its example inputs.

    Raises:
        MemoptError: `example-inputs-rejected`.
    """
    with _told(
        f"calling the model on the example inputs, {described(example_inputs)}, raised ",
        code="example-inputs-rejected",
        hint="pass what the model takes in training, in shapes and dtypes: one input, a tuple of them, or a mapping "
        "of keywords",
    ):
        yield


@contextlib.contextmanager
def tracing_step(batch: Any) -> Iterator[None]:
    """Around the abstract run of a training step.

    Raises:
        MemoptError: `step-not-differentiable`, `step-not-traceable`.
    """
    with _told(
        f"tracing the step on a batch of {described(batch)} raised ",
        code="step-not-traceable",
        hint="give the step batches of the shapes and dtypes that its model takes; what it does must be possible "
        "under jax.jit",
    ):
        yield


@contextlib.contextmanager
def _told(what: str, *, code: str, hint: str) -> Iterator[None]:
    try:
        yield
    except MemoptError:
        raise
    except (TypeError, ValueError, FlaxError) as error:
        if any(str(error).startswith(words) for words in _NO_GRADIENT):
            code, hint = "step-not-differentiable", "let the loss be one floating number, such as a mean"
        raise MemoptError(raised(what, error, code=code, hint=hint)) from error


def described(tree: Any, *, limit: int = 4) -> str:
    """The dtypes and shapes of a tree's leaves.

    >>> described({"x": jnp.zeros((2, 3))})
    'float32[2,3]'
    """
    leaves = jax.tree.leaves(tree)
    shown = [
        f"{jnp.result_type(leaf)}{list(jnp.shape(leaf))}".replace(" ", "")
        if hasattr(leaf, "shape") or isinstance(leaf, int | float | complex)
        else f"a {type(leaf).__name__}"
        for leaf in leaves[:limit]
    ]
    more = f" and {len(leaves) - limit} more" if len(leaves) > limit else ""
    return (", ".join(shown) or "nothing") + more

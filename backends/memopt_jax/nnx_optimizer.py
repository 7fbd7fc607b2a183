"""`nnx.Optimizer` whose state rests where the plan says and whose update is one fused step."""

from __future__ import annotations

from typing import Any

import jax
import optax
from flax import nnx

from memopt.errors import MemoptError

from .optimizer import StatePlacement, Update
from .shardings import place


class PlacedOptimizer(nnx.Optimizer):
    """An `nnx.Optimizer`; `update(model, grads)` is called as usual."""

    def __init__(
        self, model: Any, tx: optax.GradientTransformation, *, wrt: Any, placement: StatePlacement, update: Update
    ) -> None:
        super().__init__(model, tx, wrt=wrt)
        self._settle(placement, update)

    def _settle(self, placement: StatePlacement, update: Update) -> None:
        self._fused = nnx.static(update)
        state = placement.cut(nnx.state(self))
        nnx.update(self, place(state, placement.state_shardings(state)))

    def update(self, model: Any, grads: Any, /, **kwargs: Any) -> None:
        """Update state and parameters in place; nothing is returned, because whole update trees need not exist.

        Args:
            model: The model given to `nnx.grad`.
            grads: Its gradients.
            kwargs: Not supported: transformations with extra arguments see none.
        """
        if kwargs:
            raise TypeError(f"extra arguments {sorted(kwargs)} cannot be passed through the fused update")
        params = nnx.as_pure(nnx.state(model, self.wrt))
        gradients = nnx.as_pure(nnx.state(grads, self.wrt))
        params, state = self._fused(gradients, nnx.as_pure(self.opt_state), params)
        nnx.update(model, params)
        # Variable by variable: an array in two parts is the value of one variable.
        jax.tree.map(_set, self.opt_state, state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
        self.step[...] += 1


def adopt(optimizer: nnx.Optimizer, *, placement: StatePlacement, update: Update) -> PlacedOptimizer:
    """Makes an optimizer that is there already a placed one, the same object, its values kept.

    Raises:
        MemoptError: `not-an-optimizer` for a subclass, whose own `update` would be lost.
    """
    if type(optimizer) is not nnx.Optimizer:
        raise MemoptError.of(
            "not-an-optimizer",
            f"optimizer= takes an nnx.Optimizer itself, and the update of a {type(optimizer).__qualname__} is its own",
            hint="nnx.Optimizer(model, tx, wrt=nnx.Param), or run.optimizer(tx) after apply_policy",
        )
    optimizer.__class__ = PlacedOptimizer
    placed: Any = optimizer
    placed._settle(placement, update)
    return placed


def _set(variable: Any, value: Any) -> None:
    variable.set_value(value)

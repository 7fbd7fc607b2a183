"""What differs between JAX's versions in how a jaxpr is written down."""

from __future__ import annotations

from typing import Any


def scan_counts(equation: Any) -> tuple[int, int]:
    """How many of a scan's operands are constants of its body, and how many are carried.

    Up to JAX 0.11 these are parameters of the equation; from 0.12 on it keeps the trees of its operands instead.
    """
    parameters = equation.params
    if "num_consts" in parameters:
        return parameters["num_consts"], parameters["num_carry"]
    constants, carry, _ = parameters["ft_in"].unpack()
    return len(list(constants.vals)), len(list(carry.vals))

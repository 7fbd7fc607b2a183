"""What jaxprs say beside their equations, and what differs between JAX's versions in how they are written down."""

from __future__ import annotations

import re
from typing import Any

EXPECTED_TRIPS = "expected_trips_"
"""Name scope of a loop whose length the data decides: `expected_trips_40` makes 40 iterations in the usual case."""


def expected_trips(equation: Any) -> int | None:
    """Iterations that the scope of a `while` equation says to expect."""
    found = re.search(rf"{EXPECTED_TRIPS}(\d+)\)*$", str(equation.source_info.name_stack))
    return int(found.group(1)) if found else None


def scan_counts(equation: Any) -> tuple[int, int]:
    """How many of a scan's operands are constants of its body, and how many are carried.

    Up to JAX 0.11 these are parameters of the equation; from 0.12 on it keeps the trees of its operands instead.
    """
    parameters = equation.params
    if "num_consts" in parameters:
        return parameters["num_consts"], parameters["num_carry"]
    constants, carry, _ = parameters["ft_in"].unpack()
    return len(list(constants.vals)), len(list(carry.vals))

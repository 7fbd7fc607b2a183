"""What a traced step sends to the host between forward and backward, and what the policy names in vain.

A value that the backward pass does not read is never kept, on the device or elsewhere: JAX drops it when it splits the
step. Only the traced program tells; the policy's rows alone would count its bytes.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax

from memopt.plan import Plan
from memopt.spec import ModelSpec

from .naming import mark_name
from .treatments import Template
from .values import inner_jaxprs

_NAMING = ("name", "reduce_precision")


def sent_to_host(jaxpr: Any, times: int = 1) -> Counter[str]:
    """Checkpoint name -> bytes over the whole mesh that a program sends to the host under it; "" where it has none.

    Only copies of named values count: optimizer state on its way back is not a residual.
    """
    sent: Counter[str] = Counter()
    names: dict[Any, str] = {}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in _NAMING:
            names[eqn.outvars[0]] = str(eqn.params.get("name", names.get(eqn.invars[0], "")))
        elif eqn.primitive.name == "device_put" and _goes_to_host(eqn) and eqn.invars[0] in names:
            aval = eqn.invars[0].aval
            sent[names[eqn.invars[0]]] += times * aval.size * aval.dtype.itemsize
        inner_times = times * eqn.params["length"] if eqn.primitive.name == "scan" else times
        for nested in inner_jaxprs(eqn):
            sent.update(sent_to_host(nested, inner_times))
    return sent


def _goes_to_host(eqn: Any) -> bool:
    return any(target == jax.memory.Space.Host for target in eqn.params["devices"])


def shards_of(plan: Plan) -> int:
    """Devices that share each offloaded value; 1 where nothing is offloaded."""
    for row in plan.rows:
        if row.role == "activation" and row.residual == "offload" and row.nbytes and row.global_nbytes:
            return max(1, round(row.global_nbytes / row.nbytes))
    return 1


def named_in_vain(plan: Plan, spec: ModelSpec, sent: Counter[str]) -> dict[str, int]:
    """Values the policy offloads and the program never sends: tensor or path -> planned bytes of one device."""
    template = Template(spec)
    found: dict[str, int] = {}
    for row in plan.rows_of("activation"):
        if row.residual != "offload":
            continue
        names = {mark_name(template.label(path)) for path in (row.path, *row.aliases)} | {row.checkpoint_name}
        if not any(sent[name] for name in names if name):
            label = row.tensor or template.label(row.path)
            found[label] = found.get(label, 0) + (row.nbytes or 0)
    return found

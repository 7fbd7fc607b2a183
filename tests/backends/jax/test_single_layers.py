"""A single layer that offloads beside a loop that does: on GPUs its transfers are lost when the loop is pipelined."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import pytest
from flax import nnx
from jax.sharding import Mesh

from memopt import apply_policy
from memopt.errors import MemoptWarning
from memopt_jax.applied import warn_of_lost_offload
from memopt_jax.compiler_options import PIPELINED
from memopt_jax.treatments import lost_when_pipelined

INPUT, UP = 4 * 8 * 64 * 4, 4 * 8 * 128 * 4  # batch x positions x width x float32
REST = {"name": "rest", "action": "recompute", "match": {"unit": "layers.*"}}


def rules(up_layers: dict[str, Any] | None, *, inputs: bool = True) -> dict[str, Any]:
    up = {"path": "layers.*.mlp.up", **({} if up_layers is None else {"layers": up_layers})}
    offloads = [{"name": "up", "action": "offload", "match": up}]
    if inputs:
        offloads.append({"name": "input", "action": "offload", "match": {"path": "layers.*.input"}})
    options = {"jax": {"compiler_options": {PIPELINED: True}}}
    return {"version": 1, "rules": [*offloads, REST], "backend_options": options}


@pytest.mark.parametrize(
    "policy, lost",
    [
        (rules(None), {}),
        (rules({"first": 2}), {}),
        (rules({"first": 1}), {"layers.0": INPUT + UP}),
        (rules({"last": 1}), {"layers.3": INPUT + UP}),
        (rules({"every": 2}), {}),
        (rules({"first": 1}, inputs=False), {}),
    ],
    ids=["all", "two and two", "the first", "the last", "every second", "the only one that offloads"],
)
def test_layers_whose_transfers_would_be_lost_are_known_before_compiling(
    nnx_models: Mapping[str, Any], inputs: jax.Array, one_device: Mesh, policy: dict[str, Any], lost: dict[str, int]
) -> None:
    run = apply_policy(nnx_models["scan"](nnx.Rngs(0)), policy, example_inputs=inputs, mesh=one_device)
    assert lost_when_pipelined(run.treatments) == lost
    warn_of_lost_offload(run.plan, run.treatments, platform="cpu")
    if not lost:
        warn_of_lost_offload(run.plan, run.treatments, platform="gpu")
        return
    with pytest.warns(MemoptWarning, match=f"{next(iter(lost))}.*will stay on the device"):
        warn_of_lost_offload(run.plan, run.treatments, platform="gpu")

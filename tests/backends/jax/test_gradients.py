"""Gradients under every kind of policy are the plain model's, to the bit, and what was to go to the host goes there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from memopt import MemoptError
from memopt_jax.compiled import offloaded_bytes
from memopt_jax.values import equations

BATCH_BYTES = 4 * 8 * 4  # one number of every position of the batch
INPUT, UP = BATCH_BYTES * 64, BATCH_BYTES * 128

REST = {"name": "rest", "action": "recompute", "match": {"unit": "layers.*"}}


def offload(path: Any, **more: Any) -> dict[str, Any]:
    match = {"path": path, **({"layers": more.pop("layers")} if "layers" in more else {})}
    return {"name": "off", "action": "offload", "match": match, **more}


POLICIES: dict[str, tuple[list[dict[str, Any]], int]] = {
    "nothing": ([], 0),
    "recompute": ([REST], 0),
    "keep one, recompute the rest": ([{"name": "k", "action": "keep", "match": {"path": "layers.*.mlp.up"}}, REST], 0),
    "offload inputs and a module": ([offload(["layers.*.input", "layers.*.mlp.up"]), REST], 4 * (INPUT + UP)),
    "offload, keep the rest": ([offload("layers.*.mlp.up")], 4 * UP),
    "offload a fraction": ([offload("layers.*.mlp.up", fraction=0.5), REST], 2 * UP),
    "offload the first layer": ([offload("layers.*.mlp.up", layers={"first": 1}), REST], UP),
    "offload every second": ([offload("layers.*.mlp.up", layers={"every": 2, "offset": 1}), REST], 2 * UP),
    "matmuls kept, the rest recomputed": ([{"name": "k", "action": "keep", "match": {"op": "matmul"}}, REST], 0),
    "parameters on the host": (
        [{"name": "p", "action": "offload", "match": {"role": "param", "path": "layers.**"}}],
        0,
    ),
    "everything on the host": (
        [
            {"name": "p", "action": "offload", "match": {"role": "param", "path": "layers.**"}},
            offload("layers.*.mlp.up"),
            REST,
        ],
        4 * UP,
    ),
}


FORMS = [("nnx", "scan"), ("nnx", "loop"), ("linen", "scan"), ("linen", "loop"), ("function", "scan")]


@pytest.mark.parametrize("kind, form", FORMS)
@pytest.mark.parametrize("name", POLICIES)
def test_gradients_equal_the_plain_models_to_the_bit(
    gradients: Callable[..., Any], kind: str, form: str, name: str
) -> None:
    rules, host_bytes = POLICIES[name]
    plain, _ = gradients(kind, form)
    ours, jaxpr = gradients(kind, form, {"version": 1, "rules": rules})
    assert plain.keys() == ours.keys()
    worst = {path: float(np.abs(ours[path] - plain[path]).max()) for path in plain}
    assert max(worst.values()) == 0.0, worst
    assert all(np.abs(gradient).max() > 0 for gradient in ours.values())
    assert offloaded_bytes(jaxpr.jaxpr) == host_bytes


def test_recomputing_one_value_of_a_kept_unit_is_refused_not_ignored(gradients: Callable[..., Any]) -> None:
    rule = {"name": "r", "action": "recompute", "match": {"path": "layers.*.mlp.up"}}
    with pytest.raises(MemoptError, match="recompute-in-kept-unit"):
        gradients("nnx", "loop", {"version": 1, "rules": [rule]})


def test_no_scan_has_length_one_where_a_single_layer_is_treated_apart(gradients: Callable[..., Any]) -> None:
    rules, _ = POLICIES["offload the first layer"]
    _, jaxpr = gradients("nnx", "scan", {"version": 1, "rules": rules})
    lengths = [eqn.params["length"] for eqn in equations(jaxpr.jaxpr) if eqn.primitive.name == "scan"]
    assert lengths == [3, 3]


def test_a_repeating_pattern_is_one_scan_over_groups(gradients: Callable[..., Any]) -> None:
    rules, _ = POLICIES["offload every second"]
    _, jaxpr = gradients("nnx", "scan", {"version": 1, "rules": rules})
    lengths = [eqn.params["length"] for eqn in equations(jaxpr.jaxpr) if eqn.primitive.name == "scan"]
    assert lengths == [2, 2]

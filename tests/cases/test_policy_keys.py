"""Reports about settings that are parsed and reach nobody."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from memopt import MemoptError, load_policy, make_plan
from memopt.backend import backend_names, load_backend
from memopt.spec import ModelSpec
from memopt.workloads import load_workload

WORKLOAD = Path(__file__).parents[2] / "configs" / "workloads" / "llama-tiny.yaml"
OFFLOAD = {"name": "r", "action": "offload", "match": {"tensor": "mlp_gate"}}
STATE = {"name": "r", "action": "offload", "match": {"role": "optimizer_state"}}
SHARD = {"name": "r", "action": "shard", "match": {"role": "param"}}
UNIT = {"match": "layers.*"}


def _matching(**match: Any) -> dict[str, Any]:
    return {"rules": [{"name": "r", "action": "keep", "match": match}]}


# Key -> (settings without it, settings with it at a value that is not its default).
KEYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "mesh": ({}, {"mesh": {"replicate": 2, "fsdp": -1}}),
    "units.match": ({}, {"units": ["layers.0"]}),
    "units.group": ({"units": ["norm", "lm_head"]}, {"units": [{"match": ["norm", "lm_head"], "group": True}]}),
    "units.reshard_after_forward": ({"units": [UNIT]}, {"units": [{**UNIT, "reshard_after_forward": False}]}),
    "units.prefetch.forward": ({"units": [UNIT]}, {"units": [{**UNIT, "prefetch": {"forward": 2}}]}),
    "units.prefetch.backward": ({"units": [UNIT]}, {"units": [{**UNIT, "prefetch": {"backward": 2}}]}),
    "unit_defaults.reshard_after_forward": ({}, {"unit_defaults": {"reshard_after_forward": False}}),
    "unit_defaults.prefetch.forward": ({}, {"unit_defaults": {"prefetch": {"forward": 0}}}),
    "unit_defaults.prefetch.backward": ({}, {"unit_defaults": {"prefetch": {"backward": 0}}}),
    "precision.compute": ({"precision": {}}, {"precision": {"compute": "bfloat16"}}),
    "precision.master": ({"precision": {}}, {"precision": {"master": "bfloat16"}}),
    "precision.reduce": ({"precision": {}}, {"precision": {"reduce": "bfloat16"}}),
    "precision.optimizer_state": ({"precision": {}}, {"precision": {"optimizer_state": "bfloat16"}}),
    "accumulate.steps": ({}, {"accumulate": {"steps": 4}}),
    "accumulate.reduce": (
        {"accumulate": {"steps": 4}, "rules": [SHARD]},
        {"accumulate": {"steps": 4, "reduce": "last"}, "rules": [SHARD]},
    ),
    "budget.device": ({}, {"budget": {"device": "70GiB"}}),
    "budget.host": ({}, {"budget": {"host": "70GiB"}}),
    "rules.name": ({"rules": [SHARD]}, {"rules": [{**SHARD, "name": "other"}]}),
    "rules.action": ({"rules": [{**SHARD, "action": "keep"}]}, {"rules": [SHARD]}),
    "rules.optional": (
        {"rules": [{**SHARD, "match": {"path": "nowhere"}}]},
        {"rules": [{**SHARD, "match": {"path": "nowhere"}, "optional": True}]},
    ),
    "rules.axis": (
        {"mesh": {"replicate": 2, "fsdp": 2}, "rules": [SHARD]},
        {"mesh": {"replicate": 2, "fsdp": 2}, "rules": [{**SHARD, "axis": "replicate"}]},
    ),
    "rules.memory_kind": ({"rules": []}, {"rules": [{**OFFLOAD, "memory_kind": "pinned_host"}]}),
    "rules.fraction": ({"rules": [OFFLOAD]}, {"rules": [{**OFFLOAD, "fraction": 0.5}]}),
    "rules.update_on": ({"rules": [STATE]}, {"rules": [{**STATE, "update_on": "host"}]}),
    "rules.match.role": (_matching(), _matching(role="param")),
    "rules.match.path": (_matching(), _matching(path="lm_head.*")),
    "rules.match.unit": (_matching(), _matching(unit="layers.0")),
    "rules.match.name": (_matching(), _matching(name="nobody")),
    "rules.match.tensor": (_matching(), _matching(tensor="q")),
    "rules.match.op": (_matching(), _matching(op="matmul")),
    "rules.match.min_bytes": (_matching(), _matching(min_bytes="64KiB")),
    "rules.match.dtype": (_matching(), _matching(dtype="int32")),
    "rules.match.trainable": (_matching(), _matching(trainable=True)),
    "rules.match.layers.first": (_matching(), _matching(layers={"first": 1})),
    "rules.match.layers.last": (_matching(), _matching(layers={"last": 1})),
    "rules.match.layers.every": (_matching(), _matching(layers={"every": 2})),
    "rules.match.layers.offset": (_matching(layers={"every": 2}), _matching(layers={"every": 2, "offset": 1})),
    "rules.match.layers.index": (_matching(), _matching(layers=[3])),
    "rules.match.layers.of": (_matching(layers={"first": 1}), _matching(layers={"first": 1, "of": "elsewhere"})),
    "backend_options": ({}, {"backend_options": {"torch": {"engine": "fsdp2"}, "jax": {"check": "first_step"}}}),
}


def test_every_key_of_the_policy_is_looked_at_here(policy_keys: frozenset[str]) -> None:
    """A key that is added later must be added to this table (ms-swift#7962)."""
    assert policy_keys == set(KEYS)


@cache
def _spec(backend: str) -> ModelSpec:
    return load_backend(backend).inspect_workload(load_workload(WORKLOAD))


def _outcome(settings: dict[str, Any], backend: str) -> tuple[str, str]:
    """What the backend is handed, or what the user is told in its place."""
    try:
        plan = make_plan(load_policy({"version": 1, **settings}), _spec(backend), backend=backend, world_size=4)
    except MemoptError as error:
        return "refused", str(error)
    return "plan", plan.to_json()


@pytest.mark.parametrize("backend", backend_names())
@pytest.mark.parametrize("key", KEYS)
def test_a_key_reaches_the_backend_or_one_line_says_it_does_not(key: str, backend: str) -> None:
    """A setting at another value changes what the backend is handed, or is refused by name.

    Family: all settings parsed, one of them used (ms-swift#7962, transformers#25180, accelerate#3778).
    """
    without, with_it = (_outcome(settings, backend) for settings in KEYS[key])
    assert with_it != without
    if with_it[0] == "refused" and "unsupported-by-backend" in with_it[1]:
        assert f"the {backend} backend cannot do" in with_it[1]

"""For every two faults of a policy in different places: what is said of both is what is said of each by itself.

The faults are made from a policy that uses every key, place by place: a key misspelt, unknown, taken out or without a
value, a value of another type or misspelt, and contradictions between keys. Family: a check that stops at the first
fault, so that a policy is mended one run at a time.
"""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from memopt.checking import Setting, problems_in
from memopt.loading import load_policy

POLICY: dict[str, Any] = {
    "version": 1,
    "mesh": {"replicate": 2, "expert": 2, "fsdp": -1},
    "units": [
        "layers.*",
        {"match": ["norm", "lm_head"], "group": True},
        {"match": "layers.79", "reshard_after_forward": False, "prefetch": {"forward": 1, "backward": 2}},
    ],
    "unit_defaults": {"reshard_after_forward": True, "prefetch": {"forward": 1, "backward": 1}},
    "precision": {"compute": "bfloat16", "master": "float32", "reduce": "float32", "optimizer_state": "float32"},
    "accumulate": {"steps": 4, "reduce": "each"},
    "budget": {"device": "70GiB", "host": "400GiB"},
    "rules": [
        {"name": "norms", "action": "keep", "match": {"role": "param", "path": "**.*norm.*", "trainable": True}},
        {"name": "moe", "action": "shard", "match": {"role": "param", "path": "**.experts.**"}, "axis": {"expert": 0}},
        {"name": "state", "action": "shard", "match": {"role": ["param", "grad"], "min_bytes": "1MiB"}, "axis": "fsdp"},
        {
            "name": "adam",
            "action": "offload",
            "match": {"role": "optimizer_state", "dtype": "float32"},
            "memory_kind": "pinned_host",
            "fraction": 0.5,
            "update_on": "device",
        },
        {"name": "mlp", "action": "offload", "match": {"tensor": ["mlp_gate", "mlp_up"]}, "fraction": 0.6},
        {"name": "some", "action": "keep", "match": {"op": "attention", "layers": {"every": 2, "offset": 1}}},
        {"name": "few", "action": "keep", "match": {"name": "q_*", "layers": [0, 3]}, "optional": True},
        {"name": "rest", "action": "recompute", "match": {"unit": "layers.*"}},
    ],
    "backend_options": {
        "jax": {"compiler_options": {"xla_gpu_enable_pipelined_host_offloading": True}, "check": "first_step"},
        "torch": {"engine": "layer", "offload": {"prefetch": 2}},
    },
}
FREE = {("mesh",), ("backend_options",), ("backend_options", "jax", "compiler_options"), ("rules", 1, "axis")}
"""Mappings whose keys are the user's own."""
Path = tuple[str | int, ...]
Said = frozenset[tuple[str, str | None, str]]


@dataclass(frozen=True)
class Fault:
    """One change of a policy: `place` is what it touches, `kind` how."""

    place: Path
    kind: str
    change: Callable[[Any], None]

    def __str__(self) -> str:
        return f"{self.kind}@{'.'.join(map(str, self.place))}"


REQUIRED = {
    ("version",),
    *(("rules", i, key) for i in range(len(POLICY["rules"])) for key in ("name", "match")),
    *(("units", i, "match") for i in (1, 2)),
}


def _inside(data: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield (*path, key), value
        yield from _inside(value, (*path, key))


def _at(data: Any, path: Path) -> Any:
    for part in path:
        data = data[part]
    return data


def _misspell(word: str) -> str:
    return word[0] + word[2] + word[1] + word[3:] if len(word) > 3 and word[1] != word[2] else word + "x"


def _rename(data: dict[str, Any], old: str, new: str) -> None:
    items = [(new if key == old else key, value) for key, value in data.items()]
    data.clear()
    data.update(items)


def _faults() -> Iterator[Fault]:
    yield from _contradictions()
    for path, value in _inside(POLICY):
        outer, key = path[:-1], path[-1]
        if isinstance(value, dict) and path not in FREE:
            yield Fault((*path, "zzz"), "unknown key", lambda data, p=path: _at(data, p).update(zzz=1))
        if isinstance(key, str) and outer not in FREE:
            yield Fault(path, "key misspelt", lambda d, o=outer, k=key: _rename(_at(d, o), k, _misspell(k)))
        yield Fault(path, "another type", lambda d, o=outer, k=key: _at(d, o).__setitem__(k, [[5]]))
        if path in REQUIRED or key == "action":
            yield Fault(path, "taken out", lambda d, o=outer, k=key: _at(d, o).pop(k))
        if key in ("action", "role", "tensor", "op", "dtype", "compute", "reduce", "engine", "update_on"):
            word = _misspell(value) if isinstance(value, str) else "shrd"
            yield Fault(path, "value misspelt", lambda d, o=outer, k=key, w=word: _at(d, o).__setitem__(k, w))
            yield Fault(path, "value unknown", lambda d, o=outer, k=key: _at(d, o).__setitem__(k, "zzz"))


def _contradictions() -> Iterator[Fault]:
    def fault(kind: str, *path: str | int, value: Any) -> Fault:
        return Fault(path, kind, lambda data: _at(data, path[:-1]).__setitem__(path[-1], value))

    yield fault("name twice", "rules", 4, "name", value="norms")
    yield fault("unknown axis", "rules", 2, "axis", value="fdsp")
    yield fault("role for action", "rules", 7, "match", "role", value="param")
    yield fault("two forms", "rules", 5, "match", "layers", value={"first": 1, "last": 2})
    yield fault("selectors contradict", "rules", 4, "match", "role", value="grad")
    yield fault("listed twice", "rules", 4, "match", "tensor", value=["q", "q"])
    yield fault("two spellings", "rules", 0, "match", "path", value=["a", "model.a"])
    yield fault("size", "budget", "device", value="70 gigs")
    yield fault("two free axes", "mesh", "replicate", value=-1)
    yield fault("bound", "rules", 4, "fraction", value=60)
    yield fault("bound", "accumulate", "steps", value=0)
    yield fault("backend", "backend_options", "trch", value={})


FAULTS = list(_faults())


def _changed(*faults: Fault) -> dict[str, Any]:
    """The policy with those faults, made from the deepest place on."""
    data = copy.deepcopy(POLICY)
    for fault in sorted(faults, key=lambda fault: len(fault.place), reverse=True):
        fault.change(data)
    return data


def said(*faults: Fault) -> Said:
    """What `memopt validate` says of the policy with some faults."""
    return frozenset((one.code, one.path, one.message) for one in problems_in(_changed(*faults), Setting()))


def _are_apart(one: Fault, other: Fault) -> bool:
    """Whether neither is inside the other."""
    shorter = min(len(one.place), len(other.place))
    return one.place[:shorter] != other.place[:shorter]


PAIRS = [(one, other) for one, other in itertools.combinations(FAULTS, 2) if _are_apart(one, other)]


def test_the_policy_without_faults_is_fine() -> None:
    assert said() == frozenset()
    assert len(load_policy(POLICY).rules) == len(POLICY["rules"])


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_each_fault_is_told(fault: Fault) -> None:
    """One problem, at the place or where the key should be; a misspelt key that must be there is missing too."""
    problems = said(fault)
    assert problems
    assert all(path is not None and _is_near(path, fault.place) for _, path, _ in problems)
    must = fault.kind == "key misspelt" and fault.place in REQUIRED
    assert len(problems) == (2 if must else 1)


def _is_near(path: str, place: Path) -> bool:
    """In the block that the fault is in, or in the fault's own place."""
    outer = ".".join(map(str, place[:-1]))
    return path.startswith(outer)


@pytest.mark.parametrize("seed", range(6))
def test_of_two_faults_both_are_told_and_nothing_else(seed: int) -> None:
    for one, other in random.Random(seed).sample(PAIRS, 150):
        assert said(one, other) == said(one) | said(other), f"{one} and {other}"

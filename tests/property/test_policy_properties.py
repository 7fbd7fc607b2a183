"""Properties of the pure core that hold for any name, any text and any list of rules."""

from __future__ import annotations

import json
import math
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from memopt import MemoptError, Plan, load_policy, make_plan
from memopt.explain import compress
from memopt.lowering.layout import split
from memopt.matching import canonical, matches
from memopt.yaml_nodes import parse

FIXTURES = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)

part = st.text("ab_0", min_size=1, max_size=3)
name = st.lists(part, min_size=1, max_size=4).map(".".join)
pattern = st.lists(
    st.one_of(part, st.just("*"), st.just("**"), st.just("a*"), st.just("?")), min_size=1, max_size=4
).map(".".join)


def _reference(pattern_parts: list[str], name_parts: list[str]) -> bool:
    """The contract's words: `*` within one part, `**` any number of parts, none included."""
    if not pattern_parts:
        return not name_parts
    head, rest = pattern_parts[0], pattern_parts[1:]
    if head == "**":
        return any(_reference(rest, name_parts[i:]) for i in range(len(name_parts) + 1))
    return bool(name_parts) and _part(head, name_parts[0]) and _reference(rest, name_parts[1:])


@cache
def _part(glob: str, text: str) -> bool:
    if not glob:
        return not text
    if glob[0] == "*":
        return _part(glob[1:], text) or (bool(text) and _part(glob, text[1:]))
    return bool(text) and glob[0] in ("?", text[0]) and _part(glob[1:], text[1:])


@given(pattern, name)
@settings(max_examples=250, deadline=None)
def test_globs_mean_what_the_contract_says(pattern: str, name: str) -> None:
    assert matches(pattern, name) == _reference(pattern.split("."), name.split("."))


@given(name)
def test_a_canonical_path_is_its_own_canonical_path_after_the_root(name: str) -> None:
    wrapped = f"module.model.{name}._checkpoint_wrapped_module.w"
    assert canonical(wrapped) == f"{name}.w"


@given(st.text(alphabet=st.characters(codec="utf-8"), max_size=200))
@settings(max_examples=120, deadline=None)
def test_any_text_is_data_or_a_problem(text: str) -> None:
    try:
        parsed = parse(text, file="f.yaml")
    except MemoptError as error:
        problems = error.problems
    else:
        problems = ()
        json.dumps(parsed.data, allow_nan=False)
    assert all(problem.file == "f.yaml" for problem in problems)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text("abc", max_size=4),
    lambda children: (
        st.lists(children, max_size=3) | st.dictionaries(st.sampled_from(["name", "match", "role", "x"]), children)
    ),
    max_leaves=8,
)


@given(
    st.dictionaries(st.sampled_from(["version", "mesh", "units", "rules", "budget", "precision", "oops"]), json_values)
)
@settings(max_examples=200, deadline=None)
def test_any_document_is_a_policy_or_problems_with_places(document: dict[str, Any]) -> None:
    try:
        load_policy(document)
    except MemoptError as error:
        problems = error.problems
    else:
        problems = ()
    assert all(problem.code and problem.message for problem in problems)
    assert problems or document.get("version") == 1


paths = st.sampled_from(
    ["**", "layers.*.**", "layers.0.**", "**.*norm*.**", "lm_head.*", "layers.*.input", "**.q", "layers.*.mlp.*"]
)
match = st.fixed_dictionaries(
    {},
    optional={
        "path": paths,
        "unit": st.sampled_from(["layers.*", "layers.1"]),
        "layers": st.sampled_from([0, [1, 2], {"first": 2}, {"every": 2}]),
        "min_bytes": st.sampled_from([1, 300]),
    },
)
rule = st.one_of(
    st.fixed_dictionaries({"action": st.just("keep"), "match": match}),
    st.fixed_dictionaries({"action": st.just("shard"), "match": match}),
    st.fixed_dictionaries({"action": st.just("recompute"), "match": match, "fraction": st.sampled_from([0.3, 1.0])}),
    st.fixed_dictionaries({"action": st.just("offload"), "match": match, "fraction": st.sampled_from([0.5, 1.0])}),
)
rule_lists = st.lists(rule, min_size=1, max_size=5)


def _plan(rules, llama_spec, fake_backend, entries: list[dict[str, Any]], *, world_size: int = 2) -> Plan:
    """A plan, or no example: what is refused is not what is tested here."""
    policy = rules(*({**entry, "optional": True} for entry in entries))
    try:
        return make_plan(policy, llama_spec(), backend=fake_backend(sharding="flat"), world_size=world_size)
    except MemoptError:
        assume(False)
        raise


@given(rule_lists)
@FIXTURES
def test_what_a_plan_says_holds_together(rules, llama_spec, fake_backend, entries) -> None:
    plan = _plan(rules, llama_spec, fake_backend, entries)
    order = {name: i for i, name in enumerate(plan.rule_order)}
    for row in plan.rows:
        assert all(order[loser] > min(order[winner] for winner in row.rules.values()) for loser in row.losers)
        assert not set(row.losers) & set(row.rules.values())
        assert (row.residual is not None) == (row.role == "activation")
        if row.residual == "offload":
            assert row.memory_kind == "pinned_host"
        if row.residual in ("recompute", "offload"):
            assert row.unit is not None
            assert plan.unit_of(row.unit).region
        if row.path.endswith(".input") and row.unit is not None:
            assert row.residual != "recompute"
        if row.op == "topk":
            assert row.residual == "keep"
        if row.nbytes is not None and row.global_nbytes is not None and row.role != "activation":
            share = math.prod(plan.axis_size(axis) for axis in row.layout)
            assert row.global_nbytes <= row.nbytes * share
            assert row.nbytes <= row.global_nbytes
    for unit in plan.units:
        residuals = {row.residual for row in plan.rows if row.unit == unit.name and row.role == "activation"}
        assert unit.region == bool(residuals & {"recompute", "offload"})


@given(rule_lists)
@FIXTURES
def test_gradients_and_state_are_split_at_least_as_their_parameter(rules, llama_spec, fake_backend, entries) -> None:
    plan = _plan(rules, llama_spec, fake_backend, entries)
    for param in plan.rows_of("param"):
        grad, state = plan.row(param.path, "grad"), plan.row(param.path, "optimizer_state")
        assert set(param.layout.items()) <= set(grad.layout.items()) <= set(state.layout.items())


@given(rule_lists)
@FIXTURES
def test_a_rule_below_all_others_changes_only_what_none_of_them_decides(
    rules, llama_spec, fake_backend, entries
) -> None:
    before = _plan(rules, llama_spec, fake_backend, entries)
    last = {"name": "last", "action": "keep", "match": {"role": ["param", "grad", "optimizer_state", "activation"]}}
    after = _plan(rules, llama_spec, fake_backend, [*entries, last])
    for change in before.diff(after):
        assert change.field in ("rule", "rules")
        assert change.after == "last" or "last" in change.after.values()


@given(rule_lists)
@FIXTURES
def test_a_plan_survives_json_and_compression(rules, llama_spec, fake_backend, entries) -> None:
    plan = _plan(rules, llama_spec, fake_backend, entries)
    assert Plan.from_json(plan.to_json()).to_json() == plan.to_json()
    lines = compress(plan, plan.rows)
    assert sum(line.num_rows for line in lines) == len(plan.rows)
    keys = [(line.row.path, line.row.role) for line in lines]
    assert len(keys) == len(set(keys))


@given(st.integers(1, 40), st.floats(0.01, 1.0))
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_fraction_is_the_nearest_whole_number_of_layers(rules, llama_spec, fake_backend, layers, fraction) -> None:
    policy = rules({"action": "offload", "match": {"tensor": "q"}, "fraction": fraction})
    plan = make_plan(policy, llama_spec(layers=layers), backend=fake_backend())
    count = sum(row.residual == "offload" for row in plan.rows)
    assert count == 1 if fraction * layers < 1 else abs(count - fraction * layers) <= 0.5 + 1e-9
    assert [unit.region for unit in plan.units] == [i < count for i in range(layers)]


@given(
    st.lists(st.integers(1, 12), max_size=3).map(tuple),
    st.integers(1, 4),
    st.integers(1, 4),
    st.sampled_from(["flat", "divisible", "first"]),
)
@settings(max_examples=200, deadline=None)
def test_a_layout_splits_evenly_where_the_backend_needs_it(shape, fsdp, expert, sharding) -> None:
    sizes = {"expert": expert, "fsdp": fsdp}
    parted = split(shape, {"expert": "auto", "fsdp": "auto"}, sizes, {}, sharding=sharding)
    if sharding == "divisible" and not parted.fault:
        for dimension in set(parted.layout.values()):
            parts = math.prod(sizes[axis] for axis, at in parted.layout.items() if at == dimension)
            assert shape[dimension] % parts == 0
    assert not parted.fault or sharding == "divisible"
    assert set(parted.layout) | set(parted.whole) == set(sizes) or parted.fault


@pytest.mark.parametrize("sharding", ["flat", "divisible", "first"])
def test_a_layout_over_one_device_is_no_fault(sharding) -> None:
    assert not split((3,), {"fsdp": "auto"}, {"fsdp": 1}, {}, sharding=sharding).fault

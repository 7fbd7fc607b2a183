"""Mesh and layouts: which axis splits which dimension, and the bytes a device holds."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from memopt import MemoptError, make_plan
from memopt.lowering.entries import ITEM_BITS
from memopt.lowering.layout import split
from memopt.rules import DtypeName
from memopt.spec import TensorSpec


def codes(error: pytest.ExceptionInfo[MemoptError]) -> list[str]:
    return [problem.code for problem in error.value.problems]


@pytest.mark.parametrize(
    "mesh, world, expected",
    [
        (None, 4, {"fsdp": 4}),
        ({"fsdp": -1}, 8, {"fsdp": 8}),
        ({"replicate": 2, "fsdp": -1}, 8, {"replicate": 2, "fsdp": 4}),
        ({"a": 2, "b": 3, "c": 1}, 6, {"a": 2, "b": 3, "c": 1}),
    ],
)
def test_the_mesh_fills_the_world(rules, llama_spec, fake_backend, mesh, world, expected) -> None:
    settings = {} if mesh is None else {"mesh": mesh}
    plan = make_plan(rules(**settings), llama_spec(), backend=fake_backend(), world_size=world)
    assert dict(plan.mesh) == expected
    assert list(dict(plan.mesh)) == list(expected)


@pytest.mark.parametrize(
    "mesh, world, texts",
    [
        ({"replicate": 1, "fsdp": 2}, 4, ("2 devices", "world has 4", "fsdp: 4")),
        ({"replicate": 1, "fsdp": 2}, 3, ("2 devices", "world has 3", "fsdp: 3")),
        ({"replicate": 2, "fsdp": -1}, 3, ("3 devices", "replicate 2", "multiple of 2")),
        ({"replicate": 4, "fsdp": 2}, 6, ("8 devices", "world has 6", "product is the world")),
    ],
)
def test_a_mesh_that_is_not_the_world_shows_both_numbers_and_the_fix(
    rules, llama_spec, fake_backend, mesh, world, texts
) -> None:
    with pytest.raises(MemoptError) as error:
        make_plan(rules(mesh=mesh), llama_spec(), backend=fake_backend(), world_size=world)
    assert codes(error) == ["mesh-world"]
    said = f"{error.value.problems[0].message} {error.value.problems[0].hint}"
    assert all(text in said for text in texts), said


def test_an_unknown_axis_names_the_nearest(rules, llama_spec, fake_backend) -> None:
    with pytest.raises(MemoptError) as error:
        make_plan(
            rules({"action": "shard", "match": {"role": "param"}, "axis": "fdsp"}), llama_spec(), backend=fake_backend()
        )
    assert codes(error) == ["unknown-axis"]
    assert error.value.problems[0].hint == "did you mean `fsdp`?"


@pytest.mark.parametrize(
    "shape, axes, sizes, sharding, layout",
    [
        ((16, 8), {"fsdp": "auto"}, {"fsdp": 4}, "divisible", {"fsdp": 0}),
        ((13, 8), {"fsdp": "auto"}, {"fsdp": 2}, "divisible", {"fsdp": 1}),
        ((8, 16), {"fsdp": "auto"}, {"fsdp": 4}, "divisible", {"fsdp": 1}),
        ((8, 4, 6), {"expert": 0, "fsdp": "auto"}, {"expert": 2, "fsdp": 2}, "divisible", {"expert": 0, "fsdp": 2}),
        ((8, 3), {"expert": 0, "fsdp": "auto"}, {"expert": 2, "fsdp": 4}, "divisible", {"expert": 0, "fsdp": 0}),
        ((13, 8), {"fsdp": "auto"}, {"fsdp": 2}, "flat", {"fsdp": -1}),
        ((), {"fsdp": "auto"}, {"fsdp": 2}, "flat", {"fsdp": -1}),
        ((13, 8), {"fsdp": "auto"}, {"fsdp": 2}, "first", {"fsdp": 0}),
        ((13, 8), {"fsdp": 1}, {"fsdp": 2}, "divisible", {"fsdp": 1}),
        ((1,), {"fsdp": "auto"}, {"fsdp": 2}, "divisible", {}),
        ((), {"fsdp": "auto"}, {"fsdp": 2}, "divisible", {}),
    ],
)
def test_auto_is_what_the_backend_means_by_it(shape, axes, sizes, sharding, layout) -> None:
    assert split(shape, axes, sizes, {}, sharding=sharding).layout == layout


@pytest.mark.parametrize(
    "axis, said",
    [({"fsdp": 0}, "dimension 0 of (13, 7)"), ("fsdp", "no dimension of (13, 7)"), ({"fsdp": 2}, "does not exist")],
)
def test_an_uneven_dimension_names_weight_axis_and_size(rules, llama_spec, fake_backend, axis, said) -> None:
    spec = llama_spec()
    odd = TensorSpec("odd.weight", "param", (13, 7), "float32", module="odd")
    policy = rules({"action": "shard", "match": {"role": "param", "path": "odd.*"}, "axis": axis})
    with pytest.raises(MemoptError) as error:
        make_plan(policy, replace(spec, tensors=(*spec.tensors, odd)), backend=fake_backend(), world_size=2)
    assert codes(error) == ["uneven-dimension"]
    message = error.value.problems[0].message
    assert "`odd.weight`" in message
    assert said in message


def test_flat_shares_are_rounded_up_to_an_element(rules, llama_spec, fake_backend) -> None:
    spec = llama_spec()
    odd = TensorSpec("odd.weight", "param", (13, 7), "float32", module="odd")
    plan = make_plan(
        rules({"action": "shard", "match": {"role": "param"}}),
        replace(spec, tensors=(*spec.tensors, odd)),
        backend=fake_backend(sharding="flat"),
        world_size=4,
    )
    row = plan.row("odd.weight", "param")
    assert (row.layout, row.nbytes, row.global_nbytes) == ({"fsdp": -1}, 23 * 4, 13 * 7 * 4)


def test_too_few_elements_to_split_stay_whole_and_are_noted(rules, llama_spec, fake_backend) -> None:
    spec = llama_spec()
    scalar = TensorSpec("scale", "param", (), "float32")
    plan = make_plan(
        rules({"action": "shard", "match": {"role": "param"}}),
        replace(spec, tensors=(*spec.tensors, scalar)),
        backend=fake_backend(),
        world_size=2,
    )
    assert plan.row("scale", "param").layout == {}
    assert any("`scale`: fewer elements than `fsdp` has devices (2)" in warning for warning in plan.warnings)


def test_existing_shardings_are_left_alone_and_divide_bytes(rules, llama_spec, fake_backend) -> None:
    spec = llama_spec()
    tensors = tuple(
        replace(t, sharding={"model": 0}, axis_sizes={"model": 2}) if t.path == "lm_head.weight" else t
        for t in spec.tensors
    )
    spec = replace(spec, tensors=tensors)
    plan = make_plan(rules({"action": "shard", "match": {"role": "param"}}), spec, backend=fake_backend(), world_size=8)
    assert plan.mesh == (("fsdp", 4), ("model", 2))
    row = plan.row("lm_head.weight", "param")
    assert row.layout == {"fsdp": 1, "model": 0}
    assert row.nbytes == row.global_nbytes // 8
    untouched = make_plan(rules(), spec, backend=fake_backend(), world_size=8).row("lm_head.weight", "param")
    assert (untouched.layout, untouched.nbytes) == ({"model": 0}, untouched.global_nbytes // 2)


@pytest.mark.parametrize("mesh", [{"fsdp": 4}, {"fsdp": -1}, None])
def test_an_axis_of_another_size_than_the_models_is_an_error(rules, llama_spec, fake_backend, mesh) -> None:
    """With -1, or with no mesh at all, the axis would take all four devices and the model's bytes be quartered."""
    spec = llama_spec()
    tensors = tuple(
        replace(t, sharding={"fsdp": 0}, axis_sizes={"fsdp": 2}) if t.path == "lm_head.weight" else t
        for t in spec.tensors
    )
    spec, settings = replace(spec, tensors=tensors), {} if mesh is None else {"mesh": mesh}
    with pytest.raises(MemoptError) as error:
        make_plan(rules(**settings), spec, backend=fake_backend(), world_size=4)
    assert codes(error) == ["mesh-conflict"]
    plan = make_plan(rules(mesh={"data": -1, "fsdp": 2}), spec, backend=fake_backend(), world_size=4)
    assert plan.row("lm_head.weight", "param").nbytes == 16 * 8 * 4 // 2


def test_state_must_be_split_at_least_as_its_parameter(rules, llama_spec, fake_backend) -> None:
    policy = rules(
        {"action": "shard", "match": {"role": "param"}, "axis": "fsdp"},
        {"name": "state", "action": "shard", "match": {"role": "optimizer_state"}, "axis": "replicate"},
        mesh={"replicate": 2, "fsdp": 2},
    )
    with pytest.raises(MemoptError) as error:
        make_plan(policy, llama_spec(), backend=fake_backend(), world_size=4)
    assert codes(error) == ["layout-conflict"]
    wider = rules(
        {"action": "shard", "match": {"role": "param"}, "axis": "fsdp"},
        {"action": "shard", "match": {"role": "optimizer_state"}, "axis": {"fsdp": "auto", "replicate": "auto"}},
        mesh={"replicate": 2, "fsdp": 2},
    )
    plan = make_plan(wider, llama_spec(), backend=fake_backend(sharding="flat"), world_size=4)
    assert plan.row("lm_head.weight", "optimizer_state").layout == {"replicate": -1, "fsdp": -1}
    assert plan.row("lm_head.weight", "param").layout == {"fsdp": -1}


def test_gradients_split_alone_are_an_error(rules, llama_spec, fake_backend) -> None:
    with pytest.raises(MemoptError) as error:
        make_plan(
            rules({"action": "shard", "match": {"role": "grad"}}), llama_spec(), backend=fake_backend(), world_size=2
        )
    assert codes(error) == ["layout-conflict"]
    assert "role: [grad, optimizer_state]" in (error.value.problems[0].hint or "")
    both = rules({"action": "shard", "match": {"role": ["grad", "optimizer_state"]}})
    plan = make_plan(both, llama_spec(), backend=fake_backend(), world_size=2)
    assert plan.row("lm_head.weight", "grad").layout == plan.row("lm_head.weight", "optimizer_state").layout != {}


def test_deferred_reduction_keeps_whole_gradients_and_the_plan_shows_it(rules, llama_spec, fake_backend) -> None:
    shard = {"action": "shard", "match": {"role": "param"}}
    each = make_plan(rules(shard, accumulate={"steps": 4}), llama_spec(), backend=fake_backend(), world_size=2)
    last = make_plan(
        rules(shard, accumulate={"steps": 4, "reduce": "last"}), llama_spec(), backend=fake_backend(), world_size=2
    )
    assert each.row("lm_head.weight", "grad").layout == {"fsdp": 0}
    assert last.row("lm_head.weight", "grad").layout == {}
    assert last.row("lm_head.weight", "grad").nbytes == 2 * each.row("lm_head.weight", "grad").nbytes
    assert any("keeps whole gradients" in warning for warning in last.warnings)


def test_gradients_cannot_be_both_split_by_rule_and_kept_whole(rules, llama_spec, fake_backend) -> None:
    policy = rules(
        {"action": "shard", "match": {"role": ["grad", "optimizer_state"]}}, accumulate={"steps": 2, "reduce": "last"}
    )
    with pytest.raises(MemoptError) as error:
        make_plan(policy, llama_spec(), backend=fake_backend(), world_size=2)
    assert codes(error) == ["layout-conflict"]


@pytest.mark.parametrize("dtype, nbytes", [("int4", 8), ("float8_e4m3fn", 16), ("complex64", 128), ("key<fry>", None)])
def test_bytes_follow_the_dtype_and_are_unknown_where_it_has_no_size(
    rules, llama_spec, fake_backend, dtype, nbytes
) -> None:
    spec = llama_spec()
    state = TensorSpec("state", "buffer", (16,), dtype)
    plan = make_plan(rules(), replace(spec, tensors=(*spec.tensors, state)), backend=fake_backend())
    assert plan.row("state", "buffer").nbytes == nbytes


def test_precision_sets_master_and_state_and_leaves_frozen_weights(rules, llama_spec, fake_backend) -> None:
    spec = llama_spec()
    tensors = tuple(
        replace(t, dtype="bfloat16", trainable=False) if t.path == "embed_tokens.weight" else t for t in spec.tensors
    )
    plan = make_plan(
        rules(precision={"compute": "bfloat16", "master": "float32", "optimizer_state": "bfloat16"}),
        replace(spec, tensors=tensors),
        backend=fake_backend(),
    )
    assert plan.row("embed_tokens.weight", "param").dtype == "bfloat16"
    assert plan.row("lm_head.weight", "param").dtype == "float32"
    assert plan.row("lm_head.weight", "grad").dtype == "float32"
    assert plan.row("lm_head.weight", "optimizer_state").dtype == "bfloat16"
    assert plan.row("rotary_emb.inv_freq", "buffer").dtype == "float32"


def test_every_dtype_a_policy_can_name_has_a_size() -> None:
    assert set(get_args(DtypeName)) == set(ITEM_BITS)

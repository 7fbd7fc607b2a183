"""Reports about settings that reach nobody, read back from what each backend really runs: the operations of a step."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from memopt import MemoptError, apply_policy, load_policy, make_plan
from memopt.backend import backend_names
from memopt_torch.testing import RankFailed, run_fake

WORKLOAD = {
    "name": "tiny", "family": "llama", "layers": 4, "hidden": 32, "intermediate": 48, "heads": 2, "kv_heads": 2,
    "vocab": 64, "tie_embeddings": False, "batch": 8, "sequence": 8, "optimizer": {"name": "adamw", "lr": 0.001},
}  # fmt: skip
UNITS = {"units": ["layers.*", "embed_tokens", "norm", "lm_head"]}


def _rule(action: str, *, other: dict[str, Any] | None = None, **match: Any) -> dict[str, Any]:
    return {**UNITS, "rules": [{"name": "r", "action": action, "match": match, **(other or {})}]}


SHARD = _rule("shard", role="param")
GATE = _rule("offload", tensor="mlp_gate")
STATE = _rule("offload", role="optimizer_state")
LAYER = {"match": "layers.*"}

# Key -> (settings without it, settings with it at a value that is not its default).
KEYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "mesh": (SHARD, {**SHARD, "mesh": {"replicate": 2, "fsdp": -1}}),
    "units.match": ({**SHARD, "units": ["layers.*"]}, {**SHARD, "units": ["layers.0"]}),
    "units.group": (SHARD, {**SHARD, "units": ["layers.*", {"match": ["norm", "lm_head"], "group": True}]}),
    "units.reshard_after_forward": (
        {**SHARD, "units": [LAYER]},
        {**SHARD, "units": [{**LAYER, "reshard_after_forward": False}]},
    ),
    "units.prefetch.forward": (
        {**SHARD, "units": [LAYER]},
        {**SHARD, "units": [{**LAYER, "prefetch": {"forward": 2}}]},
    ),
    "units.prefetch.backward": (
        {**SHARD, "units": [LAYER]},
        {**SHARD, "units": [{**LAYER, "prefetch": {"backward": 2}}]},
    ),
    "unit_defaults.reshard_after_forward": (SHARD, {**SHARD, "unit_defaults": {"reshard_after_forward": False}}),
    "unit_defaults.prefetch.forward": (SHARD, {**SHARD, "unit_defaults": {"prefetch": {"forward": 0}}}),
    "unit_defaults.prefetch.backward": (SHARD, {**SHARD, "unit_defaults": {"prefetch": {"backward": 0}}}),
    "precision.compute": (SHARD, {**SHARD, "precision": {"compute": "bfloat16", "reduce": "bfloat16"}}),
    "precision.master": (
        {**SHARD, "precision": {"compute": "bfloat16", "reduce": "bfloat16"}},
        {**SHARD, "precision": dict.fromkeys(("compute", "reduce", "master", "optimizer_state"), "bfloat16")},
    ),
    "precision.reduce": (SHARD, {**SHARD, "precision": {"reduce": "bfloat16"}}),
    "precision.optimizer_state": (SHARD, {**SHARD, "precision": {"optimizer_state": "bfloat16"}}),
    "accumulate.reduce": (
        {**SHARD, "accumulate": {"steps": 2}},
        {**SHARD, "accumulate": {"steps": 2, "reduce": "last"}},
    ),
    "rules.action": (_rule("keep", role="param"), SHARD),
    "rules.axis": (
        {**SHARD, "mesh": {"replicate": 2, "fsdp": 2}},
        {**_rule("shard", role="param", other={"axis": "replicate"}), "mesh": {"replicate": 2, "fsdp": 2}},
    ),
    "rules.memory_kind": (UNITS, _rule("offload", tensor="mlp_gate", other={"memory_kind": "pinned_host"})),
    "rules.fraction": (GATE, _rule("offload", tensor="mlp_gate", other={"fraction": 0.5})),
    "rules.update_on": (STATE, _rule("offload", role="optimizer_state", other={"update_on": "host"})),
    "rules.match.role": (SHARD, _rule("shard", role="optimizer_state")),
    "rules.match.path": (SHARD, _rule("shard", role="param", path="layers.0.*")),
    "rules.match.unit": (SHARD, _rule("shard", role="param", unit="layers.0")),
    "rules.match.name": (
        _rule("offload", role="activation", tensor="mlp_gate"),
        _rule("offload", role="activation", tensor="mlp_gate", name="nobody"),
    ),
    "rules.match.tensor": (GATE, _rule("offload", tensor="mlp_up")),
    "rules.match.op": (_rule("recompute", unit="layers.*"), _rule("recompute", unit="layers.*", op="matmul")),
    "rules.match.min_bytes": (SHARD, _rule("shard", role="param", min_bytes="2KiB")),
    "rules.match.dtype": (SHARD, _rule("shard", role="param", dtype="int32")),
    "rules.match.trainable": (SHARD, _rule("shard", role="param", trainable=False)),
    "rules.match.layers.first": (GATE, _rule("offload", tensor="mlp_gate", layers={"first": 1})),
    "rules.match.layers.last": (GATE, _rule("offload", tensor="mlp_gate", layers={"last": 1})),
    "rules.match.layers.every": (GATE, _rule("offload", tensor="mlp_gate", layers={"every": 2})),
    "rules.match.layers.offset": (
        _rule("offload", tensor="mlp_gate", layers={"every": 2}),
        _rule("offload", tensor="mlp_gate", layers={"every": 2, "offset": 1}),
    ),
    "rules.match.layers.index": (GATE, _rule("offload", tensor="mlp_gate", layers=[3])),
    "backend_options": (
        STATE,
        {**STATE, "backend_options": {"torch": {"engine": "fsdp2"}, "jax": {"optimizer": "whole"}}},
    ),
}

# Keys that no operation of a step can show, and the test that reads each back.
ELSEWHERE = {
    "accumulate.steps": "how often the user's loop calls backward; the plan counts it (tests/planning)",
    "budget.device": "a verdict of the plan (test_plan_verdicts.py)",
    "budget.host": "a verdict of the plan (test_plan_verdicts.py)",
    "rules.name": "what the plan, the report and errors call the rule (test_policy_names.py)",
    "rules.optional": "lets a rule match nothing (test_policy_keys.py)",
    "rules.match.layers.of": "which of two stacks is meant; the model here has one (test_policy_keys.py)",
}


class _Operations(TorchDispatchMode):
    """Every operation with the shapes, dtypes and places it got: collectives and copies are operations too."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [a for a in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor)]
        self.seen.append(f"{func} {[(tuple(t.shape), str(t.dtype), t.storage_offset()) for t in tensors]}")
        return func(*args, **(kwargs or {}))


def _torch_operations(settings: str) -> tuple[str, ...]:
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=2, vocab_size=64,
            use_cache=False, attn_implementation="eager",
        )
    )  # fmt: skip
    run = apply_policy(model, load_policy({"version": 1, **json.loads(settings)}))
    optimizer = run.optimizer(torch.optim.AdamW, lr=1e-3)
    tokens = torch.zeros((2, 8), dtype=torch.long)

    def step() -> None:
        for _ in range(2):
            run.model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # the engine learns its order here
    with _Operations() as operations:
        step()
    return tuple(operations.seen)


def _jax_operations(settings: str) -> str:
    import jax
    from jax.sharding import AbstractMesh, AxisType

    from memopt.workloads import WorkloadConfig
    from memopt_jax.step import build_step, inspect_workload

    workload = WorkloadConfig.model_validate(WORKLOAD)
    spec = inspect_workload(workload)
    plan = make_plan(load_policy({"version": 1, **json.loads(settings)}), spec, backend="jax", world_size=4)
    names, sizes = zip(*plan.mesh, strict=True)
    mesh = AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * len(names))
    step = build_step(workload, plan, spec, mesh=mesh)
    placed = [str((leaf.shape, leaf.dtype, leaf.sharding)) for leaf in jax.tree.leaves(step.args)]
    return str(jax.jit(step.fn).trace(*step.args).jaxpr) + "\n".join(placed)


@functools.cache
def _outcome(backend: str, settings: str) -> tuple[str, Any]:
    """The step's operations, or what the user is told in their place."""
    try:
        return "runs", (run_fake(_torch_operations, 4, settings) if backend == "torch" else _jax_operations(settings))
    except RankFailed as failed:
        if not isinstance(failed.__cause__, MemoptError):
            raise
        return "refused", str(failed.__cause__)
    except MemoptError as error:
        return "refused", str(error)


def test_every_key_of_the_policy_is_read_back_here_or_in_a_named_place(policy_keys: frozenset[str]) -> None:
    """A key that is added later must be added to one of the two tables (ms-swift#7962)."""
    assert not set(KEYS) & set(ELSEWHERE)
    assert set(KEYS) | set(ELSEWHERE) == policy_keys


@pytest.mark.parametrize("backend", backend_names())
@pytest.mark.parametrize("key", KEYS)
def test_a_key_changes_the_operations_of_a_step_or_is_refused_by_name(key: str, backend: str) -> None:
    """What the backend runs is read back, not what it was handed.

    Family: all settings parsed, one of them used (ms-swift#7962, transformers#25180, accelerate#3778).
    """
    without, with_it = (_outcome(backend, json.dumps(settings)) for settings in KEYS[key])
    if with_it[0] == "refused":
        told = with_it[1]
        assert "rule `r`" in told or key in told or key.partition(".")[0] in told.partition(":")[0], told
    else:
        assert without[0] == "runs", without[1]
        assert with_it != without

"""The DeepSeek-V3-shaped model: its experts are right, and every policy leaves its gradients what they were."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh

from memopt import apply_policy
from memopt.data import byte_batches
from memopt.workloads import WorkloadConfig, load_workload
from memopt_jax import flops
from memopt_jax.compiled import offloaded_bytes
from memopt_jax.models.attention import causal_attention
from memopt_jax.models.experts import Blocks, block_size, routed_experts
from memopt_jax.shardings import place
from memopt_jax.values import equations
from memopt_jax.workloads import build

CONFIGS = Path(__file__).parents[3] / "configs"
POLICIES = CONFIGS / "policies"
BATCH, SEQUENCE = 4, 32
TOKENS = BATCH * SEQUENCE
REST = {"name": "rest", "action": "recompute", "match": {"unit": "layers.*"}}
INPUTS = {"name": "inputs", "action": "offload", "match": {"path": "layers.*.input"}}
EXPERTS = {
    "name": "experts", "action": "shard", "match": {"role": "param", "path": "**.experts.**"},
    "axis": {"expert": 0, "fsdp": "auto"},
}  # fmt: skip
OTHERS = {"name": "others", "action": "shard", "match": {"role": "param"}, "axis": {"expert": "auto", "fsdp": "auto"}}


@cache
def config() -> WorkloadConfig:
    """deepseek-tiny on a smaller batch, with a dense layer more: two of each kind, so that both are real scans."""
    described = load_workload(CONFIGS / "workloads" / "deepseek-tiny.yaml")
    assert isinstance(described, WorkloadConfig)
    assert described.moe is not None
    moe = described.moe.model_copy(update={"dense_layers": 2})
    return described.model_copy(update={"layers": 4, "moe": moe, "batch": BATCH, "sequence": SEQUENCE})


@cache
def batch() -> dict[str, np.ndarray]:
    (tokens,) = byte_batches(batch=BATCH, sequence=SEQUENCE, steps=1, seed=0)
    return {"tokens": tokens}


def gradients(policy: Any, mesh: Mesh) -> tuple[dict[str, np.ndarray], Any]:
    """Every gradient of the loss by path, and the traced program; the plain model's without a policy."""
    workload = build(config(), seed=0)
    model, inputs = workload.model(), batch()
    if policy is not None:
        example = (inputs["tokens"][:, :-1], inputs["tokens"][:, 1:])
        run = apply_policy(model, policy, example_inputs=example, mesh=mesh)
        inputs = place(inputs, run.layouts.batch(inputs))
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params: Any, rest: Any, inputs: Any) -> jax.Array:
        return workload.loss(nnx.merge(graph, params, rest), inputs)

    # Newer XLA for CPUs reorders sums around a recomputed region; see conftest.
    options: Any = {"xla_backend_optimization_level": 0} if jax.__version_info__ >= (0, 11) else {}
    traced = jax.jit(jax.grad(loss)).trace(params, rest, inputs)
    leaves = jax.tree_util.tree_flatten_with_path(
        traced.lower().compile(compiler_options=options)(params, rest, inputs)
    )
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves[0]}, traced.jaxpr


@pytest.fixture(scope="module")
def plain(one_device: Mesh) -> dict[str, np.ndarray]:
    return gradients(None, one_device)[0]


ONE_DEVICE: dict[str, tuple[Any, int]] = {
    "recompute": (POLICIES / "recompute.yaml", 0),
    "offload": (POLICIES / "offload.yaml", 1),
    "latent vectors on the host, in some layers": (
        [
            INPUTS,
            {
                "name": "latent", "action": "offload", "fraction": 0.6,
                "match": {"path": ["layers.*.self_attn.q_a_proj", "layers.*.self_attn.kv_a_proj_with_mqa"]},
            },
            REST,
        ],
        1,
    ),
    "experts' inputs and results on the host": (
        [{"name": "experts", "action": "offload", "match": {"tensor": ["expert_out", "mlp_gate", "mlp_up"]}}, REST],
        1,
    ),
    "parameters on the host": (
        [{"name": "p", "action": "offload", "match": {"role": "param", "path": "layers.**"}}],
        0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ONE_DEVICE)
def test_gradients_equal_the_plain_models_to_the_bit(plain: dict[str, np.ndarray], one_device: Mesh, name: str) -> None:
    policy, offloads = ONE_DEVICE[name]
    policy = {"version": 1, "rules": policy} if isinstance(policy, list) else policy
    ours, jaxpr = gradients(policy, one_device)
    assert plain.keys() == ours.keys()
    worst = {path: float(np.abs(ours[path] - plain[path]).max()) for path in plain}
    assert max(worst.values()) == 0.0, worst
    assert all(np.abs(gradient).max() > 0 for gradient in ours.values())
    assert (offloaded_bytes(jaxpr.jaxpr) > 0) is bool(offloads)


MESHES = {
    "experts split over both": ({"fsdp": 1, "expert": 2}, [EXPERTS, OTHERS], True),
    "weights split over both": ({"fsdp": 2, "expert": 1}, [EXPERTS, OTHERS], False),
    "experts split, layers recomputed": ({"fsdp": 1, "expert": 2}, [EXPERTS, OTHERS, INPUTS, REST], True),
    "fsdp alone": ({"fsdp": 2}, [{**OTHERS, "axis": "fsdp"}, REST], False),
}


@pytest.mark.parametrize("name", MESHES)
def test_two_devices_give_the_plain_models_gradients(plain: dict[str, np.ndarray], name: str) -> None:
    sizes, rules, splits_experts = MESHES[name]
    grid = np.array(jax.devices()[:2]).reshape(tuple(sizes.values()))
    mesh = Mesh(grid, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
    policy = {"version": 1, "mesh": sizes, "rules": rules}
    ours, jaxpr = gradients(policy, mesh)
    for path, gradient in ours.items():
        np.testing.assert_allclose(gradient, plain[path], rtol=0, atol=2e-6 * np.abs(plain[path]).max() + 1e-9)
    gathers = [eqn for eqn in equations(jaxpr.jaxpr) if eqn.primitive.name == "all_gather"]
    assert bool(gathers) is splits_experts  # tokens go to the experts; without the axis no token moves
    assert any(eqn.primitive.name == "shard_map" for eqn in equations(jaxpr.jaxpr))


def dense_experts(x: Any, weights: Any, chosen: Any, gate_up: Any, down: Any) -> Any:
    """Every token through every expert: what the blocks must equal."""
    gate, up = jnp.split(jnp.einsum("bsd,efd->bsef", x, gate_up), 2, axis=-1)
    out = jnp.einsum("bsef,edf->bsed", jax.nn.silu(gate) * up, down)
    share = jnp.sum(jax.nn.one_hot(chosen, gate_up.shape[0]) * weights[..., None], axis=-2)
    return jnp.einsum("bsed,bse->bsd", out, share)


@pytest.mark.parametrize("routing", ["even", "one expert takes all", "an expert gets nothing"])
def test_routed_experts_and_their_gradients_equal_running_every_expert(routing: str) -> None:
    experts, per_token, width, hidden = 6, 3, 16, 24
    keys = jax.random.split(jax.random.key(1), 6)
    x = jax.random.normal(keys[0], (2, 37, width))
    scores = jax.random.normal(keys[1], (2, 37, experts))
    if routing == "one expert takes all":
        scores = scores.at[..., 2].add(100)
    if routing == "an expert gets nothing":
        scores = scores.at[..., 4].add(-100)
    chosen = jax.lax.top_k(scores, per_token)[1]
    weights = jax.random.uniform(keys[2], chosen.shape)
    gate_up = jax.random.normal(keys[3], (experts, 2 * hidden, width)) * 0.2
    down = jax.random.normal(keys[4], (experts, width, hidden)) * 0.2
    wanted = jax.random.normal(keys[5], x.shape)

    def loss_of(run: Any) -> Any:
        def loss(x: Any, weights: Any, gate_up: Any, down: Any) -> Any:
            out = run(x, weights, chosen, gate_up, down)
            return jnp.sum(out * wanted), out

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3), has_aux=True))

    (_, ours), our_gradients = loss_of(routed_experts)(x, weights, gate_up, down)
    (_, theirs), their_gradients = loss_of(dense_experts)(x, weights, gate_up, down)
    np.testing.assert_allclose(ours, theirs, atol=2e-5)
    for ours, theirs in zip(our_gradients, their_gradients, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


def test_no_value_of_the_experts_holds_the_tokens_once_per_expert_or_once_per_choice() -> None:
    """The family of fault: dispatch by masks or capacity, tokens x experts x hidden in memory."""
    tokens, experts, per_token, width, hidden = 1000, 8, 4, 32, 16
    x, weights = jnp.zeros((1, tokens, width)), jnp.zeros((1, tokens, per_token))
    chosen = jnp.zeros((1, tokens, per_token), jnp.int32)
    gate_up, down = jnp.zeros((experts, 2 * hidden, width)), jnp.zeros((experts, width, hidden))
    traced = jax.make_jaxpr(jax.grad(lambda *args: jnp.sum(routed_experts(*args)), argnums=(0, 1, 3, 4)))(
        x, weights, chosen, gate_up, down
    )
    sizes = [int(np.prod(var.aval.shape)) for eqn in equations(traced.jaxpr) for var in eqn.outvars]
    assert max(sizes) == tokens * width


def test_a_loop_over_blocks_counts_the_products_of_an_even_routing() -> None:
    tokens, experts, per_token, width, hidden = 512, 4, 2, 32, 16
    x, weights = jnp.zeros((1, tokens, width)), jnp.zeros((1, tokens, per_token))
    gate_up, down = jnp.zeros((experts, 2 * hidden, width)), jnp.zeros((experts, width, hidden))
    chosen = jnp.zeros((1, tokens, per_token), jnp.int32)
    routed = jax.jit(routed_experts).trace(x, weights, chosen, gate_up, down)
    exact = 2 * tokens * per_token * width * 3 * hidden
    padding = experts // 2 * block_size(tokens * per_token, experts) * 2 * width * 3 * hidden
    counted = flops.count(routed.jaxpr)
    assert counted == flops.FlopCount(exact + padding, num_unknown_loops=0)
    compiled = flops.parse_and_count(routed.lower().compile().as_text() or "")
    assert compiled == counted


def test_the_mask_of_attention_is_never_held_for_all_blocks_at_once() -> None:
    """The family of fault: what needs no data is computed ahead of a differentiated loop, and the causal mask of all
    pairs of positions and all heads is as large as the scores that blocks were to avoid."""
    length, block = 64, 8
    x = jnp.zeros((1, length, 2, 4))

    def loss(x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return jax.checkpoint(lambda x: causal_attention(x, x, x, 0.5, block), prevent_cse=False)(x), None

        return jnp.sum(jax.lax.scan(layer, x, None, length=3)[0])

    traced = jax.make_jaxpr(jax.grad(loss))(x)
    shapes = [var.aval.shape for eqn in equations(traced.jaxpr) for var in eqn.outvars]
    assert max(int(np.prod(shape)) for shape in shapes if shape[-1:] == (length,)) == 2 * block * length


def test_blocks_cover_every_assignment_once() -> None:
    experts = jnp.asarray(np.random.default_rng(0).integers(0, 5, (40, 2)), jnp.int32)
    blocks = Blocks.of(experts, num_experts=4)  # expert 4 is held elsewhere
    seen = []
    for number in range(int(blocks.ends[-1])):
        expert, assignments, tokens = blocks.rows(jnp.int32(number), 40)
        rows = np.asarray(assignments)[np.asarray(tokens) < 40]
        assert (np.asarray(experts).reshape(-1)[rows] == int(expert)).all()
        seen.extend(rows.tolist())
    assert sorted(seen) == np.flatnonzero(np.asarray(experts).reshape(-1) < 4).tolist()

"""Toy models in every form the JAX backend knows, and their gradients under a policy; two host devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, Mesh

from memopt import apply_policy

jax.config.update("jax_num_cpu_devices", 2)  # before the first test touches a device

LAYERS, WIDTH, HIDDEN = 4, 64, 128


class Mlp(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(WIDTH, HIDDEN, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.silu(self.up(x)))


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.mlp = Mlp(rngs)

    def __call__(self, x: jax.Array, scale: float = 1.0) -> jax.Array:
        return x + scale * self.mlp(self.norm(x))


class LoopNet(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.head = nnx.Linear(WIDTH, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class ScanNet(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.split_rngs(splits=LAYERS)(nnx.vmap(Block, in_axes=0, out_axes=0))(rngs)
        self.head = nnx.Linear(WIDTH, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x: jax.Array, layer: Block) -> jax.Array:
            return layer(x)

        return self.head(run(x, self.layers))


class LinenMlp(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(WIDTH, name="down")(nn.silu(nn.Dense(HIDDEN, name="up")(x)))


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, _: Any = None) -> tuple[jax.Array, None]:
        return x + LinenMlp(name="mlp")(nn.RMSNorm(name="norm")(x)), None


class LinenNet(nn.Module):
    scanned: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        if self.scanned:
            stack = nn.scan(LinenBlock, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS)
            x, _ = stack(name="layers")(x, None)
        else:
            for index in range(LAYERS):
                x, _ = LinenBlock(name=f"layers_{index}")(x)
        return nn.Dense(4, name="head")(x)


def function_params() -> dict[str, Any]:
    """Of `function_loss`: a stack of four layers and a head."""
    rng = np.random.default_rng(1)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape) / np.sqrt(shape[-2]), jnp.float32)

    def zeros(*shape: int) -> jax.Array:
        return jnp.zeros(shape, jnp.float32)

    mlp = {
        "up": {"kernel": normal(LAYERS, WIDTH, HIDDEN), "bias": zeros(LAYERS, HIDDEN)},
        "down": {"kernel": normal(LAYERS, HIDDEN, WIDTH), "bias": zeros(LAYERS, WIDTH)},
    }
    return {"layers": {"norm": jnp.ones((LAYERS, WIDTH)), "mlp": mlp}, "head": normal(WIDTH, 4)}


def function_layer(x: jax.Array, w: dict[str, Any]) -> tuple[jax.Array, None]:
    """The toy block as a scan's body; `up` is called as the modules' is."""
    h = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * w["norm"]
    with jax.named_scope("mlp"):
        up = checkpoint_name(h @ w["mlp"]["up"]["kernel"] + w["mlp"]["up"]["bias"], "up")
        down = jax.nn.silu(up) @ w["mlp"]["down"]["kernel"] + w["mlp"]["down"]["bias"]
    return x + down, None


def function_loss(params: dict[str, Any], x: jax.Array) -> jax.Array:
    """A plain function `loss_fn(params, batch)` that scans over its layers."""
    x, _ = jax.lax.scan(function_layer, x, params["layers"])
    return jnp.square(x @ params["head"]).mean()


@pytest.fixture(scope="session")
def inputs() -> jax.Array:
    """A batch of four sequences of eight positions."""
    return jnp.asarray(np.random.default_rng(0).standard_normal((4, 8, WIDTH)), jnp.float32)


@pytest.fixture(scope="session")
def nnx_models() -> Mapping[str, Callable[[nnx.Rngs], nnx.Module]]:
    """`scan` and `loop`."""
    return {"scan": ScanNet, "loop": LoopNet}


@pytest.fixture(scope="session")
def linen_models() -> Mapping[str, nn.Module]:
    """`scan` and `loop`."""
    return {"scan": LinenNet(scanned=True), "loop": LinenNet(scanned=False)}


@pytest.fixture(scope="session")
def one_device() -> Mesh:
    """A mesh of a single device."""
    return Mesh(np.array(jax.devices()[:1]), ("fsdp",), axis_types=(AxisType.Auto,))


@pytest.fixture(scope="session")
def gradients(
    inputs: jax.Array,
    nnx_models: Mapping[str, Callable[[nnx.Rngs], nnx.Module]],
    linen_models: Mapping[str, nn.Module],
    one_device: Mesh,
) -> Callable[..., tuple[dict[str, np.ndarray], Any]]:
    """`gradients(kind, form, policy)` -> ({path: gradient}, jaxpr); without a policy the plain model's, computed
    once."""
    plain: dict[tuple[str, str], dict[str, np.ndarray]] = {}

    def of_nnx(form: str, policy: Any) -> tuple[dict[str, np.ndarray], Any]:
        model = nnx_models[form](nnx.Rngs(0))
        if policy is not None:
            apply_policy(model, policy, example_inputs=inputs, mesh=one_device)
        graph, state = nnx.split(model)

        def loss(state: Any, x: jax.Array) -> jax.Array:
            return (nnx.merge(graph, state)(x) ** 2).mean()

        return _run(loss, state, inputs)

    def of_linen(form: str, policy: Any) -> tuple[dict[str, np.ndarray], Any]:
        model = linen_models[form]
        variables = model.init(jax.random.key(0), inputs)
        if policy is not None:
            model = apply_policy(model, policy, params=variables, example_inputs=inputs, mesh=one_device).model
        return _run(lambda variables, x: jnp.square(model.apply(variables, x)).mean(), variables, inputs)

    def of_function(form: str, policy: Any) -> tuple[dict[str, np.ndarray], Any]:
        if form != "scan":
            raise ValueError("a plain function's layers can only be scanned")
        loss, params = function_loss, function_params()
        if policy is not None:
            run = apply_policy(loss, policy, params=params, example_inputs=inputs, mesh=one_device)
            loss, params = run.model, run.place_params(params)
        return _run(loss, params, inputs)

    def gradients_of(kind: str, form: str, policy: Any = None) -> tuple[dict[str, np.ndarray], Any]:
        run = {"nnx": of_nnx, "linen": of_linen, "function": of_function}[kind]
        if policy is not None:
            return run(form, policy)
        if (kind, form) not in plain:
            plain[kind, form] = run(form, None)[0]
        return plain[kind, form], None

    return gradients_of


# Newer XLA for CPUs fuses a loop stack's bias gradients differently around a recomputed region and so sums them in
# another order (1.5e-8 here). The programs are the same: without the backend's optimisations they give the same bits.
_COMPILER_OPTIONS = {"xla_backend_optimization_level": 0} if jax.__version_info__ >= (0, 11) else {}


def _run(loss: Callable[..., jax.Array], state: Any, inputs: jax.Array) -> tuple[dict[str, np.ndarray], Any]:
    traced = jax.jit(jax.grad(loss)).trace(state, inputs)
    result = traced.lower().compile(compiler_options=_COMPILER_OPTIONS)(state, inputs)
    leaves = jax.tree_util.tree_flatten_with_path(result)[0]
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}, traced.jaxpr

"""Model inventories and a backend that exist for the policy layer's tests alone: no framework is involved."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from pydantic import BaseModel, ConfigDict

from memopt.backend import Capabilities
from memopt.policy import Policy
from memopt.spec import ModelSpec, ModuleSpec, StackSpec, TensorSpec

settings.register_profile("same-every-time", derandomize=True, deadline=None)
settings.load_profile("same-every-time")

EVERYTHING = frozenset(
    {
        *(f"{action}:{role}" for action in ("offload", "fraction") for role in ("param", "grad", "optimizer_state")),
        *("offload:activation", "fraction:activation", "recompute:activation", "layers:scan", "name"),
        *(
            "shard:param",
            "shard:grad",
            "shard:optimizer_state",
            "shard:dimension",
            "update_on:host",
            "update_on:device",
        ),
        *("reshard_after_forward:false", "reshard_after_forward:int", "prefetch", "mesh:replicate", "mesh:custom"),
        *("precision", "precision:float16", "accumulate", "accumulate:last"),
        *(f"op:{op}" for op in ("matmul", "attention", "topk", "random")),
    }
)


class FakeOptions(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    engine: str = "layer"


@dataclass(frozen=True)
class FakeBackend:
    """A backend that can do what `supported` says and never touches a framework."""

    name: str = "fake"
    supported: frozenset[str] = EVERYTHING
    sharding: Any = "divisible"
    instead: Mapping[str, str] = field(default_factory=dict)

    def options(self) -> type[BaseModel]:
        return FakeOptions

    def capabilities(self, options: Mapping[str, Any]) -> Capabilities:
        return Capabilities(self.supported, sharding=self.sharding, instead=self.instead)


def llama(
    *, layers: int = 4, kind: Any = "loop", hidden: int = 8, vocab: int = 16, batch: int = 2, **extra: Any
) -> ModelSpec:
    """A Llama in miniature, as a backend would list it; activations are [batch, 4, ...]."""
    tensors = [TensorSpec("embed_tokens.weight", "param", (vocab, hidden), "float32", module="embed_tokens")]
    modules = [
        ModuleSpec("", "", "LlamaForCausalLM", 0),
        ModuleSpec("embed_tokens", "model.embed_tokens", "Embedding", 1),
    ]
    for i in range(layers):
        tensors += _layer_params(f"layers.{i}", hidden)
        tensors += _layer_values(i, hidden, batch)
        modules.append(ModuleSpec(f"layers.{i}", f"model.layers.{i}", "LlamaDecoderLayer", 1))
        for child in ("self_attn", "self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp", "mlp.gate_proj"):
            path = f"layers.{i}.{child}"
            modules.append(ModuleSpec(path, f"model.{path}", "Linear", 1))
    modules += [ModuleSpec("norm", "model.norm", "LlamaRMSNorm", 1), ModuleSpec("lm_head", "lm_head", "Linear", 1)]
    last = f"layers.{layers - 1}"
    tensors += [
        TensorSpec(last, "activation", (batch, 4, hidden), "float32", ("norm.input",), module=last),
        TensorSpec("norm.weight", "param", (hidden,), "float32", module="norm"),
        TensorSpec("norm", "activation", (batch, 4, hidden), "float32", ("lm_head.input",), module="norm"),
        TensorSpec("lm_head.weight", "param", (vocab, hidden), "float32", module="lm_head"),
        TensorSpec("lm_head", "activation", (batch, 4, vocab), "float32", module="lm_head", op="matmul"),
        TensorSpec("rotary_emb.inv_freq", "buffer", (hidden,), "float32", module="rotary_emb"),
    ]
    return ModelSpec(
        backend="fake",
        family="llama",
        tensors=tuple(tensors),
        modules=tuple(modules),
        stacks=(StackSpec("layers", layers, kind, "LlamaDecoderLayer"),),
        **extra,
    )


def _layer_params(layer: str, hidden: int) -> list[TensorSpec]:
    shapes = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.v_proj": (hidden // 2, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (2 * hidden, hidden),
        "mlp.down_proj": (hidden, 2 * hidden),
    }
    return [
        TensorSpec(f"{layer}.{module}.weight", "param", shape, "float32", (f"model.{layer}.{module}.weight",), module)
        for module, shape in shapes.items()
    ]


def _layer_values(i: int, hidden: int, batch: int) -> list[TensorSpec]:
    layer = f"layers.{i}"
    made_by = "embed_tokens" if i == 0 else f"layers.{i - 1}"

    def value(child: str, width: int, *, aliases: tuple[str, ...] = (), **extra: Any) -> TensorSpec:
        path = f"{layer}.{child}"
        return TensorSpec(path, "activation", (batch, 4, width), "float32", aliases, module=path, **extra)

    return [
        TensorSpec(f"{layer}.input", "activation", (batch, 4, hidden), "float32", (made_by,), module=made_by),
        value("input_layernorm", hidden, aliases=(f"{layer}.self_attn.input", f"{layer}.self_attn.q_proj.input")),
        value("self_attn.q_proj", hidden, op="matmul"),
        value("self_attn.q", hidden, tensor="q"),
        value("self_attn.v_proj", hidden // 2, tensor="v", op="matmul"),
        value(
            "self_attn.attn_out",
            hidden,
            tensor="attn_out",
            op="attention",
            aliases=(f"{layer}.self_attn.o_proj.input",),
        ),
        value("self_attn.o_proj", hidden, tensor="o", op="matmul", aliases=(f"{layer}.self_attn",)),
        value("mlp.gate_proj", 2 * hidden, tensor="mlp_gate", op="matmul"),
        value("mlp.router_choice", 2, op="topk"),
    ]


@pytest.fixture
def llama_spec() -> Callable[..., ModelSpec]:
    """Makes the inventory of a small Llama: `llama_spec(layers=4, kind="loop")`."""
    return llama


@pytest.fixture
def fake_backend() -> type[FakeBackend]:
    """A backend class: `fake_backend(supported=..., sharding=...)`; by default it can do everything."""
    return FakeBackend


@pytest.fixture
def everything() -> frozenset[str]:
    """Every feature a backend can have."""
    return EVERYTHING


@pytest.fixture
def rules() -> Callable[..., Policy]:
    """Makes a policy from rules written as mappings: `rules({...}, {...}, mesh={"fsdp": -1})`."""

    def build(*entries: Mapping[str, Any], **settings: Any) -> Policy:
        from memopt import load_policy

        named = [{"name": f"r{i}", **entry} for i, entry in enumerate(entries)]
        return load_policy({"version": 1, **settings, "rules": named})

    return build


def sized_llama(config: Any) -> ModelSpec:
    """A `WorkloadConfig`'s Llama with every named value at its real size, as a backend would list it; whole batch."""
    from memopt.workloads.initialise import weight_shapes

    tensors = [
        TensorSpec(path, "param", shape, "float32", module=path.rsplit(".", 1)[0])
        for path, shape in weight_shapes(config)
    ]
    modules = [ModuleSpec("", "", "LlamaForCausalLM", 0)]
    width, keys = config.heads * config.size_per_head, config.kv_heads * config.size_per_head
    values = {
        "layer_input": ("input", config.hidden),
        "q": ("self_attn.q", width),
        "k": ("self_attn.k", keys),
        "v": ("self_attn.v_proj", keys),
        "attn_out": ("self_attn.attn_out", width),
        "attn_stats": ("self_attn.attn_stats", config.heads),
        "o": ("self_attn.o_proj", config.hidden),
        "mlp_gate": ("mlp.gate_proj", config.intermediate),
        "mlp_up": ("mlp.up_proj", config.intermediate),
        "mlp_act": ("mlp.act", config.intermediate),
        "mlp_down": ("mlp.down_proj", config.hidden),
    }
    for i in range(config.layers):
        modules.append(ModuleSpec(f"layers.{i}", f"model.layers.{i}", "LlamaDecoderLayer", 1))
        for name, (child, size) in values.items():
            path, shape = f"layers.{i}.{child}", (config.batch, config.sequence, size)
            tensors.append(TensorSpec(path, "activation", shape, "bfloat16", module=path, tensor=name))
    modules += [ModuleSpec(path, f"model.{path}", "Linear", 1) for path in ("embed_tokens", "norm", "lm_head")]
    return ModelSpec(
        backend="sized",
        family="llama",
        tensors=tuple(tensors),
        modules=tuple(modules),
        stacks=(StackSpec("layers", config.layers, "loop", "LlamaDecoderLayer"),),
        batch="global",
    )


@dataclass(frozen=True)
class SizedBackend(FakeBackend):
    """Plans without a framework: bytes follow from the plan's rows, plus `hidden_bytes` that no model foretells."""

    name: str = "sized"
    hidden_bytes: int = 0
    calls: list[Any] = field(default_factory=list)

    def inspect_workload(self, workload: Any) -> ModelSpec:
        return sized_llama(workload)

    def estimate(self, workload: Any, plan: Any, spec: ModelSpec, *, target: Any, progress: Any = None) -> Any:
        from memopt.estimate import Measured, planned_bytes

        self.calls.append(plan)
        planned = planned_bytes(plan)
        held = {role: planned.resident.get((role, "device"), 0) for role in ("param", "grad", "optimizer_state")}
        host = sum(nbytes for (_, kind), nbytes in planned.resident.items() if kind != "device")
        layer = [row for row in plan.rows_of("activation") if row.unit == plan.units[-1].name]
        own = sum(row.nbytes or 0 for row in layer if row.residual in ("recompute", "offload"))
        return Measured(
            method="fake-trace",
            by_role={
                **held,
                "activation": planned.saved["keep"] + own,
                "gathered": planned.gathered,
                "temp": self.hidden_bytes,
            },
            host_bytes=host + planned.saved["offload"],
            to_host_bytes=planned.saved["offload"],
            to_device_bytes=planned.saved["offload"],
            left_out=("allocator rounding",),
            versions={"sized": "1"},
        )


@pytest.fixture
def sized_backend() -> type[SizedBackend]:
    """A backend class that plans by the plan's own bytes: `sized_backend(hidden_bytes=...)`."""
    return SizedBackend

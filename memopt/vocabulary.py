"""Neutral names of a transformer layer's values: which module path each family uses for them.

The tables are relative to a layer (`layers.3`, `transformer.h.3`). Some values are no module's output and have pseudo
paths that the backends emit: `q` and `k` after rotary embedding, `attn_out` (the result of the attention operation,
before the output projection), `attn_stats` (its softmax statistics) and `act` (the input of the down projection).

Sources: the modeling files of Hugging Face Transformers 5 for each family.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from .matching import matches

_ATTENTION = {
    "layer_input": ("input",),
    "q": ("self_attn.q",),
    "k": ("self_attn.k",),
    "v": ("self_attn.v_proj",),
    "attn_out": ("self_attn.attn_out",),
    "attn_stats": ("self_attn.attn_stats",),
    "o": ("self_attn.o_proj",),
}
_MLP = {
    "mlp_gate": ("mlp.gate_proj",),
    "mlp_up": ("mlp.up_proj",),
    "mlp_act": ("mlp.act",),
    "mlp_down": ("mlp.down_proj",),
}
_LLAMA = {**_ATTENTION, **_MLP}
# Routed experts are one module of stacked weights (`mlp.experts`) in Transformers 5, a list of MLPs before that.
_MOE = {
    "router": ("mlp.gate", "mlp.gate[0]"),  # the logits, beside the chosen experts and their weights
    "expert_in": ("mlp.experts.expert_in", "mlp.experts.input"),
    "expert_out": ("mlp.experts.expert_out", "mlp.experts"),
}
_EXPERT_MLP = {
    "mlp_gate": ("mlp.gate_proj", "mlp.experts.gate_proj", "mlp.experts.*.gate_proj"),
    "mlp_up": ("mlp.up_proj", "mlp.experts.up_proj", "mlp.experts.*.up_proj"),
    "mlp_act": ("mlp.act", "mlp.experts.act", "mlp.experts.*.act"),
    "mlp_down": ("mlp.down_proj", "mlp.experts.down_proj", "mlp.experts.*.down_proj"),
}
_SHARED = {
    name: (*globs, *(f"mlp.{module}.{globs[0].removeprefix('mlp.')}" for module in ("shared_expert", "shared_experts")))
    for name, globs in _EXPERT_MLP.items()
}
_MIXTRAL_MLP = {
    "mlp_gate": ("mlp.experts.gate_proj", "block_sparse_moe.experts.*.w1"),
    "mlp_up": ("mlp.experts.up_proj", "block_sparse_moe.experts.*.w3"),
    "mlp_act": ("mlp.experts.act", "block_sparse_moe.experts.*.act"),
    "mlp_down": ("mlp.experts.down_proj", "block_sparse_moe.experts.*.w2"),
    "router": ("mlp.gate", "block_sparse_moe.gate"),
    "expert_in": ("mlp.experts.expert_in", "mlp.experts.input", "block_sparse_moe.experts.*.input"),
    "expert_out": ("mlp.experts.expert_out", "mlp.experts", "block_sparse_moe.experts.*"),
}
_GPT2 = {
    "layer_input": ("input",),
    "q": ("attn.q",),
    "k": ("attn.k",),
    "v": ("attn.v",),
    "attn_out": ("attn.attn_out",),
    "attn_stats": ("attn.attn_stats",),
    "o": ("attn.c_proj",),
    "mlp_up": ("mlp.c_fc",),
    "mlp_act": ("mlp.act",),
    "mlp_down": ("mlp.c_proj",),
}
_T5 = {
    "layer_input": ("input",),
    "q": ("layer.*.*Attention.q",),
    "k": ("layer.*.*Attention.k",),
    "v": ("layer.*.*Attention.v",),
    "attn_out": ("layer.*.*Attention.attn_out",),
    "attn_stats": ("layer.*.*Attention.attn_stats",),
    "o": ("layer.*.*Attention.o",),
    "mlp_gate": ("layer.*.DenseReluDense.wi_0",),
    "mlp_up": ("layer.*.DenseReluDense.wi_1", "layer.*.DenseReluDense.wi"),
    "mlp_act": ("layer.*.DenseReluDense.act_out", "layer.*.DenseReluDense.wo.input"),
    "mlp_down": ("layer.*.DenseReluDense.wo",),
}
_DEEPSEEK_V = {"v": ("self_attn.v",)}  # latent attention: v is a slice of kv_b_proj's output

TABLES: Mapping[str, Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "llama": _LLAMA,
        "qwen": {**_ATTENTION, **_SHARED, **_MOE},
        "mixtral": {**_ATTENTION, **_MIXTRAL_MLP},
        "deepseek": {**_ATTENTION, **_DEEPSEEK_V, **_SHARED, **_MOE},
        "gpt2": _GPT2,
        "t5": _T5,
    }
)
"""Family -> neutral name -> globs relative to a layer."""

_FAMILY_PREFIXES = (
    ("Llama", "llama"),
    ("Qwen", "qwen"),
    ("Mixtral", "mixtral"),
    ("Mistral", "llama"),
    ("Deepseek", "deepseek"),
    ("DeepSeek", "deepseek"),
    ("GPT2", "gpt2"),
    ("T5", "t5"),
)
_LAYER_ENDINGS = ("DecoderLayer", "Block", "Layer", "Attention", "Model", "ForCausalLM", "ForConditionalGeneration")


def family_of(class_names: Iterable[str]) -> str | None:
    """The family whose class names these are, or None.

    >>> family_of(["LlamaForCausalLM", "LlamaDecoderLayer", "Linear"])
    'llama'
    """
    for class_name in class_names:
        for prefix, family in _FAMILY_PREFIXES:
            if class_name.startswith(prefix) and class_name.endswith(_LAYER_ENDINGS):
                return family
    return None


def tensor_name(family: str | None, path: str) -> str | None:
    """The neutral name of a value within a layer; `path` is relative to the layer or a whole canonical path.

    >>> tensor_name("llama", "layers.3.mlp.gate_proj"), tensor_name("llama", "self_attn.q")
    ('mlp_gate', 'q')
    """
    table = TABLES.get(family or "", {})
    relative = _relative(path)
    for name, globs in table.items():
        if any(matches(glob, relative) for glob in globs):
            return name
    return None


def _relative(path: str) -> str:
    """The path below the outermost index (`encoder.block.3.layer.0.x` -> `layer.0.x`), as layers are lists."""
    parts = path.split(".")
    for i, part in enumerate(parts[:-1]):
        if part.isdigit() and not _is_table_index(parts[: i + 1]):
            return ".".join(parts[i + 1 :])
    return path


def _is_table_index(parts: list[str]) -> bool:
    """Whether the index already is inside a layer (`layer.0`, `mlp.experts.3`)."""
    return (len(parts) == 2 and parts[0] == "layer") or "experts" in parts

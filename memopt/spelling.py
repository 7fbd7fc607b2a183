"""Near misses: the right idea under another tool's name, and the slip of a letter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .errors import close_spellings, did_you_mean

OTHER_NAMES: Mapping[str, str] = {
    # keys of other tools -> where the thing is said here
    "activation_checkpointing": "a rule with `action: recompute`",
    "gradient_checkpointing": "a rule with `action: recompute`",
    "remat": "`action: recompute`",
    "remat_policy": "rules with `action: recompute`, `keep` or `offload`",
    "checkpoint": "`action: recompute`",
    "cpu_offload": "a rule with `action: offload`",
    "offload_optimizer": "a rule with `action: offload` and `match: {role: optimizer_state}`",
    "offload_param": "a rule with `action: offload` and `match: {role: param}`",
    "zero_stage": "rules with `action: shard` on param, grad and optimizer_state",
    "sharding_strategy": "rules with `action: shard`, and `reshard_after_forward`",
    "fsdp": "a rule with `action: shard`, and an axis of `mesh`",
    "auto_wrap_policy": "`units`",
    "wrap": "`units`",
    "transformer_layer_cls_to_wrap": "`units`",
    "fsdp_transformer_layer_cls_to_wrap": "`units`",
    "modules": "`units`",
    "layers_to_wrap": "`units`",
    "mixed_precision": "`precision`",
    "mp_policy": "`precision`",
    "dtypes": "`precision`",
    "param_dtype": "`compute`",
    "compute_dtype": "`compute`",
    "master_dtype": "`master`",
    "reduce_dtype": "`reduce`",
    "gradient_accumulation_steps": "`accumulate: {steps: ...}`",
    "gradient_accumulation": "`accumulate: {steps: ...}`",
    "grad_accum": "`accumulate: {steps: ...}`",
    "micro_batches": "`steps`",
    "num_steps": "`steps`",
    "device_mesh": "`mesh`",
    "world_size": "`mesh`; the world's size is given when planning (`--world-size`) or by the launcher",
    "memory_limit": "`budget: {device: ...}`",
    "max_memory": "`budget: {device: ...}`",
    "hbm": "`device`",
    "gpu": "`device`",
    "cpu": "`host`",
    "limit_all_gathers": "`prefetch`",
    "backward_prefetch": "`prefetch: {backward: ...}`",
    "forward_prefetch": "`prefetch: {forward: ...}`",
    "options": "`backend_options`",
    "pattern": "`path`",
    "module": "`path` (a glob over module paths)",
    "modules_to_save": "a rule with `action: keep`",
    "regex": "`path` (a glob, not a regular expression)",
    "checkpoint_name": "`name`",
    "names": "`name`",
    "tensors": "`tensor`",
    "kind": "`role`",
    "type": "`role` in a selector, `action` in a rule",
    "ops": "`op`",
    "layer": "`layers`",
    "min_size": "`min_bytes`",
    "min_num_params": "`min_bytes`",
    "requires_grad": "`trainable`",
    "ratio": "`fraction`",
    "percent": "`fraction` (0 to 1)",
    "share": "`fraction`",
    "device": "`memory_kind`",
    "pin_memory": "`memory_kind: pinned_host`",
    "selector": "`match`",
    "when": "`match`",
    "where": "`match`",
    "policy": "`action`",
    "do": "`action`",
    "dim": "`axis: {fsdp: 0}`",
    "id": "`name`",
    "nth": "`every`",
    "step": "`every`",
    "start": "`offset`",
    "stack": "`of`",
    "indices": "`index`",
}

OTHER_VALUES: Mapping[str, str] = {
    "remat": "recompute",
    "checkpoint": "recompute",
    "rematerialize": "recompute",
    "save": "keep",
    "none": "keep",
    "cpu_offload": "offload",
    "swap": "offload",
    "fsdp": "shard",
    "zero": "shard",
    "split": "shard",
    "parameter": "param",
    "parameters": "param",
    "weight": "param",
    "weights": "param",
    "gradient": "grad",
    "gradients": "grad",
    "optimizer": "optimizer_state",
    "optim": "optimizer_state",
    "opt_state": "optimizer_state",
    "act": "activation",
    "residual": "activation",
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "f32": "float32",
    "float": "float32",
    "cpu": "pinned_host",
    "host": "pinned_host",
    "unpinned_host": "pinned_host",
    "q_proj": "q",
    "query": "q",
    "k_proj": "k",
    "key": "k",
    "v_proj": "v",
    "value": "v",
    "o_proj": "o",
    "out_proj": "o",
    "gate": "mlp_gate",
    "gate_proj": "mlp_gate",
    "up_proj": "mlp_up",
    "down_proj": "mlp_down",
    "input": "layer_input",
    "block_input": "layer_input",
    "dot": "matmul",
    "linear": "matmul",
    "einsum": "matmul",
    "sdpa": "attention",
    "flash_attention": "attention",
    "top_k": "topk",
    "dropout": "random",
    "rng": "random",
    "gpu": "device",
    "hbm": "device",
}


def key_hint(got: str, allowed: Sequence[str]) -> str:
    """The nearest allowed key, what another tool's key is called here, or all of them."""
    listing = f"the keys here are {', '.join(allowed)}"
    folded = got.casefold().replace("-", "_")
    near = did_you_mean(folded, allowed)
    meant = OTHER_NAMES.get(folded)
    if meant is None or folded in allowed:
        return near or listing
    return f"here that is {meant}" + (f"; {near}" if near and near.split("`")[1] not in meant else "")


def meant_key(got: str, allowed: Sequence[str]) -> str | None:
    """The one allowed key that a misspelt one is near to; None for another tool's key, or where several are as near."""
    folded = got.casefold().replace("-", "_")
    near = close_spellings(folded, allowed)
    return near[0] if len(near) == 1 and (folded not in OTHER_NAMES or folded in allowed) else None


def meant_value(got: object, allowed: Sequence[str]) -> str | None:
    """The one allowed value that was meant, by another tool's name or by spelling."""
    if not isinstance(got, str):
        return None
    folded = got.casefold().replace("-", "_")
    meant = OTHER_VALUES.get(folded)
    near = [meant] if meant is not None and meant in allowed else close_spellings(folded, allowed)
    return near[0] if len(near) == 1 else None


def value_hint(got: object, allowed: Sequence[str]) -> str | None:
    """The nearest allowed value, by another tool's name or by spelling; None where nothing is near."""
    if not isinstance(got, str):
        return None
    folded = got.casefold().replace("-", "_")
    meant = OTHER_VALUES.get(folded)
    if meant is not None and meant in allowed:
        return f"write `{meant}`"
    return did_you_mean(folded, allowed)

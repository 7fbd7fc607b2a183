"""Workloads as torch modules: Transformers' models built from a workload's numbers, with our weights in them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from memopt.errors import MemoptError
from memopt.matching import canonical
from memopt.workloads import HfWorkload, OptimizerConfig, Workload, WorkloadConfig
from memopt.workloads.initialise import initial_weight, weight_shapes

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def build(config: WorkloadConfig | HfWorkload, *, seed: int | None = None, world_size: int = 1) -> Workload:
    """The workload with a Transformers model; nothing is allocated before `.model()` is called.

    Args:
        config: A YAML workload, or a local Transformers model.
        seed: With a seed, `.model()` holds `initial_weights`; without, the model's own initialisation (the meta device
            and fake tensors are honoured: no byte of weights). A `HfWorkload` takes none.
        world_size: Ranks that share a YAML workload's batch; the example batch is one rank's part. A Transformers
            model's is as large on each rank, whatever their number.

    Raises:
        MemoptError: `workload-batch-not-divisible`, `workload-unknown-model-type`, `workload-no-seed`.
    """
    batch = _batch_per_rank(config, world_size)
    if isinstance(config, HfWorkload):
        if seed is not None:
            raise MemoptError.of(
                "workload-no-seed", f"`{config.name}` has no initialiser of ours", hint="leave seed out"
            )
        return Workload(
            name=config.name,
            model=lambda: _causal_lm(_hf_config(config)),
            loss=next_token_loss,
            batch=batch,
            optimizer=optimizer_factory(OptimizerConfig()),
            ref=f"hf:{config.path}",
        )
    return Workload(
        name=config.name,
        model=lambda: _initialised(config, seed),
        loss=next_token_loss,
        batch=batch,
        optimizer=optimizer_factory(config.optimizer),
    )


def built_model(workload: Workload) -> torch.nn.Module:
    """The workload's model.

    Raises:
        MemoptError: `workload-other-backend` for what is no torch module.
    """
    model = workload.model()
    if isinstance(model, torch.nn.Module):
        return model
    raise MemoptError.of(
        "workload-other-backend",
        f"`{workload.name}` builds a {type(model).__module__}.{type(model).__qualname__}, not a torch module",
        hint="let the workload's `model` build a torch.nn.Module, or name the backend that the model is of",
    )


def next_token_loss(model: Callable[..., Any], batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Mean cross entropy of each token given those before it.

    Args:
        model: Called with `input_ids` `[B, S]`.
        batch: `tokens` `[B, S + 1]`.
    """
    tokens = batch["tokens"]
    logits = model(input_ids=tokens[:, :-1]).logits
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def optimizer_factory(config: OptimizerConfig) -> Callable[[Iterable[Any]], torch.optim.Optimizer]:
    """A callable from parameters to the optimizer of `config`."""
    if config.name == "sgd":
        return lambda params: torch.optim.SGD(
            params, lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay
        )
    return lambda params: torch.optim.AdamW(
        params, lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay
    )


def load_initial_weights(model: torch.nn.Module, config: WorkloadConfig, *, seed: int) -> None:
    """Overwrites the model's parameters with `initial_weights`, one tensor at a time.

    Raises:
        MemoptError: `workload-weights-mismatch` when the model's parameters are not those of the description.
    """
    shapes = dict(weight_shapes(config))
    parameters = {canonical(name): parameter for name, parameter in model.named_parameters()}
    if {path: tuple(p.shape) for path, p in parameters.items()} != shapes:
        odd = sorted(set(shapes) ^ set(parameters)) or [p for p in shapes if shapes[p] != tuple(parameters[p].shape)]
        raise MemoptError.of("workload-weights-mismatch", f"the model and its description differ in {odd[:5]}")
    with torch.no_grad():
        for path, parameter in parameters.items():
            parameter.copy_(torch.from_numpy(initial_weight(path, shapes[path], seed=seed)))


def _initialised(config: WorkloadConfig, seed: int | None) -> torch.nn.Module:
    model = _causal_lm(transformers_config(config))
    if seed is not None:
        load_initial_weights(model, config, seed=seed)
    return model


def _causal_lm(config: PreTrainedConfig) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    # On the meta device there is nothing to initialise, and 126 layers of it take time.
    is_described = torch.get_default_device().type == "meta"
    with no_init_weights() if is_described else nullcontext():
        return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


def _hf_config(workload: HfWorkload) -> PreTrainedConfig:
    from transformers import AutoConfig

    with open(workload.path, encoding="utf-8") as file:
        fields = json.load(file)
    fields.pop("model_type", None)
    fields["use_cache"] = False
    try:
        return AutoConfig.for_model(workload.model_type, **fields)
    except ValueError as error:
        raise MemoptError.of(
            "workload-unknown-model-type",
            f"the installed Transformers knows no `{workload.model_type}`",
            hint="a newer transformers may; a model of your own goes through FILE.py:FUNCTION",
        ) from error


def transformers_config(config: WorkloadConfig) -> PreTrainedConfig:
    """The Transformers configuration with the workload's numbers."""
    from transformers import DeepseekV3Config, LlamaConfig

    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    common = {
        "vocab_size": config.vocab,
        "hidden_size": config.hidden,
        "intermediate_size": config.intermediate,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "use_cache": False,
    }
    if config.mla is None or config.moe is None:
        stretch = config.rope_scaling
        if stretch is not None:
            rope = {
                "rope_type": "llama3",
                "rope_theta": config.rope_theta,
                "factor": stretch.factor,
                "low_freq_factor": stretch.low_freq_factor,
                "high_freq_factor": stretch.high_freq_factor,
                "original_max_position_embeddings": stretch.original_sequence,
            }
        longest = max(config.sequence, 0 if stretch is None else int(stretch.original_sequence * stretch.factor))
        return LlamaConfig(
            **common, head_dim=config.size_per_head, rope_parameters=rope, max_position_embeddings=longest
        )
    return DeepseekV3Config(
        **common,
        **config.mla.model_dump(),
        rope_parameters=rope,
        max_position_embeddings=config.sequence,
        n_routed_experts=config.moe.experts,
        num_experts_per_tok=config.moe.experts_per_token,
        n_shared_experts=config.moe.shared_experts,
        moe_intermediate_size=config.moe.intermediate,
        first_k_dense_replace=config.moe.dense_layers,
        n_group=config.moe.groups,
        topk_group=config.moe.groups_per_token,
        routed_scaling_factor=config.moe.routed_scaling,
        norm_topk_prob=True,
    )


def _batch_per_rank(config: WorkloadConfig | HfWorkload, world_size: int) -> dict[str, torch.Tensor]:
    if isinstance(config, HfWorkload):
        return {"tokens": _tokens(config.batch_per_rank, config.sequence)}
    if config.batch % world_size:
        raise MemoptError.of(
            "workload-batch-not-divisible",
            f"a batch of {config.batch} sequences does not divide over {world_size} ranks",
            hint=f"use a batch that is a multiple of {world_size}, or another world size",
            path="batch",
        )
    return {"tokens": _tokens(config.batch // world_size, config.sequence)}


def _tokens(batch: int, sequence: int) -> torch.Tensor:
    return torch.empty((batch, sequence + 1), dtype=torch.int64, device="meta")

"""A workload as numbers: the YAML of `configs/workloads/`, from which each backend builds the same model."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Count = Annotated[int, Field(ge=1)]


class _Config(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", validate_default=True)


class OptimizerConfig(_Config):
    """The optimizer both backends use: `adamw` (decoupled weight decay) or `sgd` (with momentum)."""

    name: Literal["adamw", "sgd"] = "adamw"
    lr: Annotated[float, Field(gt=0)] = 1e-3
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    eps: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0


class RopeScaling(_Config):
    """Llama 3.1's stretching of the rotary frequencies (Transformers' `rope_type: llama3`)."""

    factor: Annotated[float, Field(ge=1)] = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_sequence: Count = 8192


class MlaConfig(_Config):
    """Multi-head latent attention: ranks and head sizes as in the DeepSeek-V3 report, section 4.2.

    `q_lora_rank` null: queries are projected straight from the hidden state.
    """

    q_lora_rank: Count | None = None
    kv_lora_rank: Count
    qk_nope_head_dim: Count
    qk_rope_head_dim: Count
    v_head_dim: Count


class MoeConfig(_Config):
    """Mixture of experts with sigmoid routing in groups (DeepSeek-V3 report, section 2.1.2).

    Attributes:
        experts: Routed experts of a layer.
        experts_per_token: Routed experts each token goes to.
        shared_experts: Experts every token goes to.
        intermediate: Width of one expert.
        dense_layers: First layers that have a plain MLP instead.
        groups, groups_per_token: Experts are chosen from the best `groups_per_token` of `groups`.
        routed_scaling: Factor on the routed experts' output.
    """

    experts: Count
    experts_per_token: Count
    shared_experts: Count = 1
    intermediate: Count
    dense_layers: Annotated[int, Field(ge=0)] = 0
    groups: Count = 1
    groups_per_token: Count = 1
    routed_scaling: float = 1.0

    @model_validator(mode="after")
    def _routable(self) -> MoeConfig:
        if self.experts % self.groups:
            raise ValueError(f"experts ({self.experts}) must be a multiple of groups ({self.groups})")
        if self.experts < 2 * self.groups:
            raise ValueError(
                f"a group's score is its best two experts; {self.experts} experts are too few for {self.groups} groups"
            )
        if self.groups_per_token > self.groups:
            raise ValueError(f"groups_per_token ({self.groups_per_token}) exceeds groups ({self.groups})")
        reachable = self.experts // self.groups * self.groups_per_token
        if self.experts_per_token > reachable:
            raise ValueError(f"experts_per_token ({self.experts_per_token}) exceeds the {reachable} a token can reach")
        return self


class WorkloadConfig(_Config):
    """One model, one batch, one optimizer; enough to build the same training step in either framework.

    Attributes:
        name: Shown in tables and pages.
        family: `llama` (grouped-query attention, SwiGLU) or `deepseek_v3` (MLA and experts).
        layers, hidden, intermediate, heads, kv_heads, vocab: Sizes.
        head_dim: Size of one head; `hidden / heads` when left out.
        tie_embeddings: The head's weight is the embedding's.
        norm_eps, rope_theta, rope_scaling: Constants of the norms and the rotary embedding.
        mla, moe: `deepseek_v3` only, and required there.
        batch: Sequences per step over all devices.
        sequence: Tokens of one sequence that are predicted; a batch holds one more.
        optimizer: See `OptimizerConfig`.
    """

    name: Annotated[str, Field(min_length=1)]
    family: Literal["llama", "deepseek_v3"] = "llama"
    layers: Count
    hidden: Count
    intermediate: Count
    heads: Count
    kv_heads: Count
    head_dim: Count | None = None
    vocab: Count
    tie_embeddings: bool = False
    norm_eps: Annotated[float, Field(gt=0)] = 1e-5
    rope_theta: Annotated[float, Field(gt=0)] = 10000.0
    rope_scaling: RopeScaling | None = None
    mla: MlaConfig | None = None
    moe: MoeConfig | None = None
    batch: Count
    sequence: Count
    optimizer: OptimizerConfig = OptimizerConfig()

    @property
    def size_per_head(self) -> int:
        """`head_dim`, or what `hidden / heads` gives."""
        return self.head_dim or self.hidden // self.heads

    @model_validator(mode="after")
    def _consistent(self) -> WorkloadConfig:
        faults = []
        if self.heads % self.kv_heads:
            faults.append(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")
        if self.head_dim is None and self.hidden % self.heads:
            faults.append(f"hidden ({self.hidden}) is not a multiple of heads ({self.heads}); give head_dim")
        if self.family == "llama" and self.size_per_head % 2:
            faults.append(f"a head has {self.size_per_head} numbers; rotary embedding needs an even count")
        blocks = {"mla": self.mla, "moe": self.moe}
        if self.family == "deepseek_v3":
            faults += [f"family deepseek_v3 needs `{name}`" for name, block in blocks.items() if block is None]
        else:
            faults += [f"`{name}` belongs to family deepseek_v3" for name, block in blocks.items() if block is not None]
        if self.moe is not None and self.moe.dense_layers > self.layers:
            faults.append(f"moe.dense_layers ({self.moe.dense_layers}) exceeds layers ({self.layers})")
        if self.rope_scaling is not None and self.family != "llama":
            faults.append("`rope_scaling` belongs to family llama")
        if faults:
            raise ValueError("; ".join(faults))
        return self

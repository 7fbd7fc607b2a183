"""A training step in torchtitan's shape of December 2024, for planning beside its published memory.

A decoder written as that trainer's model is (norms and rotary embedding in float32, repeated key and value heads, one
product after another in the same order), its selective recompute per operator through torch's own checkpoint (every
second product is kept, attention too, needed or not), the loss on float32 logits that the model's bfloat16 ones are
freed before, and AdamW without fusion. Weights are described, never made.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, embedding, scaled_dot_product_attention, silu
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from memopt.workloads import Workload

VOCAB, HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD = 128256, 4096, 14336, 32, 8, 128
_KEPT = {
    torch.ops.aten.mm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
}


class Norm(nn.Module):
    """Root mean square in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-5)).type_as(x) * self.weight


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq = nn.Linear(HIDDEN, HEADS * HEAD, bias=False)
        self.wk = nn.Linear(HIDDEN, KV_HEADS * HEAD, bias=False)
        self.wv = nn.Linear(HIDDEN, KV_HEADS * HEAD, bias=False)
        self.wo = nn.Linear(HEADS * HEAD, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (one(x).view(batch, length, -1, HEAD) for one in (self.wq, self.wk, self.wv))
        q, k = _turned(q, turns), _turned(k, turns)
        k, v = _repeated(k), _repeated(v)
        q, k, v = (one.transpose(1, 2) for one in (q, k, v))
        out = scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).contiguous()
        return self.wo(out.view(batch, length, -1))


def _turned(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns[None, :, None, :]).flatten(3).type_as(x)


def _repeated(x: torch.Tensor) -> torch.Tensor:
    batch, length, heads, size = x.shape
    return x[:, :, :, None, :].expand(batch, length, heads, HEADS // KV_HEADS, size).reshape(batch, length, HEADS, size)


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Linear(HIDDEN, INTERMEDIATE, bias=False)
        self.w2 = nn.Linear(INTERMEDIATE, HIDDEN, bias=False)
        self.w3 = nn.Linear(HIDDEN, INTERMEDIATE, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(silu(self.w1(x)) * self.w3(x))


def _every_second(counts: Counter[bool], ctx: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if func is torch.ops.aten.mm.default:
        counts[ctx.is_recompute] += 1
        if counts[ctx.is_recompute] % 2 == 0:
            return CheckpointPolicy.PREFER_RECOMPUTE
    return CheckpointPolicy.MUST_SAVE if func in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def _contexts() -> Any:
    return create_selective_checkpoint_contexts(partial(_every_second, Counter()))


class Block(nn.Module):
    """A layer; `mode` is the trainer's recompute: `selective` or `full`."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.mode = mode
        self.attention_norm, self.attention = Norm(), Attention()
        self.ffn_norm, self.feed_forward = Norm(), FeedForward()

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        kwargs: dict[str, Any] = {"context_fn": _contexts} if self.mode == "selective" else {}
        return checkpoint(self._inside, x, turns, use_reentrant=False, preserve_rng_state=False, **kwargs)

    def _inside(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        h = x + self.attention(self.attention_norm(x), turns)
        return h + self.feed_forward(self.ffn_norm(h))


class Decoder(nn.Module):
    def __init__(self, sequence: int, mode: str, num_layers: int = 32) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, HIDDEN)
        self.register_buffer("turns", torch.empty(sequence, HEAD // 2, dtype=torch.complex64))
        self.layers = nn.ModuleList([Block(mode) for _ in range(num_layers)])
        self.norm = Norm()
        self.output = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = embedding(tokens, self.tok_embeddings.weight)
        for layer in self.layers:
            x = layer(x, self.turns)
        return self.output(self.norm(x))


def _loss(model: nn.Module, batch: Any) -> torch.Tensor:
    logits = model(batch["tokens"])
    return cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten(0, 1))


def titan(*, batch: int, sequence: int, mode: str = "selective", num_layers: int = 32) -> Workload:
    """The step of one rank."""
    with torch.device("meta"):
        tokens = torch.empty(batch, sequence, dtype=torch.int64)
    return Workload(
        name=f"titan-8b-{batch}x{sequence}",
        model=lambda: Decoder(sequence, mode, num_layers),
        loss=_loss,
        batch={"tokens": tokens, "labels": tokens.clone()},
        optimizer=partial(torch.optim.AdamW, lr=3e-4, foreach=True),
    )

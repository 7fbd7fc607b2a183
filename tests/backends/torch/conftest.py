"""Small models, policies and a training loop for the torch engine's tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import memopt

VOCAB = 64


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def make_llama(*, layers: int = 4, hidden: int = 32, vocab: int = VOCAB, intermediate: int = 48, tie: bool = False):
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=hidden,
            num_hidden_layers=layers,
            vocab_size=vocab,
            intermediate_size=intermediate,
            num_attention_heads=2,
            num_key_value_heads=2,
            tie_word_embeddings=tie,
            use_cache=False,
            attn_implementation="eager",
            max_position_embeddings=64,
        )
    )


def token_batch(step: int, of_rank: int, *, vocab: int = VOCAB, micro: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1_000_003 * step + 17 * of_rank + 7 * micro + 5)
    return torch.randint(0, vocab, (2, 8), generator=generator)


def language_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return model(input_ids=tokens, labels=tokens).loss


def average_gradients(model: nn.Module) -> None:
    """What DDP does, on a plain model."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)


class Tools:
    """What tests share, handed out as one fixture (test files do not import each other)."""

    vocab = VOCAB
    llama = staticmethod(make_llama)
    batch = staticmethod(token_batch)
    loss = staticmethod(language_loss)
    average = staticmethod(average_gradients)
    rank = staticmethod(rank)

    @staticmethod
    def policy(*rules: Mapping[str, Any], **rest: Any) -> dict[str, Any]:
        return {"version": 1, "rules": list(rules), **rest}

    @staticmethod
    def shard(**match: Any) -> dict[str, Any]:
        return {"name": "shard", "action": "shard", "match": {"role": "param", **match}}

    @staticmethod
    def recompute() -> dict[str, Any]:
        return {"name": "again", "action": "recompute", "match": {"unit": "layers.*"}}

    @staticmethod
    def keep_norms() -> dict[str, Any]:
        return {"name": "norms", "action": "keep", "match": {"role": "param", "path": "**.*norm.**"}}

    @staticmethod
    def micro_batches(model: nn.Module, opt: torch.optim.Optimizer, number: int, reduce: Any, run: Any) -> float:
        """A step that adds up the gradients of three micro-batches; for `step=`."""
        total = 0.0
        for micro in range(3):
            loss = language_loss(model, token_batch(number, rank(), micro=micro)) / 3
            loss.backward()
            total += loss.item()
        reduce(model)
        opt.step()
        opt.zero_grad()
        return total

    @staticmethod
    def train_plain(
        model: nn.Module,
        *,
        steps: int = 20,
        step: Callable[..., Any] | None = None,
        optimizer: Callable[..., torch.optim.Optimizer] | None = None,
    ) -> list[Any]:
        """Losses of the plain model with averaged gradients."""
        opt = (optimizer or adamw)([p for p in model.parameters() if p.requires_grad])
        return _train(model, opt, steps, step, reduce=True, run=None)

    @staticmethod
    def train_policy(
        model: nn.Module,
        policy: Any,
        *,
        steps: int = 20,
        step: Callable[..., Any] | None = None,
        optimizer: Callable[..., torch.optim.Optimizer] | None = None,
    ) -> tuple[list[Any], Any]:
        """Losses under a policy, and what `apply_policy` returned."""
        run = memopt.apply_policy(model, policy)
        opt = run.optimizer(optimizer or adamw)
        return _train(model, opt, steps, step, reduce=False, run=run), run


def adamw(params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3)


def _train(model: nn.Module, opt: torch.optim.Optimizer, steps: int, step: Any, *, reduce: bool, run: Any) -> list[Any]:
    reduce = reduce and dist.is_initialized()
    losses = []
    for number in range(steps):
        if step is not None:
            losses.append(step(model, opt, number, average_gradients if reduce else (lambda model: None), run))
            continue
        loss = language_loss(model, token_batch(number, rank()))
        loss.backward()
        if reduce:
            average_gradients(model)
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.fixture(scope="session")
def tools() -> Tools:
    return Tools()

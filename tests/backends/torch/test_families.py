"""Unedited Transformers models of other families, sharded with nothing said of their structure, equal plain ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers

import memopt
from memopt_torch.testing import run_ranks

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def make(family: str) -> Any:
    torch.manual_seed(0)
    t = transformers
    if family == "gpt2":
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 64, "n_positions": 32}
        no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return t.GPT2LMHeadModel(t.GPT2Config(**sizes, **no_dropout, **IDS, use_cache=False))
    if family == "t5":
        sizes = {"d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 2, "vocab_size": 64}
        return t.T5ForConditionalGeneration(
            t.T5Config(**sizes, use_cache=False, dropout_rate=0.0, decoder_start_token_id=0)
        )
    if family == "mixtral":
        config = t.MixtralConfig(**SMALL, num_key_value_heads=2, vocab_size=64, num_local_experts=4, use_cache=False)
        return t.MixtralForCausalLM(config)
    if family == "bert":
        return t.BertForMaskedLM(t.BertConfig(**SMALL, **NO_DROPOUT, vocab_size=64))
    return t.ViTForImageClassification(t.ViTConfig(**SMALL, **NO_DROPOUT, image_size=16, patch_size=8, num_labels=4))


def loss_of(model: Any, family: str, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
    if family == "vit":
        pixels = torch.randn(2, 3, 16, 16, generator=generator)
        return model(pixel_values=pixels, labels=torch.randint(0, 4, (2,), generator=generator)).loss
    tokens = torch.randint(3, 64, (2, 8), generator=generator)
    return model(input_ids=tokens, labels=tokens).loss


@pytest.mark.parametrize("family", ["gpt2", "t5", "mixtral", "bert", "vit"])
def test_families_equal_plain_training(tools: Any, family: str) -> None:
    def job() -> tuple[list[float], list[float]]:
        found = []
        for rules in (None, tools.policy(tools.shard())):
            model = make(family)
            if rules is None:
                optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            else:
                optimizer = memopt.apply_policy(model, rules).optimizer(torch.optim.AdamW, lr=1e-3)
            losses = []
            for number in range(4):
                loss = loss_of(model, family, number)
                loss.backward()
                if rules is None:
                    tools.average(model)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            found.append(losses)
        return found[0], found[1]

    for plain, ours in run_ranks(job, 2):
        if family == "t5":  # gradients of the encoder's output are summed layer by layer: another order of rounding
            assert ours == pytest.approx(plain, abs=2e-6)
        else:
            assert ours == plain

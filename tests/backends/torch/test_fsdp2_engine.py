"""The fsdp2 engine says what it cannot do, and accumulates by backward passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import memopt
from memopt.errors import MemoptError
from memopt_torch.testing import run_fake, run_ranks

FSDP2 = {"torch": {"engine": "fsdp2"}}
BF16 = {"compute": "bfloat16", "master": "float32", "reduce": "float32", "optimizer_state": "float32"}


def refused(tools: Any, model: Any, world: int, **rest: Any) -> str:
    def job() -> str:
        with pytest.raises(MemoptError) as caught:
            memopt.apply_policy(model, tools.policy(tools.shard(), **{"backend_options": FSDP2, **rest}))
        return caught.value.problems[0].code

    return run_fake(job, world)


def test_what_fsdp2_cannot_follow_is_refused(tools: Any) -> None:
    assert refused(tools, tools.llama(), 1, precision=BF16) == "fsdp2-precision"
    assert refused(tools, tools.llama().to(torch.bfloat16), 2, precision=BF16) == "fsdp2-precision"
    assert refused(tools, tools.llama(), 2, unit_defaults={"prefetch": {"backward": 0}}) == "fsdp2-prefetch"
    options = {"torch": {"engine": "fsdp2", "gradient_slots": 2}}
    with pytest.raises(MemoptError, match="gradient_slots"):
        memopt.apply_policy(tools.llama(), tools.policy(tools.shard(), backend_options=options))
    kept = tools.policy(tools.keep_norms(), tools.shard(), backend_options=FSDP2)

    def job() -> str:
        with pytest.raises(MemoptError) as caught:
            memopt.apply_policy(tools.llama(), kept)
        return caught.value.problems[0].code

    assert run_fake(job, 2) == "fsdp2-kept-whole"


def test_a_deferred_accumulation_counts_backward_passes(tools: Any) -> None:
    policy = tools.policy(tools.shard(), accumulate={"steps": 2, "reduce": "last"}, backend_options=FSDP2)

    def job() -> tuple[list[float], list[float], str, bool]:
        plain, model = tools.llama(layers=2), tools.llama(layers=2)
        run = memopt.apply_policy(model, policy)
        opts = [torch.optim.AdamW(plain.parameters(), lr=1e-3), run.optimizer(torch.optim.AdamW, lr=1e-3)]
        tokens = tools.batch(50, dist.get_rank())
        losses: list[list[float]] = [[], []]
        for number in range(3):
            checked = run.check({"input_ids": tokens, "labels": tokens}).ok
            tools.loss(model, tokens)  # a forward pass without backward is no micro-batch
            for which, one in enumerate((plain, model)):
                for micro in range(2):
                    loss = tools.loss(one, tools.batch(number, dist.get_rank(), micro=micro))
                    loss.backward()
                    losses[which].append(loss.item())
                if one is plain:
                    tools.average(plain)
                opts[which].step()
                opts[which].zero_grad()
        tools.loss(model, tokens).backward()
        with pytest.raises(MemoptError) as caught:
            opts[1].step()
        return losses[0], losses[1], caught.value.problems[0].code, checked

    for plain, ours, code, checked in run_ranks(job, 2):
        assert ours == pytest.approx(plain, abs=1e-6)
        assert code == "accumulate-steps"
        assert checked

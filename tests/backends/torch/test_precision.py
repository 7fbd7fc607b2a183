"""Compute in 16 bits over fp32 shards and fp32 reductions; what is frozen or a buffer keeps its dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import memopt
from memopt.errors import MemoptError
from memopt_torch.sharded import local_tensor
from memopt_torch.testing import run_ranks

BF16 = {"compute": "bfloat16", "master": "float32", "reduce": "float32", "optimizer_state": "float32"}


def losses_of(tools: Any, model: Any, opt: Any, steps: int = 6) -> list[float]:
    found = []
    for number in range(steps):
        loss = tools.loss(model, tools.batch(number, dist.get_rank()))
        loss.backward()
        opt.step()
        opt.zero_grad()
        found.append(loss.item())
    return found


def test_bfloat16_compute_equals_fsdp2_to_the_bit(tools: Any) -> None:
    def job() -> tuple[list[float], list[float], set[torch.dtype]]:
        theirs = tools.llama()
        mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        fully_shard(theirs.model.embed_tokens, mp_policy=mixed)
        for layer in theirs.model.layers:
            fully_shard(layer, mp_policy=mixed)
        fully_shard([theirs.model.norm, theirs.lm_head], mp_policy=mixed)
        fully_shard(theirs, mp_policy=mixed)
        expected = losses_of(tools, theirs, torch.optim.AdamW(theirs.parameters(), lr=1e-3))
        model = tools.llama()
        run = memopt.apply_policy(model, tools.policy(tools.shard(), tools.recompute(), precision=BF16))
        opt = run.optimizer(torch.optim.AdamW, lr=1e-3)
        got = losses_of(tools, model, opt)
        dtypes = {p.dtype for p in model.parameters()}
        dtypes |= {local_tensor(state["exp_avg"]).dtype for state in opt.state.values()}
        return expected, got, dtypes

    for expected, got, dtypes in run_ranks(job, 2):
        assert got == expected
        assert dtypes == {torch.float32}


@pytest.mark.parametrize("rules", [(), ("shard",)])
def test_one_process_computes_in_bfloat16_over_fp32_weights(tools: Any, rules: tuple[str, ...]) -> None:
    model = tools.llama()
    run = memopt.apply_policy(model, tools.policy(*[getattr(tools, rule)() for rule in rules], precision=BF16))
    opt = run.optimizer(torch.optim.AdamW, lr=1e-3)
    tokens = tools.batch(0, 0)
    output = model(input_ids=tokens, labels=tokens)
    output.loss.backward()
    assert output.logits.dtype == torch.bfloat16
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    before = model.model.norm.weight.detach().clone()
    opt.step()
    assert not torch.equal(before, model.model.norm.weight)


def test_float16_with_loss_scaling_skips_together_and_recovers(tools: Any) -> None:
    precision = {**BF16, "compute": "float16"}

    def job() -> tuple[list[float], list[float], bool]:
        model = tools.llama()
        run = memopt.apply_policy(model, tools.policy(tools.shard(), precision=precision))
        opt = run.optimizer(torch.optim.AdamW, lr=1e-3)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        scales, losses = [], []
        before = [local_tensor(p.detach()).clone() for p in model.parameters()]
        for number in range(4):
            loss = tools.loss(model, tools.batch(number, dist.get_rank()))
            if number == 0 and dist.get_rank() == 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            run.clip_grad_norm_(1.0)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
            if number == 0:
                skipped = all(
                    torch.equal(a, local_tensor(p.detach())) for a, p in zip(before, model.parameters(), strict=True)
                )
            scales.append(scaler.get_scale())
            losses.append(loss.item())
        return scales, losses, skipped

    first, second = run_ranks(job, 2)
    assert first[0] == second[0] == [512.0] * 4
    assert first[2]
    assert second[2]
    assert first[1][-1] < first[1][0] + 0.2


def test_frozen_weights_keep_their_dtype_and_have_no_gradient_bytes(tools: Any) -> None:
    def job() -> tuple[set[torch.dtype], set[torch.dtype], int, int]:
        model = tools.llama()
        model.requires_grad_(False).to(torch.bfloat16)
        adapters = [layer.mlp.down_proj for layer in model.model.layers]
        for adapter in adapters:
            adapter.weight = nn.Parameter(adapter.weight.detach().float())
        run = memopt.apply_policy(model, tools.policy(tools.shard(), precision=BF16))
        tools.loss(model, tools.batch(0, dist.get_rank())).backward()
        frozen = {p.dtype for p in model.parameters() if not p.requires_grad}
        trained = {p.dtype for p in model.parameters() if p.requires_grad}
        grads = sum(s.grad.nbytes for unit in run.engine.units for s in unit.sections if s.grad is not None)
        planned = sum(row.nbytes for row in run.plan.rows_of("grad"))
        return frozen, trained, grads, planned

    for frozen, trained, grads, planned in run_ranks(job, 2):
        assert frozen == {torch.bfloat16}
        assert trained == {torch.float32}
        assert planned <= grads <= planned + 64 * 4  # padding alone


class Buffered(nn.Module):
    """Blocks that multiply by an fp32 buffer, which lifts 16-bit activations."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Scaled() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("scale", torch.full((8,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale


def test_buffers_stay_fp32_and_do_not_lift_the_next_unit(tools: Any) -> None:
    def job() -> tuple[list[torch.dtype], torch.dtype]:
        model = Buffered()
        memopt.apply_policy(model, tools.policy(tools.shard(), precision=BF16))
        seen: list[torch.dtype] = []
        for block in model.blocks:
            block.linear.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
        model(torch.randn(2, 8)).sum().backward()
        return seen, model.blocks[0].scale.dtype

    for seen, buffer in run_ranks(job, 2):
        assert seen == [torch.bfloat16] * 3
        assert buffer == torch.float32


def test_mixed_dtypes_in_one_unit_are_handled(tools: Any) -> None:
    def make() -> Any:
        model = tools.llama()
        for layer in model.model.layers:
            layer.self_attn.q_proj.to(torch.float64)
            layer.self_attn.q_proj.register_forward_pre_hook(lambda module, args: (args[0].double(),))
            layer.self_attn.q_proj.register_forward_hook(lambda module, args, output: output.float())
        return model

    def job() -> tuple[list[float], list[float]]:
        plain = tools.train_plain(make(), steps=4)
        return plain, tools.train_policy(make(), tools.policy(tools.shard()), steps=4)[0]

    for plain, ours in run_ranks(job, 2):
        assert ours == plain


def test_scalar_empty_and_odd_parameters(tools: Any) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.weight = nn.Parameter(torch.randn(13, 8))
            self.gain = nn.Parameter(torch.tensor(1.5))
            self.one = nn.Parameter(torch.ones(1))
            self.nothing = nn.Parameter(torch.zeros(0, 4))
            self.turned = nn.Parameter(torch.randn(8, 13).t())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x @ self.weight.t() * self.gain + self.one + self.nothing.sum()
            return (y + x @ self.turned.t()).square().mean()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Odd(), Odd()])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.blocks[0](x) + self.blocks[1](x)

    def step(model: Any, opt: Any, number: int, reduce: Any, run: Any) -> float:
        loss = model(torch.randn(4, 8, generator=torch.Generator().manual_seed(number * 2 + tools.rank())))
        loss.backward()
        reduce(model)
        opt.step()
        opt.zero_grad()
        return loss.item()

    policy = tools.policy(tools.shard(), units=["blocks.*"])

    def job() -> tuple[list[float], list[float]]:
        plain = tools.train_plain(Model(), step=step, steps=5)
        return plain, tools.train_policy(Model(), policy, step=step, steps=5)[0]

    for plain, ours in run_ranks(job, 2):
        assert ours == plain


def test_state_in_another_dtype_than_the_master_is_refused(tools: Any) -> None:
    with pytest.raises(MemoptError) as caught:
        memopt.apply_policy(tools.llama(), tools.policy(precision={**BF16, "optimizer_state": "bfloat16"}))
    assert caught.value.problems[0].code == "state-dtype"

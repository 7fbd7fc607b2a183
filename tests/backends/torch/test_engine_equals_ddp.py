"""Losses of 20 fp32 steps under a policy equal plain data-parallel training's to the bit, at two ranks."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import memopt
from memopt.errors import MemoptError
from memopt_torch.sharded import whole_tensor
from memopt_torch.testing import run_ranks


def both(tools: Any, make: Any, policy: Any, *, step: Any = None, steps: int = 20, world: int = 2) -> list[Any]:
    """(plain, policy) outcomes of every rank."""

    def job() -> tuple[list[Any], list[Any]]:
        plain = tools.train_plain(make(), step=step, steps=steps)
        ours, _ = tools.train_policy(make(), policy, step=step, steps=steps)
        return plain, ours

    return run_ranks(job, world)


def assert_equal(outcomes: list[Any]) -> None:
    for plain, ours in outcomes:
        assert ours == plain


POLICIES: dict[str, Any] = {
    "none": lambda t: t.policy(),
    "shard": lambda t: t.policy(t.shard()),
    "recompute": lambda t: t.policy(t.recompute()),
    "shard_and_recompute": lambda t: t.policy(t.shard(), t.recompute()),
    "norms_kept_whole": lambda t: t.policy(t.keep_norms(), t.shard()),
    "zero1": lambda t: t.policy({"name": "state", "action": "shard", "match": {"role": "optimizer_state"}}),
    "zero2": lambda t: t.policy({"name": "grads", "action": "shard", "match": {"role": ["grad", "optimizer_state"]}}),
    "not_resharded": lambda t: t.policy(t.shard(), unit_defaults={"reshard_after_forward": False}),
    "no_prefetch": lambda t: t.policy(t.shard(), unit_defaults={"prefetch": {"forward": 0, "backward": 0}}),
    "prefetch_two": lambda t: t.policy(t.shard(), unit_defaults={"prefetch": {"forward": 2, "backward": 2}}),
    "two_gradient_slots": lambda t: t.policy(t.shard(), backend_options={"torch": {"gradient_slots": 2}}),
    "blocking": lambda t: t.policy(t.shard(), backend_options={"torch": {"communication": "blocking"}}),
    "agree_on_unused": lambda t: t.policy(t.shard(), backend_options={"torch": {"unused_parameters": "agree"}}),
    "fsdp2": lambda t: t.policy(t.shard(), t.recompute(), backend_options={"torch": {"engine": "fsdp2"}}),
    "units_named": lambda t: t.policy(
        t.shard(),
        units=["embed_tokens", {"match": ["layers.0", "layers.1"], "group": True}, "layers.*",
               {"match": ["norm", "lm_head"], "group": True}],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", POLICIES)
def test_losses_equal_data_parallel_training_to_the_bit(tools: Any, name: str) -> None:
    assert_equal(both(tools, tools.llama, POLICIES[name](tools)))


def test_losses_equal_torchs_own_ddp(tools: Any) -> None:
    def job() -> tuple[list[float], list[float]]:
        model = nn.parallel.DistributedDataParallel(tools.llama())
        opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
        plain = []
        for number in range(8):
            loss = tools.loss(model, tools.batch(number, dist.get_rank()))
            loss.backward()
            opt.step()
            opt.zero_grad()
            plain.append(loss.item())
        return plain, tools.train_policy(tools.llama(), tools.policy(tools.shard()), steps=8)[0]

    assert_equal(run_ranks(job, 2))


def test_uneven_shapes_are_padded(tools: Any) -> None:
    assert_equal(both(tools, lambda: tools.llama(hidden=28, intermediate=37, vocab=67), tools.policy(tools.shard())))


def test_tied_weights_stay_tied_and_equal(tools: Any) -> None:
    def job() -> tuple[list[float], list[float], bool]:
        plain = tools.train_plain(tools.llama(tie=True))
        model = tools.llama(tie=True)
        ours, _ = tools.train_policy(model, tools.policy(tools.shard(), tools.recompute()))
        return plain, ours, model.lm_head.weight is model.model.embed_tokens.weight

    for plain, ours, tied in run_ranks(job, 2):
        assert ours == plain
        assert tied


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_the_models_own_checkpointing_works_inside_sharding(tools: Any, use_reentrant: bool) -> None:
    def make() -> Any:
        model = tools.llama()
        model.activation_checkpointing_enable({"use_reentrant": use_reentrant})
        return model.train()

    assert_equal(both(tools, make, tools.policy(tools.shard())))


def test_adapters_on_a_frozen_base(tools: Any) -> None:
    class Adapter(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base
            self.down = nn.Linear(base.in_features, 2, bias=False)
            self.up = nn.Linear(2, base.out_features, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x) + self.up(self.down(x))

    def make() -> Any:
        model = tools.llama()
        model.requires_grad_(False)
        for layer in model.model.layers:
            layer.self_attn.q_proj = Adapter(layer.self_attn.q_proj)
        return model

    assert_equal(both(tools, make, tools.policy(tools.shard(), tools.recompute())))


def test_frozen_layers_between_trained_ones(tools: Any) -> None:
    def make() -> Any:
        model = tools.llama()
        model.model.embed_tokens.requires_grad_(False)
        model.model.layers[0].requires_grad_(False)
        model.model.layers[2].requires_grad_(False)
        return model

    assert_equal(both(tools, make, tools.policy(tools.shard())))


def test_a_layer_used_twice(tools: Any) -> None:
    def make() -> Any:
        model = tools.llama()
        model.model.layers[3] = model.model.layers[1]
        return model

    assert_equal(both(tools, make, tools.policy(tools.shard())))


def test_nan_on_one_rank_with_an_agreed_skip(tools: Any) -> None:
    def step(model: Any, opt: Any, number: int, reduce: Any, run: Any) -> Any:
        loss = tools.loss(model, tools.batch(number, tools.rank()))
        if number == 3 and tools.rank() == 1:
            loss = loss * float("nan")
        loss.backward()
        reduce(model)
        norm = torch.stack([g.norm() for p in model.parameters() if (g := p.grad) is not None]).norm()
        if not torch.isfinite(norm):
            opt.zero_grad()
            return "skipped"
        opt.step()
        opt.zero_grad()
        return loss.item()

    outcomes = both(tools, tools.llama, tools.policy(tools.shard()), step=step, steps=8)
    assert_equal(outcomes)
    assert all(ours[3] == "skipped" for _, ours in outcomes)


def test_evaluation_between_forward_and_backward(tools: Any) -> None:
    def step(model: Any, opt: Any, number: int, reduce: Any, run: Any) -> Any:
        loss = tools.loss(model, tools.batch(number, tools.rank()))
        with torch.no_grad():
            seen = tools.loss(model, tools.batch(number + 100, tools.rank())).item()
        loss.backward()
        reduce(model)
        opt.step()
        opt.zero_grad()
        with torch.inference_mode():
            return loss.item(), seen, tools.loss(model, tools.batch(number + 200, tools.rank())).item()

    assert_equal(both(tools, tools.llama, tools.policy(tools.shard()), step=step, steps=8))


def test_two_forwards_then_one_backward(tools: Any) -> None:
    def step(model: Any, opt: Any, number: int, reduce: Any, run: Any) -> Any:
        losses = [tools.loss(model, tools.batch(number, tools.rank(), micro=micro)) for micro in range(2)]
        (losses[0] + losses[1]).backward()
        reduce(model)
        opt.step()
        opt.zero_grad()
        return losses[0].item(), losses[1].item()

    assert_equal(both(tools, tools.llama, tools.policy(tools.shard()), step=step, steps=8))


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_then_a_good_step(tools: Any, where: str) -> None:
    class Boom(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            raise ArithmeticError("on purpose")

    def step(model: Any, opt: Any, number: int, reduce: Any, run: Any) -> Any:
        if number == 2:
            layer = model.model.layers[1].mlp

            def fail(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
                if where == "forward":
                    raise ArithmeticError("on purpose")
                return Boom.apply(output)

            handle = layer.register_forward_hook(fail)
            with pytest.raises(ArithmeticError):
                tools.loss(model, tools.batch(number, tools.rank())).backward()
            handle.remove()
            opt.zero_grad()
        loss = tools.loss(model, tools.batch(number, tools.rank()))
        loss.backward()
        reduce(model)
        opt.step()
        opt.zero_grad()
        return loss.item()

    assert_equal(both(tools, tools.llama, tools.policy(tools.shard()), step=step, steps=6))


class Branch(nn.Module):
    """A block whose spare part runs only when asked."""

    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Linear(8, 8)
        self.spare = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, spare: bool) -> torch.Tensor:
        y = torch.tanh(self.main(x))
        return y + self.spare(x) if spare else y


class BranchModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(Branch() for _ in range(3))
        self.head = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor, spare: bool) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, spare)
        return self.head(x).square().mean()


def vectors(number: int, of_rank: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * number + of_rank))


def branch_step(uses_spare: Any) -> Any:
    def step(model: Any, opt: Any, number: int, reduce: Any, run: Any) -> Any:
        this_rank = dist.get_rank()
        loss = model(vectors(number, this_rank), uses_spare(number, this_rank))
        loss.backward()
        if run is None:  # plain: what DDP with find_unused_parameters does
            for parameter in model.parameters():
                used = torch.tensor([float(parameter.grad is not None)])
                dist.all_reduce(used)
                if used > 0:
                    if parameter.grad is None:
                        parameter.grad = torch.zeros_like(parameter)
                    dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
        opt.step()
        opt.zero_grad()
        return loss.item()

    return step


@pytest.mark.parametrize("rules", [("shard",), ()])
def test_parameters_unused_on_one_rank_do_not_hang(tools: Any, rules: tuple[str, ...]) -> None:
    policy = tools.policy(*[getattr(tools, rule)() for rule in rules])
    assert_equal(both(tools, BranchModel, policy, step=branch_step(lambda number, of_rank: of_rank == 0), steps=6))


def test_parameters_that_no_rank_uses_have_no_gradient(tools: Any) -> None:
    assert_equal(
        both(tools, BranchModel, tools.policy(tools.shard()), step=branch_step(lambda n, r: n % 2 == 1), steps=6)
    )


def test_parameters_unused_in_later_steps_with_agreement(tools: Any) -> None:
    policy = tools.policy(tools.shard(), backend_options={"torch": {"unused_parameters": "agree"}})
    assert_equal(both(tools, BranchModel, policy, step=branch_step(lambda number, of_rank: number < 2), steps=6))


def test_requires_grad_flips_between_steps(tools: Any) -> None:
    def step(model: Any, opt: Any, number: int, reduce: Any, run: Any) -> Any:
        model.model.layers[1].mlp.requires_grad_(number % 2 == 0)
        model.model.layers[2].requires_grad_(number % 3 == 0)
        loss = tools.loss(model, tools.batch(number, tools.rank()))
        loss.backward()
        reduce(model)
        opt.step()
        opt.zero_grad()
        return loss.item()

    assert_equal(both(tools, tools.llama, tools.policy(tools.shard()), step=step, steps=9))


@pytest.mark.parametrize(
    "rules, reduce_at",
    [("shard", "each"), ("shard", "last"), ("zero1", "each"), ("zero1", "last"), ("none", "last")],
)
def test_accumulation_over_three_micro_batches(tools: Any, rules: str, reduce_at: str) -> None:
    policy = {**POLICIES[rules](tools), "accumulate": {"steps": 3, "reduce": reduce_at}}
    outcomes = both(tools, tools.llama, policy, step=tools.micro_batches, steps=8)
    if reduce_at == "last":
        assert_equal(outcomes)
    for plain, ours in outcomes:
        assert ours == pytest.approx(plain, abs=1e-6)


@pytest.mark.parametrize(
    "rules, set_to_none",
    [("shard", True), ("shard", False), ("zero1", True), ("zero1", False), ("none", True)],
)
def test_zero_grad_inside_a_deferred_accumulation_starts_it_again(tools: Any, rules: str, set_to_none: bool) -> None:
    def step(model: Any, opt: Any, number: int, reduce: Any, run: Any) -> Any:
        total = 0.0
        for micro in range(3 + 1):
            if micro == 1:  # the first one is given up
                opt.zero_grad(set_to_none=set_to_none)
            loss = tools.loss(model, tools.batch(number, tools.rank(), micro=micro)) / 3
            loss.backward()
            total += loss.item()
        reduce(model)
        opt.step()
        opt.zero_grad()
        return total

    policy = {**POLICIES[rules](tools), "accumulate": {"steps": 3, "reduce": "last"}}
    outcomes = both(tools, tools.llama, policy, step=step, steps=5)
    for plain, ours in outcomes:
        assert ours == pytest.approx(plain, abs=1e-6)


def test_a_gradient_read_inside_a_deferred_accumulation_is_refused(tools: Any) -> None:
    def job() -> tuple[str, str, bool]:
        run = memopt.apply_policy(tools.llama(), tools.policy(tools.shard(), accumulate={"steps": 2, "reduce": "last"}))
        tools.loss(run.model, tools.batch(0, tools.rank())).backward()
        with pytest.raises(MemoptError) as read:
            run.model.lm_head.weight.grad.norm()
        with pytest.raises(MemoptError) as clipped:
            run.clip_grad_norm_(1.0)
        tools.loss(run.model, tools.batch(1, tools.rank())).backward()
        norm = run.clip_grad_norm_(1.0)
        return read.value.problems[0].code, clipped.value.problems[0].code, bool(norm > 0)

    assert run_ranks(job, 2) == [("gradient-not-reduced", "accumulate-steps", True)] * 2


@pytest.mark.parametrize("rules", ["shard", "zero1", "none"])
def test_accumulation_without_zeroing_in_between_equals_plain(tools: Any, rules: str) -> None:
    policy = POLICIES[rules](tools)

    def step(model: Any, opt: Any, number: int, reduce: Any, run: Any) -> Any:
        for micro in range(2):
            tools.loss(model, tools.batch(number, tools.rank(), micro=micro)).backward()
        reduce(model)
        norm = torch.stack([g.norm() for p in model.parameters() if (g := p.grad) is not None]).norm()
        opt.step()
        opt.zero_grad(set_to_none=number % 2 == 0)
        return norm.item()

    for plain, ours in both(tools, tools.llama, policy, step=step, steps=6):
        assert ours == pytest.approx(plain, rel=1e-5)


def test_clipping_equals_torchs(tools: Any) -> None:
    def step(model: Any, opt: Any, number: int, reduce: Any, run: Any) -> Any:
        loss = tools.loss(model, tools.batch(number, tools.rank()))
        loss.backward()
        reduce(model)
        clip = torch.nn.utils.clip_grad_norm_ if run is None else lambda _, most: run.clip_grad_norm_(most)
        norm = clip(model.parameters(), 0.3).item()
        opt.step()
        opt.zero_grad()
        return norm, loss.item()

    for plain, ours in both(tools, tools.llama, tools.policy(tools.keep_norms(), tools.shard()), step=step, steps=8):
        for (norm, loss), (our_norm, our_loss) in zip(plain, ours, strict=True):
            assert our_norm == pytest.approx(norm, rel=5e-5)
            assert our_loss == pytest.approx(loss, rel=5e-5)


def test_hybrid_sharding_over_replicas(tools: Any) -> None:
    policy = tools.policy(tools.shard(), mesh={"replicate": 2, "fsdp": 2})
    for plain, ours in both(tools, tools.llama, policy, steps=8, world=4):
        assert ours == pytest.approx(plain, rel=2e-6)


def test_four_ranks_agree_within_rounding(tools: Any) -> None:
    for plain, ours in both(tools, tools.llama, tools.policy(tools.shard()), steps=8, world=4):
        assert ours == pytest.approx(plain, rel=2e-6)


def test_a_loss_on_weights_themselves_is_not_lost(tools: Any) -> None:
    def step(model: Any, opt: Any, number: int, reduce: Any, run: Any) -> Any:
        loss = tools.loss(model, tools.batch(number, tools.rank()))
        loss = loss + 0.01 * model.model.layers[1].mlp.up_proj.weight.square().sum()
        loss.backward()
        reduce(model)
        opt.step()
        opt.zero_grad()
        return loss.item()

    for plain, ours in both(tools, tools.llama, tools.policy(tools.shard()), step=step, steps=8):
        assert ours == pytest.approx(plain, rel=1e-5)


def test_an_auxiliary_loss_from_inside_a_unit_is_refused_not_wrong(tools: Any) -> None:
    def job() -> str:
        model = tools.llama()
        kept: list[torch.Tensor] = []
        model.model.layers[1].mlp.gate_proj.register_forward_hook(lambda module, args, output: kept.append(output))
        memopt.apply_policy(model, tools.policy(tools.shard()))
        tools.loss(model, tools.batch(0, dist.get_rank()))
        try:
            kept[0].square().mean().backward()
        except MemoptError as error:
            return error.problems[0].code
        return "no error"

    assert run_ranks(job, 2) == ["backward-entered-unseen"] * 2


def test_a_step_in_another_order_is_gathered_on_demand(tools: Any) -> None:
    class Detour(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.blocks = nn.ModuleList(Branch() for _ in range(4))

        def forward(self, x: torch.Tensor, order: list[int]) -> torch.Tensor:
            for i in order:
                x = self.blocks[i](x, True)
            return x.square().mean()

    def step(model: Any, opt: Any, number: int, reduce: Any, run: Any) -> Any:
        order = [0, 1, 2, 3] if number < 3 else [3, 1, 0, 2]
        loss = model(vectors(number, dist.get_rank()), order)
        loss.backward()
        reduce(model)
        opt.step()
        opt.zero_grad()
        return loss.item()

    def job() -> Any:
        plain = tools.train_plain(Detour(), step=step, steps=6)
        with pytest.warns(memopt.errors.MemoptWarning, match="where the first step had"):
            ours, _ = tools.train_policy(Detour(), tools.policy(tools.shard()), step=step, steps=6)
        return plain, ours

    assert_equal(run_ranks(job, 2))


def test_reentrant_checkpoint_of_several_layers_by_the_user(tools: Any) -> None:
    class Chunks(BranchModel):
        def forward(self, x: torch.Tensor, spare: bool) -> torch.Tensor:
            def first_two(y: torch.Tensor) -> torch.Tensor:
                return self.blocks[1](self.blocks[0](y, True), True)

            x = checkpoint(first_two, x.requires_grad_(), use_reentrant=True)
            return self.head(self.blocks[2](x, True)).square().mean()

    assert_equal(both(tools, Chunks, tools.policy(tools.shard()), step=branch_step(lambda n, r: True), steps=6))


@pytest.mark.parametrize("rules", [(), ("shard",)])
def test_an_unused_parameter_is_not_decayed(tools: Any, rules: tuple[str, ...]) -> None:
    def job() -> list[bool]:
        model = BranchModel()
        run = memopt.apply_policy(model, tools.policy(*[getattr(tools, rule)() for rule in rules]))
        optimizer = run.optimizer(torch.optim.AdamW, lr=0.1, weight_decay=0.5)
        before = [whole_tensor(block.spare.weight).clone() for block in model.blocks]
        for number in range(3):
            for micro in range(2):
                model(vectors(2 * number + micro, dist.get_rank()), False).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [torch.equal(a, whole_tensor(b.spare.weight)) for a, b in zip(before, model.blocks, strict=True)]

    assert run_ranks(job, 2) == [[True] * 3] * 2


@pytest.mark.parametrize("rules", [(), ("shard",)])
def test_a_failed_micro_batch_restarts_a_deferred_accumulation(tools: Any, rules: tuple[str, ...]) -> None:
    policy = tools.policy(*[getattr(tools, rule)() for rule in rules], accumulate={"steps": 2, "reduce": "last"})

    def gradients(model: Any) -> list[torch.Tensor]:
        return [whole_tensor(p.grad).clone() for p in model.parameters()]

    def job() -> bool:
        good, failed = BranchModel(), BranchModel()
        for model in (good, failed):
            memopt.apply_policy(model, policy)
        failed(vectors(7, dist.get_rank()), True).backward()
        handle = failed.blocks[0].main.weight.register_hook(boom) if not rules else None
        if handle is None:
            handle = failed.blocks[0].register_full_backward_pre_hook(lambda module, grads: boom(None))
        with pytest.raises(ArithmeticError):
            failed(vectors(8, dist.get_rank()), True).backward()
        handle.remove()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", memopt.errors.MemoptWarning)
            for model in (good, failed):
                for micro in range(2):
                    model(vectors(micro, dist.get_rank()), True).backward()
        return all(torch.equal(a, b) for a, b in zip(gradients(good), gradients(failed), strict=True))

    assert run_ranks(job, 2) == [True, True]


def boom(grad: torch.Tensor | None) -> None:
    raise ArithmeticError("on purpose")

"""Faults that users of neighbouring tools reported about training under a policy: optimizers, dtypes, names."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import memopt
from memopt.errors import MemoptError
from memopt_torch.sharded import local_tensor, whole_tensor
from memopt_torch.testing import run_ranks

SHARD = {"name": "shard", "action": "shard", "match": {"role": "param"}}
RECOMPUTE = {"name": "again", "action": "recompute", "match": {"unit": "blocks.*"}}
BF16 = {"compute": "bfloat16", "master": "float32", "reduce": "float32", "optimizer_state": "float32"}


def policy(*rules: Any, **rest: Any) -> dict[str, Any]:
    return {"version": 1, "rules": list(rules), **rest}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.register_buffer("frequencies", torch.arange(8.0) / 8, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(self.norm(x))) * self.frequencies

    def reset_parameters(self) -> None:
        self.frequencies.copy_(torch.arange(8.0) / 8)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_of(model: nn.Module, number: int) -> torch.Tensor:
    rank = dist.get_rank() if dist.is_initialized() else 0
    generator = torch.Generator().manual_seed(10 * number + rank)
    return model(torch.randn(4, 8, generator=generator)).square().mean()


@pytest.mark.parametrize("passed", [True, False])
def test_an_optimizer_made_before_moves_the_weights_or_says_why_not(passed: bool) -> None:
    """huggingface/accelerate#3256: an optimizer made before wrapping steps dead tensors; the loss is flat, no error."""

    def job() -> Any:
        reference, model = Model(), Model()
        expected = torch.optim.SGD(reference.parameters(), lr=0.1)
        loss_of(reference, 0).backward()
        for parameter in reference.parameters():
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
        expected.step()
        made_before = torch.optim.SGD(model.parameters(), lr=0.1)
        memopt.apply_policy(model, policy(SHARD), optimizer=made_before if passed else None)
        loss_of(model, 0).backward()
        if not passed:
            with pytest.raises(MemoptError) as caught:
                made_before.step()
            return caught.value.problems[0].code, "optimizer=optimizer" in (caught.value.problems[0].hint or "")
        made_before.step()
        return all(
            torch.equal(whole_tensor(p), q) for p, q in zip(model.parameters(), reference.parameters(), strict=True)
        )

    expected = True if passed else ("optimizer-made-before", True)
    assert run_ranks(job, 2) == [expected] * 2


def test_an_optimizer_of_another_model_is_refused_before_anything_changes() -> None:
    """Made before a deep copy, or for another model: it would be accepted and train nothing."""
    import copy

    original = Model()
    optimizer = torch.optim.SGD(original.parameters(), lr=0.1)
    model = copy.deepcopy(original)
    with pytest.raises(MemoptError) as caught:
        memopt.apply_policy(model, policy(RECOMPUTE), optimizer=optimizer)
    problem = caught.value.problems[0]
    assert problem.code == "optimizer-of-another-model"
    assert "(8, 8)" in problem.message
    memopt.apply_policy(model, policy(RECOMPUTE))  # nothing had been changed
    memopt.apply_policy(original, policy(RECOMPUTE), optimizer=optimizer)


def test_groups_by_name_have_the_same_members_and_options_after_the_policy() -> None:
    """pytorch/pytorch#101343: wrapping changes names, and groups by name go wrong without a word."""

    def groups(model: nn.Module) -> list[dict[str, Any]]:
        decayed = {n for n, p in model.named_parameters() if p.ndim > 1 and not n.startswith("head")}
        return [
            {"params": [p for n, p in model.named_parameters() if n in decayed], "weight_decay": 0.1},
            {"params": [p for n, p in model.named_parameters() if n not in decayed], "weight_decay": 0.0},
        ]

    def members(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[tuple[set[str], float]]:
        names = {p: n for n, p in model.named_parameters()}
        return [({names[p] for p in g["params"]}, g["weight_decay"]) for g in optimizer.param_groups]

    def job() -> bool:
        plain = Model()
        expected = members(plain, torch.optim.AdamW(groups(plain)))
        before, after = Model(), Model()
        optimizer = torch.optim.AdamW(groups(before))
        memopt.apply_policy(before, policy(SHARD, RECOMPUTE), optimizer=optimizer)
        run = memopt.apply_policy(after, policy(SHARD, RECOMPUTE))
        return members(before, optimizer) == expected == members(after, run.optimizer(torch.optim.AdamW, groups(after)))

    assert run_ranks(job, 2) == [True, True]


def test_unsaved_buffers_are_right_after_a_meta_build() -> None:
    """NovaSky-AI/SkyRL#1709: buffers that are not in the state dict hold junk after a build on the meta device."""

    def job() -> list[bool]:
        eager = Model()
        with torch.device("meta"):
            model = Model()
        memopt.apply_policy(model, policy(SHARD))
        return [
            torch.equal(a.frequencies, b.frequencies) and not a.frequencies.is_meta
            for a, b in zip(model.blocks, eager.blocks, strict=True)
        ]

    assert run_ranks(job, 2) == [[True] * 3] * 2


def test_an_fp32_buffer_does_not_lift_what_the_policy_computes_in_16_bits() -> None:
    """NVIDIA-NeMo/Automodel#2419: weights are cast and buffers are not; one fp32 buffer lifts all that follows."""

    def job() -> tuple[torch.dtype, torch.dtype, set[torch.dtype]]:
        model = Model()
        run = memopt.apply_policy(model, policy(SHARD, precision=BF16))
        buffers = {row.dtype for row in run.plan.rows_of("buffer")}
        output = model(torch.randn(4, 8))
        return output.dtype, model.blocks[0].frequencies.dtype, buffers

    for output, buffer, planned in run_ranks(job, 2):
        assert output == torch.bfloat16
        assert buffer == torch.float32
        assert planned == {"float32"}  # the plan lists them as they stay


def test_frozen_low_precision_weights_are_not_lifted() -> None:
    """huggingface/accelerate#3844: a bf16 base under fp32 adapters was lifted to fp32."""

    def job() -> tuple[int, int, set[torch.dtype]]:
        model = Model()
        model.blocks.to(torch.bfloat16).requires_grad_(False)
        run = memopt.apply_policy(model, policy(SHARD, precision=BF16))
        loss_of(model, 0).backward()
        held = sum(local_tensor(p).nbytes for p in model.parameters())
        planned = sum(row.nbytes for row in run.plan.rows_of("param"))
        return held, planned, {p.dtype for p in model.blocks.parameters()}

    results = run_ranks(job, 2)
    assert sum(held for held, _, _ in results) == pytest.approx(2 * results[0][1], rel=0.02)
    assert all(dtypes == {torch.bfloat16} for _, _, dtypes in results)


def test_keys_are_the_plain_models_with_recompute_and_shard_on() -> None:
    """pytorch/pytorch#117446 (kin timm#2003, dinov2#544): wrappers' prefixes leak into the keys of a state dict."""

    def job() -> bool:
        model = Model()
        warnings.simplefilter("default")  # dynamo looks at `.grad` of activations
        memopt.apply_policy(model, policy(SHARD, RECOMPUTE)).compile(backend="eager")
        loss_of(model, 0).backward()
        return list(model.state_dict()) == list(Model().state_dict())

    assert run_ranks(job, 2) == [True, True]


@pytest.mark.parametrize("move", [lambda m: m.half(), lambda m: m.to(torch.float64), lambda m: m.to("meta")])
def test_moving_or_casting_a_model_under_a_policy_is_refused(move: Any) -> None:
    """Shards, buffers and views would part; a call that changes nothing is let be."""

    def job() -> str:
        model = Model()
        memopt.apply_policy(model, policy(SHARD))
        assert model.to("cpu") is model
        assert model.float() is model
        with pytest.raises(MemoptError) as caught:
            move(model)
        return caught.value.problems[0].code

    assert run_ranks(job, 2) == ["moved-after-policy"] * 2


def test_copying_pickling_and_a_second_policy_are_refused() -> None:
    """Each would leave a model that looks right and shares, or lacks, its values."""
    import copy
    import pickle

    def job() -> list[str]:
        model = Model()
        memopt.apply_policy(model, policy(SHARD, RECOMPUTE))
        codes = []
        for call in (
            lambda: copy.deepcopy(model),
            lambda: copy.deepcopy(model.blocks[1]),
            lambda: copy.deepcopy(model.head.weight),
            lambda: pickle.dumps(model.head.weight),
            lambda: memopt.apply_policy(model, policy(SHARD)),
        ):
            with pytest.raises(MemoptError) as caught:
                call()
            codes.append(caught.value.problems[0].code)
        return codes

    assert run_ranks(job, 2) == [["sharded-deepcopy"] * 3 + ["sharded-pickle", "already-applied"]] * 2


def test_torchrun_without_a_process_group_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank would train by itself and nobody would notice."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(MemoptError) as caught:
        memopt.apply_policy(Model(), policy(SHARD))
    assert caught.value.problems[0].code == "process-group-missing"


def test_a_model_inside_ddp_is_refused() -> None:
    """Two reductions of the same gradients."""

    def job() -> str:
        with pytest.raises(MemoptError) as caught:
            memopt.apply_policy(nn.parallel.DistributedDataParallel(Model()), policy(SHARD))
        return caught.value.problems[0].code

    assert run_ranks(job, 2) == ["wrapped-model"] * 2


def test_stepping_in_the_middle_of_a_deferred_accumulation_is_refused() -> None:
    """Gradients that were not reduced would part the ranks without a word."""

    def job() -> str:
        model = Model()
        run = memopt.apply_policy(model, policy(SHARD, accumulate={"steps": 2, "reduce": "last"}))
        optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
        loss_of(model, 0).backward()
        with pytest.raises(MemoptError) as caught:
            optimizer.step()
        loss_of(model, 1).backward()
        optimizer.step()
        return caught.value.problems[0].code

    assert run_ranks(job, 2) == ["accumulate-steps"] * 2


def test_stepping_between_forward_and_backward_is_refused() -> None:
    """The gradients would belong to weights that are gone; plain torch raises here too."""

    def job() -> str:
        model = Model()
        run = memopt.apply_policy(model, policy(SHARD))
        optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
        loss_of(model, 0).backward()
        late = loss_of(model, 1)
        optimizer.step()
        with pytest.raises(MemoptError) as caught:
            late.backward()
        optimizer.zero_grad()
        loss_of(model, 2).backward()
        return caught.value.problems[0].code

    assert run_ranks(job, 2) == ["weights-changed-since-forward"] * 2


def test_unfreezing_after_the_policy_is_refused_and_freezing_is_not() -> None:
    """A parameter without gradient memory would train on no rank, or on each by itself."""

    def job(sharded: bool) -> tuple[str, str | None]:
        model = Model()
        model.blocks[1].requires_grad_(False)
        memopt.apply_policy(model, policy(*([SHARD] if sharded else [])))
        loss_of(model, 0).backward()
        model.blocks[0].requires_grad_(False)
        loss_of(model, 1).backward()
        model.blocks[1].linear.weight.requires_grad_(True)
        with pytest.raises(MemoptError) as caught:
            loss_of(model, 2)
        return caught.value.problems[0].code, caught.value.problems[0].path

    for sharded in (True, False):
        assert run_ranks(job, 2, sharded) == [("unfrozen-after-policy", "blocks.1.linear.weight")] * 2


@pytest.mark.parametrize("role", ["param", "optimizer_state"])
def test_weights_written_by_hand_are_what_every_rank_computes_with(role: str) -> None:
    """A plain state dict loaded into a model under a policy reaches every rank's copy, gathered or kept whole."""

    def job() -> bool:
        torch.manual_seed(1)
        donor = Model()
        with torch.no_grad():
            for parameter in donor.parameters():
                parameter.mul_(1.5)
        model = Model()
        memopt.apply_policy(model, policy({**SHARD, "match": {"role": role}}))
        loss_of(model, 0)  # leaves its last units gathered: no backward comes
        model.load_state_dict(donor.state_dict())
        return torch.equal(loss_of(model, 1), loss_of(donor, 1))

    assert run_ranks(job, 2) == [True, True]

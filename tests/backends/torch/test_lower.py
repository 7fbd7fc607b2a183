"""The pieces of a plan in a loop that does its own wrapping, shaped like torchtitan's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import memopt
import memopt_torch
from memopt.errors import MemoptError
from memopt_torch.testing import run_ranks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleDict({str(i): Block() for i in range(3)})
        self.output = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return self.output(x)


def apply_ac(model: Transformer, lowered: Any = None) -> None:
    """The trainer's own function; `lowered` is what a user adds."""
    for name, block in model.layers.named_children():
        if lowered is not None and not lowered.recomputes(f"layers.{name}"):
            continue
        context = {} if lowered is None else {"context_fn": lowered.checkpoint_context_fn(f"layers.{name}")}
        model.layers.register_module(name, checkpoint_wrapper(block, preserve_rng_state=False, **context))


def apply_fsdp(model: Transformer, lowered: Any = None) -> None:
    """The trainer's own function; `lowered` is what a user adds."""
    mixed = MixedPrecisionPolicy()
    for name, block in model.layers.items():
        kwargs = {"mp_policy": mixed} if lowered is None else lowered.fully_shard_kwargs(f"layers.{name}")
        fully_shard(block, **kwargs)
    fully_shard(model, mp_policy=mixed)


def train(model: nn.Module) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for number in range(4):
        generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
        loss = model(torch.randn(4, 8, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


POLICY: dict[str, Any] = {
    "version": 1,
    "units": ["layers.*"],
    "unit_defaults": {"reshard_after_forward": False},
    "rules": [
        {"name": "shard", "action": "shard", "match": {"role": "param"}},
        {"name": "matmuls", "action": "keep", "match": {"op": "matmul"}, "optional": True},
        {"name": "again", "action": "recompute", "match": {"unit": "layers.*"}},
    ],
}


def lowered_plan(policy: dict[str, Any], world_size: int) -> Any:
    with torch.device("meta"):
        spec = memopt.inspect_model(Transformer())
    options = {"backend_options": {"torch": {"engine": "fsdp2"}}}
    return memopt_torch.lower(memopt.make_plan({**policy, **options}, spec, backend="torch", world_size=world_size))


def test_a_trainer_with_its_own_wrapping_takes_the_pieces(tools: Any) -> None:
    whole = {**POLICY, "rules": [rule for rule in POLICY["rules"] if rule["name"] != "matmuls"]}

    def job() -> tuple[list[float], list[float]]:
        theirs = Transformer()
        apply_ac(theirs)
        apply_fsdp(theirs)
        lowered = lowered_plan(whole, dist.get_world_size())
        ours = Transformer()
        apply_ac(ours, lowered)
        apply_fsdp(ours, lowered)
        return train(theirs), train(ours)

    for theirs, ours in run_ranks(job, 2):
        assert ours == theirs


def test_keyword_arguments_say_what_the_policy_says() -> None:
    precision = {"compute": "bfloat16", "master": "float32", "reduce": "float32", "optimizer_state": "float32"}
    lowered = lowered_plan({**POLICY, "precision": precision}, 2)
    kwargs = lowered.fully_shard_kwargs("layers.1")
    assert kwargs["reshard_after_forward"] is False
    assert kwargs["mp_policy"] == MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    assert lowered.units() == ("layers.0", "layers.1", "layers.2")


def test_what_torchs_own_checkpoint_cannot_be_told_is_refused() -> None:
    by_path = {
        **POLICY,
        "rules": [
            {"name": "ups", "action": "keep", "match": {"path": "layers.*.up"}},
            {"name": "again", "action": "recompute", "match": {"unit": "layers.*"}},
        ],
    }
    lowered = lowered_plan(by_path, 1)
    with pytest.raises(MemoptError) as caught:
        lowered.checkpoint_context_fn("layers.0")
    assert caught.value.problems[0].code == "lower-needs-paths"
    with pytest.raises(MemoptError) as caught:
        lowered.fully_shard_kwargs("layers.0")
    assert caught.value.problems[0].code == "unit-not-sharded"
    with pytest.raises(MemoptError) as caught:
        lowered.fully_shard_kwargs("layer.0")
    assert caught.value.problems[0].code == "unknown-unit"
    assert "layers.0" in (caught.value.problems[0].hint or "")


def test_operators_that_the_policy_keeps_are_not_run_again(tools: Any) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        num_addmm = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.num_addmm += func is torch.ops.aten.addmm.default
            return func(*args, **(kwargs or {}))

    def forward_matmuls(policy: dict[str, Any]) -> int:
        model = Transformer()
        apply_ac(model, lowered_plan(policy, 1))
        with Count() as counted:
            model(torch.randn(4, 8)).sum().backward()
        return counted.num_addmm

    whole = {**POLICY, "rules": [rule for rule in POLICY["rules"] if rule["name"] != "matmuls"]}
    assert forward_matmuls(POLICY) == 7  # six in layers and the output, none twice
    assert forward_matmuls(whole) > 7


def _wrapped(lowered: Any) -> Any:
    """What a trainer asks before it wraps a block."""
    return lowered.checkpoint_context_fn("layers.0") if lowered.recomputes("layers.0") else None


@pytest.mark.parametrize(
    "rules",
    [
        [{"name": "in", "action": "offload", "match": {"path": "layers.*.input"}}],
        [{"name": "up", "action": "offload", "match": {"path": "layers.*.up"}}],
        [{"name": "up", "action": "recompute", "match": {"path": "layers.*.up"}}],
    ],
    ids=["offload an input", "offload a value", "recompute one value"],
)
def test_what_a_checkpoint_cannot_do_is_refused_and_not_dropped(rules: list[dict[str, Any]]) -> None:
    plan = memopt.make_plan({"version": 1, "rules": rules}, memopt.inspect_model(Transformer()), backend="torch")
    with pytest.raises(MemoptError) as caught:
        _wrapped(memopt_torch.lower(plan))
    assert [problem.code for problem in caught.value.problems] == ["lower-needs-paths"]


def test_a_unit_that_the_policy_leaves_alone_is_not_wrapped() -> None:
    plan = memopt.make_plan({"version": 1}, memopt.inspect_model(Transformer()), backend="torch")
    assert not memopt_torch.lower(plan).recomputes("layers.0")

"""Recompute by unit and by value: gradients equal to the bit, bytes gone, everything else refused with the fix."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memopt
from memopt.errors import MemoptError, MemoptWarning
from memopt_torch.measure import StepMeter, StepResult

WIDTH, LENGTH, LAYERS = 32, 16, 3
WHOLE = {"name": "rest", "action": "recompute", "match": {"unit": "layers.*"}}


class LlamaAttention(nn.Module):
    """Attention with the module names of Transformers."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.dropout = dropout

    def forward(self, hidden: torch.Tensor, *, mask: torch.Tensor | None = None) -> torch.Tensor:
        q, k, v = (p(hidden).unflatten(-1, (4, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        rate = self.dropout if self.training else 0.0
        out = F.scaled_dot_product_attention(q * 2.0, k * 0.5, v, attn_mask=mask, dropout_p=rate)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """A gated MLP with the module names of Transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(WIDTH, 64, bias=False), nn.Linear(WIDTH, 64, bias=False)
        self.down_proj = nn.Linear(64, WIDTH, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class LlamaBlock(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.self_attn, self.mlp, self.drop = LlamaAttention(dropout), Mlp(), nn.Dropout(dropout)

    def forward(self, hidden: torch.Tensor, *, mask: torch.Tensor | None = None) -> torch.Tensor:
        hidden = hidden + self.drop(self.self_attn(self.input_layernorm(hidden), mask=mask))
        return hidden + self.drop(self.mlp(self.post_attention_layernorm(hidden)))


class Model(nn.Module):
    def __init__(self, block: Callable[[], nn.Module] = LlamaBlock, num_layers: int = LAYERS) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(block() for _ in range(num_layers))

    def forward(self, hidden: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden, **kwargs)
        return hidden.square().mean()


def batch(rows: int = 2) -> torch.Tensor:
    return torch.randn(rows, LENGTH, WIDTH, generator=torch.Generator().manual_seed(7))


def policy(*rules: dict[str, Any]) -> dict[str, Any]:
    return {"version": 1, "units": ["layers.*"], "rules": [*rules]}


def keep(name: str, **match: Any) -> dict[str, Any]:
    return {"name": name, "action": "keep", "match": match}


def step(model: nn.Module, seed: int, *, rows: int = 2, **kwargs: Any) -> list[torch.Tensor]:
    """Loss and gradients of one step, dropout seeded."""
    model.zero_grad()
    torch.manual_seed(seed)
    loss = model(batch(rows), **kwargs)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def assert_equal_steps(plain: nn.Module, applied: nn.Module, *, num_steps: int = 3, **kwargs: Any) -> None:
    for seed in range(num_steps):
        expected, got = step(plain, seed, **kwargs), step(applied, seed, **kwargs)
        assert len(expected) == len(got)
        assert all(torch.equal(a, b) for a, b in zip(expected, got))


def measured(model: nn.Module, *, rows: int = 2) -> StepResult:
    step(model, 0, rows=rows)
    with StepMeter(model, batch=None) as meter:
        step(model, 1, rows=rows)
    return meter.result()


EVERY_SECOND = {"unit": "layers.*", "layers": {"every": 2}}
POLICIES = {
    "everything": [WHOLE],
    "all but gate and up": [keep("mlp", tensor=["mlp_gate", "mlp_up"]), WHOLE],
    "all but attention": [keep("attention", op="attention"), WHOLE],
    "all but products": [keep("products", op="matmul"), WHOLE],
    "all but random": [keep("random", op="random"), WHOLE],
    "all but q and k": [keep("qk", tensor=["q", "k"]), WHOLE],
    "only the activation": [{"name": "act", "action": "recompute", "match": {"tensor": "mlp_act"}}],
    "only the mlp": [{"name": "mlp", "action": "recompute", "match": {"path": "layers.*.mlp.**"}}],
    "every second layer": [{"name": "rest", "action": "recompute", "match": EVERY_SECOND}],
    "the first layers": [{"name": "rest", "action": "recompute", "match": {"unit": "layers.*"}, "fraction": 0.5}],
}


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("rules", POLICIES.values(), ids=POLICIES.keys())
@pytest.mark.filterwarnings("ignore:rule `random` has held nothing:memopt.errors.MemoptWarning")
def test_gradients_equal_the_plain_models_to_the_bit(rules: list[dict[str, Any]], dropout: float) -> None:
    plain = Model(lambda: LlamaBlock(dropout))
    applied = copy.deepcopy(plain)
    memopt.apply_policy(applied, policy(*rules))
    assert_equal_steps(plain, applied)


def test_bytes_fall_as_more_is_recomputed_and_flops_rise() -> None:
    results = []
    for rules in (
        [],
        [keep("products", op="matmul"), WHOLE],
        [keep("mlp", tensor=["mlp_gate", "mlp_up"]), WHOLE],
        [WHOLE],
    ):
        model = Model(num_layers=8)
        memopt.apply_policy(model, policy(*rules))
        results.append(measured(model, rows=32))
    peaks = [result.peak.nbytes for result in results]
    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == len(peaks)
    recomputed = [result.recomputed_flops for result in results]
    assert recomputed[0] == 0
    assert recomputed == sorted(recomputed)


def test_exactly_what_is_not_held_is_computed_again() -> None:
    model = Model(num_layers=1)
    memopt.apply_policy(model, policy(keep("mlp", tensor=["mlp_gate", "mlp_up"]), WHOLE))
    tokens, product = 2 * LENGTH, 2 * WIDTH * WIDTH
    attention = 2 * 2 * 2 * LENGTH * LENGTH * WIDTH
    # q, k, v, o and attention; gate and up are held, and down's result is nobody's input.
    assert measured(model).recomputed_flops == 4 * tokens * product + attention


def test_values_autograd_does_not_need_are_not_held() -> None:
    plain, held = (Model(num_layers=4) for _ in range(2))
    memopt.apply_policy(plain, policy(WHOLE))
    memopt.apply_policy(held, policy(keep("down", tensor="mlp_down"), WHOLE))
    with pytest.warns(MemoptWarning, match="rule `down` has held nothing"):
        peak = measured(held).peak.nbytes
    assert peak == measured(plain).peak.nbytes


def test_a_keyword_input_and_its_gradient_pass_through_a_recomputed_unit() -> None:
    plain, applied = Model(), Model()
    memopt.apply_policy(applied, policy(WHOLE))
    masks = [torch.randn(LENGTH, LENGTH, requires_grad=True) for _ in range(2)]
    masks[1].data.copy_(masks[0].data)
    for model, mask in zip((plain, applied), masks):
        step(model, 0, mask=mask)
    assert masks[0].grad is not None
    assert torch.equal(masks[0].grad, masks[1].grad)


def test_changed_shapes_and_training_mode_between_steps_stay_exact() -> None:
    plain, applied = Model(lambda: LlamaBlock(0.1)), Model(lambda: LlamaBlock(0.1))
    memopt.apply_policy(applied, policy(keep("attention", op="attention"), WHOLE))
    assert_equal_steps(plain, applied, num_steps=1)
    for model in (plain, applied):
        model.eval()
    assert_equal_steps(plain, applied, num_steps=1)
    for length in (8, 24):
        inputs = torch.randn(1, length, WIDTH)
        grads = []
        for model in (plain, applied):
            model.train().zero_grad()
            torch.manual_seed(3)
            model(inputs).backward()
            grads.append([p.grad for p in model.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(*grads))


def test_thawing_a_frozen_layer_between_steps_stays_exact() -> None:
    plain, applied = Model(), Model()
    for model in (plain, applied):
        model.layers[0].requires_grad_(False)
    memopt.apply_policy(applied, policy(keep("act", tensor="mlp_act"), keep("qk", tensor=["q", "k"]), WHOLE))
    assert_equal_steps(plain, applied, num_steps=2)
    for model in (plain, applied):
        for parameter in model.parameters():
            parameter.requires_grad_(True)
    assert_equal_steps(plain, applied, num_steps=2)


class Statistics(nn.Module):
    """A block with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(LENGTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.norm(self.linear(hidden))


@pytest.mark.parametrize("rules", [[WHOLE], [keep("products", op="matmul"), WHOLE]], ids=["whole", "selective"])
def test_running_statistics_are_updated_once_a_step(rules: list[dict[str, Any]]) -> None:
    plain, applied = Model(Statistics), Model(Statistics)
    memopt.apply_policy(applied, policy(*rules))
    assert_equal_steps(plain, applied)
    assert all(torch.equal(a, b) for a, b in zip(plain.buffers(), applied.buffers()))


class InPlace(nn.Module):
    """Operators that overwrite what a module has given."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        up = self.up(hidden)
        up += 1.0
        up.relu_()
        return hidden + F.dropout(self.down(up), 0.3, inplace=True)


@pytest.mark.parametrize(
    "rules",
    [[WHOLE], [keep("up", path="layers.*.up"), WHOLE], [keep("down", path="layers.*.down"), WHOLE]],
    ids=["whole", "up held", "down held"],
)
@pytest.mark.filterwarnings("ignore:rule `down` has held nothing:memopt.errors.MemoptWarning")
def test_values_overwritten_in_place_are_given_back_as_they_ended(rules: list[dict[str, Any]]) -> None:
    plain, applied = Model(InPlace), Model(InPlace)
    memopt.apply_policy(applied, policy(*rules))
    assert_equal_steps(plain, applied)


class TwoDropouts(nn.Module):
    """The first mask may be held while the second is drawn again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop_first, self.drop_second = nn.Dropout(0.5), nn.Dropout(0.5)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.drop_second(self.second(self.drop_first(self.first(hidden)).tanh()).tanh())


def test_a_held_random_value_does_not_shift_what_later_ones_draw() -> None:
    plain, applied = Model(TwoDropouts), Model(TwoDropouts)
    memopt.apply_policy(applied, policy(keep("tanh input", path="layers.*.second.input"), WHOLE))
    assert_equal_steps(plain, applied)


def test_topk_results_are_kept_unless_named_by_op() -> None:
    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(WIDTH, 8)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            weights, chosen = self.gate(hidden).topk(2)
            return hidden * weights.sum(-1, keepdim=True) + chosen.sum(-1, keepdim=True)

    def topk_calls_in_backward(rules: list[dict[str, Any]]) -> int:
        model = Model(Router)
        memopt.apply_policy(model, policy(*rules))
        step(model, 0)
        calls: list[str] = []

        class Count(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                calls.append(func.name())
                return func(*args, **(kwargs or {}))

        loss = model(batch())
        with Count():
            loss.backward()
        return calls.count("aten::topk")

    assert topk_calls_in_backward([WHOLE]) == 0
    by_op = {"name": "topk", "action": "recompute", "match": {"op": "topk"}}
    assert topk_calls_in_backward([by_op, WHOLE]) == LAYERS


class Changing(nn.Module):
    """Takes another path when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.other, self.turn = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), 0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.turn == 1:
            return hidden + self.other(self.linear(hidden).sin().tanh()).sigmoid()
        return hidden + self.other(self.linear(hidden).tanh()).sigmoid()


def test_a_forward_that_takes_another_path_than_the_learnt_one_stays_exact() -> None:
    plain, applied = Model(Changing), Model(Changing)
    memopt.apply_policy(
        applied, policy(keep("linear", path="layers.*.linear"), keep("other", path="layers.*.other"), WHOLE)
    )
    for turn in (0, 1, 1, 0, 0):
        for model in (plain, applied):
            for layer in model.layers:
                layer.turn = turn
        assert_equal_steps(plain, applied, num_steps=1)


def test_a_forward_that_changes_before_the_backward_pass_is_an_error_not_a_wrong_gradient() -> None:
    model = Model(Changing)
    memopt.apply_policy(model, policy(keep("linear", path="layers.*.linear"), WHOLE))
    step(model, 0)
    loss = model(batch())
    for layer in model.layers:
        layer.turn = 1
    with pytest.raises(MemoptError, match="recompute-mismatch"):
        loss.backward()


def test_a_second_backward_pass_through_the_same_graph_gives_the_same_gradients() -> None:
    model = Model(lambda: LlamaBlock(0.1))
    memopt.apply_policy(model, policy(keep("attention", op="attention"), WHOLE))
    loss = model(batch())
    loss.backward(retain_graph=True)
    first = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    loss.backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(first, model.parameters()))


def test_a_held_value_overwritten_after_its_unit_is_an_error() -> None:
    class Overwriting(Model):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                hidden = layer(hidden)
                if self.layers[0].last is not None:
                    self.layers[0].last.detach().zero_()
            return hidden.square().mean()

    class Leaking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.last = nn.Linear(WIDTH, WIDTH), None

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            self.last = self.linear(hidden)
            return hidden + self.last.tanh().sin()

    model = Overwriting(Leaking)
    memopt.apply_policy(model, policy(keep("linear", path="layers.*.linear"), WHOLE))
    with pytest.raises(MemoptError, match="held-value-overwritten"):
        step(model, 0)


def test_a_unit_that_overwrites_its_input_is_refused_with_its_path() -> None:
    class Overwriting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return self.linear(hidden.tanh().add_(1.0)) + hidden.detach().mul_(2.0)

    model = Model(Overwriting)
    memopt.apply_policy(model, policy(keep("linear", path="layers.*.linear"), WHOLE))
    with pytest.raises(MemoptError, match=r"region-overwrites-input\] layers\.0"):
        step(model, 0)


def test_no_gradient_no_recomputation() -> None:
    model = Model()
    memopt.apply_policy(model, policy(WHOLE))
    with torch.no_grad(), StepMeter(model) as meter:
        model(batch())
    assert meter.result().recomputed_flops == 0
    assert step(model, 0)


def test_names_and_state_dict_are_those_of_the_plain_model() -> None:
    plain, applied = Model(), Model()
    memopt.apply_policy(applied, policy(keep("attention", op="attention"), WHOLE))
    assert [name for name, _ in plain.named_modules()] == [name for name, _ in applied.named_modules()]
    assert list(plain.state_dict()) == list(applied.state_dict())


def test_plain_and_recompute_references_switch_the_residual_slots() -> None:
    model = Model()
    run = memopt.apply_policy(model, policy(keep("attention", op="attention"), WHOLE))
    step(model, 0)
    flops = {}
    for mode in ("policy", "plain", "recompute"):
        with run.regions.reference(mode), StepMeter(model) as meter:
            step(model, 0)
        flops[mode] = meter.result().recomputed_flops
    assert flops["plain"] == 0 < flops["policy"] < flops["recompute"]


# A user's own checkpointing.


def test_a_checkpoint_of_the_models_own_around_a_unit_is_refused() -> None:
    class Checkpointed(Model):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                hidden = torch.utils.checkpoint.checkpoint(layer, hidden, use_reentrant=False)
            return hidden.sum()

    model = Checkpointed()
    memopt.apply_policy(model, policy(WHOLE))
    with pytest.raises(MemoptError, match="own-checkpointing"):
        model(batch())


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_of_the_models_own_inside_a_unit_is_refused(use_reentrant: bool) -> None:
    class Inner(LlamaBlock):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return hidden + torch.utils.checkpoint.checkpoint(self.mlp, hidden, use_reentrant=use_reentrant)

    model = Model(Inner)
    memopt.apply_policy(model, policy(keep("mlp", tensor="mlp_gate"), WHOLE))
    with pytest.raises(MemoptError, match="own-checkpointing"):
        model(batch().requires_grad_())


def test_transformers_gradient_checkpointing_on_a_unit_is_refused_with_the_fix() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=16
    )
    model = LlamaForCausalLM(config)
    for module in model.modules():
        if hasattr(module, "gradient_checkpointing"):
            module.gradient_checkpointing = True
    with pytest.raises(MemoptError, match="gradient_checkpointing_disable"):
        memopt.apply_policy(model, policy(WHOLE))


def _as_mapping(blocks: list[nn.Module]) -> nn.ModuleDict:
    return nn.ModuleDict({str(number): block for number, block in enumerate(blocks)})


@pytest.mark.parametrize("kind", [nn.ModuleList, _as_mapping])
def test_a_unit_that_names_a_list_of_layers_is_refused_with_the_layers(kind: Any) -> None:
    """A list of modules is never called: as a unit it would recompute nothing, and nobody would be told."""
    model = nn.Module()
    model.blocks = kind([nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)])
    rule = {"name": "rest", "action": "recompute", "match": {"unit": "blocks"}}
    with pytest.raises(MemoptError) as error:
        memopt.apply_policy(model, {"version": 1, "units": ["blocks"], "rules": [rule]})
    problem = error.value.problems[0]
    assert problem.code == "unit-matches-nothing"
    assert "`Sequential` × 3 at `blocks.*`" in problem.message


class WalksThrough(nn.Module):
    """Calls the children of its container one by one, never the container."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.head = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for child in self.inner:
            x = child(x).relu()
        return self.head(x).sum()


def test_a_unit_that_is_never_called_is_told_after_the_first_step() -> None:
    model = WalksThrough()
    rule = {"name": "again", "action": "recompute", "match": {"unit": "inner"}}
    run = memopt.apply_policy(model, {"version": 1, "units": ["inner"], "rules": [rule]})
    optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
    model(torch.ones(2, 4)).backward()
    with pytest.warns(MemoptWarning, match="never called 1 of 1 units"):
        optimizer.step()
    optimizer.step()  # told once: warnings are errors here

"""Faults that users of neighbouring tools reported about sharding, each as the right behaviour."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import memopt
from memopt.errors import MemoptError
from memopt_torch import BACKEND, guards
from memopt_torch.sharded import local_tensor, whole_tensor
from memopt_torch.testing import run_fake, run_ranks

SHARD = {"name": "shard", "action": "shard", "match": {"role": "param"}}
RECOMPUTE = {"name": "again", "action": "recompute", "match": {"unit": "blocks.*"}}


def policy(*rules: Any, **rest: Any) -> dict[str, Any]:
    return {"version": 1, "rules": list(rules), **rest}


class Block(nn.Module):
    """A block with a keyword mask, the shape of attention masks."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor, *, mask: torch.Tensor | None = None) -> torch.Tensor:
        y = self.down(torch.tanh(self.up(x)))
        return x + (y if mask is None else y * mask)


class Stack(nn.Module):
    def __init__(self, layers: int = 3, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, mask=mask)
        return self.head(x).square().mean()

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def vectors(rank: int, width: int = 8) -> torch.Tensor:
    return torch.randn(4, width, generator=torch.Generator().manual_seed(rank))


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: whole_tensor(p.grad).clone() for n, p in model.named_parameters() if p.grad is not None}


def same_gradients(make: Callable[[], nn.Module], rules: Any, run: Callable[[nn.Module, int], torch.Tensor]) -> bool:
    """Whether a policy's gradients equal those of the plain model, averaged over ranks, to the bit."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    plain, ours = make(), make()
    run(plain, rank).backward()
    for parameter in plain.parameters():
        if parameter.grad is not None and dist.is_initialized():
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
    memopt.apply_policy(ours, rules)
    run(ours, rank).backward()
    a, b = gradients(plain), gradients(ours)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_frozen_first_layers_under_recompute_keep_later_gradients() -> None:
    """huggingface/transformers#21381: a recomputed region whose inputs need no gradient loses its own."""

    def make() -> nn.Module:
        model = Stack()
        model.blocks[0].requires_grad_(False)
        return model

    assert same_gradients(make, policy(RECOMPUTE), lambda model, rank: model(vectors(rank)))


def test_a_keyword_mask_survives_sharding_with_recompute() -> None:
    """huggingface/transformers#34928: wrappers in the wrong order recompute with other shapes than the forward's."""

    def job() -> bool:
        mask = (torch.arange(8) % 2).float().expand(4, 8)
        return same_gradients(Stack, policy(SHARD, RECOMPUTE), lambda model, rank: model(vectors(rank), mask=mask))

    assert run_ranks(job, 2) == [True, True]


def test_gradients_exist_for_trainable_parameters_only() -> None:
    """Lightning-AI/litgpt#1417: gradient memory as if frozen weights trained. Flat units keep the two apart."""

    def job() -> tuple[int, int]:
        model = Stack(width=32)
        for block in model.blocks:
            block.up.requires_grad_(False)
            block.down.weight.requires_grad_(False)
        run = memopt.apply_policy(model, policy(SHARD))
        model(vectors(dist.get_rank(), 32)).backward()
        planned = sum(row.nbytes for row in run.plan.rows_of("grad"))
        resident = sum(s.grad.nbytes for unit in run.engine.units for s in unit.sections if s.grad is not None)
        return planned, resident

    for planned, resident in run_ranks(job, 2):
        padding = 4 * 8 * 4  # four units, eight values each
        assert planned <= resident <= planned + padding


def test_a_build_without_nccl_says_what_is_missing_and_the_way_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """pytorch/pytorch#148283: a platform without NCCL dies in the store. Planning needs no process group at all."""
    monkeypatch.setattr(guards.dist, "is_nccl_available", lambda: False)
    spec = memopt.inspect_model(Stack())
    plan = memopt.make_plan(policy(SHARD), spec, backend="torch", world_size=8)
    assert plan.world_size == 8
    memopt.apply_policy(Stack(), policy(SHARD))  # one process needs none either

    class OnGpu(nn.Parameter):
        device = torch.device("cuda", 0)

    model = Stack()
    model.head.bias = OnGpu(torch.zeros(1))
    with pytest.raises(MemoptError) as caught:
        guards.refuse_unfit(model, plan, None)
    problems = {problem.code: problem for problem in caught.value.problems}
    assert "gloo" in (problems["nccl-missing"].hint or "")


class Experts(nn.Module):
    """Four separate experts; a rank may route nothing to some of them."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor, routes: list[int]) -> torch.Tensor:
        out = torch.zeros_like(x)
        for expert in sorted(set(routes)):
            rows = [i for i, route in enumerate(routes) if route == expert]
            out[rows] = self.experts[expert](x[rows])
        return x + out


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Experts() for _ in range(4))

    def forward(self, x: torch.Tensor, routes: list[int]) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, routes)
        return x.square().mean()


def test_experts_without_tokens_on_a_rank_do_not_hang() -> None:
    """THUDM/slime#1010: routes differ by rank, so ranks disagree on which collectives come next."""
    routes = [[0, 0, 1, 1], [2, 2, 2, 1]]

    def job() -> list[bool]:
        model = Mixture()
        memopt.apply_policy(model, policy(SHARD))
        rank = dist.get_rank()
        equal = []
        for _ in range(3):
            model(vectors(rank), routes[rank]).backward()
            joined = Mixture()
            joined(torch.cat([vectors(0), vectors(1)]), routes[0] + routes[1]).backward()
            ours, whole = gradients(model), gradients(joined)
            equal.append(ours.keys() == whole.keys())
            equal += [torch.allclose(ours[name], whole[name], atol=1e-6) for name in ours]
            model.zero_grad()
        return equal

    for equal in run_ranks(job, 2):
        assert all(equal)


class WideEnds(nn.Module):
    """Large embedding and head around small blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(512, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 512, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


def test_embedding_and_head_are_not_left_whole_through_the_step() -> None:
    """pytorch/pytorch#131965: what no unit names stays in the root, gathered. Here it comes for its own call alone."""

    def job() -> tuple[list[str], int]:
        run = memopt.apply_policy(WideEnds(), policy(SHARD))
        return [unit.name for unit in run.engine.units if unit.resident], run.engine.arena.plan.nbytes

    for resident, arena in run_ranks(job, 2):
        assert resident == []
        # Head and its gradient, or embedding and its own, with two blocks; never embedding and head together.
        assert arena < 2 * 512 * 8 * 4 + 2 * 4096 + 4096


class Tied(WideEnds):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


@pytest.mark.parametrize("units", [None, ["embed", "blocks.*"]])
def test_tied_weights_in_two_units_run_and_stay_tied(units: list[str] | None) -> None:
    """huggingface/accelerate#4171: a weight shared by two groups fails at first use."""
    rules = policy(SHARD) if units is None else policy(SHARD, units=units)

    def job() -> tuple[bool, bool]:
        tokens = torch.arange(8) + dist.get_rank()
        equal = same_gradients(Tied, rules, lambda model, rank: model(tokens))
        model = Tied()
        memopt.apply_policy(model, rules)
        model(tokens).backward()
        return equal, model.head.weight is model.embed.weight

    assert run_ranks(job, 2) == [(True, True)] * 2


@pytest.mark.parametrize("world", [4, 3])
def test_a_mesh_smaller_than_the_job_names_both_numbers(world: int) -> None:
    """ByteDance-Seed/Bagel#309: a mesh smaller than the job, and ranks that fail with an index error."""
    with pytest.raises(MemoptError) as caught:
        memopt.make_plan(
            policy(SHARD, mesh={"replicate": 1, "fsdp": 2}),
            memopt.inspect_model(Stack()),
            backend="torch",
            world_size=world,
        )
    message = caught.value.problems[0].message
    assert "2" in message
    assert str(world) in message

    def job() -> str:
        with pytest.raises(MemoptError) as refused:
            memopt.apply_policy(Stack(), policy(SHARD, mesh={"replicate": 1, "fsdp": 2}))
        return refused.value.problems[0].code

    assert run_fake(job, world) == "mesh-world"


def test_reducing_at_the_last_micro_batch_costs_memory_that_shows_and_saves_collectives() -> None:
    """huggingface/accelerate#2531 (kin #3762): skipping the reduction keeps whole gradients, or is never skipped."""

    def job() -> Any:
        found = {}
        for reduce in ("each", "last"):
            model = Stack()
            run = memopt.apply_policy(model, policy(SHARD, accumulate={"steps": 4, "reduce": reduce}))
            for micro in range(4):
                (model(vectors(dist.get_rank() + 10 * micro)) / 4).backward()
            held = sum(tensor.nbytes for tensor, role in run.engine.buffers() if role == "grad")
            planned = sum(row.nbytes for row in run.plan.rows_of("grad"))
            scatters = run.engine.collectives.counts["reduce_scatter"]
            found[reduce] = scatters, held, planned, gradients(model)
        return found

    for found in run_ranks(job, 2):
        (each, each_held, each_planned, a), (last, last_held, last_planned, b) = found["each"], found["last"]
        assert (each, last) == (4 * 4, 4)  # four units, four micro-batches
        assert last_held > each_held
        assert 1.9 * each_planned < last_planned
        for name in a:
            torch.testing.assert_close(a[name], b[name], rtol=1e-5, atol=1e-7)


def test_policy_then_compile_is_the_one_order_and_the_other_is_said() -> None:
    """pytorch/torchtitan#472: the order of compile, recompute and shard is unclear and costs graph breaks."""
    with pytest.raises(MemoptError) as caught:
        memopt.apply_policy(torch.compile(Stack()), policy(RECOMPUTE))
    assert caught.value.problems[0].code == "compiled-before"

    def job() -> tuple[bool, int, int]:
        import torch._dynamo as dynamo

        warnings.simplefilter("default")  # dynamo looks at `.grad` of activations
        plain, ours = Stack(), Stack()
        memopt.apply_policy(ours, policy(SHARD, RECOMPUTE)).compile(backend="aot_eager", fullgraph=True)
        graphs = []
        for number in range(4):
            for model in (plain, ours):
                model(vectors(number)).backward()
            graphs.append(dynamo.utils.counters["stats"]["unique_graphs"])
        equal = all(
            torch.allclose(whole_tensor(p.grad), q.grad, atol=1e-6)
            for p, q in zip(ours.parameters(), plain.parameters(), strict=True)
        )
        return equal, graphs[1], graphs[3]

    for equal, early, late in run_ranks(job, 2):
        assert equal
        assert early == late > 0


def test_a_model_compiled_whole_after_the_policy_gives_the_same_gradients() -> None:
    """Family: hooks and checkpoints of a sharding library that a compiler cannot trace crash it, or are dropped."""

    def job() -> list[bool]:
        warnings.simplefilter("ignore")  # of dynamo
        plain, ours = Stack(), Stack()
        memopt.apply_policy(ours, policy(SHARD, RECOMPUTE))
        compiled = torch.compile(ours, backend="aot_eager")
        equal = []
        for number in range(3):
            for model in (plain, ours):
                model.zero_grad()
            plain(vectors(number)).backward()
            compiled(vectors(number)).backward()
            equal += [
                torch.allclose(whole_tensor(p.grad), q.grad, atol=1e-6)
                for p, q in zip(ours.parameters(), plain.parameters(), strict=True)
            ]
        return equal

    assert all(all(equal) for equal in run_ranks(job, 2))


def test_another_method_than_forward_works_once_registered_and_says_how_before() -> None:
    """mosaicml/llm-foundry#423: a method other than forward never gathers weights."""

    class Own(Block):
        def project(self, x: torch.Tensor) -> torch.Tensor:
            return self.up(x)

    def make() -> Stack:
        model = Stack()
        torch.manual_seed(1)
        model.blocks[1] = Own()
        model.blocks[0], model.blocks[2] = Own(), Own()
        return model

    def job() -> tuple[bool, str, bool]:
        plain, model = make(), make()
        run = memopt.apply_policy(model, policy(SHARD))
        x = vectors(0)
        with torch.no_grad():
            through_calls = torch.equal(model.encode(x), plain.encode(x))
        with pytest.raises(MemoptError) as caught:
            model.blocks[1].project(x)
        run.register_method(model.blocks[1], "project")
        model.blocks[1].project(x).sum().backward()
        plain.blocks[1].project(x).sum().backward()
        ours, theirs = model.blocks[1].up.weight.grad, plain.blocks[1].up.weight.grad
        return through_calls, caught.value.problems[0].hint or "", torch.equal(whole_tensor(ours), theirs)

    for through_calls, hint, equal in run_ranks(job, 2):
        assert through_calls
        assert "register_method" in hint
        assert equal


def test_odd_sizes_are_padded_and_counted() -> None:
    """Lightning-AI/lightning-thunder#248: an odd vocabulary stops sharding."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.table = nn.Parameter(torch.randn(13, 8))
            self.one = nn.Parameter(torch.ones(1))
            self.scalar = nn.Parameter(torch.tensor(2.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x @ self.table.t() * self.scalar + self.one).square().mean()

    def job() -> tuple[bool, int]:
        equal = same_gradients(Odd, policy(SHARD), lambda model, rank: model(vectors(rank)))
        run = memopt.apply_policy(Odd(), policy(SHARD))
        return equal, sum(local_tensor(p).numel() for p in run.model.parameters())

    held = run_ranks(job, 2)
    assert all(equal for equal, _ in held)
    assert sum(numel for _, numel in held) == 13 * 8 + 2  # each value on one rank


def test_every_setting_reaches_the_engine() -> None:
    """modelscope/ms-swift#7962 (kin transformers#25180, accelerate#3778): settings parsed, one of them used."""
    options = {"gradient_slots": 2, "communication": "blocking", "timeout_s": 77.0, "unused_parameters": "agree"}
    everything = policy(
        SHARD,
        mesh={"replicate": 2, "fsdp": 2},
        unit_defaults={"reshard_after_forward": False, "prefetch": {"forward": 2, "backward": 0}},
        precision={"compute": "bfloat16", "master": "float32", "reduce": "float16", "optimizer_state": "float32"},
        accumulate={"steps": 3, "reduce": "last"},
        backend_options={"torch": options},
    )

    def job() -> dict[str, Any]:
        asked: set[float] = set()
        make = dist.new_subgroups_by_enumeration

        def noted(ranks: Any, *, timeout: Any) -> Any:
            asked.add(timeout.total_seconds())
            return make(ranks, timeout=timeout)

        with pytest.MonkeyPatch.context() as monkey:
            monkey.setattr(dist, "new_subgroups_by_enumeration", noted)
            engine = memopt.apply_policy(Stack(), everything).engine
        unit = next(unit for unit in engine.units if unit.name == "blocks.0")
        return {
            "replicas": engine.groups.replicas,
            "size": engine.groups.size,
            "keep": unit.keep,
            "prefetch": (unit.prefetch_forward, unit.prefetch_backward),
            "compute": unit.sections[0].gathered.dtype,
            "master": unit.sections[0].shard.dtype,
            "reduce": unit.sections[0].slot.dtype,
            "accumulate": engine.reduction.accumulate_steps,
            "blocking": engine.collectives.blocking,
            "timeouts": asked,
            "agree": engine.reduction.agree_on_unused,
        }

    assert run_fake(job, 4) == {
        "replicas": 2,
        "size": 2,
        "keep": True,
        "prefetch": (2, 0),
        "compute": torch.bfloat16,
        "master": torch.float32,
        "reduce": torch.float16,
        "accumulate": 3,
        "blocking": True,
        "timeouts": {77.0},
        "agree": True,
    }
    two_slots = policy(SHARD, backend_options={"torch": {"gradient_slots": 2}})
    arena = [run_fake(lambda rules=rules: arena_bytes(rules), 2) for rules in (policy(SHARD), two_slots)]
    assert arena[0] < arena[1]


def arena_bytes(rules: Any) -> int:
    return memopt.apply_policy(Stack(), rules).engine.arena.plan.nbytes


def test_limits_of_other_layer_engines_are_not_ours() -> None:
    """yandex/YaFSDP@669fc36: 0-d and non-contiguous weights, mixed dtypes and shared buffers are refused there."""

    class Awkward(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.turned = nn.Parameter(torch.randn(8, 8).t())
            self.scale = nn.Parameter(torch.tensor(0.5))
            self.wide = nn.Parameter(torch.randn(8, 8, dtype=torch.float64))
            self.register_buffer("shared", SHARED)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.tanh(x @ self.turned * self.scale + (x.double() @ self.wide).float()) * self.shared

    shared_rules = policy(SHARD, units=["0", "1"])

    def make() -> nn.Module:
        return nn.Sequential(Awkward(), Awkward(), nn.Linear(8, 1))

    def job(engine: str) -> bool:
        plain, ours = make(), make()
        memopt.apply_policy(ours, {**shared_rules, "backend_options": {"torch": {"engine": engine}}})
        for model in (plain, ours):
            model(torch.cat([vectors(0), vectors(1)])).square().mean().backward()
        return all(
            torch.allclose(whole_tensor(p.grad), q.grad, atol=1e-6)
            for p, q in zip(ours.parameters(), plain.parameters(), strict=True)
        )

    assert run_ranks(job, 2, "layer") == [True, True]


SHARED = torch.full((8,), 0.25)


def test_what_the_backend_cannot_do_is_refused_by_rule_name() -> None:
    """A key that a backend does not support is never accepted and ignored."""
    spec = memopt.inspect_model(Stack())
    rules = policy({"name": "far", "action": "offload", "match": {"role": "param"}})
    with pytest.raises(MemoptError) as caught:
        memopt.make_plan(rules, spec, backend=BACKEND, world_size=2)
    assert "far" in str(caught.value)
    assert "shard" in str(caught.value)


def test_a_mesh_passed_must_be_the_policys() -> None:
    """A mesh whose axes differ from the policy's would be used for its size alone."""
    from torch.distributed.device_mesh import init_device_mesh

    def job() -> tuple[str, str]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "fsdp"))
        with pytest.raises(MemoptError) as caught:
            memopt.apply_policy(Stack(), policy(SHARD), mesh=mesh)
        memopt.apply_policy(Stack(), policy(SHARD, mesh={"replicate": 2, "fsdp": 2}), mesh=mesh)
        return caught.value.problems[0].code, caught.value.problems[0].hint or ""

    code, hint = run_fake(job, 4)
    assert code == "mesh-world"
    assert "replicate: 2, fsdp: 2" in hint

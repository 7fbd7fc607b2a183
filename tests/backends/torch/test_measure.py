"""What the step meter counts, against models small enough to count by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from memopt_torch.measure import StepMeter, note_role, register_host_storage

WIDTH = 64
MATRIX_BYTES = WIDTH * WIDTH * 4


class Chain(nn.Module):
    """Two matrices with a ReLU between: what it holds can be counted by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.second = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(batch).relu()).sum()


@pytest.fixture
def chain() -> Chain:
    torch.manual_seed(0)
    return Chain()


def test_roles_sum_to_the_peak_and_are_what_the_step_holds(chain: Chain) -> None:
    optimizer = torch.optim.Adam(chain.parameters(), foreach=False)
    batch = torch.randn(WIDTH, WIDTH)

    def step() -> None:
        chain(batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with StepMeter(chain, (optimizer,), batch=batch) as meter:
        step()
    peak = meter.result().peak
    assert sum(peak.by_role.values()) == peak.nbytes
    assert peak.by_role["param"] == 2 * MATRIX_BYTES
    assert peak.by_role["optimizer_state"] == 4 * MATRIX_BYTES + 2 * 4  # two moments each, and a step counter each
    assert peak.by_role["grad"] == 2 * MATRIX_BYTES
    assert peak.phase == "optimizer"


def test_what_outlives_the_forward_is_an_activation(chain: Chain) -> None:
    batch = torch.randn(WIDTH, WIDTH)
    with StepMeter(chain, batch=batch) as meter:
        loss = chain(batch)
        largest_in_forward = meter.ledger.peak()
        loss.backward()
    assert largest_in_forward.by_role["param"] == 2 * MATRIX_BYTES
    result = meter.result()
    # The batch and the ReLU's result are saved for the matrices' gradients; nothing else lives on.
    assert result.peak.by_role["activation"] >= 2 * MATRIX_BYTES


def test_a_tensor_that_lives_on_unseen_by_autograd_is_still_counted(chain: Chain) -> None:
    batch = torch.randn(WIDTH, WIDTH)
    extra: list[torch.Tensor] = []

    def peak_with(num_extra: int) -> int:
        extra.clear()
        with StepMeter(chain, batch=batch) as meter:
            extra.extend(torch.empty(WIDTH, WIDTH) for _ in range(num_extra))
            chain(batch).backward()
        chain.zero_grad()
        return meter.result().peak.nbytes

    assert peak_with(3) - peak_with(0) == 3 * MATRIX_BYTES


def test_views_are_counted_once_and_resizes_are_followed(chain: Chain) -> None:
    with StepMeter(chain) as meter:
        whole = torch.zeros(4 * WIDTH * WIDTH)
        views = [whole.view(4, -1), whole[10:], whole.t() if whole.dim() == 2 else whole.unsqueeze(0)]
        whole.untyped_storage().resize_(8 * MATRIX_BYTES)
        whole.untyped_storage().resize_(0)
        another = torch.zeros(WIDTH)
        del views, another
    assert meter.result().peak.nbytes == 2 * MATRIX_BYTES + 8 * MATRIX_BYTES


def test_registered_host_buffers_count_as_host_not_as_device(chain: Chain) -> None:
    batch = torch.randn(WIDTH, WIDTH)

    def run(as_host: bool) -> tuple[int, int]:
        with StepMeter(chain, batch=batch) as meter:
            buffer = torch.empty(0)
            if as_host:
                register_host_storage(buffer)
            buffer.resize_(WIDTH, WIDTH)
            chain(batch)
        return meter.result().peak.nbytes, meter.result().peak.host_nbytes

    with_device, no_host = run(as_host=False)
    without_device, host = run(as_host=True)
    assert with_device - without_device == MATRIX_BYTES
    assert (no_host, host) == (0, MATRIX_BYTES)


def test_flops_of_forward_and_backward_are_counted_from_the_operators(chain: Chain) -> None:
    with StepMeter(chain) as meter:
        chain(torch.randn(WIDTH, WIDTH)).backward()
    product = 2 * WIDTH**3
    # Two products forward; backward one for each weight and one for the first activation (the batch needs no gradient).
    assert meter.result().flops == 5 * product
    assert meter.result().recomputed_flops == 0


def test_recomputed_flops_are_told_apart_whoever_recomputes(chain: Chain) -> None:
    from torch.utils.checkpoint import checkpoint

    with StepMeter(chain) as meter:
        checkpoint(chain, torch.randn(WIDTH, WIDTH, requires_grad=True), use_reentrant=False).backward()
    result = meter.result()
    # Early stop: the second product's result is not needed again.
    assert result.recomputed_flops == 2 * WIDTH**3
    assert result.recompute_fraction == pytest.approx(1 / 7)


def test_gradients_accumulated_over_steps_are_gradients_not_activations(chain: Chain) -> None:
    batch = torch.randn(WIDTH, WIDTH)
    chain(batch).backward()
    with StepMeter(chain, batch=batch) as meter:
        chain(batch).backward()
    assert meter.result().peak.by_role["grad"] == 2 * MATRIX_BYTES


def test_timeline_ends_with_what_survives_and_holds_the_peak(chain: Chain) -> None:
    with StepMeter(chain) as meter:
        chain(torch.randn(WIDTH, WIDTH)).backward()
        chain.zero_grad()
    result = meter.result()
    assert max(live for live, _ in result.timeline) == result.peak.nbytes
    assert result.timeline[-1][0] == 2 * MATRIX_BYTES
    assert {phase for _, phase in result.timeline} >= {"start", "forward", "backward"}


def test_a_role_noted_while_measuring_is_the_role(chain: Chain) -> None:
    with StepMeter(chain) as meter:
        buffer = torch.empty(WIDTH, WIDTH)
        note_role(buffer, "gathered")
        chain(torch.randn(WIDTH, WIDTH))
    assert meter.result().peak.by_role["gathered"] == MATRIX_BYTES


def test_attention_flops_on_the_cpu_equal_those_of_the_products() -> None:
    batch, heads, length, head = 2, 4, 16, 8
    query = torch.randn(batch, heads, length, head, requires_grad=True)
    with StepMeter(nn.Identity()) as meter:
        torch.nn.functional.scaled_dot_product_attention(query, query, query).sum().backward()
    product = 2 * batch * heads * length * length * head
    assert meter.result().flops == (2 + 5) * product


@pytest.mark.parametrize("product", ["torch", "transformers"])
def test_products_of_experts_are_counted_whichever_kernel_runs_them(product: str) -> None:
    """Rows go to one expert each: twice rows x inner x columns, and as much for each of the two gradients."""
    import transformers.integrations.moe  # noqa: F401  # registers its own kernel

    rows = torch.randn(32, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    experts = nn.Parameter(torch.randn(4, WIDTH, 2 * WIDTH, dtype=torch.bfloat16))
    ends = torch.tensor([8, 16, 24, 32], dtype=torch.int32)
    model = nn.ParameterList([experts])
    with StepMeter(model) as meter:
        if product == "torch":
            out = torch._grouped_mm(rows, experts, offs=ends)
        else:
            out = torch.ops.transformers.grouped_mm_fallback(rows, experts, ends)
        assert meter.flops[0] == 2 * 32 * WIDTH * 2 * WIDTH
        out.float().sum().backward()
    assert meter.flops[0] == 3 * 2 * 32 * WIDTH * 2 * WIDTH

"""Rows of `compare` in which torch's own tools do the work: each trains as the plain model does."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from memopt.errors import MemoptError
from memopt_torch import BACKEND
from memopt_torch.baselines import baseline
from memopt_torch.measure import StepMeter
from memopt_torch.testing import run_ranks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).sin())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def two_losses(name: str | None) -> dict[str, Any]:
    """Losses of two steps, the second one's peak, and whether layers are sharded."""
    sgd = partial(torch.optim.SGD, lr=0.1)
    model, x = Model(), torch.ones(4, 8)
    made = None if name is None else baseline(name, model, sgd)
    called, optimizer = (model, sgd(model.parameters())) if made is None else (made.model, made.optimizer)

    def step() -> float:
        if made is None:
            loss = called(x).square().mean()
        else:
            with made.around():
                loss = called(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    first = step()
    with StepMeter(model, (optimizer,), batch=x) as meter:
        second = step()
    result = meter.result()
    return {
        "losses": (first, second),
        "recomputed": result.recomputed_flops,
        "is_sharded": isinstance(model.layers[0], FSDPModule),
        "note": None if made is None else made.note,
    }


def test_checkpoint_recomputes_every_layer_and_trains_to_the_same_bits() -> None:
    plain, checkpointed = two_losses(None), two_losses("checkpoint")
    assert checkpointed["losses"] == plain["losses"]
    assert plain["recomputed"] == 0
    assert checkpointed["recomputed"] == 3 * 2 * 4 * 8 * 32  # the first product; torch stops before the last one


def test_save_on_cpu_says_that_it_copies_nothing_on_a_processor() -> None:
    saved = two_losses("save_on_cpu")
    assert saved["losses"] == two_losses(None)["losses"]
    assert "copies nothing" in saved["note"]


def test_fsdp2_shards_every_layer_and_trains_as_the_plain_model() -> None:
    plain = two_losses(None)
    for ranks in run_ranks(two_losses, 2, "fsdp2"):
        assert ranks["is_sharded"]
        assert ranks["losses"] == pytest.approx(plain["losses"], rel=1e-6)


def test_fsdp2_on_one_rank_is_refused() -> None:
    with pytest.raises(MemoptError, match="baseline-needs-ranks"):
        two_losses("fsdp2")


def test_a_model_that_repeats_nothing_is_refused() -> None:
    with pytest.raises(MemoptError, match="baseline-no-layers"):
        baseline("checkpoint", nn.Linear(2, 2), partial(torch.optim.SGD, lr=0.1))


def test_the_backend_names_its_baselines() -> None:
    assert BACKEND.baselines == ("checkpoint", "fsdp2", "save_on_cpu")

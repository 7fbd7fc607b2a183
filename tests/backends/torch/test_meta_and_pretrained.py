"""Models that never exist whole: built on the meta device, loaded from safetensors shard by shard, written back."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import LlamaForCausalLM

import memopt
from memopt.errors import MemoptError
from memopt_torch.sharded import local_tensor, whole_tensor
from memopt_torch.testing import run_ranks


def on_meta(tools: Any, **kwargs: Any) -> Any:
    with torch.device("meta"):
        return tools.llama(**kwargs)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("tie", [False, True])
def test_a_meta_model_trains_and_its_unsaved_buffers_are_right(tools: Any, world: int, tie: bool) -> None:
    def job() -> tuple[bool, bool, bool, list[float]]:
        eager = tools.llama(tie=tie)
        torch.manual_seed(dist.get_rank())  # ranks may have seeded apart: values still fit together
        model = on_meta(tools, tie=tie)
        run = memopt.apply_policy(model, tools.policy(tools.keep_norms(), tools.shard()))
        ours, theirs = dict(model.named_buffers()), dict(eager.named_buffers())
        buffers = ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in theirs)
        real = not any(local_tensor(p).is_meta or local_tensor(p).isnan().any() for p in model.parameters())
        tied = (model.lm_head.weight is model.model.embed_tokens.weight) is tie
        spread = whole_tensor(model.model.layers[0].mlp.up_proj.weight).std().item()
        opt = run.optimizer(torch.optim.AdamW, lr=1e-2)
        losses = []
        for _ in range(6):
            loss = tools.loss(model, tools.batch(0, dist.get_rank()))
            loss.backward()
            opt.step()
            opt.zero_grad()
            losses.append(loss.item())
        return buffers, real, tied and 0.015 < spread < 0.025, losses

    for buffers, real, shape, losses in run_ranks(job, world):
        assert buffers
        assert real
        assert shape
        assert losses[-1] < losses[0] - 0.3


class Position(nn.Module):
    def __init__(self, resets: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("table", self._table(), persistent=False)
        self.register_buffer("mask", self._mask(), persistent=False)
        if resets:
            self.reset_buffers = self._reset

    def _reset(self) -> None:
        self.table.copy_(self._table())
        self.mask.copy_(self._mask())

    def _mask(self) -> torch.Tensor:
        return torch.ones(4, 4, dtype=torch.bool).tril()

    def _table(self) -> torch.Tensor:
        return torch.arange(4.0) + 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x + self.table)


@pytest.mark.parametrize("resets", [True, False])
def test_buffers_without_initialiser_are_named(tools: Any, resets: bool) -> None:
    def job() -> Any:
        with torch.device("meta"):
            model = nn.Sequential(Position(resets), Position(resets))
        try:
            memopt.apply_policy(model, tools.policy(tools.shard()))
        except MemoptError as error:
            return [(problem.code, problem.path) for problem in error.problems]
        return model[1].table.tolist(), model[1].mask.sum().item()

    for found in run_ranks(job, 2):
        if resets:
            assert found == ([1.0, 2.0, 3.0, 4.0], 10)
        else:
            names = ("0.table", "0.mask", "1.table", "1.mask")
            assert found == [("meta-without-initialiser", name) for name in names]


@pytest.mark.parametrize("tie", [False, True])
def test_safetensors_are_loaded_by_part_and_written_back(tools: Any, tmp_path: Path, tie: bool) -> None:
    original = tools.llama(tie=tie, hidden=28, intermediate=37, vocab=67)
    original.save_pretrained(tmp_path / "in", max_shard_size="20KB")

    def job() -> bool:
        model = on_meta(tools, tie=tie, hidden=28, intermediate=37, vocab=67)
        run = memopt.apply_policy(model, tools.policy(tools.shard()))
        run.load_pretrained(tmp_path / "in")
        expected = dict(original.named_parameters())
        same = all(torch.equal(whole_tensor(p), expected[name]) for name, p in model.named_parameters())
        run.save_pretrained(tmp_path / "out", max_file_bytes=20_000)
        return same

    assert run_ranks(job, 2) == [True, True]
    for name in ("config.json", "generation_config.json"):
        shutil.copy(tmp_path / "in" / name, tmp_path / "out" / name)
    again = LlamaForCausalLM.from_pretrained(tmp_path / "out")
    for (name, a), (_, b) in zip(again.named_parameters(), original.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def test_files_of_another_model_are_refused_with_every_difference(tools: Any, tmp_path: Path) -> None:
    tools.llama(layers=2).save_pretrained(tmp_path)
    run = memopt.apply_policy(tools.llama(layers=3, intermediate=40), tools.policy())
    with pytest.raises(MemoptError) as caught:
        run.load_pretrained(tmp_path)
    paths = {problem.path for problem in caught.value.problems}
    assert {problem.code for problem in caught.value.problems} == {"pretrained-mismatch"}
    assert {"model.layers.2.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"} <= paths


def test_a_folder_without_files_is_said(tools: Any, tmp_path: Path) -> None:
    run = memopt.apply_policy(tools.llama(layers=2), tools.policy())
    with pytest.raises(MemoptError) as caught:
        run.load_pretrained(tmp_path)
    assert caught.value.problems[0].code == "no-safetensors"

"""What people reported about memory estimates of PyTorch training: the plan's half of each row, on a traced step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from memopt.errors import MemoptError
from memopt.planning import plan_policy, prepare
from memopt.workloads import Workload

WIDTH, LAYERS, VOCAB, BATCH = 64, 4, 512, 4
SHARD = {"name": "weights", "action": "shard", "match": {"role": "param"}, "axis": "fsdp"}


class Layer(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, dtype=dtype), nn.Linear(4 * WIDTH, WIDTH, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x.to(self.up.weight.dtype)))).to(x.dtype)


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer(dtype) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    logits = model(batch["ids"])
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["ids"].flatten())


def workload(model: Any = Model, *, rows: int = BATCH) -> Workload:
    batch = {"ids": torch.zeros(rows, 16, dtype=torch.int64)}
    return Workload("toy", model, loss, batch, lambda params: torch.optim.AdamW(params, lr=1e-3))


def planned(policy: dict[str, Any], *, model: Any = Model, world_size: int = 1, target: str = "gpu:h100"):
    setting = prepare(workload=workload(model), backend="torch", target=target, world_size=world_size)
    return plan_policy({"version": 1, **policy}, setting)


def nbytes(parameters: Any) -> int:
    return sum(p.numel() * p.element_size() for p in parameters)


def frozen_but_head(dtype: torch.dtype = torch.float32) -> nn.Module:
    model = Model(dtype)
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    return model


def test_frozen_weights_have_no_gradient_and_no_state_bytes():
    """litgpt#1417. Family: gradient memory is counted as if frozen weights were trained."""
    result = planned({"rules": []}, model=frozen_but_head)
    trained = VOCAB * WIDTH * 4
    assert result.measured.by_role["param"] == nbytes(Model().parameters())
    assert result.measured.by_role.get("grad", 0) <= trained
    assert 2 * trained <= result.measured.by_role["optimizer_state"] <= 2 * trained + 64  # and a step count


def test_frozen_low_precision_weights_keep_their_bytes():
    """accelerate#3844. Family: a bf16 base is counted, or lifted, as float32 because its adapters are float32."""

    result = planned({"rules": []}, model=lambda: frozen_but_head(torch.bfloat16))
    assert result.measured.by_role["param"] == nbytes(Model(torch.bfloat16).parameters())
    assert result.measured.by_role["param"] < nbytes(Model().parameters())


def test_embedding_and_head_in_the_root_are_part_of_the_peak():
    """pytorch#131965. Family: the root's embedding and head stay whole through the peak; the estimate has a layer."""
    root = planned({"rules": [SHARD], "units": ["layers.*"]}, world_size=2)
    whole = VOCAB * WIDTH * 4
    assert root.measured.by_role["gathered"] >= whole
    apart = planned({"rules": [SHARD], "units": ["layers.*", "embed", "head"]}, world_size=2)
    assert apart.measured.by_role["gathered"] <= root.measured.by_role["gathered"]


def test_deferred_reduction_keeps_whole_gradients_in_the_plan():
    """accelerate#2531, accelerate#3762. Family: skipping the reduction keeps whole gradients and runs out of memory."""
    grads, counts = {}, {}
    for reduce in ("each", "last"):
        result = planned({"rules": [SHARD], "accumulate": {"steps": 4, "reduce": reduce}}, world_size=4)
        grads[reduce] = result.measured.by_role["grad"]
        counts[reduce] = result.measured.collectives["reduce_scatter"]["count"]
    assert grads["last"] > 2 * grads["each"]
    assert counts["each"] == 4 * counts["last"]


def test_offloaded_state_leaves_the_device_and_is_counted_on_the_host():
    """DeepSpeed#4527. Family: parameters and state are offloaded, 0.49 GB is estimated and 14 to 21 are seen."""
    plain = planned({"rules": []})
    rule = {"name": "adam", "action": "offload", "match": {"role": "optimizer_state"}}
    moved = planned({"rules": [rule]})
    state = plain.measured.by_role["optimizer_state"]
    assert moved.measured.by_role.get("optimizer_state", 0) < 0.1 * state
    assert moved.measured.host_bytes >= 0.9 * state
    assert moved.left_out
    low, high = moved.band_bytes
    assert low < high


def test_a_plan_needs_no_process_group():
    """pytorch#148283. Family: a distributed launch dies before anything can be looked at."""
    assert planned({"rules": [SHARD]}, world_size=8).measured.peak_bytes > 0
    assert not torch.distributed.is_initialized()


class ReadsValues(Model):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        if x.sum().item() > 0:  # the line the error must name
            x = -x
        return self.head(x)


def test_a_model_that_reads_values_is_told_the_line_and_what_to_do():
    """Family: data-dependent control flow ends a planner in its own traceback."""
    with pytest.raises(MemoptError) as error:
        planned({"rules": []}, model=ReadsValues)
    (problem,) = error.value.problems
    assert problem.code == "trace-reads-values"
    place = problem.path or ""
    line = int(place.rsplit(":", 1)[1])
    with open(__file__, encoding="utf-8") as source:
        assert "the line the error must name" in source.readlines()[line - 1]
    assert "example input" in (problem.hint or "")


def test_a_device_the_framework_does_not_run_on_is_refused():
    """Family: a figure for hardware on which the program could never run."""
    with pytest.raises(MemoptError) as error:
        planned({"rules": []}, target="tpu:v5e:2x2", world_size=4)
    (problem,) = error.value.problems
    assert problem.code == "plan-target"
    assert "jax" in (problem.hint or "")


def test_a_step_in_float32_says_that_the_rate_is_another_precisions():
    """Family: an estimate that is silent about what it assumes."""
    said = "products in float32"
    assert any(said in sentence for sentence in planned({"rules": []}).left_out)
    low = {"rules": [], "precision": {"compute": "bfloat16", "master": "float32"}}
    assert not any(said in sentence for sentence in planned(low).left_out)


def test_an_operator_without_a_fake_kernel_is_named():
    """Family: a custom operator that cannot run on fake tensors takes the tool down."""

    @torch.library.custom_op("memopt_cases::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    class Custom(Model):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(twice(self.embed(ids)))

    with pytest.raises(MemoptError) as error:
        planned({"rules": []}, model=Custom)
    (problem,) = error.value.problems
    assert problem.code == "trace-operator-unknown"
    assert "memopt_cases" in problem.message
    assert "register_fake" in (problem.hint or "")

"""YaFSDP's sixteen published step times, and two published gains of host offload: predicted, misses included.

Run: `python tests/benchmarks/plan_yafsdp.py [--json FILE]`. Half of the rows calibrate, the other half judges, and the
other way round. Sources: the table of the YaFSDP repository (A100 80 GB; one sequence a device is assumed); JAX's and
NVIDIA's reports of activation offload against full recompute, whose batch sizes are not all published. Two more gains,
of models this layer model cannot express, are in `plan_offload_gains.py`.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import least_squares

from memopt.backend import load_backend
from memopt.loading import load_policy
from memopt.planning import lowered, prepare
from memopt.roofline import GUESS, Efficiency, rates_for
from memopt.step_time import layer_problem
from memopt.tune import presets
from memopt.tuning.costs import model_costs
from memopt.tuning.judge import judge
from memopt.tuning.solve import Solution, solve
from memopt.workloads import WorkloadConfig

SHAPES = {  # layers, hidden, intermediate, heads, key-value heads, vocabulary
    "Llama 2 7B": (32, 4096, 11008, 32, 32, 32000),
    "Llama 2 13B": (40, 5120, 13824, 40, 40, 32000),
    "Llama 2 34B": (48, 8192, 22016, 64, 8, 32000),
    "Llama 2 70B": (80, 8192, 28672, 64, 8, 32000),
    "Llama 3 8B": (32, 4096, 14336, 32, 8, 128256),
    "Llama 3 70B": (80, 8192, 28672, 64, 8, 128256),
    "Llama 3.1 405B": (126, 16384, 53248, 128, 8, 128256),
}
# model, GPUs, sequence, recomputed layers, YaFSDP seconds, FSDP seconds
PUBLISHED = (
    ("Llama 2 7B", 64, 2048, 0, 0.81, 0.90),
    ("Llama 2 7B", 64, 4096, 0, 1.16, 1.21),
    ("Llama 2 7B", 64, 8192, 0, 2.23, 2.29),
    ("Llama 2 7B", 128, 2048, 0, 0.87, 0.97),
    ("Llama 2 7B", 128, 4096, 0, 1.19, 1.22),
    ("Llama 2 7B", 128, 8192, 0, 2.25, 2.31),
    ("Llama 2 13B", 128, 2048, 0, 1.55, 1.76),
    ("Llama 2 13B", 128, 4096, 0, 2.06, 2.14),
    ("Llama 2 34B", 128, 2048, 0, 3.39, 4.27),
    ("Llama 2 34B", 256, 2048, 0, 3.51, 4.50),
    ("Llama 2 34B", 256, 4096, 5, 5.33, 5.81),
    ("Llama 2 70B", 256, 2048, 10, 6.97, 8.87),
    ("Llama 2 70B", 256, 4096, 50, 11.07, 11.93),
    ("Llama 3 8B", 64, 2048, 0, 0.97, 1.10),
    ("Llama 3 8B", 64, 4096, 0, 1.36, 1.48),
    ("Llama 3 70B", 256, 2048, 20, 7.17, 9.76),
)
# what, published gain over full recompute, model, target, tensor-parallel degree assumed, sequences a device assumed
OFFLOAD = (
    ("JAX, GB200 NVL72, Llama 3.1 405B", "up to 57%", "Llama 3.1 405B", "gpu:gb200:64", 1),
    ("JAX, 8 x H200, Llama 3.3 70B", "6.9%", "Llama 3 70B", "gpu:h200:8", 1),
)


@dataclass(frozen=True, slots=True)
class Fit:
    """What half of the rows sets.

    Attributes:
        flops, fabric: Shares of the published rates.
        yafsdp_s, fsdp_s: Compute seconds each engine adds per layer and pass (launches, waits of the host).
        fsdp_per_gathered_byte_s: What FSDP adds to a unit's collectives: copies in and out of its flat buffers run on
            the collectives' own stream, and are what YaFSDP does without.
    """

    flops: float
    fabric: float
    yafsdp_s: float
    fsdp_s: float
    fsdp_per_gathered_byte_s: float


def config(model: str, *, batch: int, sequence: int) -> WorkloadConfig:
    layers, hidden, intermediate, heads, kv_heads, vocab = SHAPES[model]
    return WorkloadConfig(
        name=model, layers=layers, hidden=hidden, intermediate=intermediate, heads=heads, kv_heads=kv_heads,
        vocab=vocab, batch=batch, sequence=sequence,
    )  # fmt: skip


POLICY = {
    "version": 1,
    "precision": {"compute": "bfloat16", "master": "float32", "reduce": "bfloat16", "optimizer_state": "float32"},
    "rules": [
        {"name": "weights", "action": "shard", "match": {"role": "param"}, "axis": "fsdp"},
        {"name": "rest", "action": "recompute", "match": {"unit": "layers.*"}},
    ],
}


def plan_of(model: str, target: str, *, sequence: int, per_device: int = 1):
    setting = prepare(workload="configs/workloads/llama-tiny.yaml", backend=load_backend("jax"), target=target)
    described = config(model, batch=per_device * setting.world_size, sequence=sequence)
    setting = replace(setting, workload=described, spec=setting.backend.inspect_workload(described))
    return lowered(load_policy(POLICY), setting), setting


def predict(plan, setting, fit: Fit, *, recomputed: int, engine: str) -> float:
    """Seconds of a step; `recomputed` layers run their forward again."""
    efficiency = Efficiency(flops=fit.flops, hbm=GUESS.hbm, link=GUESS.link, fabric=fit.fabric)
    rates = rates_for(setting.target, efficiency)
    assert rates is not None
    costs = model_costs(plan, rates)
    whole = sum(row.global_nbytes or 0 for row in plan.rows_of("param") if row.unit == "layers.0") / 2
    added_s = fit.yafsdp_s if engine == "yafsdp" else fit.fsdp_s
    copied_s = 0.0 if engine == "yafsdp" else whole * fit.fsdp_per_gathered_byte_s
    classes = tuple(
        replace(
            layer,
            forward_s=layer.forward_s + added_s,
            backward_s=layer.backward_s + added_s,
            gather_s=layer.gather_s + copied_s,
            reduce_s=layer.reduce_s + copied_s,
            recompute_s=0.0,
        )
        for layer in costs.classes
    )
    problem = layer_problem(plan, replace(costs, classes=classes), rates)
    assignment = tuple(
        tuple("recompute" if index < recomputed and "recompute" in c.actions else "keep" for c in layer.choices)
        for index, layer in enumerate(problem.layers())
    )
    return judge(problem, assignment).step_s


def fit_rows(cases, indices) -> Fit:
    def unpack(x):
        return Fit(*np.exp(x))

    def residuals(x):
        fit = unpack(x)
        found = []
        for index in indices:
            plan, setting, row = cases[index]
            for engine, seconds in (("yafsdp", row[4]), ("fsdp", row[5])):
                found.append(math.log(predict(plan, setting, fit, recomputed=row[3], engine=engine) / seconds))
        return found

    start = np.log([0.5, 0.5, 1e-4, 1e-3, 1e-12])
    low, high = np.log([0.2, 0.05, 1e-6, 1e-6, 1e-15]), np.log([0.95, 1.0, 0.02, 0.02, 1e-10])
    return unpack(least_squares(residuals, start, bounds=(low, high)).x)


def yafsdp_table() -> dict:
    cases = []
    for row in PUBLISHED:
        plan, setting = plan_of(row[0], f"gpu:a100:{row[1]}", sequence=row[2])
        cases.append((plan, setting, row))
    halves = [list(range(0, len(cases), 2)), list(range(1, len(cases), 2))]
    table, fits = [], []
    for calibrating, judging in (halves, halves[::-1]):
        fit = fit_rows(cases, calibrating)
        fits.append(fit)
        for index in judging:
            plan, setting, row = cases[index]
            predicted = {e: predict(plan, setting, fit, recomputed=row[3], engine=e) for e in ("yafsdp", "fsdp")}
            table.append(
                {
                    "row": index,
                    "model": row[0],
                    "gpus": row[1],
                    "sequence": row[2],
                    "yafsdp_s": row[4],
                    "predicted_yafsdp_s": predicted["yafsdp"],
                    "fsdp_s": row[5],
                    "predicted_fsdp_s": predicted["fsdp"],
                    "speed_up": row[5] / row[4] - 1,
                    "predicted_speed_up": predicted["fsdp"] / predicted["yafsdp"] - 1,
                }
            )
    table.sort(key=lambda entry: entry["row"])
    errors = [abs(e[f"predicted_{k}"] / e[k] - 1) for e in table for k in ("yafsdp_s", "fsdp_s")]
    gains = [abs(e["predicted_speed_up"] - e["speed_up"]) for e in table]
    return {
        "rows": table,
        "mean_error": float(np.mean(errors)),
        "worst_error": float(max(errors)),
        "mean_speed_up_error": float(np.mean(gains)),
        "right_sign": sum(int((e["speed_up"] > 0) == (e["predicted_speed_up"] > 0)) for e in table),
        "fits": [vars_of(fit) for fit in fits],
    }


def vars_of(fit: Fit) -> dict:
    return {name: float(getattr(fit, name)) for name in Fit.__dataclass_fields__}


def offload_table() -> list[dict]:
    """The best offload at full recompute's own memory, against full recompute; sequence 8192."""
    found = []
    for what, published, model, target, per_device in OFFLOAD:
        plan, setting = plan_of(model, target, sequence=8192, per_device=per_device)
        rates = rates_for(setting.target, GUESS)
        assert rates is not None
        costs = model_costs(plan, rates)
        node = (setting.target.host_bytes_per_node or 0) * 0.9 / setting.target.devices_per_node
        problem = layer_problem(plan, costs, rates, host_bytes=node)
        full = presets(problem)["recompute"]
        best = solve(replace(problem, device_bytes=full.peak_bytes))
        assert isinstance(best, Solution)
        found.append(
            {
                "what": what,
                "published": published,
                "predicted": full.step_s / best.outcome.step_s - 1,
                "host_gib": best.outcome.host_bytes / 2**30,
                "bound": "removing all recompute",
                "most": full.step_s / (full.step_s - full.recompute_s) - 1,
            }
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    result = {"yafsdp": yafsdp_table(), "offload": offload_table()}
    print("| model | GPUs | sequence | YaFSDP s | predicted | FSDP s | predicted | speed-up | predicted |")
    print("|---|---|---|---|---|---|---|---|---|")
    for e in result["yafsdp"]["rows"]:
        print(
            f"| {e['model']} | {e['gpus']} | {e['sequence']} | {e['yafsdp_s']:.2f} | {e['predicted_yafsdp_s']:.2f} "
            f"| {e['fsdp_s']:.2f} | {e['predicted_fsdp_s']:.2f} | {e['speed_up']:.1%} | {e['predicted_speed_up']:.1%} |"
        )
    summary = {key: value for key, value in result["yafsdp"].items() if key != "rows"}
    print(json.dumps(summary, indent=1))
    for entry in result["offload"]:
        print(entry)
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()

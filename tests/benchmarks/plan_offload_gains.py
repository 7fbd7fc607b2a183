"""Two published gains of host offload over recompute that the model of the layers cannot express: traced and simulated.

Run: `python tests/benchmarks/plan_offload_gains.py [qwen] [paligemma]`. Models in their public shapes, built of
Transformers' modules; each policy is a torch plan whose traced step is played by the event simulator, uncalibrated.
Published with neither batch nor layout: what is assumed is printed with each row.

- Qwen3-30B-A3B on GB200, activations of the MLPs on the host instead of recomputed: 6 to 13%.
- PaliGemma2-28B on 8 x H200 (JAX), queries, keys and values on the host against full recompute: 11.6%.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers as tf
from torch import nn

from memopt.planning import PlanResult, plan_policy, prepare
from memopt.workloads import Workload

GIB = 2**30
BASE: dict[str, Any] = {
    "version": 1,
    "precision": {"compute": "bfloat16", "master": "float32", "reduce": "bfloat16", "optimizer_state": "float32"},
}
SHARD = {"name": "weights", "action": "shard", "match": {"role": "param"}, "axis": "fsdp"}


def recompute(*units: str) -> dict[str, Any]:
    return {"name": "again", "action": "recompute", "match": {"unit": list(units)}}


def qwen(batch: int, sequence: int) -> Workload:
    """48 layers of 128 experts, 8 a token; 30.5 billion parameters, 3.3 of them for each token."""
    config = tf.Qwen3MoeConfig(
        hidden_size=2048, num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4,
        head_dim=128,  # pyright: ignore[reportCallIssue]  # made by a decorator
        num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, intermediate_size=6144, vocab_size=151936,
        norm_topk_prob=True, tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    return _workload(
        "qwen3-30b-a3b", partial(tf.Qwen3MoeForCausalLM, config), {"tokens": (batch, sequence)}, _of_tokens
    )


class ImagesAndText(nn.Module):
    """PaliGemma2's computation: image features, projected, before the text's embeddings, through Gemma 2.

    Transformers' own class looks for the images' places by value, which a plan has none of.
    """

    def __init__(self, vision: tf.SiglipVisionConfig, text: tf.Gemma2Config) -> None:
        super().__init__()
        self.vision = tf.SiglipVisionModel(vision)
        self.projector = nn.Linear(vision.hidden_size, text.hidden_size)
        self.language = tf.Gemma2ForCausalLM(text)

    def forward(self, images: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        seen = self.projector(self.vision(images).last_hidden_state)
        hidden = torch.cat([seen, self.language.get_input_embeddings()(tokens)], dim=1)
        nothing = torch.full(seen.shape[:2], -100, dtype=tokens.dtype, device=tokens.device)
        return self.language(inputs_embeds=hidden, labels=torch.cat([nothing, tokens], dim=1)).loss


def paligemma(batch: int, sequence: int, *, depths: tuple[int, int] = (46, 27)) -> Workload:
    """SigLIP So400m at 224 pixels (256 patches) and Gemma 2 of 46 layers; 27.7 billion parameters.

    Args:
        batch, sequence: Images, and tokens with the 256 of an image.
        depths: Layers of the text and of the image tower.
    """
    vision = tf.SiglipVisionConfig(
        hidden_size=1152, intermediate_size=4304, num_hidden_layers=depths[1], num_attention_heads=16, image_size=224,
        patch_size=14, vision_use_head=False,
    )  # fmt: skip
    text = tf.Gemma2Config(
        hidden_size=4608, intermediate_size=36864, num_hidden_layers=depths[0], num_attention_heads=32,
        num_key_value_heads=16, head_dim=128, query_pre_attn_scalar=144, vocab_size=257216, use_cache=False,
        attn_implementation="eager",  # pyright: ignore[reportCallIssue]  # taken by the base class
    )  # fmt: skip
    shapes = {"images": (batch, 3, 224, 224), "tokens": (batch, sequence - 256)}
    return _workload(
        "paligemma2-28b", partial(ImagesAndText, vision, text), shapes, lambda model, batch: model(**batch)
    )


def _of_tokens(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(input_ids=batch["tokens"], labels=batch["tokens"]).loss


def _workload(
    name: str, build: Callable[[], nn.Module], shapes: dict[str, tuple[int, ...]], loss: Callable[..., torch.Tensor]
) -> Workload:
    with torch.device("meta"):
        batch = {
            key: torch.empty(shape, dtype=torch.int64 if key == "tokens" else torch.float32)
            for key, shape in shapes.items()
        }
    return Workload(name, build, loss, batch, partial(torch.optim.AdamW, lr=1e-4, foreach=True))


QWEN_UNITS = ["layers.*.mlp", "layers.*.self_attn"]
QWEN_MLPS = {"name": "mlp", "action": "offload", "match": {"role": "activation", "unit": "layers.*.mlp"}}
QWEN_PRODUCTS = {"name": "products", "action": "offload", "match": {"op": "matmul", "unit": "layers.*"}}
TEXT, IMAGE = "language.model.layers.*", "vision.encoder.layers.*"
QKV = {"name": "qkv", "action": "offload", "match": {"path": [f"{TEXT}.self_attn.{x}_proj" for x in "qkv"]}}
CASES: dict[str, dict[str, Any]] = {
    "qwen": {
        "published": "6 to 13%",
        "target": "gpu:gb200:8",
        "workload": partial(qwen, 4, 4096),
        "assumed": "8 devices, weights sharded over all of them, 4 sequences of 4096 a device",
        "units": ([*QWEN_UNITS, "embed_tokens", "lm_head"], ["layers.*", "embed_tokens", "lm_head"]),
        "pairs": (
            ("all that the MLPs save", [recompute("layers.*.mlp")], [QWEN_MLPS]),
            ("all products of the layers", [recompute("layers.*")], [QWEN_PRODUCTS, recompute("layers.*")]),
        ),
    },
    "paligemma": {
        "published": "11.6%",
        "target": "gpu:h200:8",
        "engine": "fsdp2",
        # Two kinds of text layers take turns; 46 are 21 pairs more than 4, and 27 image layers 25 more than 2.
        "depths": (((4, 2), 1), ((6, 2), 21), ((4, 3), 25)),
        "workload": partial(paligemma, 8, 512),
        "assumed": "weights sharded over all devices, 8 images with 256 tokens of text a device, attention written out",
        "units": ([TEXT, IMAGE, "language.model.embed_tokens"],),
        "pairs": (("queries, keys, values", [recompute(TEXT, IMAGE)], [QKV, recompute(TEXT, IMAGE)]),),
    },
}


def planned(case: dict[str, Any], rules: list[dict[str, Any]], **depth: Any) -> PlanResult:
    setting = prepare(workload=case["workload"](**depth), backend="torch", target=case["target"])
    engine = {"torch": {"engine": case.get("engine", "layer")}}
    # Whole layers are one unit; what an MLP alone saves is offloaded where it is a unit of its own.
    by_part = any("layers.*.mlp" in rule["match"].get("unit", "") for rule in rules)
    policy = {**BASE, "units": case["units"][0 if by_part else -1], "rules": [SHARD, *rules], "backend_options": engine}
    return plan_policy(policy, setting, name=case["target"], progress=lambda text: print(text, file=sys.stderr))


def figures(case: dict[str, Any], rules: list[dict[str, Any]]) -> list[float]:
    """Estimate, low, high, exposed copies and peak bytes.

    Where a case names depths, of whole traces of shallow models: the first, and what each further one adds, so many
    times. (The plan's own fit from few layers does not hold for Gemma 2's kinds of layers beside an image tower.)
    """
    if "depths" not in case:
        return _figures(planned(case, rules))
    first = _figures(planned(case, rules, depths=case["depths"][0][0]))
    total = list(first)
    for depths, times in case["depths"][1:]:
        more = _figures(planned(case, rules, depths=depths))
        total = [value + times * (b - a) for value, a, b in zip(total, first, more, strict=True)]
    return total


def _figures(result: PlanResult) -> list[float]:
    time = result.time
    if time.estimate_s is None or time.low_s is None or time.high_s is None or time.exposed_s is None:
        raise SystemExit(f"no seconds: {time.from_what}")
    return [time.estimate_s, time.low_s, time.high_s, time.exposed_s, result.measured.peak_bytes]


def main() -> None:
    print("| | published | offloaded | recompute | offload | gain (interval) | peak GiB | exposed | assumed |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name in sys.argv[1:] or list(CASES):
        case = CASES[name]
        for what, baseline, offload in case["pairs"]:
            before, after = figures(case, baseline), figures(case, offload)
            ends = sorted(before[end] / after[end] - 1 for end in (1, 2))
            print(
                f"| {name} | {case['published']} | {what} | {before[0]:.3f} s | {after[0]:.3f} s "
                f"| {before[0] / after[0] - 1:+.1%} ({ends[0]:+.1%} to {ends[1]:+.1%}) "
                f"| {before[4] / GIB:.1f}, {after[4] / GIB:.1f} | {after[3] / after[0]:.1%} | {case['assumed']} |",
                flush=True,
            )


if __name__ == "__main__":
    main()

"""Workloads: what a reference may be, what a description must hold, and the one initialiser."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from memopt.errors import MemoptError
from memopt.workloads import HfWorkload, Workload, WorkloadConfig, load_workload
from memopt.workloads.initialise import initial_weight, initial_weights, weight_shapes
from memopt.workloads.rotary import inverse_frequencies

CONFIGS = Path(__file__).parents[2] / "configs" / "workloads"
TINY = {
    "name": "t", "layers": 2, "hidden": 16, "intermediate": 24, "heads": 4, "kv_heads": 2, "vocab": 256,
    "batch": 2, "sequence": 8,
}  # fmt: skip


def problems_of(reference: object) -> dict[str, object]:
    with pytest.raises(MemoptError) as caught:
        load_workload(reference)  # type: ignore[arg-type]
    return {problem.code: problem for problem in caught.value.problems}


@pytest.mark.parametrize(
    "name, billions",
    [("llama-3.1-8b", 8.03), ("llama-3.1-70b", 70.55), ("llama-3.1-405b", 405.85), ("deepseek-v3", 671.03)],
)
def test_published_models_have_their_published_number_of_parameters(name, billions):
    config = load_workload(CONFIGS / f"{name}.yaml")
    assert isinstance(config, WorkloadConfig)
    count = sum(math.prod(shape) for _, shape in weight_shapes(config))
    assert count / 1e9 == pytest.approx(billions, abs=0.005)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_workload_is_valid_and_named_after_its_file(path):
    config = load_workload(path)
    assert isinstance(config, WorkloadConfig)
    assert config.name == path.stem


def test_initial_weights_do_not_depend_on_the_order_in_which_they_are_made():
    config = WorkloadConfig(**TINY)
    whole = dict(initial_weights(config, seed=3))
    shapes = dict(weight_shapes(config))
    for path in reversed(list(shapes)):
        np.testing.assert_array_equal(whole[path], initial_weight(path, shapes[path], seed=3))


def test_initial_weights_differ_between_tensors_and_between_seeds():
    config = WorkloadConfig(**TINY)
    first, second = dict(initial_weights(config, seed=0)), dict(initial_weights(config, seed=1))
    assert not np.array_equal(first["layers.0.mlp.up_proj.weight"], first["layers.1.mlp.up_proj.weight"])
    assert not np.array_equal(first["layers.0.mlp.up_proj.weight"], second["layers.0.mlp.up_proj.weight"])
    np.testing.assert_array_equal(first["norm.weight"], np.ones(16, np.float32))


def test_tied_embeddings_have_one_tensor():
    paths = [path for path, _ in weight_shapes(WorkloadConfig(**TINY, tie_embeddings=True))]
    assert "embed_tokens.weight" in paths
    assert "lm_head.weight" not in paths


def test_stretched_rotary_frequencies_keep_the_fast_and_slow_the_slow():
    config = load_workload(CONFIGS / "llama-3.1-8b.yaml")
    assert isinstance(config, WorkloadConfig)
    plain = inverse_frequencies(config.model_copy(update={"rope_scaling": None}))
    stretched = inverse_frequencies(config)
    assert stretched.dtype == np.float32
    assert stretched.shape == (64,)
    assert stretched[0] == plain[0]
    assert stretched[-1] == pytest.approx(plain[-1] / 8, rel=1e-6)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"kv_heads": 3}, "multiple of kv_heads"),
        ({"hidden": 18}, "give head_dim"),
        ({"head_dim": 5}, "even count"),
        ({"family": "deepseek_v3"}, "needs `mla`"),
        ({"moe": {"experts": 4, "experts_per_token": 2, "intermediate": 8}}, "belongs to family deepseek_v3"),
        ({"moe": {"experts": 4, "experts_per_token": 5, "intermediate": 8}}, "a token can reach"),
        ({"batch": 0}, "batch:"),
        ({"layers": 2.0}, "not a whole number"),
    ],
)
def test_a_description_that_cannot_be_built_is_refused(tmp_path, change, words):
    file = tmp_path / "w.yaml"
    file.write_text(json.dumps({**TINY, **change}), encoding="utf-8")
    with pytest.raises(MemoptError) as caught:
        load_workload(file)
    assert words in str(caught.value)


def test_a_misspelt_key_of_a_workload_is_refused_with_its_line_and_the_nearest(tmp_path):
    file = tmp_path / "w.yaml"
    file.write_text("\n".join(f"{key}: {value}" for key, value in {**TINY, "optimiser": {}}.items()), encoding="utf-8")
    with pytest.raises(MemoptError) as caught:
        load_workload(file)
    (problem,) = caught.value.problems
    assert problem.line == len(TINY) + 1
    assert "optimizer" in (problem.hint or "")


def test_a_missing_yaml_offers_the_nearest_of_its_folder():
    problems = problems_of(CONFIGS / "llama-tinny.yaml")
    assert "llama-tiny" in problems["workload-not-found"].hint  # type: ignore[attr-defined]


def test_what_is_no_reference_is_refused_with_the_four_forms():
    problems = problems_of("llama")
    assert "package.module:FUNCTION" in problems["workload-bad-reference"].message  # type: ignore[attr-defined]


def test_a_function_of_a_file_gives_its_workload_and_remembers_where_it_is_from(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from memopt import Workload\n"
        "def tiny():\n    return Workload('mine', dict, lambda model, batch: 0.0, {}, None)\n",
        encoding="utf-8",
    )
    workload = load_workload(f"{file}:tiny")
    assert isinstance(workload, Workload)
    assert workload.name == "mine"
    assert workload.ref == f"{file}:tiny"


@pytest.mark.parametrize(
    "source, function, code",
    [
        ("import no_such_package_of_anyone\n", "tiny", "workload-import-failed"),
        ("def tiny():\n    raise RuntimeError('broken')\n", "tiny", "workload-import-failed"),
        ("def tiny():\n    return 3\n", "tiny", "workload-wrong-type"),
        ("def tiny():\n    return 3\n", "tinny", "workload-no-function"),
    ],
)
def test_a_user_module_that_gives_no_workload_is_one_clear_problem(tmp_path, source, function, code):
    file = tmp_path / f"user_{code.replace('-', '_')}_{function}.py"
    file.write_text(source, encoding="utf-8")
    problems = problems_of(f"{file}:{function}")
    assert list(problems) == [code]


def test_the_line_of_the_user_module_that_failed_is_named(tmp_path):
    file = tmp_path / "user_line.py"
    file.write_text("x = 1\nraise RuntimeError('here')\n", encoding="utf-8")
    problem = problems_of(f"{file}:tiny")["workload-import-failed"]
    assert (problem.file, problem.line) == (str(file), 2)  # type: ignore[attr-defined]


def test_a_transformers_folder_is_read_without_transformers(tmp_path):
    folder = tmp_path / "tiny-model"
    folder.mkdir()
    config = {"model_type": "llama", "vocab_size": 300, "max_position_embeddings": 64}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    workload = load_workload(f"hf:{folder}")
    assert workload == HfWorkload("tiny-model", str(folder / "config.json"), "llama", 1, 64, 300)


@pytest.mark.parametrize("key", ["max_position_embeddings", "n_positions", "max_seq_len"])
def test_a_transformers_model_gets_no_more_positions_than_it_has(tmp_path, key):
    """Families call them by different names; GPT-2's `n_positions` was once passed over."""
    config = {"model_type": "gpt2", "vocab_size": 300, key: 64}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert load_workload(f"hf:{tmp_path}").sequence == 64  # type: ignore[union-attr]
    del config[key]
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert load_workload(f"hf:{tmp_path}").sequence == 2048  # type: ignore[union-attr]


def test_a_config_that_is_not_of_a_language_model_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("[]", encoding="utf-8")
    assert list(problems_of(f"hf:{tmp_path}")) == ["workload-bad-hf-config"]


def test_a_workload_with_fields_of_another_kind_is_refused_with_all_of_them_at_once():
    def batch():
        return {}

    with pytest.raises(MemoptError) as error:
        Workload("mine", 3, lambda model, batch: 0.0, batch, None)  # type: ignore[arg-type]
    first, second = error.value.problems
    assert (first.code, first.path) == (second.code, "model") == ("workload-wrong-type", "model")
    assert (second.path, second.hint) == ("batch", 'give `batch={"x": x, "y": y}`')
    assert "is the function that makes it, not a mapping of names to tensors" in second.message


def test_a_reference_that_leaves_out_half_offers_the_other_half(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "half_of_mine.py").write_text("def tiny():\n    return 3\n", encoding="utf-8")
    no_function = problems_of("half_of_mine.py")["workload-bad-reference"]
    assert no_function.hint == "name its function: `half_of_mine.py:FUNCTION`"  # type: ignore[attr-defined]
    no_file = problems_of("half_of_mine:tiny")["workload-import-failed"]
    assert no_file.hint == "did you mean `half_of_mine.py:tiny`?"  # type: ignore[attr-defined]
    nowhere = problems_of("no_such_module_of_anyone:tiny")["workload-import-failed"]
    assert (nowhere.file, nowhere.line) == (None, None)  # type: ignore[attr-defined]


def test_clipping_beside_an_optax_transformation_is_refused() -> None:
    class Transformation:
        init = update = None

    with pytest.raises(MemoptError, match="workload-clip-with-optax"):
        Workload("toy", dict, dict, {}, Transformation(), clip_norm=1.0)

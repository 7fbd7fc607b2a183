"""What the user may write after `--workload`: a YAML, a Transformers folder, or a function that gives a `Workload`."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import MemoptError, Problem, did_you_mean
from ..guarding import raised
from ..loading import load_document
from .config import WorkloadConfig
from .workload import HfWorkload, Workload

FORMS = "FILE.yaml, hf:PATH, FILE.py:FUNCTION or package.module:FUNCTION"
_HF_SEQUENCE = 2048  # of a Transformers model's example batch, or what the model can take when that is less

_HF_POSITIONS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length")


def load_workload(
    reference: str | Path | WorkloadConfig | Workload | HfWorkload,
) -> WorkloadConfig | Workload | HfWorkload:
    """The workload a reference names; allocates no model.

    Args:
        reference: One of `FORMS`; a workload itself is given back.

    Raises:
        MemoptError: `workload-not-found`, `workload-bad-reference`, `workload-import-failed`, `workload-no-function`,
            `workload-wrong-type`, `workload-bad-hf-config`, and whatever is wrong inside a YAML.
    """
    if isinstance(reference, WorkloadConfig | Workload | HfWorkload):
        return reference
    text = str(reference)
    if text.startswith("hf:"):
        return _from_transformers(Path(text.removeprefix("hf:")))
    if text.endswith((".yaml", ".yml")):
        return load_document(_existing(Path(text)), WorkloadConfig)
    place, colon, function = text.rpartition(":")
    if not colon or not place or not function.isidentifier():
        hint = f"name its function: `{text}:FUNCTION`" if text.endswith(".py") else _near_yaml(Path(text))
        raise MemoptError.of("workload-bad-reference", f"`{text}` is none of {FORMS}", hint=hint)
    module = _module_of_file(Path(place)) if place.endswith(".py") else _module_of_name(place, function)
    absolute = f"{Path(place).resolve()}:{function}" if place.endswith(".py") else text
    return dataclasses.replace(_called(module, function, text), ref=absolute)


def _existing(path: Path) -> Path:
    if path.is_file():
        return path
    raise MemoptError(
        Problem(code="workload-not-found", message=f"no such file: `{path}`", hint=_near_yaml(path), file=str(path))
    )


def _near_yaml(path: Path) -> str | None:
    """Names the YAML of the same folder that is spelt most alike."""
    folder = path.parent if path.parent.is_dir() else Path()
    return did_you_mean(path.stem, sorted(file.stem for file in folder.glob("*.yaml")))


def _from_transformers(path: Path) -> HfWorkload:
    file = _existing(path / "config.json" if path.is_dir() else path).resolve()
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        model_type, vocab = config["model_type"], config["vocab_size"]
    except (ValueError, KeyError, TypeError) as error:
        raise MemoptError(
            Problem(
                code="workload-bad-hf-config",
                message=f"not the config.json of a Transformers language model: {type(error).__name__}: {error}",
                hint="it must be a JSON object with `model_type` and `vocab_size`",
                file=str(file),
            )
        ) from error
    limits = [config[key] for key in _HF_POSITIONS if isinstance(config.get(key), int)]
    sequence = min([_HF_SEQUENCE, *limits])
    return HfWorkload(
        name=file.parent.name, path=str(file), model_type=model_type, batch_per_rank=1, sequence=sequence, vocab=vocab
    )


def _module_of_file(path: Path) -> Any:
    """Imports the file under a name of its own, its folder importable as when it is run as a script."""
    file = _existing(path).resolve()
    name = f"memopt_workload_{hashlib.sha256(str(file).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    specification = importlib.util.spec_from_file_location(name, file)
    if specification is None or specification.loader is None:
        raise MemoptError.of("workload-import-failed", f"`{file}` is not a Python module")
    module = importlib.util.module_from_spec(specification)
    folder = str(file.parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    sys.modules[name] = module
    try:
        _importing(str(path), lambda: specification.loader.exec_module(module))  # type: ignore[union-attr]
    except MemoptError:
        del sys.modules[name]
        raise
    return module


def _module_of_name(name: str, function: str) -> Any:
    if Path(f"{name}.py").is_file() and importlib.util.find_spec(name) is None:
        raise MemoptError.of(
            "workload-import-failed", f"no module `{name}` is installed", hint=f"did you mean `{name}.py:{function}`?"
        )
    return _importing(name, lambda: importlib.import_module(name))


def _importing(what: str, load: Callable[[], Any]) -> Any:
    """Runs an import; whatever the user's module raises becomes one problem that names the line."""
    try:
        return load()
    except Exception as error:  # the user's module may raise anything; the cause is kept
        raise MemoptError(raised(f"importing `{what}` failed: ", error, code="workload-import-failed")) from error


def _called(module: Any, function: str, reference: str) -> Workload:
    make = getattr(module, function, None)
    if not callable(make):
        public = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        raise MemoptError.of(
            "workload-no-function",
            f"`{reference}`: the module has no function `{function}`",
            hint=did_you_mean(function, public),
        )
    try:
        workload = make()
    except MemoptError:
        raise
    except Exception as error:  # the user's function may raise anything; the cause is kept
        raise MemoptError(raised(f"`{reference}` raised ", error, code="workload-import-failed")) from error
    if not isinstance(workload, Workload):
        raise MemoptError.of(
            "workload-wrong-type",
            f"`{reference}` returned a {type(workload).__name__}",
            hint="return memopt.Workload(name, model, loss, batch, optimizer)",
        )
    return workload

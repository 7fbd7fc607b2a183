"""Transformers checkpoints: safetensors files read part by part into shards, and written back."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from memopt.errors import MemoptError, Problem

from .checkpoint import model_tensors
from .sharded import ShardedTensor, whole_tensor

if TYPE_CHECKING:
    from .apply import Applied

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_OURS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")


@contextmanager
def _readable(folder: Any) -> Iterator[None]:
    """Names the folder where a file is missing or damaged."""
    try:
        yield
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise MemoptError.of(
            "pretrained-unreadable",
            f"the files in `{folder}` could not be read: {type(error).__name__}: {error}",
            path=str(folder),
            hint="download or write the folder again: a file is missing, cut short, or no safetensors",
        ) from error


def _files(folder: Path) -> dict[str, Path]:
    """Key -> file that holds it."""
    if folder.is_file():
        paths = [folder]
    elif (folder / INDEX).exists():
        listed = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        return {key: folder / name for key, name in listed.items()}
    else:
        paths = sorted(folder.glob("*.safetensors"))
    found: dict[str, Path] = {}
    for path in paths:
        with safe_open(path, framework="pt") as file:
            found.update(dict.fromkeys(file.keys(), path))
    if not found:
        raise MemoptError.of(
            "no-safetensors", f"`{folder}` holds no safetensors file", path=str(folder), hint="pass the model's folder"
        )
    return found


def load_pretrained(applied: Applied, folder: Any, *, strict: bool = True) -> None:
    """Reads a model's weights; each rank reads the parts it holds and nothing else.

    Tied weights may be saved under one of their names.

    Raises:
        MemoptError: `pretrained-mismatch`, with every key that is missing, left over or of another shape;
            `pretrained-unreadable`, `no-safetensors`.
    """
    targets = {key.removeprefix("model."): tensor for key, tensor in model_tensors(applied.model).items()}
    with _readable(folder), ExitStack() as stack, torch.no_grad():
        files = _files(Path(folder))
        _check_keys(targets, files, applied, strict=strict)
        opened = {path: stack.enter_context(safe_open(path, framework="pt")) for path in sorted(set(files.values()))}
        for key, tensor in targets.items():
            if key in files:
                _read(opened[files[key]].get_slice(key), tensor)
    applied.weights_changed()


def _check_keys(
    targets: Mapping[str, torch.Tensor], files: Mapping[str, Path], applied: Applied, *, strict: bool
) -> None:
    problems = []
    groups = [[raw for raw, p in applied.model.named_parameters(remove_duplicate=False) if p is q]
              for q in applied.model.parameters()]  # fmt: skip
    tied = {name: set(group) for group in groups for name in group}
    for key in targets:
        if key not in files and tied.get(key, {key}).isdisjoint(files):
            problems.append(Problem("pretrained-mismatch", "the model has it, the files do not", path=key))
    if strict:
        problems += [
            Problem("pretrained-mismatch", "the files have it, the model does not", path=key)
            for key in files.keys() - targets.keys()
        ]
    opened: dict[Path, Any] = {}
    with ExitStack() as stack:
        for key in targets.keys() & files.keys():
            path = files[key]
            if path not in opened:
                opened[path] = stack.enter_context(safe_open(path, framework="pt"))
            shape = tuple(opened[path].get_slice(key).get_shape())
            if shape != tuple(targets[key].shape):
                problems.append(
                    Problem(
                        "pretrained-mismatch",
                        f"the model's shape is {tuple(targets[key].shape)}, the files' {shape}",
                        path=key,
                    )
                )
    if problems:
        raise MemoptError(sorted(problems, key=lambda problem: problem.path or ""))


def _read(source: Any, target: torch.Tensor) -> None:
    if not isinstance(target, ShardedTensor):
        if hasattr(target, "device_mesh"):
            _read_dtensor(source, target)
            return
        target.copy_(source[:] if target.dim() else source[...])
        return
    for box, part in target.parts():
        index = tuple(slice(start, start + size) for start, size in zip(box.offsets, box.sizes, strict=True))
        part.copy_(source[index] if index else source[...])


def _read_dtensor(source: Any, target: Any) -> None:
    from torch.distributed.tensor import distribute_tensor

    whole = source[:].to(target.dtype).to(target.device)
    target.copy_(distribute_tensor(whole, target.device_mesh, target.placements))


def save_pretrained(applied: Applied, folder: Any, *, max_file_bytes: int = 5 * 2**30) -> None:
    """Writes weights and configuration as Transformers reads them; rank 0 holds at most one file's worth whole.

    Weight files of an earlier save in the folder are replaced.

    Raises:
        MemoptError: `checkpoint-write-failed`, on every rank.
    """
    writer = _Writer(Path(folder), is_first=not dist.is_initialized() or dist.get_rank() == 0)
    writer.attempt(writer.begin)
    for tensors in _batches(applied, max_file_bytes):
        writer.attempt(lambda tensors=tensors: writer.write(tensors))
    writer.attempt(lambda: writer.finish(applied.model))
    failure = [writer.failure]
    if dist.is_initialized():
        dist.broadcast_object_list(failure, src=0)
    if failure[0] is not None:
        raise MemoptError.of(
            "checkpoint-write-failed",
            f"could not write `{folder}`: {failure[0]}",
            path=str(folder),
            hint="free space, or choose another folder",
        )


class _Writer:
    """Writes files on rank 0. After a failure it writes no more; the ranks still gather together to the end."""

    def __init__(self, folder: Path, *, is_first: bool) -> None:
        self.failure: str | None = None
        self._folder, self._is_first = folder, is_first
        self._files: list[dict[str, int]] = []

    def attempt(self, call: Callable[[], None]) -> None:
        """Runs on rank 0, unless something has failed before."""
        if not self._is_first or self.failure is not None:
            return
        try:
            call()
        except (OSError, SafetensorError) as error:
            self.failure = str(error)
            for part in self._folder.glob("part-*.safetensors"):
                part.unlink()

    def begin(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)

    def write(self, tensors: dict[str, torch.Tensor]) -> None:
        """One more file, under a name that nobody reads yet."""
        save_file(tensors, self._part(len(self._files)), metadata={"format": "pt"})
        self._files.append({key: tensor.nbytes for key, tensor in tensors.items()})

    def finish(self, model: torch.nn.Module) -> None:
        """Gives the files their names, and takes away those of an earlier save that a reader would prefer."""
        count = len(self._files)
        names = [SINGLE] if count == 1 else [f"model-{n + 1:05d}-of-{count:05d}.safetensors" for n in range(count)]
        for number, name in enumerate(names):
            self._part(number).replace(self._folder / name)
        index = self._folder / INDEX
        if count == 1:
            index.unlink(missing_ok=True)
        else:
            total = sum(sum(sizes.values()) for sizes in self._files)
            weight_map = {key: name for name, sizes in zip(names, self._files, strict=True) for key in sizes}
            text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)
            index.write_text(text, encoding="utf-8")
        for path in self._folder.iterdir():
            if _OURS.fullmatch(path.name) and path.name not in names:
                path.unlink()
        _save_configuration(model, self._folder)

    def _part(self, number: int) -> Path:
        return self._folder / f"part-{number}.safetensors"


def _save_configuration(model: torch.nn.Module, folder: Path) -> None:
    """What `from_pretrained` needs beside the weights, of a Transformers model."""
    if not hasattr(getattr(model, "config", None), "save_pretrained"):
        return
    config: Any = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = next(parameter.dtype for parameter in model.parameters())  # read as written, not as it was computed
    config.save_pretrained(folder)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(folder)  # type: ignore[union-attr]


def _batches(applied: Applied, max_file_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
    """Whole tensors in files' worths; a tied tensor once, under its first name."""
    batch: dict[str, torch.Tensor] = {}
    for raw, parameter in applied.model.named_parameters():
        whole = parameter.detach()
        whole = whole.full_tensor() if hasattr(whole, "full_tensor") else whole_tensor(whole)  # type: ignore[operator]
        if batch and sum(t.nbytes for t in batch.values()) + whole.nbytes > max_file_bytes:
            yield batch
            batch = {}
        batch[raw] = whole.contiguous().cpu()
    saved = {key.removeprefix("model."): t for key, t in model_tensors(applied.model).items()}
    for raw, buffer in applied.model.named_buffers():
        if raw in saved:
            batch[raw] = buffer.detach().contiguous().cpu()
    yield batch

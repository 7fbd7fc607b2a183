"""Transformers checkpoints: safetensors files read part by part into shards, and written back."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file

from memopt.errors import MemoptError, Problem

from .checkpoint import model_tensors
from .sharded import ShardedTensor, whole_tensor

if TYPE_CHECKING:
    from .apply import Applied

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


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
        MemoptError: `pretrained-mismatch`, with every key that is missing, left over or of another shape.
    """
    files = _files(Path(folder))
    targets = {key.removeprefix("model."): tensor for key, tensor in model_tensors(applied.model).items()}
    _check_keys(targets, files, applied, strict=strict)
    with ExitStack() as stack, torch.no_grad():
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
    """Writes the weights as Transformers reads them, tensor by tensor: rank 0 holds at most one file's worth whole.

    Raises:
        MemoptError: `checkpoint-write-failed`.
    """
    target = Path(folder)
    rank = dist.get_rank() if dist.is_initialized() else 0
    files: list[list[str]] = []
    sizes: dict[str, int] = {}
    try:
        if rank == 0:
            target.mkdir(parents=True, exist_ok=True)
        for number, tensors in enumerate(_batches(applied, max_file_bytes)):
            files.append(list(tensors))
            sizes |= {key: tensor.nbytes for key, tensor in tensors.items()}
            if rank == 0:
                save_file(tensors, target / f"part-{number}.safetensors", metadata={"format": "pt"})
        if rank == 0:
            _name_files(target, files, sizes)
    except OSError as error:
        raise MemoptError.of(
            "checkpoint-write-failed", f"could not write `{target}`: {error}", path=str(target), hint="free space"
        ) from error
    if dist.is_initialized():
        dist.barrier()


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


def _name_files(target: Path, files: list[list[str]], sizes: Mapping[str, int]) -> None:
    if len(files) == 1:
        (target / "part-0.safetensors").replace(target / SINGLE)
        return
    weight_map = {}
    for number, keys in enumerate(files):
        name = f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
        (target / f"part-{number}.safetensors").replace(target / name)
        weight_map.update(dict.fromkeys(keys, name))
    index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
    (target / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")

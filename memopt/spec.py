"""The neutral inventory of a model: every tensor by canonical path, nothing allocated.

Backends fill it (from the meta device or `jax.eval_shape`); matching and lowering read it. No framework here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Role = Literal["param", "grad", "optimizer_state", "activation", "buffer"]


@dataclass(frozen=True, slots=True)
class StackSpec:
    """Layers that repeat: `path` is the parent (`layers`), whose children are `path.0` ... `path.{length-1}`.

    Attributes:
        path: Canonical path of the stack.
        length: How many layers.
        kind: `loop` (a Python list of modules) or `scan` (stacked parameters, one traced body).
        block_class: Class name of the layers, e.g. `LlamaDecoderLayer`.
        scans: For layers run by several scans one after another (dense layers, then layers with experts): the
            backend's own name of each and its length. Empty where one scan, called `path`, runs them all.
    """

    path: str
    length: int
    kind: Literal["loop", "scan"]
    block_class: str
    scans: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class ModuleSpec:
    """One module: canonical and raw path, class name, bytes of the parameters below it."""

    path: str
    raw_path: str
    class_name: str
    param_nbytes: int


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor (or one module output) of the model.

    Attributes:
        path: Canonical path. Scanned stacks carry indices: one TensorSpec a layer.
        role: `param`, `buffer` or `activation`. Lowering derives `grad` and `optimizer_state` rows from parameters.
        shape: Global shape of one layer's tensor (no stacking axis); None where unknown (no example inputs).
        dtype: numpy-style name (`float32`, `bfloat16`, `int32`); None where unknown.
        aliases: Other names of the same value: raw paths, tied paths, `PATH.input` names, checkpoint names.
        module: Canonical path of the owning module (for an activation the module whose output it is).
        trainable: Parameters only; False for frozen ones.
        checkpoint_name: The `checkpoint_name` a user's module gave the value.
        tensor: Neutral vocabulary name (`q`, `mlp_gate`), from the family's table.
        op: `matmul`, `attention`, `topk`, `random` where known.
        sharding: Existing placement: mesh axis name -> dimension, left as it is and dividing bytes.
        axis_sizes: Sizes of the axes named in `sharding`.
        split_in_use: Mesh axis name -> dimension that the module computes with while it is split (experts over an
            `expert` axis); any other axis of a rule is gathered for use.
    """

    path: str
    role: Role
    shape: tuple[int, ...] | None
    dtype: str | None
    aliases: tuple[str, ...] = ()
    module: str = ""
    trainable: bool = True
    checkpoint_name: str | None = None
    tensor: str | None = None
    op: str | None = None
    sharding: Mapping[str, int] = field(default_factory=dict)
    axis_sizes: Mapping[str, int] = field(default_factory=dict)
    split_in_use: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Everything lowering needs to know about a model.

    Attributes:
        backend: `jax` or `torch` (or a third party's name).
        family: `llama`, `qwen`, `mixtral`, `deepseek`, `gpt2`, `t5`, or None for a model without a table.
        tensors: Parameters, buffers, activations; in model order.
        modules: Every module, root first.
        stacks: The repeated layers, largest first; the first is the default of `layers:` selectors.
        ties: Groups of canonical parameter paths that share storage; the first of each group is the row.
        batch: Whether activation shapes are those of the whole mesh's batch (`global`, as JAX sees them) or of one
            device's (`per_device`, as torch does).
        optimizer_slots: State tensors per parameter of the parameter's shape; Adam's two where no optimizer is known.
    """

    backend: str
    family: str | None
    tensors: tuple[TensorSpec, ...]
    modules: tuple[ModuleSpec, ...]
    stacks: tuple[StackSpec, ...] = ()
    ties: tuple[tuple[str, ...], ...] = ()
    optimizer_slots: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
    batch: Literal["per_device", "global"] = "per_device"

    def tensors_of(self, role: Role) -> tuple[TensorSpec, ...]:
        """The tensors of one role, in model order."""
        return tuple(tensor for tensor in self.tensors if tensor.role == role)

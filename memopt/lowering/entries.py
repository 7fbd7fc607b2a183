"""Entries: every tensor a rule can decide, before any rule is read.

Gradients and optimizer state are derived from the trainable parameters; each unit gets one entry for the values inside
it that no selector reaches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from ..policy import Policy, Precision
from ..spec import ModelSpec, TensorSpec
from ..vocabulary import tensor_name
from .units import UnitTable, prefixes, raw_names

ITEM_BITS: Mapping[str, int] = {
    "float64": 64, "float32": 32, "bfloat16": 16, "float16": 16, "complex64": 64, "complex128": 128,
    "float8_e4m3fn": 8, "float8_e5m2": 8, "float8_e4m3fnuz": 8, "float8_e5m2fnuz": 8, "float8_e8m0fnu": 8,
    "float4_e2m1fn": 4, "int64": 64, "int32": 32, "int16": 16, "int8": 8, "int4": 4, "int2": 2,
    "uint64": 64, "uint32": 32, "uint16": 16, "uint8": 8, "uint4": 4, "uint2": 2, "bool": 8,
}  # fmt: skip
"""Bits of one element."""

FLOATS = frozenset({"float64", "float32", "bfloat16", "float16"})
UNNAMED = "<unnamed>"


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor in one role.

    Attributes:
        tensor: What selectors see (for `grad` and `optimizer_state` the parameter's, in that role).
        unit: Unit name, or None for the root.
        dtype: As held between steps.
        count: Tensors of that shape (optimizer slots).
        layers: Stack path -> index, of every stack it is inside of.
        own_input: Whether it is its unit's own input.
        unnamed: Whether it stands for the unit's values that no selector reaches.
    """

    tensor: TensorSpec
    unit: str | None
    dtype: str | None
    count: int = 1
    layers: Mapping[str, int] = field(default_factory=dict)
    own_input: bool = False
    unnamed: bool = False

    @property
    def role(self) -> str:
        return self.tensor.role

    @property
    def path(self) -> str:
        return self.tensor.path

    @property
    def global_nbytes(self) -> int | None:
        """Bytes over the whole mesh, counted once; None where the shape, or the size of the dtype, is unknown."""
        return None if self.tensor.shape is None else self.nbytes_of(math.prod(self.tensor.shape))

    def nbytes_of(self, num_elements: int) -> int | None:
        """Bytes of so many of its elements; None for a dtype of unknown size, as of a random-number key."""
        bits = ITEM_BITS.get(self.dtype or "")
        return None if bits is None else math.ceil(num_elements * bits / 8) * self.count


def make_entries(policy: Policy, spec: ModelSpec, units: UnitTable) -> tuple[Entry, ...]:
    """Every entry, in model order: parameters with their gradient and state, buffers, activations, unnamed values."""
    stacks = {stack.path for stack in spec.stacks}
    model_dtype = next((tensor.dtype for tensor in spec.tensors_of("param") if tensor.dtype in FLOATS), None)
    entries: list[Entry] = []
    for tensor in _without_ties(spec):
        layers = _layers(tensor.path, stacks)
        if tensor.role == "param":
            entries.extend(_parameter(tensor, _unit_of_parameter(tensor, units), layers, policy.precision, spec))
        elif tensor.role == "activation":
            entries.append(_activation(tensor, layers, stacks, model_dtype, policy.precision, spec, units))
        else:
            entries.append(Entry(tensor, units.of(tensor.path), tensor.dtype, layers=layers))
    for unit in units.units:
        placeholder = TensorSpec(path=f"{unit.name}.{UNNAMED}", role="activation", shape=None, dtype=None)
        layers = _layers(unit.members[0], stacks) if len(unit.members) == 1 else {}
        entries.append(Entry(placeholder, unit.name, None, layers=layers, unnamed=True))
    return tuple(entries)


def _without_ties(spec: ModelSpec) -> Iterator[TensorSpec]:
    """Parameters that share storage are one tensor with aliases, the first of each group."""
    first_of = {path: group[0] for group in spec.ties for path in group[1:]}
    tied_to = {group[0]: group[1:] for group in spec.ties}
    by_path = {tensor.path: tensor for tensor in spec.tensors if tensor.role == "param"}
    for tensor in spec.tensors:
        if tensor.role != "param":
            yield tensor
            continue
        if tensor.path in first_of and first_of[tensor.path] in by_path:
            continue
        others = tied_to.get(tensor.path, ())
        aliases = [*tensor.aliases, *others, *(a for path in others if path in by_path for a in by_path[path].aliases)]
        yield replace(tensor, aliases=tuple(name for name in dict.fromkeys(aliases) if name != tensor.path))


def _unit_of_parameter(tensor: TensorSpec, units: UnitTable) -> str | None:
    """Its unit; a parameter that modules of several units share belongs to the root, which outlives them."""
    owners = {units.of(name) for name in (tensor.path, *(alias for alias in tensor.aliases if "." in alias))}
    own = units.of(tensor.path)
    others = {owner for owner in owners if owner is not None and owner != own}
    return None if others else own


def _parameter(
    tensor: TensorSpec, unit: str | None, layers: Mapping[str, int], precision: Precision | None, spec: ModelSpec
) -> Iterator[Entry]:
    is_cast = precision is not None and tensor.trainable and tensor.dtype in FLOATS
    master = precision.master if precision is not None and is_cast else tensor.dtype
    yield Entry(tensor, unit, master, layers=layers)
    if not tensor.trainable:
        return
    state = precision.optimizer_state if precision is not None and is_cast else tensor.dtype
    yield Entry(replace(tensor, role="grad"), unit, master, layers=layers)
    yield Entry(replace(tensor, role="optimizer_state"), unit, state, count=len(spec.optimizer_slots), layers=layers)


def _activation(
    tensor: TensorSpec,
    layers: Mapping[str, int],
    stacks: set[str],
    model_dtype: str | None,
    precision: Precision | None,
    spec: ModelSpec,
    units: UnitTable,
) -> Entry:
    names = (tensor.path, *tensor.aliases)
    unit, is_own_input = _unit_of_activation(tensor, names, units)
    if is_own_input:
        input_name = next(name for name in names if _input_owner(name) is not None and units.of(name) == unit)
        layers = _layers(input_name, stacks)
    neutral = tensor.tensor or next(
        (name for name in (tensor_name(spec.family, path) for path in names) if name is not None), None
    )
    follows = tensor.dtype in FLOATS and tensor.dtype == model_dtype and neutral != "attn_stats"  # those stay float32
    is_cast = precision is not None and follows
    dtype = precision.compute if precision is not None and is_cast else tensor.dtype
    aliases = tuple(
        name for name in dict.fromkeys((*tensor.aliases, *raw_names(names, units.raw))) if name != tensor.path
    )
    named = replace(tensor, tensor=neutral, aliases=aliases)
    return Entry(named, unit, dtype, layers=layers, own_input=is_own_input)


def _unit_of_activation(tensor: TensorSpec, names: tuple[str, ...], units: UnitTable) -> tuple[str | None, bool]:
    """The unit that holds the value, and whether it is that unit's own input.

    A layer's output that is the next layer's input is held by the next: it is what that unit's backward starts from. A
    unit's output that no other unit takes in is held by the root.
    """
    made_in = {units.of(name) for name in names if _input_owner(name) is None}
    for name in names:
        owner = _input_owner(name)
        unit = units.by_member.get(owner) if owner is not None else None
        if unit is not None and unit not in made_in:
            return unit, True
    unit = units.of(tensor.path)
    return (None if unit is not None and _is_output(unit, names, units) else unit), False


def _is_output(unit: str, names: tuple[str, ...], units: UnitTable) -> bool:
    """Whether the value leaves the unit: a member gives it, and nothing inside the unit takes it in."""
    members = units.by_name[unit].members
    owners = [owner for owner in map(_input_owner, names) if owner is not None]
    is_given = any(_input_owner(name) is None and name.partition("[")[0] in members for name in names)
    return is_given and not any(units.of(owner) == unit for owner in owners)


def _input_owner(name: str) -> str | None:
    """`layers.3` for `layers.3.input` and `layers.3.input[1]`, None for other names."""
    owner, dot, last = name.rpartition(".")
    return owner if dot and last.partition("[")[0] == "input" else None


def _layers(path: str, stacks: set[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for prefix in prefixes(path):
        parent, _, index = prefix.rpartition(".")
        if index.isdigit() and parent in stacks:
            found[parent] = int(index)
    return found

"""Accelerators to plan for: memory, rates and links of each, every constant with its source.

The constants live in `targets.json` beside this file; a source that begins with `assumed` marks a figure for which no
source was found, and whatever is computed from it is an estimate. No framework is imported here.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from .errors import MemoptError, did_you_mean

Kind = Literal["cpu", "gpu", "tpu"]

_SYNTAX = "cpu, gpu:NAME[:COUNT] (gpu:gb200:64) or tpu:NAME:TOPOLOGY (tpu:v5e:2x2)"


@dataclass(frozen=True, slots=True)
class Fact:
    """One constant: `value` is None where nothing is published."""

    value: float | None
    source: str

    @property
    def is_assumed(self) -> bool:
        """Whether no source was found for it."""
        return self.source.startswith("assumed")


@dataclass(frozen=True, slots=True)
class Target:
    """Devices of one kind, present or not. Rates are per device and per direction; None where unknown.

    Attributes:
        name: As the user typed it, `gpu:gb200:64`.
        kind: `cpu`, `gpu` or `tpu`.
        model: `gb200`, `v5e`, or `cpu`.
        description: The vendor's name.
        num_devices: Devices in all. A TPU v7x chip is two devices.
        topology: TPU only: chips along each dimension.
        capacity_bytes: Memory of one device; None on the CPU, where it is the machine's.
        compiler_bytes: What the target's own compiler lets a program use, where it says so.
        bf16_flops: Dense bf16 operations per second.
        hbm_bytes_per_s: Device memory bandwidth.
        fabric_bytes_per_s: Links between devices.
        host_link_bytes_per_s: Link between a device and its host.
        host_dram_bytes_per_s: Memory bandwidth of one host processor, which `devices_per_host_dram` devices share.
        devices_per_node: Devices that share one host's memory.
        host_bytes_per_node: That memory.
        facts: Every constant above with its source.
        xla: What a compile with no device needs to know (`GpuTargetConfigProto`'s fields).
    """

    name: str
    kind: Kind
    model: str
    description: str
    num_devices: int
    topology: tuple[int, ...] = ()
    capacity_bytes: int | None = None
    compiler_bytes: int | None = None
    bf16_flops: float | None = None
    hbm_bytes_per_s: float | None = None
    fabric_bytes_per_s: float | None = None
    host_link_bytes_per_s: float | None = None
    host_dram_bytes_per_s: float | None = None
    devices_per_host_dram: int = 1
    devices_per_node: int = 1
    host_bytes_per_node: int | None = None
    facts: Mapping[str, Fact] = field(default_factory=dict)
    xla: Mapping[str, Any] = field(default_factory=dict)

    @property
    def assumed(self) -> tuple[str, ...]:
        """Names of the constants no source was found for."""
        return tuple(sorted(name for name, fact in self.facts.items() if fact.is_assumed))

    @property
    def num_nodes(self) -> int:
        """Hosts the devices are spread over."""
        return math.ceil(self.num_devices / self.devices_per_node)

    def reserve(self, framework: str) -> tuple[tuple[str, int, str], ...]:
        """What the framework's allocator cannot hand out: (what, bytes, source) each.

        JAX preallocates a share of a GPU and keeps contexts and collectives outside it; on a TPU the compiler itself
        says what a program may use; torch shares the whole device with both.
        """
        if self.capacity_bytes is None:
            return ()
        if self.kind == "tpu":
            compiler_bytes = self.compiler_bytes or self.capacity_bytes
            return (("runtime", self.capacity_bytes - compiler_bytes, self.facts["compiler_bytes"].source),)
        if framework == "jax":
            share = framework_fact("jax_gpu_preallocated_fraction")
            left_bytes = self.capacity_bytes - int(self.capacity_bytes * float(share.value or 0))
            return (("outside JAX's preallocated share", left_bytes, share.source),)
        context, collectives = framework_fact("torch_gpu_context_bytes"), framework_fact("torch_gpu_collectives_bytes")
        fragments = framework_fact("torch_gpu_fragmentation_fraction")
        reserve = [("contexts and workspaces", int(context.value or 0), context.source)]
        if self.num_devices > 1:
            reserve.append(("collectives", int(collectives.value or 0), collectives.source))
        reserve.append(("fragmentation", int(self.capacity_bytes * float(fragments.value or 0)), fragments.source))
        return tuple(reserve)

    def usable_bytes(self, framework: str) -> int | None:
        """Device memory a program can have under the framework's defaults; None where the capacity is unknown.

        >>> round(load_target("gpu:gb200").usable_bytes("jax") / 2**30, 1)  # 0.75 of the device
        138.2
        """
        if self.capacity_bytes is None:
            return None
        return self.capacity_bytes - sum(num_bytes for _, num_bytes, _ in self.reserve(framework))

    def pinned_pool_bytes(self, framework: str) -> int | None:
        """Cap of the framework's pool of pinned host memory, one per process; None where there is none."""
        if self.kind != "gpu" or framework != "jax":
            return None
        return int(framework_fact("jax_gpu_pinned_pool_bytes").value or 0)

    def with_devices(self, num_devices: int) -> Target:
        """The same accelerator in another number.

        Raises:
            MemoptError: `target-devices`, for a TPU, whose topology fixes the number.
        """
        if num_devices == self.num_devices:
            return self
        if self.kind == "tpu":
            raise MemoptError.of(
                "target-devices",
                f"`{self.name}` has {self.num_devices} devices, not {num_devices}",
                hint="name the topology that has that many, as in tpu:v5e:4x4",
            )
        stem = "cpu" if self.kind == "cpu" else f"gpu:{self.model}"
        return replace(self, name=f"{stem}:{num_devices}", num_devices=num_devices)

    def to_json(self) -> dict[str, Any]:
        """Name, devices and every constant with its source, as `memopt targets --json` prints it."""
        facts = {name: {"value": fact.value, "source": fact.source} for name, fact in sorted(self.facts.items())}
        return {
            "name": self.name,
            "kind": self.kind,
            "description": self.description,
            "num_devices": self.num_devices,
            "assumed": list(self.assumed),
            "facts": facts,
        }


def load_target(name: str) -> Target:
    """The target with that name.

    Raises:
        MemoptError: `unknown-target` (with the nearest), or `bad-target` (a count or topology that cannot be).

    >>> load_target("gpu:h100:8").num_devices
    8
    """
    parts = name.strip().lower().split(":")
    table = _table()
    if parts[0] == "cpu" and len(parts) <= 2:
        num_devices = _count(parts[1], name) if len(parts) == 2 else 1
        return Target(
            name=name, kind="cpu", model="cpu", description="this machine's processor", num_devices=num_devices
        )
    if parts[0] not in ("gpu", "tpu") or not 2 <= len(parts) <= 3:
        raise _unknown(name)
    kind: Kind = "gpu" if parts[0] == "gpu" else "tpu"
    if parts[1] not in table[kind]:
        raise _unknown(name)
    entry = table[kind][parts[1]]
    if kind == "gpu":
        num_devices = _count(parts[2], name) if len(parts) == 3 else 1
        return _target(name, kind, parts[1], entry, num_devices, ())
    if len(parts) != 3 or not re.fullmatch(r"\d+(x\d+){1,2}", parts[2]):
        raise MemoptError.of("bad-target", f"`{name}` needs a topology, chips along each dimension", hint=_SYNTAX)
    topology = tuple(int(size) for size in parts[2].split("x"))
    if 0 in topology:
        raise MemoptError.of("bad-target", f"`{name}` has a dimension of no chips", hint=_SYNTAX)
    num_devices = math.prod(topology) * entry["devices_per_chip"]
    return _target(name, kind, parts[1], entry, num_devices, topology)


def target_names() -> tuple[str, ...]:
    """One name per accelerator, `cpu` first; a TPU's with the smallest topology of a whole host."""
    table = _table()
    gpus = tuple(f"gpu:{model}" for model in table["gpu"])
    tpus = tuple(f"tpu:{model}:{entry['host_topology']}" for model, entry in table["tpu"].items())
    return ("cpu", *gpus, *tpus)


def framework_fact(name: str) -> Fact:
    """A constant of a framework's runtime, e.g. `jax_gpu_pinned_pool_bytes`."""
    return _fact(_table()["frameworks"][name])


def _target(name: str, kind: Kind, model: str, entry: Mapping[str, Any], num_devices: int, topology: Any) -> Target:
    facts = {key: _fact(value) for key, value in entry["facts"].items()}
    constants: dict[str, Any] = {key: fact.value for key, fact in facts.items() if fact.value is not None}
    return Target(
        name=name,
        kind=kind,
        model=model,
        description=entry["description"],
        num_devices=num_devices,
        topology=topology,
        facts=facts,
        xla={**_table()["xla_common"], **entry["xla"]} if kind == "gpu" else {"topology": entry["topology_prefix"]},
        **constants,
    )


def _count(text: str, name: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise MemoptError.of("bad-target", f"`{name}`: `{text}` is no number of devices", hint=_SYNTAX)
    return int(text)


def _unknown(name: str) -> MemoptError:
    known = target_names()
    stem = ":".join(name.split(":")[:2])
    stems = [":".join(other.split(":")[:2]) for other in known]
    bare = [other for other in stems if other.split(":")[-1] == stem.lower() and ":" in other]
    near = f"did you mean `{bare[0]}`?" if bare else did_you_mean(stem, stems)
    message = f"no target is called `{name}`; there are {', '.join(known)}"
    return MemoptError.of("unknown-target", message, hint=near or _SYNTAX)


def _fact(entry: Mapping[str, Any]) -> Fact:
    return Fact(value=entry["value"], source=entry["source"])


@cache
def _table() -> Mapping[str, Any]:
    return json.loads(files("memopt").joinpath("targets.json").read_text(encoding="utf-8"))

"""Seconds per task from FLOPs and bytes: the roofline of one device, with the efficiencies stated.

No task runs at a data sheet's rate. What share is reached is not known before a run, so an `Efficiency` is a stated
guess with a pessimistic and an optimistic end, or comes from one measured step (`calibrate`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from .simulate import HostLink
from .targets import Target
from .timeline import Task

Bound = Literal["compute", "hbm"]

# Per GPU and direction, between nodes, from the data sheets of DGX A100 (8 x HDR 200 Gb/s), DGX H100, H200 and
# B200 (8 x NDR 400 Gb/s) and GB200 NVL72 (400 Gb/s per GPU). Devices beyond a fabric's domain talk through it.
NETWORK_BYTES_PER_S = {"a100": 25e9, "h100": 50e9, "h200": 50e9, "b200": 50e9, "gb200": 50e9}
FABRIC_DEVICES = {"a100": 8, "h100": 8, "h200": 8, "b200": 8, "gb200": 72}


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Share of the data sheet's rate that is reached; 1 is the sheet.

    Attributes:
        flops: Of dense matrix operations.
        hbm: Of device memory bandwidth.
        link: Of the host link.
        fabric: Of the links between devices.
        overhead_s: Host seconds per compute task that no device work hides.
    """

    flops: float
    hbm: float
    link: float
    fabric: float
    overhead_s: float = 0.0


# Public training runs of dense models reach 35 to 60% of bf16 peak over a whole step; the matrix operations alone reach
# more. These three are what an uncalibrated interval spans. Assumed; `memopt plan --calibrate` replaces them.
GUESS = Efficiency(flops=0.55, hbm=0.75, link=0.85, fabric=0.70)
PESSIMISTIC = Efficiency(flops=0.38, hbm=0.60, link=0.65, fabric=0.45, overhead_s=20e-6)
OPTIMISTIC = Efficiency(flops=0.75, hbm=0.90, link=1.0, fabric=0.90)


@dataclass(frozen=True, slots=True)
class Rates:
    """What one device reaches, efficiency included. None: unknown on this target, so nothing is said about seconds."""

    flops: float
    hbm_bytes_per_s: float
    fabric_bytes_per_s: float | None
    network_bytes_per_s: float | None
    fabric_devices: int
    link: HostLink | None
    overhead_s: float = 0.0

    def scaled(self, *, flops: float = 1.0, link: float = 1.0) -> Rates:
        """With matrix and memory rates, and the link's, multiplied: what `regret` varies."""
        moved = None
        if self.link is not None:
            moved = replace(self.link, bytes_per_s=self.link.bytes_per_s * link)
        return replace(self, flops=self.flops * flops, hbm_bytes_per_s=self.hbm_bytes_per_s * flops, link=moved)


def rates_for(target: Target, efficiency: Efficiency) -> Rates | None:
    """The target's rates at that efficiency; None where its compute or memory rate is not published (`cpu`)."""
    if target.bf16_flops is None or target.hbm_bytes_per_s is None:
        return None
    link = None
    if target.host_link_bytes_per_s is not None:
        dram = target.host_dram_bytes_per_s
        share = None if dram is None else dram / target.devices_per_host_dram
        link = HostLink(target.host_link_bytes_per_s * efficiency.link, share)
    fabric, network = target.fabric_bytes_per_s, NETWORK_BYTES_PER_S.get(target.model)
    return Rates(
        flops=target.bf16_flops * efficiency.flops,
        hbm_bytes_per_s=target.hbm_bytes_per_s * efficiency.hbm,
        fabric_bytes_per_s=None if fabric is None else fabric * efficiency.fabric,
        network_bytes_per_s=None if network is None else network * efficiency.fabric,
        fabric_devices=FABRIC_DEVICES.get(target.model, target.num_devices),
        link=link,
        overhead_s=efficiency.overhead_s,
    )


def task_seconds(task: Task, rates: Rates) -> float:
    """Seconds of one task alone: the slower of its FLOPs and its bytes.

    A transfer's are at the link's rate with nobody beside it; `simulate` shares it.
    """
    if task.seconds is not None:
        return task.seconds
    if task.stream == "compute":
        return sum(bound_seconds(task, rates).values()) + rates.overhead_s
    if task.stream == "collective":  # copies into and out of a collective's buffers may run on its stream
        return _collective_seconds(task, rates) + sum(bound_seconds(task, rates).values())
    if rates.link is None:
        return 0.0
    if task.stream == "host_compute":
        return task.hbm_bytes / (rates.link.dram_bytes_per_s or rates.link.bytes_per_s)
    return task.nbytes / rates.link.rate(1)


def _collective_seconds(task: Task, rates: Rates) -> float:
    """Ring collectives over several fabric domains are bound by the cards of one domain that belong to the group, each
    of which carries a ring (NCCL's channels), and never exceed the fabric itself.
    """
    rate = rates.fabric_bytes_per_s
    if rate is None:
        return 0.0
    if (task.group - 1) * task.stride >= rates.fabric_devices and rates.network_bytes_per_s is not None:
        cards = max(1, rates.fabric_devices // task.stride)  # of this group, in one domain; the others have their own
        rate = min(rate, rates.network_bytes_per_s * cards)
    return task.nbytes / rate


def bound_seconds(task: Task, rates: Rates) -> dict[Bound, float]:
    """Seconds of a task's operators by what bounds each of them: the slower of its FLOPs and its bytes."""
    found: dict[Bound, float] = {"compute": 0.0, "hbm": 0.0}
    for flops, nbytes in task.parts or ((task.flops, task.hbm_bytes),):
        compute_s, hbm_s = flops / rates.flops, nbytes / rates.hbm_bytes_per_s
        found["compute" if compute_s >= hbm_s else "hbm"] += max(compute_s, hbm_s)
    return found


def seconds_of(tasks: Sequence[Task], rates: Rates) -> list[float]:
    """`task_seconds` of each."""
    return [task_seconds(task, rates) for task in tasks]

"""Rates from one measured step: `memopt plan --calibrate results.json`, refused when it is from other hardware."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .errors import MemoptError, Problem
from .estimate import Measured
from .plan import Plan
from .processor import cpu_name
from .roofline import GUESS, Efficiency, Rates, rates_for
from .step_time import play
from .targets import Target

_LEAST, _MOST = 0.001, 4.0


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """A `results.json` of `memopt compare`, as far as calibration reads it.

    Attributes:
        file: Where it was read.
        device: Its `environment.device`.
        workload: Name of the workload it trained.
        seconds: (backend, policy) -> median seconds of a step.
        world_size: (backend, policy) -> ranks or devices.
    """

    file: str
    device: Mapping[str, Any]
    workload: str | None
    seconds: Mapping[tuple[str, str], float]
    world_size: Mapping[tuple[str, str], int]


def load_run(path: str | Path, *, target: Target) -> MeasuredRun:
    """Read the results of a comparison and check that they are this hardware's.

    Raises:
        MemoptError: `calibrate-not-found`, `calibrate-not-results`, `calibrate-other-hardware`, `calibrate-no-step`.
    """
    file = Path(path)
    if not file.is_file():
        raise MemoptError(Problem("calibrate-not-found", f"no such file: `{file}`", file=str(file)))
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        rows, device = data["rows"], data["environment"]["device"]
        timed = [row for row in rows if row["ok"] and row["step_time_s"]]
        run = MeasuredRun(
            file=str(file),
            device=device,
            workload=data["environment"].get("workload", {}).get("name"),
            seconds={(row["backend"], row["policy"]): float(row["step_time_s"]) for row in timed},
            world_size={(row["backend"], row["policy"]): int(row.get("world_size", 1)) for row in timed},
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise MemoptError(
            Problem(
                "calibrate-not-results",
                f"`{file}` is not what `memopt compare --out` writes: {type(error).__name__}: {error}",
                hint="give the results.json of a comparison that ran on this hardware",
                file=str(file),
            )
        ) from error
    _check_hardware(run, target)
    if not run.seconds:
        raise MemoptError(Problem("calibrate-no-step", "no row of it ran to its end with a timed step", file=str(file)))
    return run


def _check_hardware(run: MeasuredRun, target: Target) -> None:
    """The device must be the target's kind and model; a CPU must be this very one."""
    kind = str(run.device.get("kind", "")).split(":")[0].lower().replace("cuda", "gpu")
    names = " ".join(str(value) for value in run.device.values()).lower()
    here = cpu_name().lower()
    if target.kind != kind:
        got = f"a {kind or 'device of no stated kind'}"
    elif target.kind == "cpu" and str(run.device.get("cpu", "")).lower() != here:
        got = f"`{run.device.get('cpu')}`, and this is `{here}`"
    elif target.kind != "cpu" and not _names_model(names, target.model):
        got = f"`{run.device.get('name') or run.device.get('kind')}`"
    else:
        return
    raise MemoptError(
        Problem(
            "calibrate-other-hardware",
            f"it was measured on {got}; the target is `{target.name}` ({target.description})",
            hint="rates of one device say nothing about another: measure there, or plan without --calibrate",
            file=run.file,
        )
    )


def _names_model(names: str, model: str) -> bool:
    words = names.replace(":", " ").replace("-", " ").replace(",", " ").split()
    return model in words


def measured_seconds(
    run: MeasuredRun, *, backend: str, policy: str, workload: str | None, world_size: int
) -> float | None:
    """The step time of the row with this backend, policy, workload and world size; None where it has none."""
    if workload is not None and run.workload is not None and run.workload != workload:
        return None
    if run.world_size.get((backend, policy)) != world_size:
        return None
    return run.seconds.get((backend, policy))


def calibrated_rates(steps: Sequence[tuple[Measured, Plan, float]], target: Target) -> Rates:
    """One factor on all device rates such that the simulated steps take what was measured, in the geometric mean.

    A CPU publishes no rates: they are then found from the factor alone, bytes at a fixed proportion to FLOPs.

    Args:
        steps: (measurement, plan, measured seconds), at least one.
        target: What was measured on.

    Raises:
        MemoptError: `calibrate-out-of-range`: no sensible rate explains the measured time.
    """
    base = rates_for(target, GUESS) or _any_cpu()
    low, high = _LEAST, _MOST
    if rates_for(target, GUESS) is None:
        low, high = 1e-6, 1e6
    for _ in range(60):
        middle = (low * high) ** 0.5
        if _mean_ratio(steps, base.scaled(flops=middle)) > 1:
            low = middle
        else:
            high = middle
    found = base.scaled(flops=(low * high) ** 0.5)
    ratio = _mean_ratio(steps, found)
    if not 0.98 < ratio < 1.02:
        raise MemoptError.of(
            "calibrate-out-of-range",
            f"no rate between {_LEAST} and {_MOST} times the assumed one makes the modelled step take what was "
            f"measured (nearest: {ratio:.3g} times the measured time)",
            hint="is it the same workload, batch and world size, timed after warm-up?",
        )
    return found


def calibrated_efficiency(rates: Rates, target: Target) -> Efficiency:
    """The efficiency the rates stand for on a target that publishes its own."""
    published = rates_for(target, replace(GUESS, flops=1.0, hbm=1.0))
    if published is None:
        raise ValueError("the target publishes no rates")
    flops, hbm = rates.flops / published.flops, rates.hbm_bytes_per_s / published.hbm_bytes_per_s
    return replace(GUESS, flops=flops, hbm=hbm)


def _any_cpu() -> Rates:
    """A scale only: ten bytes of memory bandwidth per hundred FLOPs, which calibration multiplies."""
    return Rates(
        flops=1e11, hbm_bytes_per_s=1e10, fabric_bytes_per_s=1e10, network_bytes_per_s=None, fabric_devices=1, link=None
    )


def _mean_ratio(steps: Sequence[tuple[Measured, Plan, float]], rates: Rates) -> float:
    """Geometric mean of simulated over measured seconds."""
    product = 1.0
    for measured, plan, seconds in steps:
        played = play(measured, plan, rates)
        if played is None:
            raise MemoptError.of(
                "calibrate-no-model",
                "the plan has neither a traced step nor layers with known values to calibrate",
                hint="plan without --calibrate",
            )
        product *= played.simulation.makespan_s / seconds
    return product ** (1 / len(steps))

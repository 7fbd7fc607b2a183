"""What each policy of a comparison was foretold to hold, from `memopt plan` in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence

from ..backend import load_backend

PLAN_TIMEOUT_S = 600.0


def planned_peaks(
    policies: Sequence[str], *, workload: str, backend: str, target: str, world_size: int
) -> dict[str, int]:
    """Planned peak bytes per device, by policy file; a policy that cannot be planned is absent.

    Args:
        policies: Files, planned by one process: the framework is imported once.
        workload: Reference.
        backend: Backend name.
        target: As for `memopt plan`.
        world_size: Ranks or devices.
    """
    command = [sys.executable, "-m", "memopt", "plan", *policies, "--workload", workload, "--backend", backend]
    command += ["--target", target, "--world-size", str(world_size), "--json"]
    options = getattr(load_backend(backend), "comparison_options", lambda device: {})(target.partition(":")[0])
    command += [
        word for name, value in options.items() for word in ("--compiler-option", f"{name}={json.dumps(value)}")
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PLAN_TIMEOUT_S)
        document = json.loads(done.stdout)
    except (subprocess.TimeoutExpired, ValueError):  # no document: nothing was planned, and the column stays empty
        return {}
    plans = document.get("plans", [document])
    if len(plans) != len(policies):
        return {}
    return {
        policy: plan["device"]["peak_bytes"] for policy, plan in zip(policies, plans, strict=True) if plan.get("ok")
    }

"""`memopt tune` beside every shipped policy: each compiled for the target, and its step estimated the same way.

    python tests/benchmarks/jax_tune.py --work 8b-h100 --work 70b-gb200 --work 405b-gb200 --out tune.json

Printed are the tuned policy's row first, then one row per file of `configs/policies/gpu`. A policy whose values do not
fit the target's hosts is not compiled: its row says how many it would need. Exit code 1 where the tuned policy is over
its budget, or its estimate is above that of a shipped policy that fits the device and the hosts. Expect a quarter of an
hour for each work on two cores; rows that `jax_aot_tables.py memory` has made of the same policies need not be compiled
again:

    python tests/benchmarks/jax_aot_tables.py memory --work 70b-gb200 --out 70b.json
    python tests/benchmarks/jax_tune.py --work 70b-gb200 --rows 70b.json
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jax_cases import GIB, ROOT, WORKS, workload_of

from memopt.backend import load_backend
from memopt.errors import MemoptError
from memopt.loading import load_policy
from memopt.planning import PlanResult, Setting, lowered, plan_policy, prepare
from memopt.tune import tune
from memopt.tuning.search import Wishes, is_acceptable
from memopt_jax import topology
from memopt_jax.accelerators import import_jax

BUDGET_GIB = {"8b-gb200": 40, "8b-h100": 30, "70b-gb200": 40, "405b-gb200": 138}
TUNED = "tuned"
POLICIES = sorted((ROOT / "configs" / "policies" / "gpu").glob("*.yaml"))


def told(text: str) -> None:
    print("  ", text, file=sys.stderr, flush=True)


def rows(work: str, policies: list[Path], file: Path | None, known: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The tuned policy, then the shipped ones.

    Args:
        work: Of `WORKS`.
        policies: Shipped files.
        file: A policy that was tuned before; searched for without one.
        known: Rows of the memory table; those of the same work and policy are taken.
    """
    config = workload_of(work)
    budget_bytes = BUDGET_GIB[work] * GIB
    # The budget is the device's for all: a shipped policy above it would be no rival.
    setting = prepare(
        workload=config, backend=load_backend("jax"), target=WORKS[work].target, budget={"device": budget_bytes}
    )
    if file is None:
        tuned = tune(
            workload=config,
            backend="jax",
            target=WORKS[work].target,
            wishes=Wishes(device_bytes=budget_bytes),
            progress=told,
        )
        yield {**row(work, TUNED, tuned.result), "plans": tuned.rounds, "search_s": round(tuned.elapsed_s),
               "settings": list(tuned.settings), "text": tuned.text}  # fmt: skip
    else:
        yield row(work, TUNED, plan_policy(file, setting, progress=told))
    for policy in policies:
        told(f"{work}: {policy.stem}")
        found = [each for each in known if (each["work"], each["policy"]) == (work, policy.stem)]
        yield compiled_before(found[-1], setting) if found else shipped(work, policy, setting)


def shipped(work: str, policy: Path, setting: Setting) -> dict[str, Any]:
    """The row of a shipped policy; not compiled where its values alone are more than a host has for the device."""
    try:
        plan = lowered(load_policy(policy), setting)
        on_host = sum(
            item.nbytes or 0
            for item in plan.rows
            if item.residual == "offload" or (item.role != "activation" and item.memory_kind == "pinned_host")
        )
        room = (setting.target.host_bytes_per_node or on_host) / setting.target.devices_per_node
        if on_host > room:
            return {"work": work, "policy": policy.stem, "host_gib": round(on_host / GIB, 1), "fits": False,
                    "estimate_s": None, "reason": f"a host has {room / GIB:.0f} GiB for each device"}  # fmt: skip
        return row(work, policy.stem, plan_policy(policy, setting, progress=told))
    except MemoptError as error:
        return {"work": work, "policy": policy.stem, "fits": False, "estimate_s": None,
                "reason": error.problems[0].message}  # fmt: skip


def compiled_before(made: dict[str, Any], setting: Setting) -> dict[str, Any]:
    """A row of the memory table, judged by the same limits."""
    room_gib = (setting.target.host_bytes_per_node or 0) / setting.target.devices_per_node / GIB
    fits = made["hbm_gib"] <= setting.budget["device"] / GIB and made["host_gib"] <= room_gib
    return {
        "work": made["work"],
        "policy": made["policy"],
        "hbm_gib": round(made["hbm_gib"], 1),
        "host_gib": round(made["host_gib"], 1),
        "recompute": made["recompute_compiled"],
        "exposed_s": made["exposed_of_step_shared"] * made["step_s_model"],
        "estimate_s": made["estimate_s"],
        "fits": fits,
        "offset_audit": made["audit"],
        "reason": None
        if fits
        else f"the budget is {setting.budget['device'] / GIB:.0f} GiB, a host has {room_gib:.0f}",
    }


def row(work: str, name: str, result: PlanResult) -> dict[str, Any]:
    """The figures of a planned policy; the pinned pool's cap is a setting and no limit."""
    measured, recompute = result.measured, result.measured.recompute_flops
    overlap = measured.overlap or {}
    return {
        "work": work,
        "policy": name,
        "hbm_gib": round(measured.peak_bytes / GIB, 1),
        "host_gib": round(measured.host_bytes / GIB, 1),
        "recompute": None if recompute is None or not measured.step_flops else recompute / measured.step_flops,
        "exposed_s": overlap.get("exposed_s"),
        "estimate_s": result.time.estimate_s,
        "fits": is_acceptable(result),
        "offset_audit": overlap.get("offset_audit"),
        "reason": "; ".join(verdict.render() for verdict in result.verdicts if verdict.fits is False) or None,
    }


def faults(made: list[dict[str, Any]]) -> list[str]:
    """What is not as it should be in the rows of one work."""
    tuned, others = made[0], [other for other in made[1:] if other["fits"]]
    found = [] if tuned["fits"] else [f"{tuned['work']}: the tuned policy does not fit"]
    return found + [
        f"{tuned['work']}: `{other['policy']}` takes {other['estimate_s']:.4f} s, the tuned policy more"
        for other in others
        if other["estimate_s"] < tuned["estimate_s"]
    ]


def main() -> None:
    """Prints the rows of each work."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", action="append", choices=BUDGET_GIB, required=True)
    parser.add_argument("--tuned", type=Path, help="a policy tuned before, instead of a search; with one work")
    parser.add_argument("--policy", action="append", choices=[file.stem for file in POLICIES])
    parser.add_argument("--rows", action="append", type=Path, help="what jax_aot_tables.py wrote, instead of compiling")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    if asked.tuned and len(asked.work) > 1:
        parser.error("--tuned goes with one --work")
    known = [row for file in asked.rows or () for row in json.loads(file.read_text(encoding="utf-8"))["rows"]]
    known = [row for row in known if row["options"] == "shipped"]
    import_jax()
    began_s, wrong = time.monotonic(), []
    document: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "versions": topology.versions(),
        "rows": [],
    }
    for work in asked.work:
        made: list[dict[str, Any]] = []
        policies = [file for file in POLICIES if file.stem in (asked.policy or [file.stem])]
        for each in rows(work, policies, asked.tuned, known):
            print(json.dumps(each), flush=True)
            made.append(each)
            document["rows"].append(each)
            document["elapsed_s"] = round(time.monotonic() - began_s, 1)
            if asked.out:
                asked.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        wrong += faults(made)
    sys.exit("\n".join(wrong) or 0)


if __name__ == "__main__":
    main()

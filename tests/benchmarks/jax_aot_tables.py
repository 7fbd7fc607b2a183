"""Tables of docs/explanation/evidence-jax.md: what the compilers of GPUs and TPUs say about whole train steps.

    python tests/benchmarks/jax_aot_tables.py memory --out memory.json
    python tests/benchmarks/jax_aot_tables.py options --work 8b-gb200 --out options.json
    python tests/benchmarks/jax_aot_tables.py link --work 8b-gb200 --out link.json
    python tests/benchmarks/jax_aot_tables.py all --work 8b-h100 --out 8b-h100.json

`all` makes the rows of the other three from one compile of each policy and set of options. No device is needed. Rows
are printed as they come and written as JSON with the date and the versions that made them.
"""

from __future__ import annotations

import argparse
import datetime
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jax_cases import OPTIONS, WORKS, break_even_rate, case, compiled, row, shipped_options

from memopt_jax import overlap, topology
from memopt_jax.accelerators import import_jax

SHIPPED = "shipped"
BASE = "full-recompute"
EVERY = (BASE, "offload-inputs", "offload-qkv", "offload-attention", "offload-all", "offload-optimizer")
MEMORY_ROWS = {
    "8b-gb200": EVERY,
    "8b-h100": EVERY,
    "70b-gb200": (*EVERY[:4], "offload-405b", *EVERY[4:]),
    "405b-gb200": (*EVERY[:4], "offload-405b", *EVERY[4:]),
    "deepseek-gb200": ("deepseek/full-recompute", "deepseek/offload"),
    "tiny-v5e": (BASE, "offload-all"),
    "tiny-v6e": (BASE, "offload-all"),
}
OPTION_ROWS = ("offload-inputs", "offload-attention", "offload-all")
TABLES = {"memory": (True, False, False), "options": (False, True, False), "link": (True, False, True),
          "all": (True, True, True)}  # fmt: skip


def rows(work: str, policies: list[str], options: list[str], table: str) -> Iterator[dict[str, Any]]:
    """The rows of one work.

    Args:
        work: Of `WORKS`.
        policies: These alone; all of the work's without any.
        options: Names of `OPTIONS` for the options table.
        table: Which rows.
    """
    wants_shipped, wants_options, wants_link = TABLES[table]
    recompute_s: float | None = None
    for policy in MEMORY_ROWS[work]:
        is_base = policy.endswith(BASE)
        if policies and policy not in policies and not (is_base and wants_link):
            continue
        what = case(work, policy)
        variants = {SHIPPED: shipped_options(what)} if wants_shipped else {}
        if wants_options and policy in OPTION_ROWS:
            variants |= {name: OPTIONS[name] for name in options}
        if not variants:
            continue
        steps = compiled(what, variants)
        if wants_link and is_base:
            recompute_s = overlap.read(steps[SHIPPED].text or "", what.target).step_s
        for name, step in steps.items():
            made = row(what, step, name)
            if name == SHIPPED and wants_link and recompute_s is not None and not is_base:
                made |= _link(break_even_rate(step, what.target, recompute_s), recompute_s)
            yield made


def _link(rate: float | None, recompute_s: float) -> dict[str, Any]:
    """The host link's rate below which full recompute's modelled step is shorter than the policy's."""
    return {
        "full_recompute_step_s": round(recompute_s, 3),
        "pays_above_gb_per_s": None if rate is None else round(rate / 1e9, 1),
    }


def main() -> None:
    """Makes one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--work", action="append", choices=WORKS)
    parser.add_argument("--policy", action="append")
    parser.add_argument("--option", action="append", choices=OPTIONS, help="rows of the options table; all without it")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    import_jax()
    began_s = time.monotonic()
    document: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "versions": topology.versions(),
        "rows": [],
    }
    for work in asked.work or list(MEMORY_ROWS):
        for made in rows(work, asked.policy or [], asked.option or list(OPTIONS), asked.table):
            print(json.dumps(made), flush=True)
            document["rows"].append(made)
            document["elapsed_s"] = round(time.monotonic() - began_s, 1)
            if asked.out:  # at each row, so that an interrupted run leaves what it has
                asked.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

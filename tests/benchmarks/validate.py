"""How long `memopt validate` takes on a policy of forty rules: processor time of the command, median and quartiles.

Usage: python tests/benchmarks/validate.py [ROUNDS]
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

NUM_RULES = 40


def forty_rules() -> str:
    """A policy of forty rules that say something each, in flow and block style."""
    rules = [_keep(i) if i % 2 else _offload(i) for i in range(NUM_RULES)]
    return "\n".join(["version: 1", "mesh: {replicate: 2, fsdp: -1}", "units: ['layers.*']", "rules:", *rules, ""])


def _keep(i: int) -> str:
    selectors = f"role: param, path: 'layers.{i}.*norm.*', layers: {{first: {i + 1}}}"
    return f"  - {{name: keep{i}, action: keep, match: {{{selectors}}}}}"


def _offload(i: int) -> str:
    match = f"{{tensor: [mlp_gate, mlp_up], min_bytes: {i + 1}MiB}}"
    return f"  - name: offload{i}\n    action: offload\n    match: {match}"


def main() -> None:
    """Print one JSON document."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    processor_s, wall_s = [], []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "policy.yaml"
        file.write_text(forty_rules())
        for _ in range(rounds):
            before, started_s = _children_s(), time.perf_counter()
            code = "from memopt.cli import main; main()"
            subprocess.run([sys.executable, "-c", code, "validate", str(file)], check=True, stdout=subprocess.DEVNULL)
            wall_s.append(time.perf_counter() - started_s)
            processor_s.append(_children_s() - before)
    print(json.dumps({"rules": NUM_RULES, "processor_s": _spread(processor_s), "wall_s": _spread(wall_s)}, indent=2))


def _children_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _spread(values: list[float]) -> dict[str, float]:
    low, median, high = statistics.quantiles(values, n=4)
    return {"median": round(median, 3), "lower_quartile": round(low, 3), "upper_quartile": round(high, 3)}


if __name__ == "__main__":
    main()

"""`memopt check`: are the gradients under a policy those of the plain model?"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer


def check(
    policy: Annotated[Path, typer.Argument(help="The policy file.", metavar="POLICY")],
    workload: Annotated[str, typer.Option(help="FILE.yaml, hf:PATH, FILE.py:FUNCTION or package.module:FUNCTION.")],
    backend: Annotated[str, typer.Option(help="jax, torch, or another registered backend.")],
    seed: Annotated[int, typer.Option(min=0, help="Of the weights and the batch.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="The result as JSON on stdout.")] = False,
) -> None:
    """Compare every gradient of one batch with the policy on and off, on this machine's own device.

    Exit code 0 when they agree, 1 when they do not.
    """
    from ..backend import load_backend
    from ..loading import load_policy
    from ..workloads import load_workload

    chosen = load_backend(backend)
    result = chosen.check(load_workload(workload), load_policy(policy), seed=seed)
    if as_json:
        print(json.dumps(result.to_json(), indent=2))
    else:
        verdict = "the same gradients" if result.ok else "DIFFERENT gradients"
        worst = "" if result.worst_tensor is None else f" (worst: {result.worst_tensor})"
        differs = (
            f"loss differs by {result.loss_diff:g}, gradients by at most {result.max_grad_rel_diff:g} of their norm"
        )
        print(f"{policy}: {verdict} as with {result.reference} residuals\n  {differs}{worst}")
    sys.exit(0 if result.ok else 1)

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
    world_size: Annotated[int | None, typer.Option(min=1, help="Devices; left out: the least the mesh takes.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the weights and the batch.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="The result as JSON on stdout.")] = False,
) -> None:
    """Compare every gradient of one batch with the policy on and off, on this machine's own device.

    Exit code 0 when they agree, 1 when they do not.
    """
    from ..backend import load_backend, require_frameworks
    from ..checking import least_world
    from ..errors import all_of
    from ..guarding import guarded
    from ..loading import load_policy
    from ..workloads import load_workload

    chosen, loaded, described, _ = all_of(
        lambda: load_backend(backend),
        lambda: load_policy(policy),
        lambda: load_workload(workload),
        lambda: require_frameworks(backend),
    )
    size = world_size or least_world(loaded)
    result = guarded(
        f"a step of `{workload}`",
        lambda: chosen.check(described, loaded, world_size=size, seed=seed),
        code="workload-crashed",
    )
    if as_json:
        print(json.dumps(result.to_json(), indent=2))
    else:
        verdict = "the same gradients" if result.ok else "DIFFERENT gradients"
        worst = "" if result.worst_tensor is None else f" (worst: {result.worst_tensor})"
        print(f"{policy}: {verdict} as with {result.reference} residuals{worst}")
        print(
            f"  loss: {result.loss_diff:g} apart; gradients: at most {result.max_grad_rel_diff:g} of their norm apart"
        )
    sys.exit(0 if result.ok else 1)

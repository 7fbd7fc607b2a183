"""`memopt plan`: peak memory and step time of policies on a target, with no such device at hand."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..loading import load_policy
from ..outputs import require_folder
from ..plan_table import make_console, render_result, side_by_side
from ..planning import PlanResult, Refused, plan_policies, prepare
from .compiler_options import parse_options
from .sizes import parse_budget


def plan(
    policies: Annotated[list[Path], typer.Argument(help="Policy files; several are shown side by side.")],
    workload: Annotated[str, typer.Option(help="YAML, hf:PATH, FILE.py:FUNCTION or package.module:FUNCTION.")],
    backend: Annotated[str, typer.Option(help="jax or torch.")],
    target: Annotated[str, typer.Option(help="cpu, gpu:h100:8, tpu:v5e:2x2 ...; see `memopt targets`.")],
    budget: Annotated[str | None, typer.Option(help="Device bytes, such as 70GiB; over it the exit code is 1.")] = None,
    host_budget: Annotated[str | None, typer.Option(help="Host bytes per node, such as 400GiB.")] = None,
    world_size: Annotated[int | None, typer.Option(help="Devices in all, instead of the target's number.")] = None,
    calibrate: Annotated[
        Path | None, typer.Option(help="results.json of a comparison on this hardware: its step time sets the rates.")
    ] = None,
    compiler_option: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Of XLA's compiler, beside those of the policies; may be repeated."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for plan.json and a page, index.html.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Foretell peak memory by role, host memory, traffic and step time of policies on a target.

    Exit code 0 when all were planned and within the budget, 1 when one was refused or is over it.
    """
    if out is not None:
        require_folder(out, option="--out")
    console = Console(stderr=True)
    options = parse_options(compiler_option or ())
    setting = prepare(
        workload=workload,
        backend=backend,
        target=target,
        world_size=world_size,
        budget=parse_budget(device=budget, host=host_budget),
        checks=[lambda: load_policy(policies[0])] if len(policies) == 1 else [],
    )
    results = plan_policies(
        policies,
        setting,
        compiler_options=options,
        calibrate=calibrate,
        progress=lambda text: console.print(text, style="dim", highlight=False, markup=False, soft_wrap=True),
    )
    document = json.dumps(to_document(results), indent=2)
    if as_json:
        print(document)
    else:
        _print(results)
    if out is not None:
        _write(results, document, out, console)
    sys.exit(exit_code(results))


def to_document(results: tuple[PlanResult | Refused, ...]) -> dict[str, object]:
    """The contract's JSON: one policy's keys, or `plans` with several."""
    if len(results) == 1:
        return results[0].to_json()
    return {"plans": [result.to_json() for result in results]}


def exit_code(results: tuple[PlanResult | Refused, ...]) -> int:
    """1 when something was refused or is over a budget that was given."""
    return int(any(isinstance(result, Refused) or result.is_over_budget for result in results))


def _print(results: tuple[PlanResult | Refused, ...]) -> None:
    console = make_console()
    for result in results:
        if isinstance(result, PlanResult):
            console.print(render_result(result))
            console.print()
        else:
            for problem in result.problems:
                console.print(problem.render(), style="red", highlight=False, markup=False)
    if len(results) > 1:
        console.print(side_by_side(results))


def _write(results: tuple[PlanResult | Refused, ...], document: str, out: Path, console: Console) -> None:
    from ..plan_page import plan_page

    out.mkdir(parents=True, exist_ok=True)
    (out / "plan.json").write_text(document + "\n", encoding="utf-8")
    (out / "index.html").write_text(plan_page(results), encoding="utf-8")
    console.print(f"page: {out / 'index.html'}", highlight=False, markup=False, soft_wrap=True)

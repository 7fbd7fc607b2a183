"""`memopt validate`: every problem of a policy at once, before anything is loaded that costs time."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from ..errors import MemoptError, Problem


def validate(
    files: Annotated[list[Path], typer.Argument(help="Policy files.", metavar="FILE...")],
    workload: Annotated[str | None, typer.Option(help="Also judge the rules against this model.")] = None,
    backend: Annotated[str | None, typer.Option(help="Also refuse what this backend cannot do.")] = None,
    world_size: Annotated[int | None, typer.Option(min=1, help="Also check the mesh against so many devices.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="`ok` and `problems` as JSON on stdout.")] = False,
) -> None:
    """Check policy files: keys, values, and with a workload whether each rule does something."""
    from ..checking import Setting, verdict_on

    amiss: tuple[Problem, ...] = ()  # with the arguments: the files are judged without them
    try:
        setting = Setting.prepare(workload=workload, backend=backend, world_size=world_size)
    except MemoptError as error:
        setting, amiss = Setting(world_size=world_size), error.problems
    problems: list[Problem] = []
    for file in files:
        verdict = verdict_on(file, setting)
        problems += [problem for problem in verdict.problems if problem not in problems]
        for note in verdict.notes:
            print(f"{file}: note: {note}", file=sys.stderr)
        if not verdict.problems and not amiss and not as_json:
            print(f"{file}: ok")
    if amiss:
        raise MemoptError([*amiss, *problems])
    from . import report

    if problems or as_json:
        report(problems, as_json=as_json)
    if problems and not as_json:
        print(f"{len(problems)} problem{'s' if len(problems) > 1 else ''}", file=sys.stderr)
    sys.exit(1 if problems else 0)

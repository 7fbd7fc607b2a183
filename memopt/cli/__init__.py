"""The `memopt` command. Only the module of the command that runs is imported: `validate` must answer at once."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Annotated, Any, NoReturn

import typer

from ..backend import FRAMEWORKS, INSTALL
from ..errors import MemoptError, Problem

COMMANDS = ("validate", "explain", "plan", "tune", "compare", "check", "doctor", "schema", "targets")
"""In the order of the help text; each is a module of this package with a function of its name."""

_ClickException: Any = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")
"""click's, wherever this version of typer keeps its click."""

_USAGE = frozenset(
    {
        "bad-output",
        "bad-size",
        "bad-target",
        "bad-world-size",
        "compare-too-few-steps",
        "target-devices",
        "unknown-backend",
        "unknown-target",
        "workload-bad-reference",
        "workload-not-found",
    }
)
"""What is wrong with an argument and with no file: exit code 2."""


def build_app(names: Sequence[str]) -> typer.Typer:
    """The app with those commands; a command whose module is not there is absent."""
    app = typer.Typer(
        name="memopt",
        help="One YAML memory policy - shard, recompute, offload - for the same model in JAX and in PyTorch.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )

    @app.callback()
    def _group(  # its being there keeps a lone command from becoming the app itself
        version: Annotated[
            bool, typer.Option("--version", help="Show the version and exit.", is_eager=True, callback=_tell_version)
        ] = False,
    ) -> None:
        del version

    for name in names:
        if find_spec(f"{__name__}.{name}") is not None:
            app.command(name)(getattr(import_module(f"{__name__}.{name}"), name))
    return app


def _tell_version(asked: bool) -> None:
    if asked:
        print(f"memopt {metadata.version('memopt')}")
        raise typer.Exit


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; exits 0 when all is fine, 1 with problems, 2 for wrong usage."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    names = [given[0]] if given and given[0] in COMMANDS else COMMANDS
    as_json = "--json" in given
    try:  # with --json wrong usage is a document too, which click would print as text
        code = build_app(names)(args=given, prog_name="memopt", standalone_mode=not as_json)
        sys.exit(code if isinstance(code, int) else 0)
    except _ClickException as error:
        _end([_usage_problem(error)], as_json=True, code=2)
    except MemoptError as error:
        _end(error.problems, as_json=as_json, code=2 if all(_is_usage(one) for one in error.problems) else 1)
    except ModuleNotFoundError as error:
        _end([_missing_framework(error)], as_json=as_json, code=1)


def _end(problems: Sequence[Problem], *, as_json: bool, code: int) -> NoReturn:
    try:
        report(problems, as_json=as_json)
        sys.stdout.flush()
    except BrokenPipeError:  # `memopt ... | head`: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def _usage_problem(error: Any) -> Problem:
    command = error.ctx.command_path if getattr(error, "ctx", None) is not None else "memopt"
    return Problem("wrong-usage", error.format_message(), hint=f"{command} --help")


def report(problems: Sequence[Problem], *, as_json: bool) -> None:
    """All problems: as one JSON document on stdout, or as text on stderr."""
    if as_json:
        print(json.dumps({"ok": not problems, "problems": [problem.to_json() for problem in problems]}, indent=2))
        return
    for problem in problems:
        print(problem.render(), file=sys.stderr)


def _missing_framework(error: ModuleNotFoundError) -> Problem:
    """The install command, where what is missing is a framework; any other missing module is a fault of ours."""
    for name, packages in FRAMEWORKS.items():
        if error.name is not None and error.name.partition(".")[0] in packages:
            return Problem("extra-missing", f"{error.name} not installed", hint=INSTALL[name])
    raise error


def _is_usage(problem: Problem) -> bool:
    return problem.code in _USAGE and problem.line is None and problem.path is None

"""lockstep: dispatches a job from outside. Imports no torch, so that its commands answer at once."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from training import config as configuration
from training.contract import EXIT_USAGE, VERSION, UserError

app = typer.Typer(
    name="lockstep", no_args_is_help=True, pretty_exceptions_enable=False, add_completion=True,
    help="Train PyTorch models in data parallel, and take the same job from a laptop to a cluster.",
)  # fmt: skip


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version and end.")] = False) -> None:
    if version:
        print(f"lockstep {VERSION}")
        raise typer.Exit


@app.command(epilog="Example: lockstep run smoke --ranks 2 --set epochs=4")
def run(
    recipe: Annotated[str, typer.Argument(help="A recipe's name, or the path of a YAML file.")],
    ranks: Annotated[str, typer.Option(help="Processes to start; auto: one a GPU, else 2.")] = "auto",
    run_dir: Annotated[Path | None, typer.Option(help="Where the run is kept; the same one resumes.")] = None,
    assignments: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Change a setting.")
    ] = None,
    fresh: Annotated[bool, typer.Option(help="Start over; an earlier run is moved aside.")] = False,
    max_restarts: Annotated[int, typer.Option(help="Restarts after a failure.", min=0)] = 0,
    log_format: Annotated[str, typer.Option(help="table or json.")] = "table",
    prefix: Annotated[bool, typer.Option(help="Begin every line with its rank.")] = False,
) -> None:
    """Train on this machine, in the foreground."""
    configuration.load(recipe, assignments or [])  # a typing error costs no start-up
    if not re.fullmatch(r"auto|[1-9]\d{0,3}", ranks):
        raise UserError(f"--ranks must be a number from 1, or auto; got {ranks!r}")
    if log_format not in ("table", "json"):
        raise UserError(f"--log-format must be table or json, got {log_format!r}")
    command = [sys.executable, "-m", "training", "launch", "--ranks", ranks, "--max-restarts", str(max_restarts)]
    command += ["--prefix" if prefix else "--no-prefix", "run", recipe, "--log-format", log_format]
    command += ["--run-dir", str(run_dir)] if run_dir else []
    command += ["--fresh"] if fresh else []
    command += ["--set", *assignments] if assignments else []
    sys.stdout.flush()
    os.execv(command[0], command)  # noqa: S606 - the launcher takes this process's place, and its signals


def main() -> NoReturn:
    """Runs the command line. Errors that a person can mend are one line and exit code 2."""
    try:
        app(standalone_mode=False)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_USAGE)
    except typer.Exit as ending:
        sys.exit(ending.exit_code)
    except Exception as error:
        if not hasattr(error, "format_message"):  # click's own usage errors have one
            raise
        print(f"error: {error.format_message()}", file=sys.stderr)
        sys.exit(EXIT_USAGE)
    sys.exit(0)

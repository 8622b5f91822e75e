"""lockstep: dispatches a job from outside. Imports no torch, so that its commands answer at once."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import shlex
import signal
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from lockstep import tools, torture
from lockstep.training import extras
from lockstep.training.cli import COMMANDS, INSIDE, search_path
from lockstep.training.contract import (
    ENV_PROGRAM,
    EXIT_UNREACHABLE,
    EXIT_USAGE,
    VERSION,
    UserError,
    answering,
    print_error,
    to_stderr,
)
from lockstep.training.files import keep_out_others
from lockstep.wire.signals import signals_held_back

from ..status import Unreachable
from . import commands


def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if context.invoked_subcommand is None and not version:
        print(context.get_help())
    if version:
        print(f"lockstep {VERSION}")
        raise typer.Exit


def run(
    recipe: Annotated[
        str, typer.Argument(help="A recipe's name, or the path of a YAML file; or -- and your own PROGRAM.")
    ],
    program: Annotated[list[str] | None, typer.Argument(metavar="[ARG]...", help="Arguments of the PROGRAM.")] = None,
    ranks: Annotated[str, typer.Option(help="Processes to start; auto: one per GPU, or 2 without a GPU.")] = "auto",
    run_dir: Annotated[Path | None, typer.Option(help="Run directory; a run that is there is resumed.")] = None,
    assignments: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Change a setting.")
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start over; an earlier run in the directory is renamed, not deleted.")
    ] = False,
    max_restarts: Annotated[int, typer.Option(help="Restarts after a failure.", min=0)] = 0,
    live: Annotated[
        bool, typer.Option("--live", help="If a rank is killed the others continue; needs sync.name=exact, on CPUs.")
    ] = False,
    prefix: Annotated[bool, typer.Option(help="Put the rank at the beginning of every line.")] = False,
) -> None:
    """Train on this machine, in the foreground."""
    settings = list(assignments or [])
    own = "--" in sys.argv
    if not own and program:
        mend = f"write --set {program[0]}" if "=" in program[0] else "your own program goes after --"
        raise UserError(f"one recipe, got {recipe} and {program[0]}: {mend}")
    words = _program(recipe, program or [], run_dir, settings, fresh) if own else ["run", recipe]
    if not own:
        from lockstep.training import config as configuration

        config = configuration.load(recipe, settings)  # a typing error costs no start-up
        if live and not config.exact:
            raise UserError(f"--live needs --set sync.name=exact, and the recipe has {config.sync.name}")
        words += ["--run-dir", str(run_dir)] if run_dir else []
        words += ["--fresh"] if fresh else []
        words += ["--set", *settings] if settings else []
    if not re.fullmatch(r"auto|[1-9]\d{0,3}", ranks):
        raise UserError(f"--ranks must be a number from 1, or auto; got {ranks!r}")
    command = [sys.executable, "-m", "lockstep.training", "launch", "--ranks", ranks]
    command += ["--max-restarts", str(max_restarts), "--prefix" if prefix else "--no-prefix"]
    command += [*["--live"] * live, *words]
    environment = {**os.environ, "PATH": search_path(os.environ)} if own else os.environ
    os.execve(command[0], command, environment)  # noqa: S606 - the launcher takes this process's place, and its signals


def _program(name: str, arguments: list[str], run_dir: Path | None, settings: list[str], fresh: bool) -> list[str]:
    """Returns the words of the user's own program, whose Session takes the options. Raises `UserError`."""
    from lockstep.training import config as configuration
    from lockstep.wire.payload import SessionOptions

    configuration.check_overrides(settings)
    options = SessionOptions(
        str(run_dir.absolute()) if run_dir else "", tuple(settings), uuid.uuid4().hex[:12] if fresh else "",
        expected=bool(settings or fresh),
    )  # fmt: skip
    return (["--session", options.text()] if options != SessionOptions() else []) + ["--", name, *arguments]


def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder that is new or empty.")],
    name: Annotated[str | None, typer.Option(help="Name of its job; by default the folder's.")] = None,
) -> None:
    """Begin a project: a training, its test, and a job for every backend."""
    from ..project import create
    from ..status import say

    created = create(folder, name)
    say(f"{folder}: {', '.join(created)}")
    say(f"Now: cd {shlex.quote(str(folder))} && make train && make test")


def _schema() -> None:
    """Print the JSON Schema of job.yaml, for editors."""
    from lockstep.tools.settings import json_schema

    from ..spec.model import JobSpec
    from ..status import show

    show(json_schema(JobSpec))


_COMMANDS: dict[str, tuple[Callable[..., None], str]] = {
    "run": (run, "Examples: lockstep run smoke --ranks 2 --set epochs=4 · lockstep run --ranks 2 -- python train.py"),
    "init": (init, "Example: lockstep init mine && cd mine && make train && make test"),
    "render": (commands.render, "Example: lockstep render k8s job.yaml --nodes 4 --set k8s.queue=gpu"),
    "lint": (commands.lint, "Example: lockstep lint job.yaml"),
    "submit": (commands.submit, "Example: lockstep submit k8s job.yaml --gpus 4"),
    "prepare": (commands.prepare, "Example: lockstep prepare k8s job.yaml"),
    "schema": (_schema, "Example: lockstep schema > job.schema.json"),
    "status": (commands.status, "Example: lockstep status k8s smoke --json"),
    "logs": (commands.logs, "Example: lockstep logs k8s smoke --rank 5 --tail 100 --follow"),
    "exec": (commands.execute, "Example: lockstep exec k8s smoke --rank 5 -- nvidia-smi"),
    "wait": (commands.wait, "Example: lockstep wait k8s smoke --timeout 3600"),
    "cancel": (commands.cancel, "Example: lockstep cancel k8s smoke"),
    "list": (commands.list_jobs, "Example: lockstep list k8s"),
    "doctor": (commands.doctor, "Examples: lockstep doctor k8s job.yaml · lockstep doctor gpu"),
}
"""Name → function and epilog of the commands that this module parses."""
_WITHOUT_PLUGINS = ("render", "lint", "schema")
"""Commands that start no process and run no code of a user's. pydantic reads all installed packages to find plugins, which takes longer
than to render."""


def _add_other(app: typer.Typer, command: str, summary: str, module: str | None = None) -> None:
    """Adds a command that parses its own words, and has its own help. click would take a `--` out of them.

    Args:
        module: module whose `main(argv)` runs in this process. None: `python -m lockstep.training COMMAND` replaces this process, with
            the name that was typed. Such a command belongs inside a job, and loads torch.
    """
    taken = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}
    help_ = f"{summary[0].upper()}{summary[1:]}."

    def run_command(context: typer.Context) -> NoReturn:  # noqa: ARG001 - typer gives the words to it
        words = sys.argv[2:]
        if module is not None:
            raise typer.Exit(importlib.import_module(module).main(words))
        inside = [sys.executable, "-m", "lockstep.training", command, *words]
        os.execve(inside[0], inside, {**os.environ, ENV_PROGRAM: "lockstep"})  # noqa: S606 - the words that were typed

    app.command(command, help=help_, add_help_option=False, context_settings=taken, options_metavar="…")(run_command)


def app_of(command: str = "") -> typer.Typer:
    """Returns the app with this command alone, or with all if there is no such one: typer builds the options of every command."""
    app = typer.Typer(
        name="lockstep", pretty_exceptions_enable=False, add_completion=True,
        rich_markup_mode=None,  # rich takes longer to import than everything else together
        help="Train PyTorch models with data parallelism, and take the same job from a laptop to a cluster.",
        epilog="Examples: lockstep run smoke --ranks 2 · lockstep render k8s job.yaml · lockstep submit k8s job.yaml · "
        "lockstep logs k8s smoke --rank 5 -f · lockstep wait k8s smoke --timeout 3600. "
        "Exit codes: 0 succeeded, 1 failed, 2 usage, 3 unschedulable, 4 lost, 69 no answer, 75 preempted, 124 timed out, "
        "141 no process reads the output.",
    )  # fmt: skip
    app.callback(invoke_without_command=True)(_root)
    for name in [command] if command in _COMMANDS else _COMMANDS:
        function, epilog = _COMMANDS[name]
        app.command(name, epilog=epilog)(commands.flatten_options(function))
    if command not in _COMMANDS:
        for name, summary in COMMANDS.items():
            if name not in INSIDE:
                _add_other(app, name, summary)
        for name, summary in tools.COMMANDS.items():
            _add_other(app, name, summary, f"lockstep.tools.{name}")
        _add_other(app, "torture", torture.SUMMARY, "lockstep.torture.command")
    return app


def main() -> NoReturn:
    """Runs the command line. Prints an error that the user can correct in one line, and ends with code 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # None if the stream is closed
            stream.reconfigure(errors="backslashreplace")  # a letter that the locale lacks ends no command
    with answering():
        try:
            keep_out_others()
            command = next(iter(sys.argv[1:]), "")
            if command in _WITHOUT_PLUGINS:
                os.environ["PYDANTIC_DISABLE_PLUGINS"] = "__all__"
            with signals_held_back() if command == "run" else contextlib.nullcontext():
                # Outside standalone mode typer returns the code of an Exit instead of raising it.
                code = app_of(command)(sys.argv[1:], standalone_mode=False)
        except (UserError, ModuleNotFoundError) as raised:
            error = raised if isinstance(raised, UserError) else extras.as_user_error(raised)
            print_error(error)
            sys.exit(EXIT_UNREACHABLE if isinstance(error, Unreachable) else error.code)
        except typer.Exit as ending:
            sys.exit(ending.exit_code)
        except (KeyboardInterrupt, typer.Abort):
            sys.exit(128 + signal.SIGINT)
        except Exception as error:
            if not hasattr(error, "format_message"):  # click's own usage errors have one
                raise
            to_stderr(f"error: {error.format_message()}")
            sys.exit(EXIT_USAGE)
        sys.exit(code if isinstance(code, int) else 0)

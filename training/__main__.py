"""python -m lockstep.training run | launch | shard | evaluate.

Exit codes: 0 done; 2 wrong usage, config or data (one line says what to do); 75 saved, run the same command again;
1 anything else.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import io
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from lockstep.wire.signals import FORWARDED

# Else a lost store is a warning with a stack, around the sentence that names the rank.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
if __name__ == "__main__" and sys.argv[1:2] in (["run"], ["launch"]):
    # First of all: what is imported now takes its time. Until `Signals`, or the launcher, catches them. A PID 1 without
    # handlers would not get them at all.
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)

from . import extras
from .cli import COMMANDS, PROGRAM, Parser, add_set, run_dir
from .contract import (
    EXIT_DONE,
    UserError,
    answering,
    end_process,
    print_error,
    say,
)  # fmt: skip
from .files import keep_out_others

_BEGAN = time.perf_counter()


_RECIPE = "a recipe's name, or the path of a YAML file"


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog=PROGRAM, description="What runs inside the job, one process a rank.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)

    run = commands.add_parser("run", help=COMMANDS["run"], description="Trains a recipe, or resumes it.")
    run.add_argument("recipe", help=_RECIPE)
    _add_set(run)
    run.add_argument("--run-dir", type=Path, help="run directory; a run that is there is resumed; default: runs/RECIPE")
    run.add_argument(
        "--fresh", action="store_true", help="start over; an earlier run in the directory is renamed, not deleted"
    )
    run.add_argument("--fresh-once", metavar="WORD", help="start over unless the run was started with this WORD; for jobs, which "
                     "may be started again with the same words")  # fmt: skip
    run.set_defaults(action=_run)

    shard = commands.add_parser("shard", help=COMMANDS["shard"])
    shard.add_argument("recipe", help=_RECIPE)
    _add_set(shard)
    shard.add_argument(
        "--out", help="folder to write, or s3://BUCKET/PREFIX; default: the folder where a run looks for them"
    )
    shard.set_defaults(action=_shard)

    evaluate = commands.add_parser("evaluate", help=COMMANDS["evaluate"])
    evaluate.add_argument("target", type=run_dir, metavar="RUN", help="a run directory")
    _add_set(evaluate, "data.root=DIR")
    evaluate.add_argument(
        "--trust-model", action="store_true", help="run the code that RUN names: its model class and its data function"
    )
    evaluate.set_defaults(action=_evaluate)

    commands.add_parser("launch", help=COMMANDS["launch"], add_help=False)
    return parser


def _add_set(parser: argparse.ArgumentParser, example: str = "epochs=2 lr=0.1") -> None:
    add_set(parser, f"change settings, e.g. --set {example} (all names: lockstep settings)")


def _run(args: argparse.Namespace) -> int:
    from . import config as configuration

    try:
        config = configuration.load(args.recipe, args.assignments)
    except UserError as error:
        error.shared = True  # every rank has the same arguments
        raise

    with extras.importing():  # torch: only when the arguments are known to be valid
        from .recipe import loop

    try:
        loop.train(config, args.run_dir or Path("runs") / config.recipe, args.fresh_once or args.fresh, _BEGAN)
    except SystemExit as end:
        return int(end.code or EXIT_DONE)
    return EXIT_DONE


def _shard(args: argparse.Namespace) -> int:
    from . import config as configuration
    from .data import shard_writer, sources

    data = configuration.load(args.recipe, args.assignments).data
    if args.out is None:
        manifest = shard_writer.prepare(data)
    elif "://" in args.out:
        manifest = shard_writer.send(data, args.out)
    else:
        folder = Path(args.out)
        if folder.exists():
            raise UserError(f"{folder} exists already: choose another folder, or remove it")
        manifest = shard_writer.write(sources.stream(data), folder, data.source)
    for line in manifest.describe(data).splitlines():
        say(line)
    if args.out is not None and "://" in args.out:
        say(f"sent to {args.out}")
    return EXIT_DONE


def _evaluate(args: argparse.Namespace) -> int:
    from .parallel import world
    from .recipe import evaluate as scoring

    config, checksum = scoring.config_of(args.target, args.assignments, args.trust_model)
    with world.joined(world.detect(os.environ), config.device, config.collective_timeout, config.backend) as joined:
        world.set_threads(joined, config.threads, os.environ)
        score = scoring.score_run(args.target, config, checksum, joined)
        if joined.leader:
            print(f"accuracy {score.accuracy:.4f} ({score.correct} of {score.count}), loss {score.loss:.4f}")
    return EXIT_DONE


def main(argv: list[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        keep_out_others()
        with extras.explained():
            if argv[:1] == ["launch"]:  # it parses its own arguments
                from .launch import command

                return command.main(argv[1:])
            args = _parser().parse_args(argv)
            action: Callable[[argparse.Namespace], int] = args.action
            return action(args)
    except UserError as error:
        print_error(error)
        return error.code


def leave(code: int) -> NoReturn:
    """Ends the process without tearing the interpreter down.

    A gloo thread may still hold the last reference to a finished collective. If the thread drops it during finalisation of the
    interpreter, the process aborts with 134 after its work is done. That was seen about once in ten starts (torch 2.15).
    """
    atexit._run_exitfuncs()
    end_process(code)


if __name__ == "__main__":
    for output in (sys.stdout, sys.stderr):
        if isinstance(output, io.TextIOWrapper):  # None where it is closed
            output.reconfigure(errors="backslashreplace")  # a locale without a letter of ours ends no training
    # A run whose lines cannot be written continues, and ends with its own code.
    trains = sys.argv[1:2] in (["run"], ["launch"])
    with contextlib.nullcontext() if trains else answering():
        ended = main()
    leave(ended)

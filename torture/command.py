"""lockstep torture [options] -- PROGRAM …   |   lockstep torture [options] RECIPE [--set …].

Kills, stops and signals a training at seeded moments, starts it again, and reports whether it ends in the same weights. Linux only.

`{run}` in the command is a fresh folder in each case; a command that does not name it runs in that folder.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Collection
from dataclasses import asdict
from pathlib import Path

from lockstep.training.cli import Parser, count, positive
from lockstep.training.contract import EXIT_DONE, EXIT_FAILED, UserError, say

from .attempt import FAULTS
from .cases import MOMENTS, Case, Torture

WEIGHTS = "{run}/**/checkpoints/*/state.safetensors"
"""Weights of a Lockstep run."""
HEAD = ("CASE", "FAULT", "MOMENT", "ENDED WITH", "WEIGHTS", "SECONDS LOST", "STEPS AGAIN", "LOST", "VERDICT")
_WIDTHS = (4, 13, 32, 12, 13, 12, 11, 4, 0)


def main(argv: list[str]) -> int:
    """Prints the findings, and returns 0 if all promises held, else 1. Raises `UserError` for wrong arguments."""
    args = _parse(argv)
    if not hasattr(os, "pidfd_open"):
        raise UserError("lockstep torture needs Linux: it looks for processes in /proc")
    _resolve(args)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # removes the folder and ends all processes
    with tempfile.TemporaryDirectory(prefix="torture-", ignore_cleanup_errors=True) as folder:
        try:
            return _run(args, Torture(args, Path(folder)))
        except KeyboardInterrupt:
            return 128 + signal.SIGINT


def _run(args: argparse.Namespace, torture: Torture) -> int:
    tell = (lambda _: None) if args.json else say
    torture.undisturbed()
    tell(torture.about())
    tell(_row(HEAD))
    cases: list[Case] = []
    for number in range(args.cases or len(args.faults)) if args.case is None else [args.case]:
        cases.append(torture.case(number))
        tell(_row(_cells(cases[-1])))
    failed = [case for case in cases if case.problems]
    counts = [sum(case.verdict.startswith(how) for case in cases) for how in ("held", "not disturbed", "ended, ")]
    held, missed, uncompared = counts
    tell(
        f"{held} of {len(cases)} held, {len(failed)} did not, {missed} were not disturbed"
        + f", {uncompared} ended in weights that were not compared" * bool(uncompared)
    )
    for case in failed:
        tell(f"case {case.case} again: {_again(args, case)}")
    if args.json:
        told = [{**asdict(case), "verdict": case.verdict, "repeat": _again(args, case)} for case in cases]
        print(json.dumps({"held": not failed, "seed": args.seed, **torture.as_json(), "cases": told}, indent=1))
    return EXIT_FAILED if failed else EXIT_DONE


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = Parser(
        prog="lockstep torture", description="Disturbs a training at seeded moments, starts it again, and says whether it ends in the "
        "weights of an undisturbed run. Weights that differ without a disturbance are not compared. Exit codes: 0 all held, 1 something "
        "did not.",
        epilog="COMMAND is `-- PROGRAM …` for your own program, or `RECIPE [--set …]`. {run} in it is the folder of a run, fresh in each "
        "case; a program that does not name it runs in that folder. {ranks} is the number of ranks. Faults: " + ", ".join(FAULTS) + ".",
    )  # fmt: skip
    parser.add_argument("--weights", default=WEIGHTS, metavar="GLOB", help="the weights of a run, of several files the last: "
                        f"safetensors, torch, npz, or any file; default: {WEIGHTS}")  # fmt: skip
    parser.add_argument(
        "--steps-pattern", type=_pattern, metavar="REGEX", help="its first group is a step's number in the output"
    )
    parser.add_argument("--faults", type=_of(FAULTS), default=list(FAULTS), metavar="NAME,…",
                        help="which to draw from; default: all")  # fmt: skip
    parser.add_argument("--moments", type=_of(MOMENTS), default=list(MOMENTS), metavar="NAME,…",
                        help=f"which to draw from; default: all of {', '.join(MOMENTS)} that are seen")  # fmt: skip
    parser.add_argument("--ranks", type=positive, default=2, metavar="N", help="ranks for {ranks}; default: 2")
    parser.add_argument("--seed", type=count, default=0, help="default: 0")
    parser.add_argument("--cases", type=positive, metavar="N", help="default: one for each fault")
    parser.add_argument("--case", type=count, metavar="K", help="only this one")
    parser.add_argument("--hang-seconds", type=positive, default=60, metavar="SECONDS",
                        help="how much longer than three undisturbed runs a start may take; default: 60")  # fmt: skip
    parser.add_argument("--grace-seconds", type=positive, default=10, metavar="SECONDS",
                        help="how long processes may be there after their launcher's end; default: 10")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON value with stable fields")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND", help="what is tortured: see below")
    args = parser.parse_args(argv)
    args.words = argv[: len(argv) - len(args.command)]
    if args.command in ([], ["--"]):
        parser.error("nothing to torture: add `-- PROGRAM …`, or a recipe's name")
    return args


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a regular expression: {error}") from None


def _of(names: Collection[str]) -> Callable[[str], list[str]]:
    """Returns a parser of some of these names, for `type=`."""

    def parse(text: str) -> list[str]:
        for name in text.split(","):
            if name not in names:
                raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(names)}")
        return text.split(",")

    return parse


def _resolve(args: argparse.Namespace) -> None:
    """Adds the words that `start` the job, and whether the job runs `inside` its folder. Raises `UserError`."""
    words = args.command[1:]
    if args.command[0] != "--":
        launch = [sys.executable, "-m", "lockstep.training", "launch", "--ranks", "{ranks}", "--no-prefix"]
        words = [*launch, "run", args.command[0], "--run-dir", "{run}", *args.command[1:], "--set", "log.every=1"]
    elif shutil.which(words[0]) is None:
        raise UserError(f"there is no program {words[0]!r} on PATH")
    args.inside = not any("{run}" in word for word in words)
    if args.inside:
        words = [os.path.abspath(word) if os.path.isfile(word) else word for word in words]
    if args.steps_pattern is not None and not args.steps_pattern.groups:
        raise UserError("--steps-pattern has no group: put the number into ( )")
    args.start = words


def _cells(case: Case) -> tuple[str, ...]:
    codes = " → ".join(signal.Signals(-code).name[3:] if code < 0 else str(code) for code in case.codes)
    again, lost = ("–" if number is None else str(number) for number in (case.steps_repeated, case.steps_lost))
    seconds = f"{case.seconds_lost:.1f}"
    return str(case.case), case.fault, case.moment, codes, case.weights, seconds, again, lost, case.verdict


def _row(cells: tuple[str, ...]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, _WIDTHS)).rstrip()


def _again(args: argparse.Namespace, case: Case) -> str:
    """Returns the command that repeats the case. The last of repeated flags counts."""
    words = [word for word in args.words if word != "--json"]
    words += ["--seed", str(args.seed), "--case", str(case.case)]
    return f"lockstep torture {shlex.join([*words, *args.command])}"

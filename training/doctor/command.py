"""lockstep doctor gpu: one table of what the GPUs of this machine can do, with advice for each row that failed.

Every row has a bound of its own, and all together have five minutes: what fails or hangs keeps no other row from running.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path
from typing import Any, TextIO

import torch

from lockstep.training.cli import PROGRAM, Parser, about, positive
from lockstep.training.contract import EXIT_DONE, EXIT_FAILED, UserError, printable
from lockstep.training.doctor import inside
from lockstep.training.doctor.outside import Program, in_processes, names_of_gpus
from lockstep.training.doctor.table import ROWS, VISIBLE, Check, Outcome, is_rehearsal

RESULTS = ("benchmarks", "results")
SECONDS = 300


def main(argv: list[str], program_command: Sequence[str] = (sys.executable, "-u", "-m", "lockstep.training")) -> int:
    """Prints the table. Returns 1 where a row failed.

    Args:
        program_command: what stands for `python -m lockstep.training`.

    Raises:
        UserError: there is no GPU; wrong arguments; a file that cannot be written.
    """
    args = _parser().parse_args(argv)
    if args.inside is not None:
        return inside.main(args.inside, args.what, args.alone)
    if args.what != ["gpu"]:
        raise UserError(f"doctor looks at `gpu`, got {' '.join(args.what)!r}")
    rows = _chosen(args.only)
    gpus = torch.cuda.device_count()
    if gpus == 0:
        why = (
            "this torch is built without CUDA"
            if torch.version.cuda is None
            else "no GPU is visible: see `nvidia-smi` and CUDA_VISIBLE_DEVICES"
        )
        raise UserError(f"nothing to look at: {why}")
    out = _out(args.out)
    folder = Path(tempfile.mkdtemp(prefix="lockstep-doctor-"))
    try:
        program = Program(program_command, gpus, folder, args.data_root.absolute())
        table = Table(program, rows, out, args.seconds, sys.stderr if args.json else sys.stdout)
        outcomes = table.run()
        if args.json:
            print(json.dumps(table.value(), indent=1))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return EXIT_FAILED if any(row.result == "failed" for row in outcomes.values()) else EXIT_DONE


def _parser() -> Parser:
    parser = Parser(prog=f"{PROGRAM} doctor", description=about(__doc__))
    parser.add_argument("what", nargs="+", metavar="gpu", help="what to look at: this machine's GPUs")
    parser.add_argument(
        "--out",
        type=Path,
        help="JSON file to write, or a folder for one with the GPU's name; default: benchmarks/results, where there is one",
    )
    parser.add_argument(
        "--only", action="append", metavar="ROW", help="only rows whose name begins with this; may be given again"
    )
    parser.add_argument(
        "--data-root", type=Path, default=Path("data"), help="where CIFAR-10 lies, for the speedrun (default: data)"
    )
    parser.add_argument(
        "--seconds", type=positive, default=SECONDS, help=f"begin no row after this time (default {SECONDS})"
    )
    parser.add_argument("--json", action="store_true", help="print what the file would hold; the table goes to stderr")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)  # for the processes that it starts
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    return parser


def _chosen(only: list[str] | None) -> list[Check]:
    """The first row is always there: it says what the others ran on. Raises `UserError`."""
    for word in only or ():
        if not any(check.name.startswith(word) for check in ROWS):
            raise UserError(f"--only {word}: there is no such row; known: {', '.join(check.name for check in ROWS)}")
    wanted = (VISIBLE, *(only or ("",)))
    return [check for check in ROWS if check.name.startswith(wanted)]


def _out(requested: Path | None) -> Path | None:
    """Where the file goes, seen to be writable before anything runs. Raises `UserError`."""
    path = requested
    if path is None:
        folder = Path(*RESULTS)
        return folder if folder.is_dir() else None
    try:
        folder = path if path.suffix != ".json" else path.parent
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(f"--out {path}: {error.strerror or error}; name a file or folder that can be written") from None
    return path


class Table:
    """Runs the rows and shows each as soon as it is known.

    Args:
        checks: the rows, in the order in which they are shown.
        out: the file, or its folder; None for none.
        seconds: no row begins after this time.
        stream: gets the table.
    """

    def __init__(
        self, program: Program, checks: Sequence[Check], out: Path | None, seconds: float, stream: TextIO
    ) -> None:  # fmt: skip
        self.program, self.order, self.out, self.stream = program, checks, out, stream
        self.deadline = time.monotonic() + seconds
        self.shown = 0
        self.outcomes: dict[str, Outcome] = {}
        self.width = max(len(check.name) for check in ROWS)

    def run(self) -> dict[str, Outcome]:
        """Raises `UserError` where the results of a rehearsal would lie among those of GPUs."""
        for where, group in itertools.groupby(self.order, lambda check: check.where):
            tried = [check for check in group if self._can_be_tried(check)]
            if where == "runs":
                for check in tried:
                    if self._can_be_tried(check):  # time has passed since
                        self.tell(check, self._of_a_run(check))
            else:
                in_processes(self.program, tried, self.tell, self.deadline)
        self._write()
        return self.outcomes

    def _can_be_tried(self, check: Check) -> bool:
        why = ""
        if check.gpus > self.program.gpus:
            why = "one GPU"
        elif VISIBLE in self.outcomes and self.outcomes[VISIBLE].result == "failed":
            why = "the GPUs cannot be used: see the first row"
        elif time.monotonic() > self.deadline:
            why = "the time is over"
        if why:
            self.tell(check, Outcome("not tried", why))
        return not why

    def _of_a_run(self, check: Check) -> Outcome:
        module, _, function = check.function.partition(":")
        began = time.monotonic()
        try:
            called: Callable[..., Outcome] = getattr(
                importlib.import_module(f"lockstep.training.doctor.{module}"), function
            )
            outcome = called(self.program, min(check.bound, self.deadline - time.monotonic()))
        except Exception as error:  # noqa: BLE001 - whatever it is, it is this row's, and the next one runs
            outcome = Outcome("failed", f"{type(error).__name__}: {error}"[:300])
        return replace(outcome, seconds=time.monotonic() - began)

    def _look(self, visible: Outcome) -> None:
        """Takes from the first row what the others and the file need. Raises `UserError`."""
        names = [gpu["name"] for gpu in visible.facts.get("gpus", [])]
        names = names or names_of_gpus(self.program)  # it failed before it could say so
        rehearsal = any(map(is_rehearsal, names))
        if rehearsal:
            self.program = replace(self.program, rehearsal=True)
            self._say("rehearsal: these GPUs are a stand-in, so no rates are printed")
            parts = self.out.absolute().resolve().parts if self.out is not None else ()
            if RESULTS in itertools.pairwise(parts):
                if self.out == Path(*RESULTS):  # nobody asked for it
                    self.out = None
                else:
                    raise UserError(
                        f"--out {self.out}: a rehearsal is no result of a GPU; name a place outside {'/'.join(RESULTS)}"
                    )
        if self.out is not None and self.out.suffix != ".json":
            name = re.sub(r"[^a-z0-9]+", "-", (names or ["unknown"])[0].lower()).strip("-")
            self.out = self.out / f"doctor-{self.program.gpus}x-{name}-{_today()}.json"

    def tell(self, check: Check, outcome: Outcome) -> None:
        """Keeps a row, and shows it when those before it are known. Raises `UserError`, see `run`."""
        if check.name == VISIBLE:
            self._look(outcome)
        if self.program.rehearsal:
            outcome = replace(outcome, rates={}, seconds=0.0)
        self.outcomes[check.name] = outcome
        for known in itertools.takewhile(lambda row: row.name in self.outcomes, self.order[self.shown :]):
            self._show(known, self.outcomes[known.name])
            self.shown += 1

    def _show(self, check: Check, outcome: Outcome) -> None:
        rates = [f"{name} {value:.3g}" for name, value in outcome.rates.items()]
        self._say(f"{check.name:{self.width}}  {outcome.result:9}  {'; '.join([outcome.detail, *rates])}")
        if outcome.result == "failed":
            self._say(f"{'':{self.width}}  → {check.advice}")

    def _say(self, text: str) -> None:
        print(printable(text), file=self.stream, flush=True)

    def value(self) -> dict[str, Any]:
        """The table as plain values; `rehearsal` is there and true where no GPU has computed."""
        value: dict[str, Any] = {"rehearsal": True} if self.program.rehearsal else {}
        value |= {"date": _today(), "gpus": self.program.gpus, "rows": []}
        for check in self.order:
            outcome = self.outcomes[check.name]
            row = {"name": check.name, **asdict(outcome)}
            row["facts"].pop("raised", None)
            if outcome.result == "failed":
                row["advice"] = check.advice
            value["rows"].append({key: content for key, content in row.items() if content not in ({}, 0.0, "")})
        return value

    def _write(self) -> None:
        if self.out is not None:
            self.out.write_text(json.dumps(self.value(), indent=1) + "\n", encoding="utf-8")
            self._say(f"written to {self.out}")


def _today() -> str:
    return date.today().isoformat()  # noqa: DTZ011 - the user's own day

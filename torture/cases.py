"""The cases of a torture: which fault comes at which moment, and whether the run ends in the weights of an undisturbed run."""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.training.contract import UserError

from . import weights
from .attempt import Attempt, Disturbance

MOMENTS = ("start", "training", "step", "save", "end")
STARTS = 5
A_DAY = 24 * 3600.0


@dataclass
class Case:
    """The disturbances of one run, and their effects."""

    case: int
    fault: str
    moment: str
    done: list[str]
    """Disturbance of each start; empty if its moment did not come."""
    codes: list[int]
    """Exit code of each start; for a signal, its negative number."""
    seconds_lost: float
    """Seconds over all starts, less those of the undisturbed run."""
    steps_repeated: int | None = None
    steps_lost: int | None = None
    """Number of lost steps; None if no steps are seen."""
    weights: str = "not complete"
    """Result: equal, different, not compared, unreadable, not complete."""
    steps_alone: int = 0
    """Steps that ranks took after their launcher's end: a start at that time would have met them."""
    left: list[str] = field(default_factory=list)
    """Processes that had to be killed after their launcher's end."""
    problems: list[str] = field(default_factory=list)
    """Reasons why the case has not held."""

    @property
    def verdict(self) -> str:
        if self.problems:
            return "; ".join(self.problems)
        if not any(self.done):
            return "not disturbed: it had ended before"
        return "ended, weights not compared" if self.weights == "not compared" else "held"


class Torture:
    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args, self.folder = args, folder
        self.runs: list[Attempt] = []
        """The two undisturbed runs."""

    def undisturbed(self) -> None:
        """Runs the command twice. Raises `UserError` if a run fails."""
        fingerprints = []
        for number in (1, 2):
            run = self._fresh(f"calm-{number}")
            ended = Attempt(self.args, run).go(A_DAY)
            if ended.code != 0 or ended.left:
                what = f"ended with {ended.code}" if ended.code else f"left behind {', '.join(_named(ended))}"
                raise UserError(
                    f"undisturbed, the command {what}: mend that first. Its output: {' / '.join(ended.said)}"
                )
            self.runs.append(ended)
            fingerprints.append(self.read(run))
            shutil.rmtree(run.parent, ignore_errors=True)
        self.weights = fingerprints[0]
        self.deterministic = not weights.differing(*fingerprints)
        self.seconds = statistics.mean(run.seconds for run in self.runs)

    def _fresh(self, name: str) -> Path:
        run = self.folder / name / "run"
        run.mkdir(parents=True)
        return run

    def read(self, run: Path) -> weights.Fingerprints:
        """Returns a run's weights. Raises `UserError`."""
        return weights.of_file(weights.newest(run, self.args.weights))

    def about(self) -> str:
        """Returns a line about the undisturbed runs."""
        first = self.runs[0]
        told = [f"undisturbed: {self.seconds:.1f} s", f"{first.ranks} ranks" if first.ranks else "one process"]
        told += [f"{len(first.steps)} steps seen" if first.steps else "no steps seen (--steps-pattern)"]
        told += [f"{first.tree.saves_of(first.tree.large())} saves seen"]
        told += ["the same weights twice" if self.deterministic else "not deterministic: weights are not compared"]
        return ", ".join(told)

    def as_json(self) -> dict[str, Any]:
        first = self.runs[0]
        return {
            "command": self.args.start,
            "undisturbed": {
                "seconds": [round(run.seconds, 2) for run in self.runs], "deterministic": self.deterministic,
                "ranks": first.ranks, "steps": len(first.steps), "saves": first.tree.saves_of(first.tree.large()),
            },
        }  # fmt: skip

    def case(self, number: int) -> Case:
        """Runs one case, from its first start until it ends with 0, or was started `STARTS` times."""
        how = self._drawn(number)
        run = self._fresh(f"case-{number}")
        bound = 3 * self.seconds + self.args.hang_seconds
        starts: list[Attempt] = []
        try:
            while len(starts) < STARTS and (not starts or starts[-1].code != 0):
                starts.append(Attempt(self.args, run, None if starts else how).go(bound))
            return self._judged(number, how, run, starts)
        finally:
            shutil.rmtree(run.parent, ignore_errors=True)

    def _chance(self, what: str) -> random.Random:
        return random.Random(f"{self.args.seed} {what}")  # noqa: S311 - it repeats, and guards nothing

    def _drawn(self, number: int) -> Disturbance:
        """Returns the disturbance of a case. Each fault comes once before any fault comes again, and so do the moments."""
        first = self.runs[0]
        faults = [name for name in self.args.faults if first.ranks or name != "kill-launcher"]
        if not faults:
            raise UserError("kill-launcher does not fit a job of one process: see --faults")
        moments = self._moments(number)
        order = self._chance("order")
        order.shuffle(faults)
        order.shuffle(moments)
        chosen = moments[(number + number // len(faults)) % len(moments)]
        return chosen._replace(fault=faults[number % len(faults)])

    def _moments(self, number: int) -> list[Disturbance]:
        """Returns one moment of each kind that the undisturbed runs have shown."""
        run, draw = self.runs[0], self._chance(f"moment {number}")
        share, rank, pause = draw.random(), draw.random(), draw.uniform(0.1, 2.0)
        delay = draw.choice((0.0, 0.0, 0.001, 0.003, 0.01, 0.03))
        first, last = (run.step_times[0], run.step_times[-1]) if run.steps else (run.seconds / 5, run.seconds * 0.9)
        percent = f"{share:.0%}"
        found: dict[str, tuple[Any, ...]] = {
            "start": (f"after {percent} of the start", "time", share * first),
            "training": (f"after {percent} of the training", "time", first + 0.9 * share * (last - first)),
        }
        if run.steps:
            step = sorted(run.steps)[int(share * len(run.steps))]
            end = 0.8 * share * max(0.0, run.seconds - last)
            found["step"] = (f"at step {step}", "step", step, delay)
            found["end"] = (f"after {percent} of the end", "step", max(run.steps), end)
        kinds = run.tree.large()
        if kinds:
            save = 1 + int(share * run.tree.saves_of(kinds))
            found["save"] = (f"at save {save}", "save", save, delay, kinds)
        chosen = [words for name, words in found.items() if name in self.args.moments]
        if not chosen:
            raise UserError(
                f"the undisturbed runs have shown none of the moments {', '.join(self.args.moments)}: see --moments"
            )
        return [Disturbance("", *words)._replace(rank=rank, pause=pause) for words in chosen]

    def _judged(self, number: int, how: Disturbance, run: Path, starts: list[Attempt]) -> Case:
        last = starts[-1]
        case = Case(
            number, how.fault, how.says, [start.done for start in starts], [start.code for start in starts],
            round(sum(start.seconds for start in starts) - self.seconds, 1),
        )  # fmt: skip
        wanted = Counter(self.runs[0].steps)
        if wanted:
            seen = Counter(step for start in starts for step in start.steps)
            case.steps_repeated, case.steps_lost = sum((seen - wanted).values()), len(wanted.keys() - seen.keys())
        case.left = [one for start in starts for one in _named(start)]
        case.steps_alone = sum(start.steps_alone for start in starts)
        if any(start.hung for start in starts):
            case.problems.append(
                f"it hung: it took {self.args.hang_seconds:.0f} s longer than three undisturbed runs, and was killed"
            )
        if case.left:
            case.problems.append(f"left behind: {', '.join(case.left)}")
        if last.code == 0:
            case.weights, problem = self._compared(run)
            if problem:
                case.problems.append(problem + " (the disturbed start ended with 0)" * (len(starts) == 1))
        else:
            case.problems.append(f"does not end with 0 in {len(starts)} starts: {' / '.join(last.said[-3:])}")
        return case

    def _compared(self, run: Path) -> tuple[str, str]:
        """Returns the result for the weights, and the problem with them."""
        try:
            found = self.read(run)
        except UserError as error:
            return "unreadable", str(error)
        differing = weights.differing(self.weights, found)
        if not differing:
            return "equal", ""
        if not self.deterministic:
            return "not compared", ""
        return (
            "different",
            f"{len(differing)} of {len(found)} tensors differ from the undisturbed run's, first {differing[0]}",
        )


def _named(ended: Attempt) -> list[str]:
    return [f"process {one.pid} ({one.words[:60]})" for one in ended.left]

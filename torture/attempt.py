"""One start of the command, watched from its first process to its last, and disturbed once at a moment of its steps, files or output."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import resource
import signal
import subprocess
import time
import uuid
from pathlib import Path
from typing import NamedTuple

from lockstep.training.contract import EVENTS_FILE

from . import processes
from .disk import Tree
from .processes import Process

WATCH_SECONDS = 0.002
COUNT_SECONDS = 0.5
"""Seconds between two reads of the process table."""


class Fault(NamedTuple):
    whom: str
    """Target: launcher, rank, all, or disk."""
    signals: tuple[int, ...] = ()
    """Signals that are sent one after the other, with a pause between two."""


_KILL, _STOP, _CONT, _TERM = signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT, signal.SIGTERM
FAULTS = {
    "kill-rank": Fault("rank", (_KILL,)),
    "kill-launcher": Fault("launcher", (_KILL,)),
    "kill-all": Fault("all", (_KILL,)),
    "stop-rank": Fault("rank", (_STOP, _CONT)),
    "term": Fault("launcher", (_TERM,)),
    "usr1": Fault("launcher", (signal.SIGUSR1,)),
    "disk-full": Fault("disk"),
}


class Disturbance(NamedTuple):
    fault: str
    says: str
    """Description of the moment."""
    kind: str
    """Kind of the moment: step or save; else time."""
    value: float
    """Number of the step or of saves; or seconds since the start."""
    delay: float = 0.0
    """Seconds after the moment."""
    of: frozenset[str] = frozenset()
    """The kinds of files that are saves."""
    rank: float = 0.0
    """Position of the rank, as a share of the number of ranks."""
    pause: float = 0.0
    """Seconds between two signals."""


class Attempt:
    """The observations of one start, and its end."""

    def __init__(self, args: argparse.Namespace, run: Path, disturbance: Disturbance | None = None) -> None:
        """
        Args:
            args: flags of the command, with the words that `start` the job, and whether the job runs `inside` its folder.
            run: folder that exists.
        """
        self.args, self.run, self.disturbance = args, run, disturbance
        self.words = [word.replace("{run}", str(run)).replace("{ranks}", str(args.ranks)) for word in args.start]
        self.mark = uuid.uuid4().hex
        self.code = self.ranks = 0
        """Exit code of the first process, and the largest number of ranks."""
        self.seconds = 0.0
        self.steps: list[int] = []
        self.step_times: list[float] = []
        """Seconds since the start, for each step."""
        self.said: list[str] = []
        """Last lines of the output."""
        self.done = ""
        """Description of the disturbance; empty if the moment did not come."""
        self.hung = False
        self.steps_alone = 0
        """Steps that the ranks took after their launcher's end."""
        self.left: list[Process] = []
        """Processes that still lived after the first process had ended and `grace_seconds` were over."""
        self.tree = Tree(run)
        self._events_read = self.tree.size_of(EVENTS_FILE)
        self._rest = b""
        self._due: list[tuple[float, Process, int]] = []

    def go(self, bound: float) -> Attempt:
        """Runs the command until no process of it is left. A run of more than `bound` seconds counts as hung, and is killed."""
        temporary = self.run.parent / "tmp"
        temporary.mkdir(exist_ok=True)
        self._began = time.monotonic()
        self._launcher = subprocess.Popen(
            self.words, cwd=self.run if self.args.inside else None, env=processes.environment(self.mark, temporary),
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True, preexec_fn=_as_from_a_shell,
        )  # fmt: skip
        assert self._launcher.stdout is not None
        os.set_blocking(self._launcher.stdout.fileno(), False)
        try:
            self._watch(bound)
            self.hung = self._launcher.poll() is None
            if not self.hung:
                self._wait_for_the_others()
        finally:
            killed = processes.end(self.mark, self._launcher.pid)
            self.code = self._launcher.wait()
            self._look()
            self._launcher.stdout.close()
        self.left = [] if self.hung else killed
        return self

    def _watch(self, bound: float) -> None:
        reached, counted = math.inf, 0.0
        while self._launcher.poll() is None and self.seconds < bound:
            self._look()
            if self.seconds > counted:
                self._count()
                counted = self.seconds + COUNT_SECONDS
            if self.disturbance is not None and not self.done:
                if self._has_come(self.disturbance):
                    reached = min(reached, self.seconds + self.disturbance.delay)
                if self.seconds >= reached:
                    self._disturb(self.disturbance)
            self._send()
            time.sleep(max(WATCH_SECONDS, 3 * self.tree.cost))

    def _wait_for_the_others(self) -> None:
        self._look()
        deadline, steps = time.monotonic() + self.args.grace_seconds, len(self.steps)
        while time.monotonic() < deadline and processes.living(self.mark, self._launcher.pid):
            self._look()
            self._send()
            time.sleep(0.02)
        self.steps_alone = len(self.steps) - steps

    def _has_come(self, moment: Disturbance) -> bool:
        if moment.kind == "step":
            return any(step >= moment.value for step in self.steps)
        if moment.kind == "save":
            return self.tree.saves_of(moment.of) >= moment.value
        return self.seconds >= moment.value

    def _look(self) -> None:
        """Reads new output, new files in the folder, and new events of a Lockstep run."""
        if self._launcher.returncode is None:
            self.seconds = time.monotonic() - self._began
        assert self._launcher.stdout is not None
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._launcher.stdout.fileno(), 1 << 16):
                *lines, self._rest = (self._rest + data).split(b"\n")
                for line in lines:
                    self._on_line(line.decode(errors="replace"))
        self.tree.look()
        self._read_events()

    def _on_line(self, line: str) -> None:
        self.said = [*self.said[-8:], line] if line.strip() else self.said
        with contextlib.suppress(ValueError, TypeError):  # a pattern may match other text than numbers
            if self.args.steps_pattern and (found := self.args.steps_pattern.search(line)):
                self._on_step(int(found[1]))

    def _on_step(self, step: int) -> None:
        self.steps.append(step)
        self.step_times.append(self.seconds)

    def _read_events(self) -> None:
        """Reads steps from a Lockstep run's events, if no pattern is given."""
        if self.args.steps_pattern:
            return
        size, path = self.tree.size_of(EVENTS_FILE), self.tree.path_of(EVENTS_FILE)
        self._events_read = min(self._events_read, size)  # a resume may have truncated the file
        if path is None or size == self._events_read:
            return
        with contextlib.suppress(OSError), open(path, "rb") as file:
            file.seek(self._events_read)
            whole, newline, _ = file.read().rpartition(b"\n")
            self._events_read += len(whole + newline)
            for line in whole.splitlines():
                with contextlib.suppress(ValueError, TypeError, KeyError):  # the file may be another program's
                    event = json.loads(line)
                    if event["event"] == "step":
                        self._on_step(int(event["step"]))

    def _count(self) -> tuple[list[Process], list[Process]]:
        """Returns all processes, and the ranks among them."""
        living = processes.living(self.mark, self._launcher.pid)
        ranks = processes.ranks_of(living, self._launcher.pid)
        if any(rank.pid != self._launcher.pid for rank in ranks):
            self.ranks = max(self.ranks, len(ranks))
        return living, ranks

    def _disturb(self, how: Disturbance) -> None:
        fault = FAULTS[how.fault]
        living, ranks = self._count()
        if fault.whom == "disk":
            for one in living:
                with contextlib.suppress(OSError):
                    resource.prlimit(one.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
            self.done = "no file may grow (RLIMIT_FSIZE)"
            return
        first = [one for one in living if one.pid == self._launcher.pid]
        all_ = first + [one for one in living if one not in first]
        whom = {"launcher": first, "all": all_}.get(fault.whom, ranks)
        if fault.whom == "rank":
            whom = whom[int(how.rank * len(whom)) :][:1]
        if whom:  # otherwise the target does not exist yet
            now = self.seconds
            self._due = [(now + turn * how.pause, one, what) for turn, what in enumerate(fault.signals) for one in whom]
            names = ", ".join(signal.Signals(number).name for number in fault.signals)
            which = f" {whom[0].rank or 0}" if fault.whom == "rank" else ""
            self.done = f"{names} to {fault.whom}{which} after {now:.2f} s, step {max(self.steps, default=0)}"

    def _send(self) -> None:
        for at, one, number in self._due:
            if at <= self.seconds:
                one.send(number)
        self._due = [entry for entry in self._due if entry[0] > self.seconds]


def _as_from_a_shell() -> None:
    """Resets signals that are ignored, for example under nohup: the job would inherit that."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)

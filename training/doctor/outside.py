"""Starts the doctor's processes, bounds them, and gathers what they write."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lockstep.training.contract import printable
from lockstep.training.doctor.inside import begun_file, read
from lockstep.training.doctor.table import Check, Outcome

START_SECONDS = 60.0
"""For processes to load torch and to join, beside the bound of their first row."""
END_SECONDS = 15.0
"""Between a TERM to a launcher and the end of all that it has started."""
NAMES_SECONDS = 30.0
_NAMES = (
    "import json, torch; print(json.dumps([torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]))"
)
_OF_A_LAUNCHER = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


@dataclass(frozen=True, slots=True)
class Ended:
    code: int | None
    """None where it had to be ended."""
    output: str

    @property
    def last(self) -> str:
        """The last line that says something."""
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        return printable(lines[-1])[:300] if lines else "it wrote nothing"


@dataclass(frozen=True, slots=True)
class Program:
    """How the doctor starts processes on this machine.

    Args:
        command: what stands for `python -m lockstep.training`.
        gpus: how many are visible.
        folder: for what they write.
        data_root: where data sets lie.
    """

    command: Sequence[str]
    gpus: int
    folder: Path
    data_root: Path
    rehearsal: bool = False

    def launch(self, ranks: int, arguments: Sequence[str], restarts: int = 0) -> list[str]:
        """The command that starts ranks under the program's own launcher."""
        launcher = ["launch", "--ranks", str(ranks), "--max-restarts", str(restarts), "--grace", "5"]
        return [*self.command, *launcher, "--", *self.command, *arguments]

    def run(self, command: Sequence[str], bound: float, **env: str) -> Ended:
        """To its end, or to the end of `bound` seconds."""
        path = self.folder / "output"
        with started(command, path, env) as process:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(bound)
            code = process.poll()
        return Ended(code, path.read_text(encoding="utf-8", errors="backslashreplace"))


@contextlib.contextmanager
def started(command: Sequence[str], output: Path, env: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is gone at the end, with all that it has started."""
    inherited = {name: value for name, value in os.environ.items() if name not in _OF_A_LAUNCHER}
    with output.open("wb") as file:
        process = subprocess.Popen(
            list(command), stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
            env={**inherited, **env},
        )  # fmt: skip
    try:
        yield process
    finally:
        family = _descendants(process.pid)  # a launcher's ranks are in sessions of their own
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_SECONDS)
        process.kill()
        for member, since in family.items():
            if since and _since(member) == since:  # and not another one, which got its number meanwhile
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(member, signal.SIGKILL)
        process.wait()


def names_of_gpus(program: Program) -> list[str]:
    """The GPUs' names from the driver. Asked in a separate process, because a driver may hang; empty without an answer."""
    output = program.folder / "names"
    with started([sys.executable, "-c", _NAMES], output, {}) as process, contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(NAMES_SECONDS)
    lines = [line for line in output.read_text(encoding="utf-8", errors="replace").splitlines() if line[:2] == '["']
    return list(json.loads(lines[-1])) if lines and process.returncode == 0 else []


def _descendants(pid: int) -> dict[int, str]:
    """The processes that this one and its children have started, and when; none where there is no /proc."""
    assert pid > 1, "all processes descend from the first one"
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc") if os.path.isdir("/proc/self") else ():
        if entry.isdigit() and (fields := _stat(int(entry))):
            children.setdefault(int(fields[1]), []).append(int(entry))
    family = [pid]
    for member in family:  # grows while it is read
        family += children.get(member, [])
    return {member: _since(member) for member in family[1:]}


def _since(pid: int) -> str:
    """When it was started, in the kernel's ticks; empty where it has ended."""
    fields = _stat(pid)
    return fields[19] if fields else ""


def _stat(pid: int) -> list[str]:
    """proc(5), /proc/PID/stat from the state on: the parent is the second, the start the 20th."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return []


def in_processes(
    program: Program, checks: Sequence[Check], report: Callable[[Check, Outcome], None], deadline: float
) -> None:
    """Runs rows of one kind (`alone` or `ranks`) in processes that they share. One that fails or hangs costs the others
    nothing but a new start.

    Args:
        report: gets each row as soon as it is known, in their order.
        deadline: of the whole table, by `time.monotonic`.
    """
    left = list(checks)
    while left and time.monotonic() < deadline:
        left = _in_one_start(program, left, report, deadline)
    for check in left:
        report(check, Outcome("not tried", "the time is over"))


def _in_one_start(
    program: Program, checks: list[Check], report: Callable[[Check, Outcome], None], deadline: float
) -> list[Check]:
    """The rows that need another start: those behind one that has ended these processes."""
    alone = checks[0].where == "alone"
    ranks = 1 if alone else program.gpus
    begun = [begun_file(program.folder, rank) for rank in range(ranks)]
    for path in begun:
        path.unlink(missing_ok=True)
    inside = [
        "doctor",
        "--inside",
        str(program.folder),
        *(["--alone"] if alone else []),
        *(check.name for check in checks),
    ]
    command = [*program.command, *inside] if alone else program.launch(ranks, inside)
    output = program.folder / "output"
    with started(command, output, {}) as process:
        since = time.monotonic() + START_SECONDS
        for number, check in enumerate(checks):
            outcome = None
            while outcome is None:
                ended = process.poll() is not None  # asked before the files are read: nothing is written after it
                over = time.monotonic() > deadline
                late = over or time.monotonic() > since + check.bound
                outcome = _of_all_ranks(program.folder, check, ranks, over=ended or late)
                if outcome is None and over and not ended:
                    return checks[number:]
                if outcome is None and (ended or late):
                    outcome = Outcome("failed", f"no answer within {check.bound:.0f} s" if late else _last_line(output))
                    if not all(path.exists() for path in begun):
                        report(check, outcome)
                        for other in checks[number + 1 :]:
                            report(other, Outcome("not tried", "the processes did not start: see the row before"))
                        return []
                    outcome = Outcome(outcome.result, outcome.detail, facts={"raised": True})
                if outcome is None:
                    time.sleep(0.05)
            report(check, outcome)
            since = time.monotonic()
            if outcome.facts.get("raised"):
                return checks[number + 1 :]
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
    return []


def _of_all_ranks(folder: Path, check: Check, ranks: int, over: bool) -> Outcome | None:
    """The outcome of all ranks, with the rank's name where they differ; None until all have one. `over`: wait for no more ranks."""
    lines = {rank: line for rank in range(ranks) if (line := read(folder, rank).get(check.name)) is not None}
    failed = {rank: line for rank, line in lines.items() if line.result == "failed"}
    if len(lines) < ranks and not (over and failed):
        return None
    if not failed:
        return lines[0]
    rank, line = min(failed.items())
    who = f"rank {rank}: " if len(failed) < ranks else ""
    raised = any(other.facts.get("raised") for other in failed.values())
    return replace(line, detail=f"{who}{line.detail}", facts={**line.facts, **({"raised": True} if raised else {})})


def _last_line(path: Path) -> str:
    return Ended(None, path.read_text(encoding="utf-8", errors="backslashreplace")).last

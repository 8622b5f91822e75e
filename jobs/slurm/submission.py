"""A submission: its folder, how it comes to be there whole or not at all, and the ranks' logs in it.

$LOCKSTEP_HOME/slurm/NAME/   job.json  ended.json  submitit/{123_submission.sh, 123_submitted.pkl, 123_0_log.out, …}

The nodes see it. They unpickle what lies in submitit/, so every folder is ours, mode 0700, and no symbolic link.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lockstep.training import files
from lockstep.training.contract import ENV_SECRET, OF_A_JOB, UserError
from lockstep.wire import submitit_api
from lockstep.wire.signals import signals_held_back

from ..logs import PREFIX, Pieces, begin, of_rank, shares
from ..status import Check, Unreachable
from . import observe, render
from .task import TrainingTask

NEW = "new"
"""Stands in the names of the files for the job's number until sbatch has given one."""
SENDING = ".sbatch"
"""It is locked for as long as sbatch is at work, which goes on where the command that submits is killed."""
SOON = 60.0
"""Seconds within which a job starts at once: the controller looks at its queue once in a while."""
SECONDS = 300.0
"""For sbatch, which tries for minutes where the controller is busy."""
CHUNK = 1 << 20
"""Bytes of one log that are read at once."""
NOISE = r"submitit [A-Z]+ \([0-9]{4}-"
"""What submitit's own lines begin with."""
_OF_A_RANK = re.compile(PREFIX.pattern.encode())
_IN_DOUBT = re.compile("timed out|zero bytes|receive failure", re.I)
"""What sbatch says where it has sent the job, and heard no answer."""
_OF_THE_CLUSTER = ("SLURM_CONF", "SLURM_CLUSTERS", "SBATCH_ACCOUNT")


def send(
    name: str, script: str, minutes: int, jobs: Path, written: dict[str, dict[str, Any]], comment: str,
    tasks: list[TrainingTask],
) -> list[str]:  # fmt: skip
    """Submits, keeps the records, and returns the job's ids, one a task. What had their folders before is gone then.

    The caller holds the lock of `jobs`.

    Args:
        name: of the job, or of the whole array.
        minutes: its time limit.
        jobs: the folder of all jobs.
        written: records by name, one a task.
        comment: what SLURM shall know this submission by, in place of the script's, which is the spec's.

    Raises:
        UserError: with what sbatch says; all is as it was.
        Unreachable: it is submitted, or not. The next submission finds out. Or the controller was not reached: all is as it was.
    """
    program = shutil.which("sbatch")
    if program is None:
        raise observe.missing("sbatch")
    ends = [""] if len(tasks) == 1 else [f"_{element}" for element in range(len(tasks))]
    payloads = {
        f"{NEW}{end}_{submitit_api.PAYLOAD}": submitit_api.payload(task, minutes)
        for end, task in zip(ends, tasks, strict=True)
    }
    try:
        # Whoever interrupts this command waits: a submission is not cut in two.
        with signals_held_back():
            with _in_place(jobs, name, written, script, payloads) as whole:
                number = _sbatch(program, name, comment, whole / observe.SUBMITIT / f"{NEW}_{submitit_api.SCRIPT}")
            adopt(whole / observe.SUBMITIT, number)
            for (own, record), end in zip(written.items(), ends, strict=True):
                observe.write(jobs / own, {**record, "job_id": f"{number}{end}"})
    except OSError as error:
        raise UserError(f"cannot keep the job in {jobs}: {error.strerror}; set LOCKSTEP_HOME") from None
    return [f"{number}{end}" for end in ends]


@contextlib.contextmanager
def _in_place(
    jobs: Path, whole: str, written: dict[str, dict[str, Any]], script: str, payloads: dict[str, bytes]
) -> Iterator[Path]:  # fmt: skip
    """The new folders are in their place; after an error the earlier ones are back, unless it may be submitted all the same."""
    for stale in jobs.glob(f".{whole}.*-"):
        shutil.rmtree(stale, ignore_errors=True)
    stage = Path(tempfile.mkdtemp(prefix=f".{whole}.", suffix="-", dir=jobs))
    names = list(dict.fromkeys([whole, *written]))
    put: list[str] = []
    try:
        for name in names:
            (stage / name).mkdir(0o700)
        (stage / whole / observe.SUBMITIT).mkdir(0o700)
        files.replace(stage / whole / observe.SUBMITIT / f"{NEW}_{submitit_api.SCRIPT}", script.encode())
        for file, data in payloads.items():
            files.replace(stage / whole / observe.SUBMITIT / file, data)
        for name, record in written.items():
            observe.write(stage / name, record)
        for name in names:
            put.append(name)
            shutil.rmtree(jobs / f".{name}.replaced", ignore_errors=True)
            with contextlib.suppress(FileNotFoundError):
                (jobs / name).rename(jobs / f".{name}.replaced")
            (stage / name).rename(jobs / name)
        yield jobs / whole
        for name in names:
            shutil.rmtree(jobs / f".{name}.replaced", ignore_errors=True)
    except _InDoubt:
        raise
    except BaseException:
        for name in put:
            shutil.rmtree(jobs / name, ignore_errors=True)
            with contextlib.suppress(FileNotFoundError):
                (jobs / f".{name}.replaced").rename(jobs / name)
        raise
    finally:
        shutil.rmtree(stage, ignore_errors=True)


class _InDoubt(Unreachable):
    """The controller may have taken the job before it fell silent: the record stays, without a number."""


def preflight(name: str, script: str) -> Check:
    """When sbatch expects the job to start. Raises `UserError`, `Unreachable`."""
    program = shutil.which("sbatch")
    if program is None:
        raise observe.missing("sbatch")
    try:
        told = subprocess.run(
            [program, "--test-only"], env=_environment(), input=script, capture_output=True, text=True, errors="replace",
            timeout=SECONDS, check=False, cwd=render.base_folder(),
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise Unreachable(f"the SLURM controller did not answer for {SECONDS:g} s") from None
    if told.returncode:
        raise _refusal(name, told.stderr)
    said = observe.one_line(told.stderr.replace("sbatch: ", ""))
    start = re.search(r"to start at (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)", said)
    if start is None:
        return Check("start", "cannot tell", said)
    at_once = time.mktime(time.strptime(start[1], "%Y-%m-%dT%H:%M:%S")) < time.time() + SOON
    return Check("start", "ok" if at_once else "warning", said)


def _environment() -> dict[str, str]:
    """With a secret by which the launchers of a `live` job know one another."""
    return {ENV_SECRET: secrets.token_hex(32)} | {
        name: value for name, value in os.environ.items()
        if name in _OF_THE_CLUSTER or (name not in (*OF_A_JOB, render.HERE) and not name.startswith(("SBATCH_", "SLURM_")))
    }  # fmt: skip


def _refusal(name: str, said: str) -> UserError:
    """What sbatch complains of, without what it is called."""
    lines = [line for line in said.splitlines() if "error:" in line] or [said]
    reason = observe.one_line("; ".join(line.split("error:", 1)[-1].strip() for line in lines))
    if _IN_DOUBT.search(said):
        return _InDoubt(
            f"the SLURM controller does not answer: {reason}: submit again, what is there already is not submitted twice"
        )
    if observe.NO_CONTACT.search(said):
        return Unreachable(f"the SLURM controller does not answer: {reason}")
    return UserError(f"SLURM refuses {name}: {reason}")


def _sbatch(program: str, name: str, comment: str, script: Path) -> str:
    """The job's number. The ranks start in `render.base_folder()`. Raises `UserError`, `Unreachable`."""
    with (script.parent.parent / SENDING).open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            told = subprocess.run(
                [program, f"--comment={comment}", str(script)], env=_environment(), stdin=subprocess.DEVNULL, capture_output=True,
                text=True, errors="replace", timeout=SECONDS, check=False, start_new_session=True, pass_fds=[lock.fileno()],
                cwd=render.base_folder(),
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            told = observe.Told([program], 1, "", f"timed out after {SECONDS:g} s")
    if told.returncode:
        raise _refusal(name, told.stderr)
    number = re.search(r"job (\d+)", told.stdout)
    if number is None:
        raise _InDoubt(f"sbatch gave no number for {name}, but said: {observe.one_line(told.stdout)}: submit again")
    return number[1]


def adopt(submitit: Path, number: str) -> None:
    """Gives the job's number to the files of a submission: submitit looks for them by it. Raises `OSError`."""
    for path in submitit.glob(f"{NEW}_*"):
        if not path.is_symlink():
            with contextlib.suppress(FileNotFoundError):  # another command does the same
                path.rename(submitit / f"{number}{path.name.removeprefix(NEW)}")
    with contextlib.suppress(FileExistsError):  # the name that SLURM was given
        (submitit / f"{NEW}_{submitit_api.SCRIPT}").symlink_to(f"{number}_{submitit_api.SCRIPT}")


def under_way(folder: Path) -> bool:
    """Whether sbatch is still at work for the submission."""
    try:
        with (folder / SENDING).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def log(record: dict[str, Any], rank: int) -> Path:
    return Path(record["submitit"]) / f"{record['job_id']}_{rank}_log.out"


def lines(
    record: dict[str, Any], tasks: list[int], rank: int | None, live: bool, ended: Callable[[], bool], interval: float,
    last: int | None = None,
) -> Iterator[str]:  # fmt: skip
    """The tasks' lines as they come, without submitit's own, until the job has ended: those of one rank, or of all with `[rank N]`
    before them.

    Args:
        live: a task is a node, and its ranks' lines have that already.
        last: begin this many lines before the end. They have no times, so each rank has an equal share of them.
    """
    logs = {task: log(record, task) for task in tasks}
    of = rank if live else None
    read = dict.fromkeys(tasks, 0) if last is None else _beginnings(logs, last, of)
    pieces = {task: Pieces(b"\n", _OF_A_RANK) for task in tasks}
    while True:
        try:
            over = ended()  # asked before reading, so that nothing is missed
        except Unreachable:
            over = False
        more = False
        for task in tasks:
            new = b""
            with contextlib.suppress(OSError), files.regular(logs[task]) as file:
                file.seek(read[task])
                new = file.read(CHUNK)
            read[task] += len(new)
            more = more or bool(new)
            whole = list(pieces[task].of(new))
            if over and not new and (rest := pieces[task].rest()):
                whole.append(rest)
            for line in (raw.decode(errors="replace") for raw in whole):
                if not re.match(NOISE, line) and (kept := of_rank(line, of)) is not None:
                    yield f"[rank {task}] {kept}" if rank is None and not live else kept
        if over and not more:
            return
        if not more:
            time.sleep(interval)


def _beginnings(logs: dict[int, Path], last: int, of: int | None) -> dict[int, int]:
    """Where each task's log is to be read from, for `last` lines in all. `of`: those of this rank alone count."""
    noise, mark = re.compile(NOISE.encode()), b"" if of is None else b"[rank %d] " % of

    def look(rank: int, count: int) -> tuple[int, int]:
        try:
            return begin(logs[rank], count, lambda head: not noise.match(head) and head.startswith(mark))
        except OSError:
            return 0, 0

    there = {rank: look(rank, last) for rank in logs}
    given = dict(zip(logs, shares([lines for _, lines in there.values()], last)))
    return {rank: look(rank, given[rank])[0] if given[rank] < there[rank][1] else there[rank][0] for rank in logs}

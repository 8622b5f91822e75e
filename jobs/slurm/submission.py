"""A submission: its folder, how it comes to be there whole or not at all, and what the ranks leave in it.

$LOCKSTEP_HOME/slurm/NAME/   job.json  ended.json  submitit/{123_submission.sh, 123_submitted.pkl, 123_0_log.out, …}

The nodes see it. They unpickle what lies in submitit/, so every folder is ours, mode 0700, and no symbolic link.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path, PurePath
from typing import Any

from lockstep.jobs import records
from lockstep.jobs.logs import Pieces, begin, shares
from lockstep.jobs.slurm import observe, render
from lockstep.jobs.slurm.task import TrainingTask, note
from lockstep.jobs.spec.model import JobSpec
from lockstep.jobs.status import Unreachable
from lockstep.training import files
from lockstep.training.contract import OF_A_JOB, UserError
from lockstep.wire import submitit_api
from lockstep.wire.signals import signals_held_back

JOB = "job.json"
ENDED = "ended.json"
SUBMITIT = "submitit"
NEW = "new"
"""Stands in the names of the files for the job's number until sbatch has given one."""
SENDING = ".sbatch"
"""It is locked for as long as sbatch is at work, which goes on where the command that submits is killed."""
SECONDS = 300.0
"""For sbatch, which tries for minutes where the controller is busy."""
CHUNK = 1 << 20
"""Bytes of one log that are read at once."""
NOISE = r"submitit [A-Z]+ \([0-9]{4}-"
"""What submitit's own lines begin with."""
_IN_DOUBT = re.compile("timed out|zero bytes|receive failure", re.I)
"""What sbatch says where it has sent the job, and heard no answer."""
_OF_THE_CLUSTER = ("SLURM_CONF", "SLURM_CLUSTERS", "SBATCH_ACCOUNT")


def read(folder: Path) -> dict[str, Any] | None:
    """job.json; its `job_id` is None until sbatch has answered. None where there is none, or it is damaged."""
    record = records.read(folder / JOB, records.SlurmJob)
    return None if record is None else {"element": None, **record}


def write(folder: Path, record: dict[str, Any]) -> None:
    """Raises `OSError`."""
    files.replace_json(folder / JOB, record)


def read_end(folder: Path) -> dict[str, Any] | None:
    """ended.json: how the job has ended, once that is known."""
    ending = records.read(folder / ENDED, records.SlurmEnded)
    return None if ending is None else {**ending}


def write_end(folder: Path, plain: dict[str, Any]) -> None:
    """Raises `OSError`."""
    files.replace_json(folder / ENDED, plain)


class Notes:
    """What the ranks and their tasks have left of one job."""

    def __init__(self, record: dict[str, Any]) -> None:
        self._record, self._job_id, self._folder = record, str(record["job_id"]), Path(record["submitit"])

    @property
    def said(self) -> records.Said | None:
        """status.json of this very job, which is trusted above exit codes; not one of another run in the same folder."""
        return records.said(Path(self._record["run_dir"]), self._record["job"])

    @property
    def ends(self) -> dict[int, records.Note]:
        """What the tasks noted when their ranks ended: rank → {code, reason, restart, host, time}."""
        found: dict[int, records.Note] = {}
        for path in self._folder.glob(f"{self._job_id}_*_end.json"):
            match = re.fullmatch(rf"{re.escape(self._job_id)}_(\d+)_end\.json", path.name)
            end = records.read(path, records.Note) if match else None
            if match and end is not None:
                found[int(match[1])] = end
        return found

    @property
    def saved(self) -> set[int]:
        """The starts after which the job had saved and got further: they do not count against `max_restarts`."""
        mark = f"{self._job_id}_saved_"
        found = [path.name.removeprefix(mark) for path in self._folder.glob(f"{mark}*")]
        return {int(number) for number in found if number.isdecimal()}

    @property
    def cancelled(self) -> bool:
        return cancelled(self._record).exists()


def cancelled(record: dict[str, Any]) -> Path:
    """The note that somebody has asked lockstep to cancel the job."""
    return note(Path(record["submitit"]), str(record["job_id"]), "cancelled")


def send(
    spec: JobSpec, place: render.Place, jobs: Path, written: dict[str, dict[str, Any]], comment: str,
    tasks: list[TrainingTask], after: str | None,
) -> list[str]:  # fmt: skip
    """Submits, keeps the records, and returns the job's ids, one a task. What had their folders before is gone then.

    The caller holds the lock of `jobs`.

    Args:
        spec: of the job, or of the whole array.
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
    script = render.script(spec, jobs / spec.name / SUBMITIT, after, len(tasks), place)
    ends = [""] if len(tasks) == 1 else [f"_{element}" for element in range(len(tasks))]
    payloads = {
        f"{NEW}{end}_{submitit_api.PAYLOAD}": submitit_api.payload(task, render.minutes(spec))
        for end, task in zip(ends, tasks, strict=True)
    }
    try:
        # Whoever interrupts this command waits: a submission is not cut in two.
        with signals_held_back():
            with _in_place(jobs, spec.name, written, script, payloads) as whole:
                number = _sbatch(
                    program, spec.name, comment, whole / SUBMITIT / f"{NEW}_{submitit_api.SCRIPT}", place.here
                )
            adopt(whole / SUBMITIT, number)
            for (name, record), end in zip(written.items(), ends, strict=True):
                write(jobs / name, {**record, "job_id": f"{number}{end}"})
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
        (stage / whole / SUBMITIT).mkdir(0o700)
        files.replace(stage / whole / SUBMITIT / f"{NEW}_{submitit_api.SCRIPT}", script.encode())
        for file, data in payloads.items():
            files.replace(stage / whole / SUBMITIT / file, data)
        for name, record in written.items():
            write(stage / name, record)
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


def _sbatch(program: str, name: str, comment: str, script: Path, here: PurePath) -> str:
    """The job's number. The ranks start in `here`. Raises `UserError`, `Unreachable`."""
    env = {
        name: value for name, value in os.environ.items()
        if name in _OF_THE_CLUSTER or (name not in OF_A_JOB and not name.startswith(("SBATCH_", "SLURM_")))
    }  # fmt: skip
    with (script.parent.parent / SENDING).open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            told = subprocess.run(
                [program, f"--comment={comment}", str(script)], env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                errors="replace", timeout=SECONDS, check=False, start_new_session=True, pass_fds=[lock.fileno()],
                cwd=here,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            told = observe.Told([program], 1, "", f"timed out after {SECONDS:g} s")
    if told.returncode:
        # What sbatch complains of, without what it is called.
        lines = [line for line in told.stderr.splitlines() if "error:" in line] or [told.stderr]
        reason = observe.one_line("; ".join(line.split("error:", 1)[-1].strip() for line in lines))
        if _IN_DOUBT.search(told.stderr):
            raise _InDoubt(
                f"the SLURM controller does not answer: {reason}: submit again, what is there already is not submitted twice"
            )
        if observe.NO_CONTACT.search(told.stderr):
            raise Unreachable(f"the SLURM controller does not answer: {reason}")
        raise UserError(f"SLURM refuses {name}: {reason}")
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
    record: dict[str, Any], ranks: list[int], prefix: bool, ended: Callable[[], bool], interval: float, last: int | None = None
) -> Iterator[str]:  # fmt: skip
    """The ranks' lines as they come, without submitit's own, with `[rank N]` before them where `prefix` says so, until the
    job has ended.

    Args:
        last: begin this many lines before the end. They have no times, so each rank has an equal share of them.
    """
    logs = {rank: log(record, rank) for rank in ranks}
    read = dict.fromkeys(ranks, 0) if last is None else _beginnings(logs, last)
    pieces = {rank: Pieces(b"\n") for rank in ranks}
    while True:
        try:
            over = ended()  # asked before reading, so that nothing is missed
        except Unreachable:
            over = False
        more = False
        for rank in ranks:
            new = b""
            with contextlib.suppress(OSError), files.regular(logs[rank]) as file:
                file.seek(read[rank])
                new = file.read(CHUNK)
            read[rank] += len(new)
            more = more or bool(new)
            whole = list(pieces[rank].of(new))
            if over and not new and (rest := pieces[rank].rest()):
                whole.append(rest)
            for line in (raw.decode(errors="replace") for raw in whole):
                if not re.match(NOISE, line):
                    yield f"[rank {rank}] {line}" if prefix else line
        if over and not more:
            return
        if not more:
            time.sleep(interval)


def _beginnings(logs: dict[int, Path], last: int) -> dict[int, int]:
    """Where each rank's log is to be read from, for `last` lines in all."""
    noise = re.compile(NOISE.encode())

    def look(rank: int, count: int) -> tuple[int, int]:
        try:
            return begin(logs[rank], count, lambda head: not noise.match(head))
        except OSError:
            return 0, 0

    there = {rank: look(rank, last) for rank in logs}
    given = dict(zip(logs, shares([lines for _, lines in there.values()], last)))
    return {rank: look(rank, given[rank])[0] if given[rank] < there[rank][1] else there[rank][0] for rank in logs}

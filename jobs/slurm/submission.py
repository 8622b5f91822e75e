"""A submission: its folder, which is created completely or not at all.

$LOCKSTEP_HOME/slurm/NAME/   job.json  ended.json  submitit/{123_submission.sh, 123_submitted.pkl, 123_0_log.out, …}

The nodes see the folder. They unpickle files of submitit/, so every folder is ours, mode 0700, and no symbolic link.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lockstep.training import files
from lockstep.training.contract import ENV_SECRET, OF_A_JOB, UserError
from lockstep.wire import submitit_api
from lockstep.wire.signals import signals_held_back

from .. import records
from ..records import SlurmJob
from ..status import Check, Unreachable
from . import observe, render

NEW = "new"
"""Text in the names of the files in place of the job's number, until sbatch has given a number."""
SENDING = ".sbatch"
"""File that is locked while sbatch runs. sbatch continues if the command that submits is killed."""
SOON = 60.0
"""Seconds within which a start counts as at once: the controller checks its queue only at intervals."""
SECONDS = 300.0
"""Timeout of sbatch in seconds. sbatch tries for minutes if the controller is busy."""
_IN_DOUBT = re.compile("timed out|zero bytes|receive failure", re.I)
"""Errors of sbatch that sent the job and got no answer."""
_OF_THE_CLUSTER = ("SLURM_CONF", "SLURM_CLUSTERS", "SBATCH_ACCOUNT")


def send(jobs: Path, script: str, submissions: list[tuple[str, SlurmJob, bytes]]) -> dict[str, SlurmJob]:
    """Submits the jobs, saves their records, and returns the records by name, with their ids. Removes earlier folders of these names.

    The caller holds the lock of `jobs`.

    Args:
        jobs: the folder of all jobs.
        script: batch script of the job, or of the whole array.
        submissions: name, record and payload of the job, or of each element of an array.

    Raises:
        UserError: sbatch refuses the job. Nothing has changed.
        Unreachable: no answer. Either the job may be submitted, and the next submission finds out; or nothing was sent, and nothing has
            changed.
    """
    whole, comment = submissions[0][1].array_name, submissions[0][1].comment
    # A signal to this command waits, so it cannot interrupt a submission.
    with records.keeping(jobs), signals_held_back():
        with _staged_folders(jobs, whole, script, submissions) as submitit:
            number = _submit(whole, comment, submitit / f"{NEW}_{submitit_api.SCRIPT}")
        assign_job_id(submitit, number)
        numbered = {name: record.numbered(number) for name, record, _ in submissions}
        for name, record in numbered.items():
            record.write(jobs / name / records.JOB)
    return numbered


@contextlib.contextmanager
def _staged_folders(
    jobs: Path, whole: str, script: str, submissions: list[tuple[str, SlurmJob, bytes]]
) -> Iterator[Path]:  # fmt: skip
    """Moves the new folders to their places. After an error restores the earlier folders, unless the job may have been submitted.

    Yields submitit's folder.
    """
    for stale in jobs.glob(f".{whole}.*-"):
        shutil.rmtree(stale, ignore_errors=True)
    stage = Path(tempfile.mkdtemp(prefix=f".{whole}.", suffix="-", dir=jobs))
    names = list(dict.fromkeys([whole, *(name for name, _, _ in submissions)]))
    put: list[str] = []
    try:
        for name in names:
            (stage / name).mkdir(0o700)
        submitit = stage / whole / render.SUBMITIT
        submitit.mkdir(0o700)
        files.replace(submitit / f"{NEW}_{submitit_api.SCRIPT}", script.encode())
        for name, record, payload in submissions:
            files.replace(submitit / record.numbered(NEW).file(submitit_api.PAYLOAD).name, payload)
            record.write(stage / name / records.JOB)
        for name in names:
            put.append(name)
            shutil.rmtree(jobs / f".{name}.replaced", ignore_errors=True)
            with contextlib.suppress(FileNotFoundError):
                (jobs / name).rename(jobs / f".{name}.replaced")
            (stage / name).rename(jobs / name)
        yield jobs / whole / render.SUBMITIT
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
    """An error for a submission without an answer. The controller may have taken the job, so the record stays, without a number."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"{reason}: submit again, what is there already is not submitted twice")


def preflight(name: str, script: str) -> Check:
    """Returns a check that says when sbatch expects the job to start. Raises `UserError`, `Unreachable`."""
    done = _sbatch("--test-only", input=script)
    if done.returncode:
        raise _refusal(name, done.stderr)
    answer = observe.one_line(done.stderr.replace("sbatch: ", ""))
    start = re.search(r"to start at (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)", answer)
    if start is None:
        return Check("start", "cannot tell", answer)
    at_once = time.mktime(time.strptime(start[1], "%Y-%m-%dT%H:%M:%S")) < time.time() + SOON
    return Check("start", "ok" if at_once else "warning", answer)


def _environment() -> dict[str, str]:
    """Returns the environment of sbatch, with a secret by which the launchers of a `live` job authenticate each other."""
    return {ENV_SECRET: secrets.token_hex(32)} | {
        name: value for name, value in os.environ.items()
        if name in _OF_THE_CLUSTER or (name not in (*OF_A_JOB, render.FOLDER_VARIABLE) and not name.startswith(("SBATCH_", "SLURM_")))
    }  # fmt: skip


def _refusal(name: str, errors: str) -> UserError:
    """Returns the error of sbatch, without the program's name."""
    lines = [line for line in errors.splitlines() if "error:" in line] or [errors]
    reason = observe.one_line("; ".join(line.split("error:", 1)[-1].strip() for line in lines))
    if _IN_DOUBT.search(errors) or observe.NO_CONTACT.search(errors):
        return Unreachable(f"the SLURM controller does not answer: {reason}")
    return UserError(f"SLURM refuses {name}: {reason}")


def _sbatch(*words: str, **options: Any) -> observe.Output:
    """Runs sbatch. The ranks start in `render.base_folder()`. Raises `UserError`, `Unreachable`."""
    return observe.run_slurm(
        "sbatch", *words, seconds=SECONDS, env=_environment(), cwd=render.base_folder(), **options
    )  # fmt: skip


def _submit(name: str, comment: str, script: Path) -> str:
    """Returns the job's number. Raises `UserError`, `Unreachable`."""
    with (script.parent.parent / SENDING).open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            done = _sbatch(f"--comment={comment}", str(script), start_new_session=True, pass_fds=[lock.fileno()])
        except Unreachable as error:
            raise _InDoubt(str(error)) from None
    if done.returncode:
        refusal = _refusal(name, done.stderr)
        raise _InDoubt(str(refusal)) if _IN_DOUBT.search(done.stderr) else refusal
    number = re.search(r"job (\d+)", done.stdout)
    if number is None:
        raise _InDoubt(f"sbatch gave no number for {name}, but printed: {observe.one_line(done.stdout)}")
    return number[1]


def assign_job_id(submitit: Path, number: str) -> None:
    """Renames the files of a submission to the job's number, by which submitit finds them. Raises `OSError`."""
    for path in submitit.glob(f"{NEW}_*"):
        if not path.is_symlink():
            with contextlib.suppress(FileNotFoundError):  # another command does the same
                path.rename(submitit / f"{number}{path.name.removeprefix(NEW)}")
    with contextlib.suppress(FileExistsError):  # SLURM knows the script by this name
        (submitit / f"{NEW}_{submitit_api.SCRIPT}").symlink_to(f"{number}_{submitit_api.SCRIPT}")

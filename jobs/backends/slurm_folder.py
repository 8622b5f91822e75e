"""Where a SLURM job is kept: a folder that the nodes see, and that nobody else can write.

$LOCKSTEP_HOME/slurm/NAME/   job.json  ended.json  submitit/{123_submission.sh, 123_submitted.pkl, 123_0_log.out, …}

The nodes unpickle what lies in submitit/. So every folder is ours, mode 0700, and no symbolic link.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import Any

from jobs.backends.slurm_task import note
from training import files
from training.contract import UserError

JOB = "job.json"
ENDED = "ended.json"
SUBMITIT = "submitit"


def home() -> Path:
    """`$LOCKSTEP_HOME/slurm`: it must lie on storage that the nodes share."""
    return Path(os.environ.get("LOCKSTEP_HOME") or Path.home() / ".local/state/lockstep").absolute() / "slurm"


def make(folder: Path) -> Path:
    """The folder, made where it is missing, and checked. Raises `UserError`."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        check(folder)
    except OSError as error:
        raise UserError(f"cannot keep jobs in {folder}: {error.strerror}; set LOCKSTEP_HOME") from None
    return folder


def check(folder: Path) -> None:
    """Refuses a folder that somebody else could have put a payload into. Raises `UserError`, `OSError`."""
    found = folder.lstat()
    if stat.S_ISLNK(found.st_mode) or not stat.S_ISDIR(found.st_mode):
        raise UserError(f"{folder} is no folder of its own (a link?): the nodes run what lies there; set LOCKSTEP_HOME")
    if found.st_uid != os.geteuid():
        raise UserError(f"{folder} belongs to user {found.st_uid}: the nodes run what lies there; set LOCKSTEP_HOME")
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise UserError(f"{folder} is open to others (mode {stat.S_IMODE(found.st_mode):o}): chmod 700 it")


_RECORD: dict[str, Any] = {
    "spec": dict, "hash": str, "run_dir": str, "submitit": str, "job_id": (str, type(None)), "created": str,
    "since": (int, float), "comment": str, "array_name": str, "earlier_attempts": int,
}  # fmt: skip
_ENDING: dict[str, Any] = {"state": str, "reason": str, "ranks": list, "exit_code": (int, type(None))}


class Folder:
    """One job's folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def record(self) -> dict[str, Any] | None:
        """job.json; its `job_id` is None until sbatch has answered. None where there is none, or it is damaged."""
        value = files.read_json(self.path / JOB)
        if not isinstance(value, dict) or any(not isinstance(value.get(name), kind) for name, kind in _RECORD.items()):
            return None
        return {"element": None, **value}

    def write(self, record: dict[str, Any]) -> None:
        files.replace_json(self.path / JOB, record)

    def ended(self) -> dict[str, Any] | None:
        value = files.read_json(self.path / ENDED)
        fits = isinstance(value, dict) and all(isinstance(value.get(name), kind) for name, kind in _ENDING.items())
        return value if fits and all(isinstance(part, dict) for part in value["ranks"]) else None


def ends(record: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """What the tasks noted when their ranks ended: rank → {code, reason, restart, host, time}."""
    found: dict[int, dict[str, Any]] = {}
    folder, job_id = Path(record["submitit"]), str(record["job_id"])
    for path in folder.glob(f"{job_id}_*_end.json"):
        match = re.fullmatch(rf"{re.escape(job_id)}_(\d+)_end\.json", path.name)
        value = files.read_json(path)
        if match and isinstance(value, dict) and isinstance(value.get("code"), int):
            found[int(match[1])] = value
    return found


def cancelled(record: dict[str, Any]) -> Path:
    return note(Path(record["submitit"]), str(record["job_id"]), "cancelled")


def log(record: dict[str, Any], rank: int) -> Path:
    return Path(record["submitit"]) / f"{record['job_id']}_{rank}_log.out"

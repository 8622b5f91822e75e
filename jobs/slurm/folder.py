"""Where a SLURM job is kept: a folder that the nodes see, and that nobody else can write.

$LOCKSTEP_HOME/slurm/NAME/   job.json  ended.json  submitit/{123_submission.sh, 123_submitted.pkl, 123_0_log.out, …}

The nodes unpickle what lies in submitit/. So every folder is ours, mode 0700, and no symbolic link.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from jobs import private, records
from jobs.records import fits
from jobs.slurm.task import note
from training import files

JOB = "job.json"
ENDED = "ended.json"
SUBMITIT = "submitit"


def home() -> Path:
    """`$LOCKSTEP_HOME/slurm`: it must lie on storage that the nodes share."""
    return private.home().absolute() / "slurm"


_RECORD: dict[str, Any] = {
    "spec": dict, "hash": str, "run_dir": str, "submitit": str, "job_id": (str, type(None)), "created": str,
    "since": (int, float), "comment": str, "array_name": str, "job": str,
}  # fmt: skip
_ENDING: records.Shape = {"state": str, "reason": str, "ranks": list, "exit_code": (int, type(None))}
_PART: records.Shape = {"name": str, "ranks": list, "state": str, "reason": str, "restarts": int}


class Folder:
    """One job's folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def record(self) -> dict[str, Any] | None:
        """job.json; its `job_id` is None until sbatch has answered. None where there is none, or it is damaged."""
        value = files.read_json(self.path / JOB)
        return {"element": None, **value} if fits(value, _RECORD) else None

    def write(self, record: dict[str, Any]) -> None:
        files.replace_json(self.path / JOB, record)

    def ended(self) -> dict[str, Any] | None:
        value = records.read(self.path / ENDED, _ENDING)
        whole = value is not None and all(fits(part, _PART) and part.keys() == _PART.keys() for part in value["ranks"])
        return value if whole else None


def ends(record: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """What the tasks noted when their ranks ended: rank → {code, reason, restart, host, time}."""
    found: dict[int, dict[str, Any]] = {}
    folder, job_id = Path(record["submitit"]), str(record["job_id"])
    for path in folder.glob(f"{job_id}_*_end.json"):
        match = re.fullmatch(rf"{re.escape(job_id)}_(\d+)_end\.json", path.name)
        value = records.read(path, records.NOTE)
        if match and value is not None:
            found[int(match[1])] = value
    return found


def saved(record: dict[str, Any]) -> set[int]:
    """The starts after which the job had saved and got further: they do not count against `max_restarts`."""
    mark = f"{record['job_id']}_saved_"
    found = (path.name.removeprefix(mark) for path in Path(record["submitit"]).glob(f"{mark}*"))
    return {int(number) for number in found if number.isdecimal()}


def cancelled(record: dict[str, Any]) -> Path:
    return note(Path(record["submitit"]), str(record["job_id"]), "cancelled")


def log(record: dict[str, Any], rank: int) -> Path:
    return Path(record["submitit"]) / f"{record['job_id']}_{rank}_log.out"

"""Where a SLURM job is kept: a folder that the nodes see, and that nobody else can write.

$LOCKSTEP_HOME/slurm/NAME/   job.json  ended.json  submitit/{123_submission.sh, 123_submitted.pkl, 123_0_log.out, …}

The nodes unpickle what lies in submitit/. So every folder is ours, mode 0700, and no symbolic link.
"""

from __future__ import annotations

import re
from pathlib import PurePath, PurePosixPath
from typing import Any

from lockstep.jobs import records
from lockstep.jobs.slurm.task import note
from lockstep.jobs.slurm.transport.base import Transport, parsed
from lockstep.jobs.slurm.transport.local import LOCAL
from lockstep.training import contract, files

JOB = "job.json"
ENDED = "ended.json"
SUBMITIT = "submitit"


def text(value: dict[str, Any]) -> bytes:
    """A record as it lies in its file."""
    return (files.json_text(value, indent=1) + "\n").encode()


class Folder:
    """One job's folder."""

    def __init__(self, path: PurePath, transport: Transport = LOCAL) -> None:
        self.path, self.transport = path, transport

    def record(self) -> dict[str, Any] | None:
        """job.json; its `job_id` is None until sbatch has answered. None where there is none, or it is damaged."""
        return as_record(self.transport.json(self.path / JOB))

    def write(self, record: dict[str, Any]) -> None:
        self.transport.write(self.path / JOB, text(record))

    def ended(self) -> dict[str, Any] | None:
        return as_ending(self.transport.json(self.path / ENDED))


def as_record(value: Any) -> dict[str, Any] | None:
    record = records.parse(value, records.SlurmJob)
    return None if record is None else {"element": None, **record}


def as_ending(value: Any) -> dict[str, Any] | None:
    ending = records.parse(value, records.SlurmEnded)
    return None if ending is None or ending["ranks"] != value["ranks"] else {**ending}


class Notes:
    """What the ranks and their tasks have left of one job, all of it read at once."""

    def __init__(self, record: dict[str, Any], folder: PurePath, transport: Transport = LOCAL) -> None:
        job_id, self._submitit = str(record["job_id"]), PurePosixPath(record["submitit"])
        marks = [f"{job_id}_{what}" for what in ("*_end.json", "saved_*", "cancelled")]
        self._id, self._record, self._run = job_id, record, PurePosixPath(record["run_dir"])
        self._found = transport.files(
            (folder, ENDED), (self._run, contract.STATUS_FILE), *((self._submitit, mark) for mark in marks)
        )
        self.ended = as_ending(parsed(self._found.get(PurePosixPath(folder / ENDED))))

    @property
    def said(self) -> records.Said | None:
        """status.json of this very job, which is trusted above exit codes; not one of another run in the same folder."""
        said = records.parse(parsed(self._found.get(self._run / contract.STATUS_FILE)), records.Said)
        return said if said is not None and said.get("job") == self._record["job"] else None

    @property
    def ends(self) -> dict[int, records.Note]:
        """What the tasks noted when their ranks ended: rank → {code, reason, restart, host, time}."""
        found: dict[int, records.Note] = {}
        for path, data in self._found.items():
            match = re.fullmatch(rf"{re.escape(self._id)}_(\d+)_end\.json", path.name)
            end = records.parse(parsed(data), records.Note) if match and path.parent == self._submitit else None
            if match and end is not None:
                found[int(match[1])] = end
        return found

    @property
    def saved(self) -> set[int]:
        """The starts after which the job had saved and got further: they do not count against `max_restarts`."""
        mark = f"{self._id}_saved_"
        found = [path.name.removeprefix(mark) for path in self._found if path.name.startswith(mark)]
        return {int(number) for number in found if number.isdecimal()}

    @property
    def cancelled(self) -> bool:
        return PurePosixPath(cancelled(self._record)) in self._found


def cancelled(record: dict[str, Any]) -> PurePath:
    return note(PurePosixPath(record["submitit"]), str(record["job_id"]), "cancelled")


def log(record: dict[str, Any], rank: int) -> PurePath:
    return PurePosixPath(record["submitit"]) / f"{record['job_id']}_{rank}_log.out"

"""Stand-ins for SLURM's commands that print what a test sets, and one job that was submitted earlier."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.helpers import lockstep
from tests.product import JobSpec

PROGRAM = """#!/bin/sh
name=$(basename "$0")
cd "$(dirname "$0")" || exit 1
echo "$name $*" >> called
case "$*" in *" -O "*) name=jobs;; esac
if [ -e "$name.down" ]; then cat "$name.down" >&2; exit 1; fi
if [ -e "$name.does" ]; then . "./$name.does"; fi
"""
DOWN = "error: Unable to contact slurm controller (connect failure)\n"
NO_CONFIGURATION = """sbatch: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host
sbatch: error: fetch_config: DNS SRV lookup failed
sbatch: fatal: Could not establish a configuration source
"""
NO_ACCOUNTING = "Slurm accounting storage is disabled\n"
NO_DATABASE = "sacct: error: Problem talking to the database: Connection refused\n"
UNKNOWN = "slurm_load_jobs error: Invalid job id specified\n"
RUNNING = "JobId=7 JobState=RUNNING"
COMMENT = "lockstep:mine.0123456789ab"
QUEUED = "JobId=8 JobState=PENDING Reason=Priority"
_COLUMNS = {
    "JobId": "", "JobState": "", "Reason": "None", "Restarts": "0", "ExitCode": "0", "Partition": "", "Requeue": "1",
    "EndTime": "N/A", "NodeList": "",
}  # fmt: skip
"""The fields of a job in the order of squeue's columns, and their defaults."""


@dataclass
class Site:
    """Stand-ins for SLURM's commands, and one job that was submitted earlier."""

    folder: Path
    env: dict[str, str]
    spec: JobSpec

    @property
    def file(self) -> str:
        return str(self.folder / "job.yaml")

    @property
    def job_folder(self) -> Path:
        return self.folder / "home/slurm/mine"

    def down(self, program: str, message: str = DOWN) -> None:
        """Makes a program fail. `jobs` is squeue with the columns that a status needs."""
        (self.folder / "bin" / f"{program}.down").write_text(message)

    def up(self, program: str) -> None:
        (self.folder / "bin" / f"{program}.down").unlink(missing_ok=True)

    def does(self, program: str, line: str) -> None:
        (self.folder / "bin" / f"{program}.does").write_text(line)

    def calls(self, program: str) -> list[str]:
        path = self.folder / "bin/called"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line for line in lines if line.split()[0] == program]

    def record(self, **more: Any) -> None:
        submitit = self.job_folder / "submitit"
        for folder in (self.job_folder.parent, self.job_folder, submitit):
            folder.mkdir(0o700, exist_ok=True)
        value = {
            "spec": self.spec.record(), "hash": self.spec.hash(), "run_dir": str(self.folder / "run"), "submitit": str(submitit),
            "job_id": "7", "created": "2026-01-01T00:00:00+00:00", "since": time.time() - 3600, "comment": COMMENT,
            "array_name": "mine", "element": None, "job": "mine.0123456789ab", **more,
        }  # fmt: skip
        (self.job_folder / "job.json").write_text(json.dumps(value))

    def shows(self, *jobs: str) -> None:
        """Sets the controller's answer: one text such as "JobId=7 JobState=RUNNING" for each job."""
        rows = [{**_COLUMNS, **dict(re.findall(r"(\w+)=(\S*)", job))} for job in jobs]
        for row in (
            rows
        ):  # squeue prints the status of wait(2), of which the exit code is the second byte, and reasons with spaces
            row["ExitCode"] = str(int(row["ExitCode"].partition(":")[0]) << 8)
            row["Reason"] = row["Reason"].replace("_", " ")
        self.does("jobs", "\n".join(f"printf '%-200s' {shlex.join(row.values())}; echo" for row in rows))

    def write_note(self, rank: int, code: int, reason: str = "", time: float = 0, restart: int = 0) -> None:
        """Notes how a rank's task ended."""
        host = f"node{rank // 2}"
        note = {"rank": rank, "code": code, "reason": reason, "host": host, "time": time, "restart": restart}
        (self.job_folder / f"submitit/7_{rank}_end.json").write_text(json.dumps(note))

    def status(self) -> dict[str, Any]:
        """Returns the status, and the command's exit code."""
        done = self.run("status", "slurm", "mine", "--json")
        return {**json.loads(done.stdout), "code": done.returncode}

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return lockstep(self.folder, *words, **self.env)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return made(tmp_path)


def made(tmp_path: Path) -> Site:
    """Returns a site in an empty folder."""
    (tmp_path / "bin").mkdir()
    for name in ("sbatch", "scancel", "squeue", "scontrol", "sacct", "sinfo"):
        (tmp_path / "bin" / name).write_text(PROGRAM)
        (tmp_path / "bin" / name).chmod(0o755)
    values = {"name": "mine", "command": ["true"], "run_dir": str(tmp_path / "run"), "grace_seconds": 5}
    (tmp_path / "job.yaml").write_text(json.dumps(values))
    (tmp_path / "home").mkdir(0o700)
    env = {"LOCKSTEP_HOME": str(tmp_path / "home"), "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    stand_in = Site(tmp_path, env, JobSpec.of(values))
    stand_in.down("sacct", NO_ACCOUNTING)
    stand_in.does("sbatch", "echo Submitted batch job 8")
    return stand_in

"""SLURM's commands of this machine as programs that say what a test has them say, and one job that was submitted there long ago."""

from __future__ import annotations

import json
import os
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
RUNNING = "JobId=7 JobName=mine JobState=RUNNING Restarts=0 Requeue=1 ExitCode=0:0"
COMMENT = "lockstep:mine.0123456789ab"


@dataclass
class Site:
    """SLURM's commands of this machine, and one job that was submitted there long ago."""

    folder: Path
    env: dict[str, str]
    spec: JobSpec

    @property
    def file(self) -> str:
        return str(self.folder / "job.yaml")

    @property
    def kept(self) -> Path:
        return self.folder / "home/slurm/mine"

    def down(self, program: str, said: str = DOWN) -> None:
        (self.folder / "bin" / f"{program}.down").write_text(said)

    def up(self, program: str) -> None:
        (self.folder / "bin" / f"{program}.down").unlink(missing_ok=True)

    def does(self, program: str, line: str) -> None:
        (self.folder / "bin" / f"{program}.does").write_text(line)

    def called(self, program: str) -> list[str]:
        found = self.folder / "bin/called"
        lines = found.read_text().splitlines() if found.exists() else []
        return [line for line in lines if line.split()[0] == program]

    def record(self, **more: Any) -> None:
        submitit = self.kept / "submitit"
        for folder in (self.kept.parent, self.kept, submitit):
            folder.mkdir(0o700, exist_ok=True)
        value = {
            "spec": self.spec.record(), "hash": self.spec.hash(), "run_dir": str(self.folder / "run"), "submitit": str(submitit),
            "job_id": "7", "created": "2026-01-01T00:00:00+00:00", "since": time.time() - 3600, "comment": COMMENT,
            "array_name": "mine", "element": None, "job": "mine.0123456789ab", **more,
        }  # fmt: skip
        (self.kept / "job.json").write_text(json.dumps(value))

    def shows(self, line: str) -> None:
        """The controller, of the job."""
        self.does("scontrol", f"echo '{line}'")

    def noted(self, rank: int, code: int, reason: str = "", time: float = 0, restart: int = 0) -> None:
        """How a rank's task has ended."""
        host = f"node{rank // 2}"
        note = {"rank": rank, "code": code, "reason": reason, "host": host, "time": time, "restart": restart}
        (self.kept / f"submitit/7_{rank}_end.json").write_text(json.dumps(note))

    def status(self) -> dict[str, Any]:
        """The job's, with the exit code of the command."""
        done = self.run("status", "slurm", "mine", "--json")
        return {**json.loads(done.stdout), "code": done.returncode}

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return lockstep(self.folder, *words, **self.env)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return made(tmp_path)


def made(tmp_path: Path) -> Site:
    """A site in an empty folder."""
    (tmp_path / "bin").mkdir()
    for name in ("sbatch", "scancel", "squeue", "scontrol", "sacct", "sinfo"):
        (tmp_path / "bin" / name).write_text(PROGRAM)
        (tmp_path / "bin" / name).chmod(0o755)
    values = {"name": "mine", "command": ["true"], "run_dir": str(tmp_path / "run"), "grace_seconds": 5}
    (tmp_path / "job.yaml").write_text(json.dumps(values))
    (tmp_path / "home").mkdir(0o700)
    env = {"LOCKSTEP_HOME": str(tmp_path / "home"), "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    found = Site(tmp_path, env, JobSpec.of(values))
    found.down("sacct", NO_ACCOUNTING)
    found.does("sbatch", "echo Submitted batch job 8")
    return found

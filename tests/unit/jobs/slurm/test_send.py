"""The script that submits: what comes in part changes nothing. A program stands in for sbatch."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from lockstep.jobs.slurm.send import COMMIT, NEW
from lockstep.jobs.slurm.transport.local import LOCAL

pytestmark = pytest.mark.promise("slurm-ssh")
TOKEN = "number-12ab"
FILES = {
    f"job/submitit/{NEW}_submission.sh": b"#!/bin/sh\n", f"job/submitit/{NEW}_0_submitted.pkl": b"\0\xff\nend\n" * 50,
    "job-0/job.json": b'{"job_id": null}\n', "job-0/.job.json": b'{"job_id": "number-12ab_0", "spec": {"job_id": null}}\n',
}  # fmt: skip
DATA = b"".join(b"%d %s\n%s" % (len(data), name.encode(), data) for name, data in FILES.items()) + b"end\n"


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "bin").mkdir()
    for name, value in (("PATH", f"{tmp_path}/bin:{os.environ['PATH']}"), ("SBATCH_PARTITION", "of an outer job")):
        monkeypatch.setenv(name, value)
    folder = tmp_path / "jobs of mine"
    (folder / "job-0").mkdir(parents=True)
    (folder / "job-0/job.json").write_text("old")
    return folder


def commit(jobs: Path, data: bytes, sbatch: str) -> Any:
    program = jobs.parent / "bin/sbatch"
    program.write_text(f"#!/bin/sh\necho called >> {jobs.parent}/called\n{sbatch}\n")
    program.chmod(0o755)
    return LOCAL.shell(COMMIT, jobs, "job", TOKEN, "lockstep:of-this", "job", "job-0", data=data, whole=True)


def test_a_submission_is_whole(jobs: Path) -> None:
    told = commit(jobs, DATA, f"env > {jobs.parent}/env; echo Submitted batch job 71 on cluster x")
    assert (told.returncode, told.stdout) == (0, b"71"), told
    assert json.loads((jobs / "job-0/job.json").read_text()) == {"job_id": "71_0", "spec": {"job_id": None}}
    assert (jobs / "job/submitit/71_0_submitted.pkl").read_bytes() == FILES[f"job/submitit/{NEW}_0_submitted.pkl"]
    left = sorted(str(path.relative_to(jobs)) for path in jobs.rglob("*") if path.is_file())
    names = ("71_0_submitted.pkl", "71_submission.sh", "new_submission.sh")
    assert left == ["job-0/job.json", *(f"job/submitit/{name}" for name in names)]
    assert (jobs / "job/submitit").stat().st_mode & 0o777 == 0o700
    assert "SBATCH_PARTITION" not in (jobs.parent / "env").read_text()


@pytest.mark.parametrize("length", [0, 3, 40, 70, len(DATA) // 2, len(DATA) - 5, len(DATA) - 4, len(DATA)])
def test_one_that_came_in_part_or_is_refused_takes_nothing_away(jobs: Path, length: int) -> None:
    told = commit(jobs, DATA[:length], "echo 'sbatch: error: no' >&2; exit 1")
    whole = length == len(DATA)
    assert told.returncode == (3 if whole else 1) and (b"error: no" if whole else b"in part") in told.stderr
    assert (jobs.parent / "called").exists() == whole
    assert (
        sorted(entry.name for entry in jobs.iterdir()) == ["job-0"] and (jobs / "job-0/job.json").read_text() == "old"
    )

"""The script that submits: what comes in part changes nothing. A program stands in for sbatch."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from lockstep.jobs.slurm.send import COMMIT, NEW
from lockstep.jobs.slurm.transport.local import LOCAL

TOKEN = "number-12ab"
FILES = {
    f"job/submitit/{NEW}_submission.sh": b"#!/bin/sh\n", f"job/submitit/{NEW}_0_submitted.pkl": b"\0\xff\nend\n" * 50,
    f"job/submitit/{NEW}_1_submitted.pkl": b"", "job-0/job.json": b'{"job_id": null}\n',
    "job-0/.job.json": b'{"job_id": "number-12ab_0", "spec": {"job_id": null}}\n', "job-1/job.json": b'{"job_id": null}\n',
    "job-1/.job.json": b'{"job_id": "number-12ab_1"}\n',
}  # fmt: skip
DATA = b"".join(b"%d %s\n%s" % (len(data), name.encode(), data) for name, data in FILES.items()) + b"end\n"


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("SBATCH_PARTITION", "of an outer job")
    monkeypatch.setenv("LOCKSTEP_RESTARTS", "7")
    folder = tmp_path / "jobs of mine"
    (folder / "job-0").mkdir(parents=True)
    (folder / "job-0/job.json").write_text("old")
    sbatch(tmp_path, 'env > "$(dirname "$0")/env"; echo Submitted batch job 71 on cluster x')
    return folder


def sbatch(folder: Path, line: str) -> None:
    (folder / "bin/sbatch").write_text(f"#!/bin/sh\necho called >> {folder}/called\n{line}\n")
    (folder / "bin/sbatch").chmod(0o755)


def commit(jobs: Path, data: bytes) -> Any:
    return LOCAL.shell(COMMIT, jobs, "job", TOKEN, "lockstep:of-this", "job", "job-0", "job-1", data=data, whole=True)


def test_a_submission_is_whole(jobs: Path) -> None:
    told = commit(jobs, DATA)
    assert (told.returncode, told.stdout) == (0, b"71"), told
    assert json.loads((jobs / "job-0/job.json").read_text()) == {"job_id": "71_0", "spec": {"job_id": None}}
    assert json.loads((jobs / "job-1/job.json").read_text()) == {"job_id": "71_1"}
    assert (jobs / "job/submitit/71_0_submitted.pkl").read_bytes() == FILES[f"job/submitit/{NEW}_0_submitted.pkl"]
    assert sorted(entry.name for entry in jobs.iterdir()) == ["job", "job-0", "job-1"]
    assert sorted(entry.name for entry in (jobs / "job-0").iterdir()) == ["job.json"]
    assert sorted(entry.name for entry in (jobs / "job/submitit").iterdir()) == [
        "71_0_submitted.pkl", "71_1_submitted.pkl", "71_submission.sh", "new_submission.sh"
    ]  # fmt: skip
    assert (jobs / "job/submitit").stat().st_mode & 0o777 == 0o700
    variables = {line.partition("=")[0] for line in (jobs.parent / "bin/env").read_text().splitlines()}
    assert not {"SBATCH_PARTITION", "LOCKSTEP_RESTARTS"} & variables


@pytest.mark.parametrize("length", [0, 3, 40, 70, len(DATA) // 2, len(DATA) - 5, len(DATA) - 4])
def test_a_submission_that_came_in_part_is_none(jobs: Path, length: int) -> None:
    told = commit(jobs, DATA[:length])
    assert told.returncode == 1 and b"in part" in told.stderr
    assert not (jobs.parent / "called").exists()
    assert (
        sorted(entry.name for entry in jobs.iterdir()) == ["job-0"] and (jobs / "job-0/job.json").read_text() == "old"
    )


def test_what_sbatch_refuses_takes_nothing_away(jobs: Path) -> None:
    sbatch(jobs.parent, "echo 'sbatch: error: no' >&2; exit 1")
    told = commit(jobs, DATA)
    assert (told.returncode, told.stderr) == (3, b"sbatch: error: no\n")
    assert (
        sorted(entry.name for entry in jobs.iterdir()) == ["job-0"] and (jobs / "job-0/job.json").read_text() == "old"
    )

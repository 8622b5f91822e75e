"""Records that cannot be read, and the report on a run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lockstep.jobs import records
from tests.processes import PYTHON, run


def test_why_an_attempt_has_ended_that_another_may_follow() -> None:
    reason = "the run diverged at step 263: rank 3: loss is not finite"
    status = records.RunStatus(code=1, step=262, attempt=1, reason=reason)
    assert records.progress(status) == f"step 262, the attempt has ended: {reason}"
    assert records.progress(status.model_copy(update={"code": 0, "reason": "complete"})) == "step 262, ending"
    saved = "ended early by SIGTERM at step 7"
    status = records.RunStatus(code=75, step=7, attempt=1, reason=f"{saved}: run the same command again to resume")
    assert records.progress(status) == f"step 7, the attempt has ended: {saved}", "a job starts again by itself"
    running = records.RunStatus(code=None, step=250, attempt=2, reason="running", restart=1, hang="no step for 10 s")
    assert records.progress(running) == "step 250, restart 1; no step for 10 s"


def test_a_file_system_that_does_not_answer_is_no_damaged_record(tmp_path: Path) -> None:
    """A process without a free descriptor reads no record. A wait continues then, and no message asks to remove the job's folder."""
    program = """
import os, resource, sys
from pathlib import Path
from lockstep.jobs import records
from lockstep.jobs.status import Unreachable
folder = Path(sys.argv[1])
(folder / "j").mkdir(mode=0o700)
(folder / "j" / records.JOB).write_text("{}")
free = os.dup(0)
os.close(free)
for spare in (0, 4):
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + spare, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    try:
        records.job_record(folder, "j", records.LocalJob)
    except Exception as error:
        print(type(error).__name__, error)
"""
    tmp_path.chmod(0o700)
    result = run([PYTHON, "-c", program, str(tmp_path)])
    without, later = result.output.splitlines()
    assert result.code == 0 and without.startswith("Unreachable") and "job.json is damaged" in later, result.output


def test_the_folder_of_jobs_is_the_users_alone_whatever_the_umask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKSTEP_HOME", str(tmp_path / "state/home"))
    before = os.umask(0)
    try:
        records.make(records.home() / "places/local")
    finally:
        os.umask(before)
    folders = [tmp_path / "state", records.home(), records.home() / "places", records.home() / "places/local"]
    assert [path.stat().st_mode & 0o777 for path in folders] == [0o700] * 4

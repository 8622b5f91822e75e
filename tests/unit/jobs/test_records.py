"""The permitted owners of a folder above the jobs, and the report on a run."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from contextlib import nullcontext
from pathlib import Path

import pytest

from lockstep.jobs import records
from lockstep.training.contract import UserError
from tests.processes import PYTHON, run


def test_a_users_private_group_has_no_other_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where each user has one, folders are made with 775."""
    me = pwd.struct_passwd(("ann", "x", 1000, 1000, "", "/home/ann", "/bin/sh"))
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: me)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    for members, name, private in (
        ([], "ann", True),
        (["ann"], "ann", True),
        (["ben"], "ann", False),
        ([], "staff", False),
    ):
        monkeypatch.setattr(grp, "getgrgid", lambda gid, group=(name, "x", 1000, members): grp.struct_group(group))
        for mode, refused in ((0o775, not private), (0o777, True), (0o755, False), (0o1777, False)):
            about = os.stat_result((stat.S_IFDIR | mode, 0, 0, 1, 1000, 1000, 0, 0, 0, 0))
            with pytest.raises(UserError, match="can be changed by other users") if refused else nullcontext():
                records._check_parent(Path("/home/ann"), about)


def test_a_link_leads_to_no_folder_that_others_can_write(tmp_path: Path) -> None:
    """And what is missing is made, behind links, too."""
    tmp_path.chmod(0o700)
    (tmp_path / "shared/mine").mkdir(parents=True, mode=0o700)
    (tmp_path / "way").symlink_to("shared/../shared/mine")
    assert records.make(tmp_path / "way/a/jobs").is_dir()
    (tmp_path / "emptied").symlink_to("later")
    assert records.make(tmp_path / "emptied/jobs").is_dir()
    (tmp_path / "shared").chmod(0o777)
    for folder in (tmp_path / "way/a/jobs", tmp_path / "way/jobs"):
        with pytest.raises(UserError, match=r"shared can be changed by other users \(mode 777\)"):
            records.make(folder)
    (tmp_path / "round").symlink_to("round")
    with pytest.raises(UserError, match="Too many levels of symbolic links"):
        records.make(tmp_path / "round/jobs")


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
    """A process without a free descriptor reads no record. A wait continues then, and nobody is told to remove the job's folder."""
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
    done = run([PYTHON, "-c", program, str(tmp_path)])
    without, later = done.output.splitlines()
    assert done.code == 0 and without.startswith("Unreachable") and "job.json is damaged" in later, done.output

"""Whose a folder above the jobs may be, and what is said of a run."""

from __future__ import annotations

import grp
import pwd
from pathlib import Path

import pytest

from lockstep.jobs import records
from lockstep.training.contract import UserError


def test_a_group_of_ones_own_is_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where each user has one, folders are made with 775."""
    me = pwd.struct_passwd(("ann", "x", 1000, 1000, "", "/home/ann", "/bin/sh"))
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: me)
    for members, name, mine in ([], "ann", True), (["ann"], "ann", True), (["ben"], "ann", False), ([], "staff", False):
        monkeypatch.setattr(grp, "getgrgid", lambda gid, found=(name, "x", 1000, members): grp.struct_group(found))
        assert records._is_mine(1000, 1000) is mine
    records._judge_step(Path("/home/ann"), 1000, 0o775, 1000, group_is_mine=True)
    for mode, group_is_mine in ((0o775, False), (0o777, True)):
        with pytest.raises(UserError, match="can be changed by other users"):
            records._judge_step(Path("/home/ann"), 1000, mode, 1000, group_is_mine)


def test_why_an_attempt_has_ended_that_another_may_follow() -> None:
    said = records.Said(code=1, step=262, attempt=1, reason="the run diverged at step 263: rank 3: loss is not finite")
    assert records.progress(said) == f"step 262, the attempt has ended: {said['reason']}"
    assert records.progress({**said, "code": 0, "reason": "complete"}) == "step 262, ending"
    saved = "ended early by SIGTERM at step 7"
    said = records.Said(code=75, step=7, attempt=1, reason=f"{saved}: run the same command again to resume")
    assert records.progress(said) == f"step 7, the attempt has ended: {saved}", "a job starts again by itself"
    running = records.Said(code=None, step=250, attempt=2, reason="running", restart=1, hang="no step for 10 s")
    assert records.progress(running) == "step 250, restart 1; no step for 10 s"

"""Whose a folder above the jobs may be."""

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

"""Somebody else who may write in a run directory, as in one below a folder of a team's, while the run goes on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.events import events
from tests.processes import poll, require
from tests.runs import Job

NOBODY = 65534


@pytest.mark.promise("other-users")
def test_checkpoints_go_nowhere_where_a_link_of_another_user_leads(job: Job, tmp_path: Path) -> None:
    require(os.geteuid() == 0, "needs root, to act as another user")
    job.ranks = 1
    victim, held = tmp_path / "victim", tmp_path / "held"
    theirs = victim / "step-00000001/state.json"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("mine\n")
    held.touch()
    folder = job.run_dir / "checkpoints"
    with job.started(LOCKSTEP_TEST_FATE="0:5:WAIT", LOCKSTEP_TEST_HELD=str(held)) as gang:
        poll(lambda: folder.exists() and not list(folder.glob(".*")), what="a checkpoint")
        folder.rename(tmp_path / "checkpoints")
        folder.symlink_to(victim)
        os.chown(folder, NOBODY, NOBODY, follow_symlinks=False)
        held.unlink()
        done = gang.wait(120)
    assert "a checkpoint could not be saved, the run continues" in done.output, done
    assert any(event["event"] == "checkpoint_failed" for event in events(job.run_dir)), done
    assert [path.name for path in victim.iterdir()] == ["step-00000001"], "nothing was written or removed there"
    assert theirs.read_text() == "mine\n"

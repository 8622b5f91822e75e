"""A job of the local backend that ends in the very moment in which somebody asks about it."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.jobs.local.backend import LocalBackend
from lockstep.jobs.local.supervise import ENDED
from lockstep.jobs.spec.model import JobSpec
from tests.processes import ROOT, poll


class Slow(LocalBackend):
    """Asked whether a job's processes live, it answers when they have just ended, as a busy machine would."""

    def _supervised(self, folder: Path) -> bool:  # type: ignore[override]
        poll((folder / ENDED).exists, 60, "the end of the job")
        poll(lambda: not LocalBackend._supervised(folder), 60, "the end of its processes")
        return LocalBackend._supervised(folder)


def test_a_job_that_ends_between_two_questions_has_ended_and_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    backend = Slow(tmp_path / "home")
    backend.submit(JobSpec(name="brief", command=["python", "-c", "pass"], max_restarts=0, ranks_per_node=1))
    assert backend.status("brief").state == "succeeded"

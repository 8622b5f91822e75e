"""The run directory: whose it is, who may use it, and what is recorded in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import filelock
import pytest

from lockstep.training.observe import rundir
from tests.warm.gang import python


@pytest.mark.promise("fresh")
def test_a_lock_is_of_the_directory_that_has_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another start with `fresh` renames the directory at the moment at which its lock is taken."""
    path, aside = tmp_path / "run", tmp_path / "run.old-1"

    class Renamed(filelock.FileLock):
        def acquire(self, *args: Any, **more: Any) -> Any:
            lock = super().acquire(*args, **more)
            if not aside.exists():
                path.rename(aside)
            return lock

    monkeypatch.setattr(filelock, "FileLock", Renamed)
    with pytest.raises(filelock.Timeout):
        rundir._locked(path, 10.0)
    filelock.FileLock(aside / ".lock", timeout=0).acquire().lock.release()


STARVED = """
import os, subprocess, time
from lockstep.training.observe.rundir import Background
late = []
disk = Background("disk", lambda: late.append("late"))
pause = f"kill -STOP {os.getpid()}; sleep 0.6; kill -CONT {os.getpid()}"
done = disk.run(lambda: subprocess.run(["sh", "-c", pause]), seconds=0.4)
print(done, disk.run(lambda: time.sleep(30), seconds=0.2), late)
os._exit(0)
"""


def test_a_disk_is_not_blamed_for_time_in_which_the_process_had_no_cpu() -> None:
    assert python("-c", STARVED).output == "True False ['late']\n"

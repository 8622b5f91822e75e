"""The launcher's temporary folder, while others start and look for abandoned ones."""

from __future__ import annotations

import contextlib
from pathlib import Path

from tests.processes import PYTHON, clean_env, started

MANY = """
import os, time
from lockstep.training import files
until, made, lost = time.monotonic() + 3, 0, 0
while time.monotonic() < until:
    with files.temporary_folder("lockstep-test-") as path:
        made += 1
        lost += not os.path.exists(os.path.join(path, files.LOCK))
print(made, lost)
"""


def test_no_start_takes_the_folder_of_another_for_an_abandoned_one(tmp_path: Path) -> None:
    """Three processes start all the time: each looks for folders to remove while the others make theirs."""
    env = clean_env(TMPDIR=str(tmp_path))
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(started([PYTHON, "-c", MANY], env)) for _ in range(3)]
        outputs = [process.communicate(timeout=60)[0] for process in processes]
    counts = [output.split() for output in outputs]
    assert [lost for _, lost in counts] == ["0"] * 3 and all(int(made) > 10 for made, _ in counts), outputs
    assert list(tmp_path.iterdir()) == []

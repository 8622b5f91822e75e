"""What most tests rest on: ranks that are forked from the server train what ranks from a shell do."""

from __future__ import annotations

import contextlib
from pathlib import Path

from tests.conftest import Undisturbed
from tests.processes import PYTHON, free_port, started
from tests.runs import Job, assert_same


def test_forked_ranks_train_what_ranks_from_a_shell_do(
    undisturbed: Undisturbed, data_root: Path, tmp_path: Path
) -> None:
    job = Job(tmp_path / "run", data_root, 2)
    port = str(free_port())
    with contextlib.ExitStack() as stack:
        ranks = []
        for rank in "01":
            place = {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": port}
            env = job.env(MASTER_ADDR="127.0.0.1", **place)
            ranks.append(stack.enter_context(started([PYTHON, "-m", "lockstep.training", *job.words], env)))
        outputs = [process.communicate(timeout=180)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], outputs
    assert_same(job.run_dir, undisturbed(2))

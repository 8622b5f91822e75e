"""A training loop of one's own as a job: a signal to one rank saves all, SLURM starts it again, and it ends in the same bits."""

from __future__ import annotations

import json

from tests.own.job import SCRIPT, OwnJob, assert_same
from tests.processes import PYTHON
from tests.slurm.conftest import Bench


def test_a_signal_to_one_rank_of_ones_own_loop(bench: Bench) -> None:
    calm, disturbed = (OwnJob(bench.folder / name, 2, "batches", "sync.name=flat") for name in ("calm", "own"))
    assert calm.go().code == 0
    spec = bench.command(
        "own", "", command=[PYTHON, SCRIPT, str(bench.folder / "elsewhere"), "batches"], grace_seconds=30,
        run_dir=str(disturbed.run_dir),
        overrides={"sync.name": "flat", "checkpoint.every_steps": 2, "checkpoint.keep": 50},
        env={
            **disturbed.variables, "LOCKSTEP_TEST_FATE": "1:13:TERM", "LOCKSTEP_TEST_ONCE": str(bench.folder / "once"),
        },
    )  # fmt: skip
    bench.backend.submit(spec)
    found = bench.wait("own", 120)
    assert (found.state, found.code) == ("succeeded", 0), found
    assert json.loads((disturbed.run_dir / "status.json").read_text())["attempt"] == 2
    assert_same(disturbed, calm)
    assert not (bench.folder / "elsewhere").exists(), "the job says where the run is kept"

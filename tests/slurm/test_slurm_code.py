"""Code of one's own on a real SLURM: what was submitted is what runs, pending or requeued."""

from __future__ import annotations

import json
import shutil

from lockstep.jobs.code import store
from lockstep.jobs.slurm.backend import SlurmBackend
from lockstep.jobs.spec.model import JobSpec
from tests.processes import PYTHON
from tests.slurm.conftest import Bench, lockstep

TRAIN = """
import os, sys, helper, lockstep.training
print(helper.WORD, os.environ["LOCKSTEP_CODE"], os.getcwd(), os.environ["RANK"], flush=True)
"""


def test_a_waiting_job_runs_what_was_submitted_whatever_is_edited_meanwhile(bench: Bench) -> None:
    folder = bench.folder / "own"
    folder.mkdir()
    (folder / "train.py").write_text(TRAIN)
    (folder / "helper.py").write_text("WORD = 'submitted'\n")
    values = {
        "name": "own", "command": [PYTHON, "train.py"], "code": str(folder), "nodes": 2, "ranks_per_node": 2, "max_restarts": 0,
        "run_dir": str(bench.folder / "run"), "memory": "1Gi", "slurm": {"patch": {"begin": "now+1hour"}},
        "env": {"PYTHONPATH": str(bench.folder / "elsewhere")},
    }  # fmt: skip
    (bench.folder / "own.json").write_text(json.dumps({**values, "slurm": {}}))
    done = lockstep("doctor", "slurm", str(bench.folder / "own.json"))
    node = next(line for line in done.stdout.splitlines() if line.startswith("node "))
    assert node.split()[1] == "ok" and "has not been read" not in done.stdout, done.stdout + done.stderr
    (bench.folder / "elsewhere").mkdir()
    (bench.folder / "elsewhere/helper.py").write_text("WORD = 'of another folder'\n")
    bench.backend.submit(JobSpec.of(values))
    bench.becomes("own", "pending")
    (folder / "helper.py").write_text("WORD = 'edited'\n")
    shutil.rmtree(folder)
    bench.cluster.ask("scontrol", "update", f"jobid={bench.backend.job_id('own')}", "starttime=now")
    assert bench.wait("own").state == "succeeded", "\n".join(bench.backend.logs("own"))
    identity = bench.backend.require("own").plain["code"]["hash"]
    copy = store.folder(identity)
    assert sorted(bench.backend.logs("own")) == [
        f"[rank {rank}] submitted {identity} {copy} {rank}" for rank in range(4)
    ]


def test_nodes_that_do_not_see_the_copy_say_so(bench: Bench) -> None:
    folder = bench.folder / "own"
    folder.mkdir()
    (folder / "train.py").write_text("print('hi')\n")
    values = {
        "name": "own", "command": [PYTHON, "train.py"], "code": str(folder), "run_dir": str(bench.folder / "run"), "max_restarts": 3,
        "memory": "1Gi", "slurm": {"patch": {"begin": "now+1hour"}},
    }  # fmt: skip
    bench.backend.submit(JobSpec.of(values))
    store.folder(bench.backend.require("own").plain["code"]["hash"]).rename(bench.folder / "gone")
    bench.cluster.ask("scontrol", "update", f"jobid={bench.backend.job_id('own')}", "starttime=now")
    found = bench.wait("own")
    assert (
        found.state == "failed"
        and found.code == 2
        and "LOCKSTEP_HOME must be a folder that the nodes see" in found.reason
    ), found
    script = next((SlurmBackend().folder / "own/submitit").glob("*_submission.sh")).read_text()
    assert str(bench.folder / "home/code") in script

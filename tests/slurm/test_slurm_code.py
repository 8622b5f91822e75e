"""Code of one's own on a real SLURM: what was submitted is what runs, pending or requeued."""

from __future__ import annotations

import json
import shutil

import pytest

from tests import product
from tests.processes import PYTHON
from tests.slurm.conftest import LATER, Bench, lockstep

TRAIN = """
import os, sys, helper, lockstep.training
print(helper.WORD, os.environ["LOCKSTEP_CODE"], os.getcwd(), os.environ["RANK"], flush=True)
"""


@pytest.mark.promise("code-travels")
def test_a_waiting_job_runs_what_was_submitted_whatever_is_edited_meanwhile(bench: Bench) -> None:
    folder, elsewhere = bench.folder / "own", bench.folder / "elsewhere"
    for path in (folder, elsewhere):
        path.mkdir()
    (folder / "train.py").write_text(TRAIN)
    (folder / "helper.py").write_text("WORD = 'submitted'\n")
    (elsewhere / "helper.py").write_text("WORD = 'of another folder'\n")

    def spec(name: str) -> product.JobSpec:
        more = {"command": [PYTHON, "train.py"], "code": str(folder), "nodes": 2, "slurm": LATER, "memory": "1Gi"}
        return bench.command(name, "", env={"PYTHONPATH": str(elsewhere)}, **more)

    (bench.folder / "own.json").write_text(json.dumps({**spec("own").plain(), "slurm": {}}))
    done = lockstep("doctor", "slurm", str(bench.folder / "own.json"))
    node = next(line for line in done.stdout.splitlines() if line.startswith("node "))
    assert node.split()[1] == "ok" and "has not been read" not in done.stdout, done.stdout + done.stderr
    bench.backend.submit(spec("own"))
    bench.becomes("own", "pending")
    (folder / "helper.py").write_text("WORD = 'edited'\n")
    bench.backend.submit(spec("unseen"))
    shutil.rmtree(folder)
    bench.cluster.begins(bench.backend.job_id("own"))
    assert bench.wait("own").state == "succeeded", "\n".join(bench.backend.logs("own"))
    identity = bench.backend.require("own").plain["code"]["hash"]
    where = f"submitted {identity} {product.kept_code(identity)}"
    assert sorted(bench.backend.logs("own")) == [f"[rank {rank}] {where} {rank}" for rank in range(4)]
    # Nodes that do not see the copy say so.
    product.kept_code(bench.backend.require("unseen").plain["code"]["hash"]).rename(bench.folder / "gone")
    bench.cluster.begins(bench.backend.job_id("unseen"))
    found = bench.wait("unseen")
    assert (found.state, found.code) == ("failed", 2) and "LOCKSTEP_HOME" in found.reason, found

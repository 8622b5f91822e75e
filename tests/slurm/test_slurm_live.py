"""`live: true` on a real SLURM: a task is a node's launcher. Ranks and nodes are lost, and the survivors end with the weights
of a run without loss."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.events import events
from tests.processes import poll, processes
from tests.slurm.conftest import Bench
from tests.slurm.test_slurm_exec import exec_output
from tests.slurm.trainings import SETTINGS, Training, setting_words, train_here

pytestmark = pytest.mark.promise("survivors", "slurm-survives")

EXACT = {**SETTINGS, "sync.name": "exact", "epochs": 5}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, data_root: Path) -> Path:
    """The same training on one rank of this machine, without SLURM."""
    run = tmp_path_factory.mktemp("whole") / "run"
    return train_here(run, 1, *setting_words(EXACT), f"data.root={data_root}")


class Live(Training):
    """Has 2 nodes × 2 ranks."""

    def __init__(self, bench: Bench, name: str, **more: object) -> None:
        super().__init__(bench, name, live=True, ranks_per_node=2, cpus=2, overrides=EXACT, **more)

    def processes(self, *words: str, **variables: str) -> list[int]:
        """Returns the job's processes with these words in their command line and these variables, but not their children."""
        pids, parents = list[int](), {pid: parent for pid, _, parent, _ in processes()}
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                line = (entry / "cmdline").read_bytes().split(b"\0")
                env = (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            marks = {f"{name}={value}".encode() for name, value in {"SLURM_JOB_ID": self.job_id, **variables}.items()}
            if marks <= set(env) and all(word.encode() in line for word in words):
                pids.append(int(entry.name))
        return [pid for pid in pids if parents.get(pid) not in pids]


def test_a_rank_then_a_node_is_lost_and_the_others_continue(bench: Bench, undisturbed: Path) -> None:
    job = Live(bench, "going", max_restarts=0, at=14)  # after the first step: before it, a loss ends the job
    job.hold.wait()
    for rank in (0, 3):
        place = exec_output("going", "echo $RANK $WORLD_SIZE $LOCAL_RANK $SLURMD_NODENAME", rank).split()
        assert place[:3] == [str(rank), "4", str(rank % 2)] and place[3].endswith(str(1 + rank // 2)), place
    (lost,) = job.processes("run", RANK="2")
    os.kill(lost, signal.SIGKILL)
    job.hold.at(40)
    bench.becomes("going", "running", 60, "3 of 4 ranks")
    job.hold.wait()
    (launcher,) = job.processes("launch", SLURM_NODEID="1")
    os.kill(launcher, signal.SIGKILL)
    status = job.ends_like(undisturbed)
    assert status.ranks[0].restarts == 0 and job.attempts() == 1, status
    assert status.goodput is not None and status.goodput["restarts"] == 0, status
    assert [event["rank"] for event in events(job.run, "rank_lost")] == [2, 3], events(job.run)
    lines = list(bench.backend.logs("going"))
    assert any(line.startswith("launch: rank 2 was ended by SIGKILL") for line in lines), lines
    rank_lines = [line.removeprefix("[rank 0] ") for line in lines if line.startswith("[rank 0] ")]
    assert rank_lines and list(bench.backend.logs("going", rank=0)) == rank_lines
    assert list(bench.backend.logs("going", rank=0, last=2)) == rank_lines[-2:]


def test_all_save_at_slurms_signal_and_when_the_job_is_cancelled(bench: Bench) -> None:
    job = Live(bench, "moved", max_restarts=0)
    job.hold.wait()
    bench.signal("moved")
    job.saves(1)
    bench.becomes("moved", "restarting")
    job.hold.at(6)  # the next start waits there
    job.hold.wait()
    assert job.resumed_at() == job.saved_at()
    status = bench.backend.cancel("moved")
    assert (status.state, status.code, status.ranks[0].restarts) == ("cancelled", 75, 1), status
    assert len(job.saved_at()) == 2, events(job.run)


def test_restarts_by_the_launcher_and_by_slurm_are_one_count(bench: Bench) -> None:
    job = Live(bench, "counted", nodes=1, max_restarts=1)
    job.hold.wait()
    (lost,) = job.processes("run", RANK="1")
    os.kill(lost, signal.SIGKILL)
    poll(
        lambda: "was ended by SIGKILL" in "".join(bench.backend.logs("counted")), 60, "the loss, and so the replacement"
    )
    (launcher,) = job.processes("launch")
    os.kill(launcher, signal.SIGKILL)
    status = bench.wait("counted", 120)
    assert (status.state, status.code) == ("failed", 1), status
    assert job.attempts() == 1, "SLURM has not started it again"

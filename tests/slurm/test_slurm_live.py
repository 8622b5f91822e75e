"""`live: true` on a real SLURM: a task is a node's launcher. Ranks and nodes are lost, and the others end in the weights of a run
without loss."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.events import events
from tests.processes import poll, processes
from tests.slurm.conftest import Bench
from tests.slurm.test_slurm_exec import said
from tests.slurm.trainings import SETTINGS, Training, setting_words, trained_here

pytestmark = pytest.mark.promise("survivors", "slurm-survives")

EXACT = {**SETTINGS, "sync.name": "exact", "epochs": 5}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, data_root: Path) -> Path:
    """The same training on one rank of this machine, without SLURM."""
    run = tmp_path_factory.mktemp("whole") / "run"
    return trained_here(run, 1, *setting_words(EXACT), f"data.root={data_root}")


class Live(Training):
    """On 2 nodes × 2 ranks."""

    def __init__(self, bench: Bench, name: str, **more: object) -> None:
        super().__init__(bench, name, live=True, ranks_per_node=2, cpus=2, overrides=EXACT, **more)

    def processes(self, *words: str, **variables: str) -> list[int]:
        """Those of this job with these words in their command line, and these variables; not what they have just forked."""
        found, parents = list[int](), {pid: parent for pid, _, parent, _ in processes()}
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                line = (entry / "cmdline").read_bytes().split(b"\0")
                env = (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            marks = {f"{name}={value}".encode() for name, value in {"SLURM_JOB_ID": self.job_id, **variables}.items()}
            if marks <= set(env) and all(word.encode() in line for word in words):
                found.append(int(entry.name))
        return [pid for pid in found if parents.get(pid) not in found]


def test_a_rank_then_a_node_is_lost_and_the_others_continue(bench: Bench, undisturbed: Path) -> None:
    job = Live(bench, "going", max_restarts=0, at=14)  # beyond the first step, until which a loss ends all
    job.hold.reached()
    for rank in (0, 3):
        place = said("going", "echo $RANK $WORLD_SIZE $LOCAL_RANK $SLURMD_NODENAME", rank).split()
        assert place[:3] == [str(rank), "4", str(rank % 2)] and place[3].endswith(str(1 + rank // 2)), place
    (lost,) = job.processes("run", RANK="2")
    os.kill(lost, signal.SIGKILL)
    job.hold.at(40)
    bench.becomes("going", "running", 60, "3 of 4 ranks")
    job.hold.reached()
    (launcher,) = job.processes("launch", SLURM_NODEID="1")
    os.kill(launcher, signal.SIGKILL)
    found = job.ends_like(undisturbed)
    assert found.ranks[0].restarts == 0 and job.attempts() == 1, found
    assert found.goodput is not None and found.goodput["restarts"] == 0, found
    assert [event["rank"] for event in events(job.run, "rank_lost")] == [2, 3], events(job.run)
    whole = list(bench.backend.logs("going"))
    assert any(line.startswith("launch: rank 2 was ended by SIGKILL") for line in whole), whole
    own = [line.removeprefix("[rank 0] ") for line in whole if line.startswith("[rank 0] ")]
    assert own and list(bench.backend.logs("going", rank=0)) == own
    assert list(bench.backend.logs("going", rank=0, last=2)) == own[-2:]


def test_all_save_at_slurms_signal_and_when_the_job_is_cancelled(bench: Bench) -> None:
    job = Live(bench, "moved", max_restarts=0)
    job.hold.reached()
    bench.signal("moved")
    job.saves(1)
    bench.becomes("moved", "restarting")
    job.hold.at(6)  # where the next start stands still
    job.hold.reached()
    assert job.resumed_at() == job.saved_at()
    found = bench.backend.cancel("moved")
    assert (found.state, found.code, found.ranks[0].restarts) == ("cancelled", 75, 1), found
    assert len(job.saved_at()) == 2, events(job.run)


def test_restarts_by_the_launcher_and_by_slurm_are_one_count(bench: Bench) -> None:
    job = Live(bench, "counted", nodes=1, max_restarts=1)
    job.hold.reached()
    (lost,) = job.processes("run", RANK="1")
    os.kill(lost, signal.SIGKILL)
    poll(
        lambda: "was ended by SIGKILL" in "".join(bench.backend.logs("counted")), 60, "the loss, and so the replacement"
    )
    (launcher,) = job.processes("launch")
    os.kill(launcher, signal.SIGKILL)
    found = bench.wait("counted", 120)
    assert (found.state, found.code) == ("failed", 1), found
    assert job.attempts() == 1, "SLURM has not started it again"

"""A job on SLURM survives each disturbance, and its weights equal the undisturbed run's bit by bit."""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path

import pytest

from tests.processes import PYTHON, poll
from tests.slurm.conftest import Bench
from tests.slurm.test_slurm_exec import IN_APPTAINER, stand_in
from tests.slurm.trainings import SETTINGS, Training, setting_words, train_here

pytestmark = pytest.mark.promise("slurm-survives")


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, data_root: Path) -> Path:
    """The same training on 2 ranks of this machine, without SLURM."""
    run = tmp_path_factory.mktemp("whole") / "run"
    return train_here(run, 2, *setting_words(SETTINGS), f"data.root={data_root}")


def test_preempted_and_out_of_time_more_often_than_it_may_fail(bench: Bench, undisturbed: Path) -> None:
    """A higher partition preempts the job, then its time limit ends. Neither costs a restart.

    SLURM checks every 30 s, and may signal 30 s early."""
    job = Training(bench, "moved", max_restarts=0)
    job.hold.wait()
    urgent = {"partition": "urgent", "patch": {"exclusive": True}}
    bench.backend.submit(bench.command("high", "print('urgent work')", nodes=2, ranks_per_node=1, slurm=urgent))
    job.saves(1)
    job.hold.at(6)  # the next start waits there
    assert bench.wait("high", 90).state == "succeeded"
    job.hold.wait()
    bench.cluster.ask("scontrol", "update", f"jobid={job.job_id}", "timelimit=1")
    job.saves(2)
    bench.becomes("moved", "restarting")
    bench.cluster.ask("scontrol", "update", f"jobid={job.job_id}", "timelimit=60")
    status = job.ends_like(undisturbed)
    assert status.ranks[0].restarts == 2 and job.resumed_at() == job.saved_at() and job.attempts() == 3, status


def test_the_controller_is_restarted_a_job_requeued_by_hand_and_a_node_powered_off(
    bench: Bench, undisturbed: Path
) -> None:
    """The ranks train on without the controller. After a requeue or a lost node, the next start resumes from the last checkpoint."""
    job = Training(bench, "unlucky")
    job.hold.wait()
    # The controller writes its state some seconds after a change. A controller that is killed before forgets the job.
    changed = time.time()
    bench.cluster.ask("scontrol", "update", f"jobid={job.job_id}", "admincomment=here")
    state = bench.cluster.folder / "state/job_state"

    def written() -> bool:
        try:
            return state.stat().st_mtime >= changed
        except FileNotFoundError:  # also while the controller replaces the file
            return False

    poll(written, 60, "the controller's state on the disk")
    bench.cluster.node("stop", "ctl")
    try:
        status = bench.backend.wait("unlucky", 0)
        assert (status.state, status.final) == ("running", False), status
        assert status.reason.startswith("the SLURM controller does not answer: "), status
        job.hold.at(13)
        job.hold.wait()
        job.await_checkpoint(10)
    finally:
        bench.cluster.node("start", "ctl")
    ping = ["scontrol", "ping"]
    poll(lambda: "is UP" in subprocess.run(ping, capture_output=True, text=True, timeout=60).stdout, 60, pause=0.2)
    assert job.attempts() == 1
    bench.cluster.ask("scontrol", "requeue", job.job_id)
    job.hold.at(12)
    bench.becomes("unlucky", "restarting")
    job.hold.wait()
    job.await_checkpoint(20)
    bench.cluster.node("stop", "node2")
    try:
        bench.becomes("unlucky", "restarting", 90)
        poll(lambda: not bench.alive("unlucky"), 60, "the start has ended on the other node", pause=0.2)  # see `wait`
    finally:
        bench.cluster.node("start", "node2")
    job.ends_like(undisturbed)
    first, second = job.resumed_at()
    assert first >= 10 and second == 20 and job.attempts() == 3


def test_a_signal_before_the_ranks_are_there(bench: Bench, undisturbed: Path) -> None:
    """The signal comes before Python starts, and is held back. The ranks exit before the rendezvous, and SLURM restarts the job."""
    folder = bench.folder / "starts"
    folder.mkdir()
    python = bench.folder / "python"
    python.write_text(
        f"""#!{PYTHON}
import os, pathlib, sys, time
folder = pathlib.Path({str(folder)!r})
if "submitit.core._submit" in sys.argv:
    (folder / os.environ["SLURM_PROCID"]).touch()
    while not (folder / "go").exists():
        time.sleep(0.05)
os.execv({PYTHON!r}, [{PYTHON!r}, *sys.argv[1:]])
"""
    )
    python.chmod(0o755)
    job = Training(bench, "early", slurm={"python": str(python)})
    poll(lambda: len(list(folder.iterdir())) == 2, 60, "the tasks")
    bench.signal(job.name)
    (folder / "go").touch()
    status = job.ends_like(undisturbed)
    assert {part.restarts for part in status.ranks} == {1}, status
    # The script also requests a requeue if a signal kills a task. SLURM sends TERM when one task has exited: the other
    # task, which held back both signals, may handle TERM first.
    logs = [bench.note(f"early/submitit/{job.job_id}_{rank}_log.out") for rank in (0, 1)]
    signals = [
        re.findall(r"^SIG(USR2|TERM) before the ranks were connected", log.read_text(), re.MULTILINE) for log in logs
    ]
    assert [len(names) for names in signals] == [1, 1] and ["USR2"] in signals, signals


def test_a_signal_while_a_task_is_being_started(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal kills the task, and the script restarts the job once: if every task dies, if one dies, and if srun ends the other task
    before its start."""
    first = (
        '[ "${SLURM_RESTART_COUNT:-0}" != 0 ] || case $SLURM_JOB_NAME$SLURM_PROCID in every?|peer0) kill -USR2 $$;; '
        "peer1) exec sleep 60;; "
        f"one1) while [ ! -e {bench.folder}/$SLURM_JOB_NAME ]; do sleep 0.1; done; kill -USR2 $$;; esac"
    )
    stand_in(bench, monkeypatch, first)
    # Setup lines do not change the lines of the script that request a requeue.
    setup = [
        "set -euxf -o pipefail",
        "shopt -s nullglob",
        "lockstep_job=mine lockstep_restarts=9",
    ]
    for name in ("every", "one", "peer"):
        program = f"print('through'); open({str(bench.folder / name)!r}, 'w')"
        spec = bench.command(name, program, max_restarts=1, slurm={**IN_APPTAINER, "setup": setup})
        bench.backend.submit(spec)
    for name in ("every", "one", "peer"):
        status = bench.wait(name)
        assert (status.state, status.ranks[0].restarts) == ("succeeded", 1), status
        for rank in (0, 1):
            lines = [line for line in bench.backend.logs(name, rank=rank) if not line.startswith("slurmstepd")]
            assert lines == ["through"] * (2 if (name, rank) == ("one", 0) else 1), lines


def test_a_start_that_gets_no_further_counts(bench: Bench) -> None:
    """Each start gets the signal before its first step. The restarts are used up, the state is saved, and a new submission resumes."""
    job = Training(bench, "spent", epochs=2, nodes=1, max_restarts=1)
    job.hold.wait()
    log = bench.log("spent")
    for start in (1, 2, 3):
        bench.signal(job.name)
        if start == 3:
            break
        bench.becomes("spent", "restarting")
        poll(lambda: log.read_text().count("Loading pickle") == start + 1, 60, "the next start")
    status = bench.wait("spent")
    assert (status.state, status.code, status.ranks[0].restarts) == ("preempted", 75, 2), status
    assert "restarts are used up" in status.reason
    job.hold.let_go()
    bench.backend.submit(job.spec, "replace")
    assert bench.wait("spent", 90).state == "succeeded"
    assert job.saved_at() and job.resumed_at() == job.saved_at()


def test_what_counts_of_another_program(bench: Bench) -> None:
    """Exit code 75 after a signal costs no restart; without a signal it costs one, as a crash does. An uncaught signal ends the job,
    and the reason names it."""
    marker = bench.folder / "begun"
    program = f"""
import os, signal, sys
start = int(os.environ["LOCKSTEP_RESTARTS"])
signal.signal(signal.SIGUSR2, lambda *_: sys.exit(75))
open(f"{marker}-{{start}}", "w").close()
while start < 2:
    signal.pause()
sys.exit(75 if start == 2 else 7)
"""
    deaf = f"import time; open('{marker}', 'w').close(); time.sleep(60)"
    bench.backend.submit(bench.command("own", program, ranks_per_node=1, max_restarts=1))
    bench.backend.submit(bench.command("deaf", deaf, ranks_per_node=1))
    poll(marker.exists, 60, "the start")
    bench.signal("deaf")
    for start in (0, 1):
        poll(Path(f"{marker}-{start}").exists, 60, f"start {start}")
        bench.signal("own")
        bench.becomes("own", "restarting")
    status = bench.wait("own", 90)
    assert (status.state, status.reason, status.ranks[0].restarts) == ("failed", "rank 0 on node1: exit code 7", 3), (
        status
    )
    status = bench.wait("deaf", 90)
    assert (status.state, status.code) == (
        "failed",
        1,
    ) and "rank 0 was ended by SIGUSR2, which it did not catch" in status.reason, status


def test_without_scontrol_the_script_asks(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container there is no scontrol. Rank 0 leaves a note, and the batch script requeues the job once."""
    stand_in(bench, monkeypatch, f"PATH={bench.folder}/bin")
    program = (  # rank 0 ends the second start for good, before rank 1
        "import os, shutil, sys, time; print(shutil.which('scontrol')); first = os.environ['LOCKSTEP_RESTARTS'] == '0'\n"
        "time.sleep(0 if first or os.environ['RANK'] == '0' else 60); sys.exit(75 if first else 2)"
    )
    bench.backend.submit(
        bench.command("inside", program, max_restarts=1, nodes=2, ranks_per_node=1, slurm=IN_APPTAINER)
    )
    status = bench.wait("inside")
    assert (status.state, status.code, status.ranks[0].restarts) == ("failed", 2, 1), status
    lines = [line for line in bench.backend.logs("inside", rank=0) if not line.startswith("slurmstepd")]
    assert lines == ["None", "None"]

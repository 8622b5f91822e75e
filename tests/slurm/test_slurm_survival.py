"""What a job on SLURM survives: each disturbance once, and the weights are those of the undisturbed run, bit by bit."""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path

import pytest

from tests.processes import PYTHON, poll
from tests.slurm.conftest import Bench
from tests.slurm.test_slurm_exec import IN_APPTAINER, stand_in
from tests.slurm.trainings import SETTINGS, Training, setting_words, trained_here

pytestmark = pytest.mark.promise("slurm-survives")


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, data_root: Path) -> Path:
    """The same training on 2 ranks of this machine, without SLURM."""
    run = tmp_path_factory.mktemp("whole") / "run"
    return trained_here(run, 2, *setting_words(SETTINGS), f"data.root={data_root}")


def test_preempted_and_out_of_time_more_often_than_it_may_fail(bench: Bench, undisturbed: Path) -> None:
    """A higher partition preempts the job, then its time limit ends. SLURM looks every 30 s, and may signal 30 s early. Neither costs a
    restart."""
    job = Training(bench, "moved", max_restarts=0)
    job.hold.reached()
    urgent = {"partition": "urgent", "patch": {"exclusive": True}}
    bench.backend.submit(bench.command("high", "print('urgent work')", nodes=2, ranks_per_node=1, slurm=urgent))
    job.saves(1)
    job.hold.at(6)  # where the next start stands still
    assert bench.wait("high", 90).state == "succeeded"
    job.hold.reached()
    bench.cluster.ask("scontrol", "update", f"jobid={job.job_id}", "timelimit=1")
    job.saves(2)
    bench.becomes("moved", "restarting")
    bench.cluster.ask("scontrol", "update", f"jobid={job.job_id}", "timelimit=60")
    found = job.ends_like(undisturbed)
    assert found.ranks[0].restarts == 2 and job.resumed_at() == job.saved_at() and job.attempts() == 3, found


def test_the_controller_is_restarted_a_job_requeued_by_hand_and_a_node_powered_off(
    bench: Bench, undisturbed: Path
) -> None:
    """While the controller is away the ranks train on. The others leave no time to save: the next start resumes from the last
    checkpoint."""
    job = Training(bench, "unlucky")
    job.hold.reached()
    # The controller writes its state some seconds after a change; killed before, it would not know of the job at all.
    changed = time.time()
    bench.cluster.ask("scontrol", "update", f"jobid={job.job_id}", "admincomment=here")
    state = bench.cluster.folder / "state/job_state"

    def written() -> bool:
        try:
            return state.stat().st_mtime >= changed
        except FileNotFoundError:  # also for the moment in which the controller puts a new file in its place
            return False

    poll(written, 60, "the controller's state on the disk")
    bench.cluster.node("stop", "ctl")
    try:
        told = bench.backend.wait("unlucky", 0)
        assert (told.state, told.final) == ("running", False), told
        assert told.reason.startswith("the SLURM controller does not answer: "), told
        job.hold.at(13)
        job.hold.reached()
        job.checkpointed(10)
    finally:
        bench.cluster.node("start", "ctl")
    ping = ["scontrol", "ping"]
    poll(lambda: "is UP" in subprocess.run(ping, capture_output=True, text=True, timeout=60).stdout, 60, pause=0.2)
    assert job.attempts() == 1
    bench.cluster.ask("scontrol", "requeue", job.job_id)
    job.hold.at(12)
    bench.becomes("unlucky", "restarting")
    job.hold.reached()
    job.checkpointed(20)
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
    """The signal comes before Python has started, and is held back. The ranks leave before they have met, and the job is started again."""
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
    found = job.ends_like(undisturbed)
    assert {part.restarts for part in found.ranks} == {1}, found
    # The script asks for a new start where a signal kills a task, too. SLURM's TERM comes when one of them has left: the other
    # one may hear that first, as it has held back both.
    logs = [bench.note(f"early/submitit/{job.job_id}_{rank}_log.out") for rank in (0, 1)]
    heard = [
        re.findall(r"^SIG(USR2|TERM) before the ranks were connected", log.read_text(), re.MULTILINE) for log in logs
    ]
    assert [len(names) for names in heard] == [1, 1] and ["USR2"] in heard, heard


def test_a_signal_while_a_task_is_being_started(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing holds the signal back yet, so the task dies of it, and the script starts the job again, once. It does so where every task
    dies, where one task dies, and where srun ends the other task before that has begun."""
    first = (
        '[ "${SLURM_RESTART_COUNT:-0}" != 0 ] || case $SLURM_JOB_NAME$SLURM_PROCID in every?|peer0) kill -USR2 $$;; '
        "peer1) exec sleep 60;; "
        f"one1) while [ ! -e {bench.folder}/$SLURM_JOB_NAME ]; do sleep 0.1; done; kill -USR2 $$;; esac"
    )
    stand_in(bench, monkeypatch, first)
    # What stands in a setup line does not reach the lines of the script that ask.
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
        found = bench.wait(name)
        assert (found.state, found.ranks[0].restarts) == ("succeeded", 1), found
        for rank in (0, 1):
            said = [line for line in bench.backend.logs(name, rank=rank) if not line.startswith("slurmstepd")]
            assert said == ["through"] * (2 if (name, rank) == ("one", 0) else 1), said


def test_a_start_that_gets_no_further_counts(bench: Bench) -> None:
    """Each start is signalled before it has made a step, as with a short time limit. The restarts are used up, the state is saved, and
    a new submission resumes."""
    job = Training(bench, "spent", epochs=2, nodes=1, max_restarts=1)
    job.hold.reached()
    log = bench.log("spent")
    for start in (1, 2, 3):
        bench.signal(job.name)
        if start == 3:
            break
        bench.becomes("spent", "restarting")
        poll(lambda: log.read_text().count("Loading pickle") == start + 1, 60, "the next start")
    found = bench.wait("spent")
    assert (found.state, found.code, found.ranks[0].restarts) == ("preempted", 75, 2), found
    assert "restarts are used up" in found.reason
    job.hold.let_go()
    bench.backend.submit(job.spec, "replace")
    assert bench.wait("spent", 90).state == "succeeded"
    assert job.saved_at() and job.resumed_at() == job.saved_at()


def test_what_counts_of_another_program(bench: Bench) -> None:
    """A program ends with 75. After a signal that costs no restart; unasked it costs one, as a crash does. A signal that it does not
    catch ends the job, and is named."""
    begun = bench.folder / "begun"
    program = f"""
import os, signal, sys
start = int(os.environ["LOCKSTEP_RESTARTS"])
signal.signal(signal.SIGUSR2, lambda *_: sys.exit(75))
open(f"{begun}-{{start}}", "w").close()
while start < 2:
    signal.pause()
sys.exit(75 if start == 2 else 7)
"""
    deaf = f"import time; open('{begun}', 'w').close(); time.sleep(60)"
    bench.backend.submit(bench.command("own", program, ranks_per_node=1, max_restarts=1))
    bench.backend.submit(bench.command("deaf", deaf, ranks_per_node=1))
    poll(begun.exists, 60, "the start")
    bench.signal("deaf")
    for start in (0, 1):
        poll(Path(f"{begun}-{start}").exists, 60, f"start {start}")
        bench.signal("own")
        bench.becomes("own", "restarting")
    found = bench.wait("own", 90)
    assert (found.state, found.reason, found.ranks[0].restarts) == ("failed", "rank 0 on node1: exit code 7", 3), found
    found = bench.wait("deaf", 90)
    assert (found.state, found.code) == (
        "failed",
        1,
    ) and "rank 0 was ended by SIGUSR2, which it did not catch" in found.reason, found


def test_without_scontrol_the_script_asks(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container there is no scontrol. Rank 0 leaves a note, and the batch script has the job started again, once."""
    stand_in(bench, monkeypatch, f"PATH={bench.folder}/bin")
    program = (  # the second start ends for good, by rank 0, before rank 1 could
        "import os, shutil, sys, time; print(shutil.which('scontrol')); first = os.environ['LOCKSTEP_RESTARTS'] == '0'\n"
        "time.sleep(0 if first or os.environ['RANK'] == '0' else 60); sys.exit(75 if first else 2)"
    )
    bench.backend.submit(
        bench.command("inside", program, max_restarts=1, nodes=2, ranks_per_node=1, slurm=IN_APPTAINER)
    )
    found = bench.wait("inside")
    assert (found.state, found.code, found.ranks[0].restarts) == ("failed", 2, 1), found
    said = [line for line in bench.backend.logs("inside", rank=0) if not line.startswith("slurmstepd")]
    assert said == ["None", "None"]

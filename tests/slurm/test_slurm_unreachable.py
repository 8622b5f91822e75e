"""A missing answer of SLURM says nothing about a job, and an interrupted submission is recovered.

`site` has programs in place of SLURM's: `down` makes one fail, `does` gives it a script, `shows` an answer of squeue.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time

import pytest

from tests import product
from tests.processes import PYTHON, poll
from tests.product import PROGRAM, Status, Unreachable
from tests.slurm.stand_ins import (
    COMMENT,
    DOWN,
    NO_ACCOUNTING,
    NO_CONFIGURATION,
    NO_DATABASE,
    QUEUED,
    RUNNING,
    UNKNOWN,
    Site,
)

pytestmark = pytest.mark.promise("slurm-truth")

EXIT_UNREACHABLE, EXIT_LOST = 69, 4

STATUS, LOGS, CANCEL = ("status", "mine"), ("logs", "mine"), ("cancel", "mine")
SUBMIT, REPLACE = ("submit", "FILE"), ("submit", "FILE", "--replace")
WAIT, EXEC, LIST = ("wait", "mine", "--timeout", "0"), ("exec", "mine", "--", "true"), ("list",)


def unanswered(site: Site, words: tuple[str, ...]) -> None:
    verb, *rest = (site.file if word == "FILE" else word for word in words)
    done = site.run(verb, "slurm", *rest)
    assert done.returncode == EXIT_UNREACHABLE, (words, done)
    assert "does not answer" in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr, (words, done)
    assert not site.calls("sbatch") and not list(site.job_folder.glob("ended.json")), words


def test_whether_an_interrupted_submission_is_there_is_not_known(site: Site) -> None:
    """sbatch's answer with the job's id is lost, and squeue does not answer. No command says whether there is a job."""
    site.record(job_id=None)
    site.down("squeue")
    for words in (STATUS, LOGS, CANCEL, SUBMIT, REPLACE, WAIT, LIST):
        unanswered(site, words)
    site.up("squeue")
    site.does("squeue", f"echo '7|{COMMENT}'")
    site.shows(RUNNING)
    done = site.run("status", "slurm", "mine")
    assert done.returncode == 0 and "mine: running" in done.stdout, done


def test_the_controller_does_not_answer(site: Site) -> None:
    """The commands print nothing."""
    site.record()
    for program in ("jobs", "squeue"):
        site.down(program, "")
    for words in (STATUS, CANCEL, SUBMIT, EXEC, LIST):
        unanswered(site, words)


def test_an_outage_ends_no_job_and_the_last_known_state_is_shown(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without SLURM `wait` raises Unreachable, until a note says how the job ended."""
    for name, value in site.env.items():
        monkeypatch.setenv(name, value)
    site.record(since=time.time())
    site.shows("JobId=7 JobState=PENDING Reason=Priority Partition=main")
    backend, states = product.slurm(lost_after=0.1), list[str]()

    def falls_silent(status: Status) -> None:
        states.append(status.state)
        site.down("jobs")

    with pytest.raises(Unreachable, match=r"does not answer: .*; \d+ s ago the job was queued \(waits behind"):
        backend.wait("mine", 60, falls_silent)
    assert set(states) == {"queued"} and backend.wait("mine", 0).state == "pending"
    site.write_note(0, 1)  # SLURM may start it again
    with pytest.raises(Unreachable, match="does not answer"):
        backend.wait("mine", 60)
    site.write_note(0, 0)
    assert backend.wait("mine", 60).state == "succeeded"


def test_the_accounting_does_not_answer_for_a_job_that_the_controller_has_forgotten(site: Site) -> None:
    site.record()
    site.down("jobs", UNKNOWN)
    site.down("sacct", NO_DATABASE)
    for words in (STATUS, CANCEL, SUBMIT, LIST):
        unanswered(site, words)
    # The ranks' notes need no accounting, and without accounting there is no other source.
    site.down("sacct", NO_ACCOUNTING)
    done = site.run("status", "slurm", "mine")
    assert done.returncode == EXIT_LOST and "no longer knows the job" in done.stdout, done
    (site.job_folder / "ended.json").unlink()
    site.write_note(0, 0)
    site.down("sacct", NO_DATABASE)
    done = site.run("status", "slurm", "mine")
    assert done.returncode == 0 and "mine: succeeded" in done.stdout, done


@pytest.mark.parametrize("program", ["squeue", "scancel"])
def test_a_cancellation_that_slurm_has_not_heard(site: Site, program: str) -> None:
    site.record()
    site.shows(RUNNING)
    site.does("squeue", "echo 7.0")
    site.down(program)
    unanswered(site, CANCEL)


@pytest.mark.parametrize("message", [DOWN, NO_CONFIGURATION])
def test_sbatch_does_not_reach_the_controller(site: Site, message: str) -> None:
    site.down("sbatch", message)
    done = site.run("submit", "slurm", site.file)
    assert done.returncode == EXIT_UNREACHABLE and "the SLURM controller does not answer: " in done.stderr, done
    assert not site.job_folder.exists(), "nothing was submitted, and nothing is left"


def test_sbatch_hears_no_answer(site: Site) -> None:
    """The controller may have the job. The next submission looks for it, and does not submit it twice."""
    site.down("sbatch", "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation\n")
    done = site.run("submit", "slurm", site.file)
    assert done.returncode == EXIT_UNREACHABLE and "submit again" in done.stderr, done
    site.does("squeue", f"echo '8|{json.loads((site.job_folder / 'job.json').read_text())['comment']}'")
    site.shows(QUEUED)
    done = site.run("submit", "slurm", site.file)
    assert done.returncode == 0 and "mine: is there already" in done.stdout, done
    assert len(site.calls("sbatch")) == 1


def test_a_dry_run_that_hears_no_answer_has_submitted_nothing(site: Site) -> None:
    site.down("sbatch", "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation\n")
    done = site.run("submit", "slurm", site.file, "--dry-run")
    assert done.returncode == EXIT_UNREACHABLE and "the SLURM controller does not answer: " in done.stderr, done
    assert "submit again" not in done.stderr and not site.job_folder.exists(), done


def start(site: Site, *words: str) -> subprocess.Popen[bytes]:
    command = [PYTHON, "-c", PROGRAM, *words]
    return subprocess.Popen(command, env={**os.environ, **site.env}, stderr=subprocess.DEVNULL)


def test_a_submission_continues_after_its_command_was_killed(site: Site) -> None:
    """The command is killed while sbatch works. Other commands report the submission, and the job once sbatch has ended."""
    site.does("sbatch", "while [ ! -e go ]; do sleep 0.05; done; echo Submitted batch job 8")
    with start(site, "submit", "slurm", site.file) as process:
        try:
            poll(lambda: site.calls("sbatch"), 60, "sbatch")
        finally:
            process.send_signal(signal.SIGKILL)
    try:
        for words in (("submit", "slurm", site.file, "--replace"), ("cancel", "slurm", "mine")):
            done = site.run(*words)
            assert done.returncode == EXIT_UNREACHABLE and "is being submitted" in done.stderr, (words, done)
    finally:
        (site.folder / "bin/go").touch()
    comment = json.loads((site.job_folder / "job.json").read_text())["comment"]
    site.does("squeue", f"echo '8|{comment}'")
    site.shows(QUEUED)
    poll(lambda: "mine: queued" in site.run("status", "slurm", "mine").stdout, 60, "the job's number")
    assert json.loads((site.job_folder / "job.json").read_text())["job_id"] == "8"
    assert (site.job_folder / "submitit/8_submission.sh").exists()
    assert "is there already" in site.run("submit", "slurm", site.file).stdout
    assert len(site.calls("sbatch")) == 1 and not site.calls("scancel")


def test_listing_many_jobs_asks_once(site: Site) -> None:
    """`list` asks the controller once, and the accounting once for forgotten jobs."""
    site.record()
    record = json.loads((site.job_folder / "job.json").read_text())
    for number in range(8, 72):
        folder = site.job_folder.parent / f"job-{number}"
        folder.mkdir(0o700)
        values = {**record, "job_id": str(number), "array_name": folder.name, "submitit": str(folder)}
        (folder / "job.json").write_text(json.dumps(values))
    site.shows(*(f"JobId={number} JobState=RUNNING" for number in range(7, 70)))
    site.up("sacct")
    site.does("sacct", "echo '70|FAILED|3:0|node1|main|1000'; echo '71|COMPLETED|0:0|node1|main|1000'")
    jobs = json.loads(site.run("list", "slurm", "--json").stdout)
    states = [row["state"] for row in jobs]
    assert (len(jobs), states.count("running"), states.count("failed")) == (65, 63, 2), states
    assert [len(site.calls(name)) for name in ("squeue", "sacct")] == [1, 1]


def test_a_submission_without_a_number_hides_no_other_job_from_a_list(site: Site) -> None:
    """The accounting refuses a query with an id that is None."""
    site.record()
    cut_off = site.job_folder.parent / "cut-off"
    cut_off.mkdir(0o700)
    record = json.loads((site.job_folder / "job.json").read_text())
    (cut_off / "job.json").write_text(json.dumps({**record, "job_id": None, "array_name": "cut-off"}))
    site.up("sacct")
    site.does("sacct", "case $* in *None*) exit 1;; esac; echo '7|TIMEOUT|0:0|node1|main|1000'")
    done = site.run("list", "slurm", "--json")
    assert done.returncode == 0, done
    assert {row["name"]: row["state"] for row in json.loads(done.stdout)} == {"mine": "timed_out", "cut-off": "lost"}


DOCTOR = {
    "sinfo": 'echo "slurm 22.05"',
    "scontrol": 'case "$*" in ping) echo "Slurmctld(primary) at host is UP";; *) echo "PreemptMode = GANG,CANCEL";; esac',
    "sbatch": "echo 'sbatch: Job 8 to start at 2020-01-01T00:00:00 using 1 processors' >&2",
}
FAILS = 'echo "error: Unable to contact slurm controller (connect failure)" >&2; exit 1'
REFUSES = "case $* in *only) echo 'sbatch: error: no such account' >&2; exit 1;; esac"
ROWS: dict[str, tuple[dict[str, str], tuple[str, str], tuple[str, str]]] = {
    "all answer": ({}, ("warning", "CANCEL: a preempted job ends"), ("ok", "to start at")),
    "scontrol": ({"scontrol": FAILS}, ("cannot tell", "Unable to contact"), ("ok", "to start at")),
    "sbatch": ({"sbatch": FAILS}, ("warning", ""), ("cannot tell", "Unable to contact")),
    "sbatch refuses": ({"sbatch": REFUSES}, ("warning", ""), ("missing", "SLURM refuses mine: no such account")),
}
"""Programs whose answers change after the first → the rows `preemption` and `start`."""


@pytest.mark.parametrize("case", ROWS)
def test_doctor_says_how_preemption_ends_a_job_and_when_sbatch_would_start_it(site: Site, case: str) -> None:
    later_answers, *rows = ROWS[case]
    for name, answer in DOCTOR.items():
        first = {"scontrol": "ping", "sbatch": "--version"}.get(name, "none")
        text = f'case "$*" in {first}) {answer};; *) {later_answers.get(name, answer)};; esac'
        (site.folder / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
    done = site.run("doctor", "slurm", site.file, "--json")
    findings = {row["name"]: row for row in json.loads(done.stdout)}
    for name, (result, detail) in zip(("preemption", "start"), rows):
        assert findings[name]["result"] == result and detail in findings[name]["detail"], findings
    assert done.returncode == int(case == "sbatch refuses") and not site.job_folder.exists(), done
    done = site.run("submit", "slurm", site.file, "--dry-run", "--json")
    assert done.returncode == {"sbatch": 69, "sbatch refuses": 2}.get(case, 0), done

"""What SLURM has not answered says nothing about a job, and a submission that was interrupted is found again.

`site` has programs in place of SLURM's: `down` makes one fail, `does` gives it a script, `shows` an answer of scontrol.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.processes import PYTHON, poll
from tests.slurm.stand_ins import COMMENT, NO_ACCOUNTING, NO_DATABASE, RUNNING, UNKNOWN, Site

pytestmark = pytest.mark.promise("slurm-truth")

EXIT_UNREACHABLE, EXIT_LOST = 69, 4

STATUS, LOGS, CANCEL, DIFF = (("status", "mine"), ("logs", "mine"), ("cancel", "mine"), ("diff", "FILE"))
SUBMIT, REPLACE, NEW = ("submit", "FILE"), ("submit", "FILE", "--replace"), ("submit", "FILE", "--new")
WAIT, EXEC, LIST = ("wait", "mine", "--timeout", "0"), ("exec", "mine", "--", "true"), ("list",)


def unanswered(site: Site, words: tuple[str, ...]) -> None:
    verb, *rest = (site.file if word == "FILE" else word for word in words)
    done = site.run(verb, "slurm", *rest)
    assert done.returncode == EXIT_UNREACHABLE, (words, done)
    assert "does not answer" in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr, (words, done)
    assert not site.called("sbatch") and not list(site.kept.glob("ended.json")), words


def test_whether_an_interrupted_submission_is_there_is_not_known(site: Site) -> None:
    """sbatch's answer was lost, and so is the job's number: it may wait in the queue, which nobody can see at this moment."""
    site.record(job_id=None)
    site.down("squeue")
    for words in (STATUS, LOGS, CANCEL, DIFF, SUBMIT, REPLACE, NEW, WAIT, EXEC, LIST):
        unanswered(site, words)
    site.up("squeue")
    site.does("squeue", f"echo '7|{COMMENT}'")
    site.shows(RUNNING)
    done = site.run("status", "slurm", "mine")
    assert done.returncode == 0 and "mine: running" in done.stdout, done


@pytest.mark.parametrize(
    "says", ["error: Unable to contact slurm controller\n", ""], ids=["in words", "without a word"]
)
def test_the_controller_does_not_answer(site: Site, says: str) -> None:
    site.record()
    for program in ("scontrol", "squeue"):
        site.down(program, says)
    for words in (STATUS, CANCEL, DIFF, SUBMIT, REPLACE, EXEC, LIST):
        unanswered(site, words)


def test_the_accounting_does_not_answer_for_a_job_that_the_controller_has_forgotten(site: Site) -> None:
    site.record()
    site.down("scontrol", UNKNOWN)
    site.down("sacct", NO_DATABASE)
    for words in (STATUS, CANCEL, SUBMIT, REPLACE, LIST):
        unanswered(site, words)
    # What the ranks have left of it needs no accounting, and where there is none nobody else can tell.
    site.down("sacct", NO_ACCOUNTING)
    done = site.run("status", "slurm", "mine")
    assert done.returncode == EXIT_LOST and "no longer knows the job" in done.stdout, done
    (site.kept / "ended.json").unlink()
    site.noted(0, 0)
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


def test_sbatch_does_not_reach_the_controller(site: Site) -> None:
    site.down("sbatch")
    done = site.run("submit", "slurm", site.file)
    assert done.returncode == EXIT_UNREACHABLE and "the SLURM controller does not answer: Unable" in done.stderr, done
    assert not site.kept.exists(), "nothing was submitted, and nothing is left"


def test_sbatch_hears_no_answer(site: Site) -> None:
    """The controller may have the job. It is looked for by the next submission, and is not submitted twice."""
    site.down("sbatch", "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation\n")
    done = site.run("submit", "slurm", site.file)
    assert done.returncode == EXIT_UNREACHABLE and "submit again" in done.stderr, done
    site.does("squeue", f"echo '8|{json.loads((site.kept / 'job.json').read_text())['comment']}'")
    site.does("scontrol", "echo JobId=8 JobName=mine JobState=PENDING Reason=Priority")
    done = site.run("submit", "slurm", site.file)
    assert done.returncode == 0 and "mine: is there already" in done.stdout, done
    assert len(site.called("sbatch")) == 1


def broken_off(site: Site, *words: str) -> None:
    """A submission that was killed when it came to sbatch."""
    site.does("sbatch", "kill -9 $PPID")
    with started(site, *(words or ("submit", "slurm", site.file, "--replace"))) as process:
        assert process.wait(60) == -signal.SIGKILL
    assert site.called("sbatch")


def started(site: Site, *words: str) -> subprocess.Popen[bytes]:
    program = "import sys; sys.argv[0] = 'lockstep'; from lockstep.jobs.cli.main import main; main()"
    command = [PYTHON, "-c", program, *words]
    return subprocess.Popen(command, env={**os.environ, **site.env}, stderr=subprocess.DEVNULL)


def test_an_older_job_of_the_same_spec_is_not_the_submission_that_broke_off(site: Site) -> None:
    site.does("squeue", 'echo "8|$(cat comment)"')
    site.does("scontrol", "echo JobId=8 JobName=mine JobState=COMPLETED EndTime=1000")
    site.does(
        "sbatch", 'for word; do case $word in --comment=*) echo "${word#--comment=}" > comment;; esac; done; echo job 8'
    )
    assert site.run("submit", "slurm", site.file).returncode == 0
    site.noted(0, 0, job_id="8")
    assert "mine: succeeded" in site.run("status", "slurm", "mine").stdout
    broken_off(site)
    done = site.run("status", "slurm", "mine")
    assert "mine: pending – is being submitted" in done.stdout, done
    done = site.run("submit", "slurm", site.file)
    assert done.returncode == 2 and "interrupted before sbatch answered" in done.stderr, done


def test_cancelling_a_submission_that_broke_off_asks_nothing_of_slurm(site: Site) -> None:
    broken_off(site)
    done = site.run("cancel", "slurm", "mine")
    assert done.returncode == 0 and "mine: lost – the submission was interrupted" in done.stdout, done
    assert not site.called("scancel") and not list(site.kept.rglob("None*"))
    assert site.run("diff", "slurm", site.file).stdout == "no difference\n"
    assert "None" not in (site.folder / "bin/called").read_text()
    site.does("sbatch", "echo Submitted batch job 8")
    assert "mine: submitted (SLURM job 8" in site.run("submit", "slurm", site.file, "--replace").stdout


def test_a_preparation_that_broke_off_is_not_waited_for(site: Site) -> None:
    values = {
        "name": "mine",
        "recipe": "smoke",
        "run_dir": str(site.folder / "run"),
        "shards": str(site.folder / "shards"),
    }
    Path(site.file).write_text(json.dumps(values))
    broken_off(site, "prepare", "slurm", site.file)
    site.does("sbatch", "echo Submitted batch job 8")
    done = site.run("submit", "slurm", site.file)
    assert done.returncode == 0, done
    assert "afterok" not in (site.kept / "submitit/8_submission.sh").read_text()


def test_a_submission_goes_on_after_its_command_was_killed(site: Site) -> None:
    """sbatch is still at work: nobody knows yet whether there will be a job."""
    site.does("sbatch", "while [ ! -e go ]; do sleep 0.05; done; echo Submitted batch job 8")
    with started(site, "submit", "slurm", site.file) as process:
        try:
            poll(lambda: site.called("sbatch"), 60, "sbatch")
        finally:
            process.send_signal(signal.SIGKILL)
    try:
        for words in (("submit", "slurm", site.file, "--replace"), ("cancel", "slurm", "mine")):
            done = site.run(*words)
            assert done.returncode == EXIT_UNREACHABLE and "is being submitted" in done.stderr, (words, done)
    finally:
        (site.folder / "bin/go").touch()
    comment = json.loads((site.kept / "job.json").read_text())["comment"]
    site.does("squeue", f"echo '8|{comment}'")
    site.does("scontrol", "echo JobId=8 JobName=mine JobState=PENDING Reason=Priority")
    poll(lambda: "mine: queued" in site.run("status", "slurm", "mine").stdout, 30, "the job's number")
    assert json.loads((site.kept / "job.json").read_text())["job_id"] == "8"
    assert (site.kept / "submitit/8_submission.sh").exists()
    assert "is there already" in site.run("submit", "slurm", site.file).stdout
    assert len(site.called("sbatch")) == 1 and not site.called("scancel")


def test_what_sbatch_refuses_takes_nothing_away(site: Site) -> None:
    """Of a whole array, too; and nothing of an outer job reaches sbatch."""
    assert site.run("submit", "slurm", site.file).returncode == 0
    site.noted(0, 0, job_id="8")
    site.does("scontrol", "echo JobId=8 JobName=mine JobState=COMPLETED EndTime=1000")
    assert "mine: succeeded" in site.run("status", "slurm", "mine").stdout
    before = {path: path.read_bytes() for path in site.kept.rglob("*") if path.is_file()}
    site.env["SBATCH_PARTITION"] = "of an outer job"
    site.does("sbatch", "env > environment; echo 'sbatch: error: no such thing' >&2; exit 1")
    done = site.run("submit", "slurm", site.file, "--replace")
    assert done.returncode == 2 and done.stderr.endswith("\nerror: SLURM refuses mine: no such thing\n"), done
    assert {path: path.read_bytes() for path in site.kept.rglob("*") if path.is_file()} == before
    assert sorted(path.name for path in site.kept.parent.iterdir() if path.is_dir()) == ["mine"]
    assert "SBATCH_PARTITION" not in (site.folder / "bin/environment").read_text()


def test_listing_many_jobs_asks_once(site: Site) -> None:
    """One question to the controller, and one to the accounting for those that it has forgotten."""
    site.record()
    kept = json.loads((site.kept / "job.json").read_text())
    for number in range(8, 72):
        folder = site.kept.parent / f"job-{number}"
        folder.mkdir(0o700)
        own = {**kept, "job_id": str(number), "array_name": folder.name, "submitit": str(folder)}
        (folder / "job.json").write_text(json.dumps(own))
    rows = [(str(number), "RUNNING", "None", "0", "0", "node1", "main", "1", "N/A") for number in range(7, 70)]
    site.does("squeue", "\n".join("printf '%-200s' " + " ".join(row) + "; echo" for row in rows))
    site.up("sacct")
    site.does("sacct", "echo '70|FAILED|3:0|node1|main|1000'; echo '71|COMPLETED|0:0|node1|main|1000'")
    listed = json.loads(site.run("list", "slurm", "--json").stdout)
    states = [row["state"] for row in listed]
    assert (len(listed), states.count("running"), states.count("failed")) == (65, 63, 2), states
    assert [len(site.called(name)) for name in ("squeue", "sacct", "scontrol")] == [1, 1, 0]

"""From SLURM's answers to a status: `lockstep status` with stand-ins for SLURM's commands. Needs no SLURM."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests import product
from tests.product import JobSpec
from tests.slurm.stand_ins import UNKNOWN, Site

pytestmark = pytest.mark.promise("slurm-truth")

LONG_AGO = "EndTime=1000"
"""Before the minute in which a job's notes may still arrive."""


def just_ended() -> str:
    return f"EndTime={time.time():.0f}"


REASONS = [
    ("Resources", 0, "pending", "partition main"),
    ("Priority", 0, "queued", "partition main"),
    ("BeginTime", 2, "restarting", "restart 2"),
    ("DependencyNeverSatisfied", 0, "unschedulable", "depends"),
    ("PartitionTimeLimit", 0, "unschedulable", "time_limit"),
    ("QOSMaxGRESPerJob", 0, "unschedulable", "QOSMaxGRESPerJob"),
    ("QOSMaxJobsPerUserLimit", 0, "queued", "QOSMaxJobsPerUserLimit"),
    ("AssocGrpGRES", 0, "queued", "AssocGrpGRES"),
    ("ReqNodeNotAvail,_UnavailableNodes:node2", 0, "pending", "down, drained or reserved"),
    ("JobHeldUser", 0, "pending", "scontrol release 7"),
    ("launch_failed_requeued_held", 0, "unschedulable", "scontrol release 7"),
    ("Something_new", 0, "pending", "Something new"),
    ("", 0, "pending", "scheduler"),
]


@pytest.fixture
def job(site: Site) -> Site:
    """A program on two nodes × two ranks. Only its ranks' notes say how it ended."""
    values = {"nodes": 2, "ranks_per_node": 2, "max_restarts": 3}
    site.spec = JobSpec.of({**site.spec.plain(), **values})
    site.record()
    return site


def status_for(site: Site, state: str, *more: str) -> dict[str, Any]:
    site.shows(" ".join(["JobId=7 Partition=main", f"JobState={state}", *more]))
    (site.job_folder / "ended.json").unlink(missing_ok=True)
    return site.status()


def test_reasons_in_words(job: Site) -> None:
    for reason, restarts, state, words in REASONS:
        status = status_for(job, "PENDING", f"Reason={reason or '(null)'} Restarts={restarts}")
        assert status["state"] == state and words in status["reason"], (reason, status)


@pytest.mark.parametrize("state", product.slurm_states())
def test_every_final_state_is_resolved_in_bounded_time(job: Site, state: str) -> None:
    """Also after `lockstep cancel`."""
    for cancelled in (False, True):
        job.record()
        if cancelled:
            (job.job_folder / "cancelled").touch()
        status = status_for(job, state, LONG_AGO, "NodeList=node[1-2]")
        assert status["final"] and status["reason"] and status["code"] in (1, 4, 75, 124), status


def test_the_words_of_an_earlier_start_do_not_hide_how_this_one_ended(site: Site) -> None:
    """Start 0 saved and was requeued; start 1 failed before it could write status.json."""
    values = {name: value for name, value in site.spec.plain().items() if name != "command"}
    site.spec = JobSpec.of({**values, "recipe": "smoke", "ranks_per_node": 1})
    site.record()
    (site.folder / "run").mkdir(exist_ok=True)
    for restart, code, state in ((0, 2, "failed"), (1, 75, "preempted")):
        value = {"code": 75, "reason": "saved", "attempt": 1, "step": 3, "restart": restart, "job": "mine.0123456789ab"}
        (site.folder / "run/status.json").write_text(json.dumps(value))
        site.write_note(0, 2, "no such data", restart=1)
        status = status_for(site, "FAILED", LONG_AGO, "Restarts=1 ExitCode=2:0")
        assert (status["state"], status["code"]) == (state, code), status


def test_the_node_that_failed_may_come_back(job: Site) -> None:
    failed = ("NODE_FAIL", just_ended(), "NodeList=node2")
    status = status_for(job, *failed)
    assert status["state"] == "restarting" and "node2" in status["reason"], status
    status = status_for(job, *failed, "Restarts=3")
    assert (status["state"], status["code"]) == ("lost", 4) and "max_restarts" in status["reason"], status


def test_a_job_that_is_requeued_and_held_says_how_to_release_it(job: Site) -> None:
    for state, words in (
        ("REQUEUE_HOLD", "is held: scontrol release 7"), ("SPECIAL_EXIT", "is held: scontrol release 7"),
        ("REQUEUED", "SLURM starts it again"),
    ):  # fmt: skip
        status = status_for(job, state, "Restarts=1")
        assert (status["state"], status["reason"]) == ("restarting", f"restart 1: {words}"), status


def test_a_preempted_job_that_is_not_requeued_has_ended(job: Site) -> None:
    status = status_for(job, "PREEMPTED", just_ended(), "Requeue=0")
    assert status["state"] == "preempted", status


def test_the_nodes_of_a_job_have_slurms_names(job: Site) -> None:
    job.spec = JobSpec.of({**job.spec.plain(), "nodes": 6})
    job.record()
    long = "x.y" * 100
    status = status_for(job, "RUNNING", f"NodeList=cpu[08-10,12],{long},n[1-3]-ib")
    assert [node["name"] for node in status["ranks"]] == ["cpu08", "cpu09", "cpu10", "cpu12", long, "n1-ib"], status
    assert [node["ranks"] for node in status["ranks"]] == [[2 * node, 2 * node + 1] for node in range(6)], status
    job.down("jobs", UNKNOWN)
    job.up("sacct")
    job.does("sacct", "echo '7|CANCELLED by 1000|0:0|None assigned|main|1000'")
    status = job.status()
    assert status["ranks"][0]["name"] == "node 0", status


def test_a_job_of_another_version_has_a_status(job: Site) -> None:
    """Lockstep reads its nodes, ranks and limits despite the unknown setting."""
    record = json.loads((job.job_folder / "job.json").read_text())
    job.record(spec={**record["spec"], "new_setting": 1})
    assert status_for(job, "RUNNING")["state"] == "running"
    done = job.run("exec", "slurm", "mine", "--", "true")
    assert done.returncode == 2 and "unknown setting 'new_setting'" in done.stderr, done


@pytest.mark.promise("exec")
def test_no_command_comes_into_a_container(job: Site) -> None:
    job.record(spec={**job.spec.record(), "slurm": {"container": "apptainer", "image": "/images/a.sif"}})
    assert status_for(job, "RUNNING")["state"] == "running"
    done = job.run("exec", "slurm", "mine", "--", "true")
    assert done.returncode == 2 and "mine runs in containers (apptainer)" in done.stderr, done


def test_completed_is_not_believed_without_results(job: Site) -> None:
    for rank in (0, 1):
        job.write_note(rank, 0)
    status = status_for(job, "COMPLETED", just_ended())
    assert status["state"] == "running" and "ranks 2, 3" in status["reason"], status
    status = status_for(job, "COMPLETED", LONG_AGO)
    assert (status["state"], status["code"]) == ("failed", 1) and "ranks 2, 3" in status["reason"], status
    for rank in (2, 3):
        job.write_note(rank, 0)
    assert status_for(job, "COMPLETED", LONG_AGO)["state"] == "succeeded"
    assert status_for(job, "COMPLETED", LONG_AGO, "Restarts=1")["state"] == "failed", (
        "notes of an earlier start do not count"
    )


def test_the_cause_is_named_not_what_followed(job: Site) -> None:
    status = status_for(job, "FAILED", LONG_AGO, "ExitCode=3:0")
    assert status["reason"] == "exit code 3", "SLURM's code, where no rank left a note"
    job.write_note(3, 137, time=9)
    assert "rank 3 on node1" in status_for(job, "FAILED", LONG_AGO, "ExitCode=1:0")["reason"]
    job.write_note(0, 1, "step 4: rank 2 did not arrive: ended by SIGKILL (Connection closed by peer)", time=10)
    job.write_note(2, 1, "ZeroDivisionError: division by zero", time=11)
    status = status_for(job, "FAILED", LONG_AGO, "ExitCode=1:0")
    assert status["reason"] == "rank 2 on node1: ZeroDivisionError: division by zero" and status["code"] == 1, status
    job.write_note(2, 2, "no such data", time=11)
    assert status_for(job, "FAILED", LONG_AGO)["code"] == 2
    assert "memory" in status_for(job, "OUT_OF_MEMORY", LONG_AGO)["reason"]


def test_what_slurm_does_not_know(job: Site) -> None:
    job.down("jobs", UNKNOWN)
    assert (job.status()["state"], job.status()["code"]) == ("lost", 4)
    (job.job_folder / "ended.json").unlink()
    job.record(since=time.time())
    assert job.status()["state"] == "pending"
    for rank in range(4):
        job.write_note(rank, 0)
    assert job.status()["state"] == "succeeded"


def test_damaged_records_are_one_line(job: Site) -> None:
    job.shows("JobId=7 JobState=RUNNING")
    path = job.job_folder / "job.json"
    good = json.loads(path.read_text())
    for change in (
        {"run_dir": None},
        {"spec": []},
        {"since": "late"},
        {"job_id": 7},
        {"spec": {**good["spec"], "nodes": "2"}},
        {"spec": {**good["spec"], "nodes": 40_000_000}},
        {"spec": {**good["spec"], "ranks_per_node": -2}},  # no note of a task would be missing
    ):
        path.write_text(json.dumps({**good, **change}))
        done = job.run("status", "slurm", "mine")
        assert done.returncode == 2 and done.stderr.count("\n") == 1 and "Traceback" not in done.stderr, (change, done)
    path.write_text(json.dumps(good))
    for text in ("", "[]", "{}", '{"state": "failed", "reason": "x", "ranks": [1], "exit_code": 1}'):
        Path(job.job_folder, "ended.json").write_text(text)
        assert job.status()["state"] == "running", text

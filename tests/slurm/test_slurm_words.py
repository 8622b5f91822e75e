"""From SLURM's words to a status, and who may own the job's folder. Needs no SLURM."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from lockstep.jobs import private, sweep
from lockstep.jobs.slurm import folder as slurm_folder
from lockstep.jobs.slurm import query as slurm_query
from lockstep.jobs.slurm import reasons as slurm_words
from lockstep.jobs.slurm import render
from lockstep.jobs.slurm.backend import SlurmBackend
from lockstep.jobs.slurm.checks import _gpus_in, seconds
from lockstep.jobs.slurm.observe import SETTLE_SECONDS, explain
from lockstep.jobs.slurm.query import FINAL, Found
from lockstep.jobs.slurm.task import _last_error
from lockstep.jobs.spec.model import JobSpec
from lockstep.training.contract import UserError

NOW = 1000.0
SPEC = JobSpec.of({"name": "a", "recipe": "smoke", "nodes": 2, "ranks_per_node": 2, "max_restarts": 3})
OWN = JobSpec.of({"name": "a", "command": ["x"], "nodes": 2, "ranks_per_node": 2, "max_restarts": 3})


def end(rank: int, code: int, reason: str = "", time: float = 0, restart: int = 0) -> dict[str, Any]:
    return {"rank": rank, "code": code, "reason": reason, "host": f"node{rank // 2}", "time": time, "restart": restart}


def told(found: Found | None, **more: Any) -> tuple[str, str, int]:
    values: dict[str, Any] = {
        "ends": {},
        "said": None,
        "cancelled": False,
        "since": 0.0,
        "now": NOW,
        "spec": SPEC,
        **more,
    }
    status = explain(values.pop("spec"), found, **values)
    return status.state, status.reason, status.code


@pytest.mark.parametrize(
    ("reason", "restarts", "state", "words"),
    [
        ("Resources", 0, "pending", "waits for nodes to be free in partition main"),
        ("Priority", 0, "queued", "waits behind jobs of higher priority in partition main"),
        ("BeginTime", 2, "restarting", "restart 2: waits for its start time"),
        ("DependencyNeverSatisfied", 0, "unschedulable", "the job that it depends on has failed"),
        ("PartitionTimeLimit", 0, "unschedulable", "time_limit is above the limit of partition main: lower it"),
        ("QOSMaxGRESPerJob", 0, "unschedulable", "is above a limit of the QOS (QOSMaxGRESPerJob): ask for less"),
        ("QOSMaxJobsPerUserLimit", 0, "queued", "waits: a limit of the QOS is reached (QOSMaxJobsPerUserLimit)"),
        ("AssocGrpGRES", 0, "queued", "waits: a limit of your account's association is reached (AssocGrpGRES)"),
        ("ReqNodeNotAvail,_UnavailableNodes:node2", 0, "pending", "nodes that it needs are down, drained or reserved"),
        ("JobHeldUser", 0, "pending", "is held: scontrol release 7"),
        ("launch_failed_requeued_held", 0, "unschedulable", "its start failed on a node and it is held: scontrol release 7"),
        ("Something_new", 0, "pending", "Something new"),
        ("", 0, "pending", "waits for the scheduler"),
    ],
)  # fmt: skip
def test_reasons_in_words(reason: str, restarts: int, state: str, words: str) -> None:
    found, text = slurm_words.pending(reason, "main", "7", restarts)
    assert found == state and text.startswith(words)


@pytest.mark.parametrize("state", FINAL)
@pytest.mark.parametrize("spec", [SPEC, OWN])
@pytest.mark.parametrize("cancelled", [True, False])
def test_every_final_state_is_resolved_in_bounded_time(state: str, spec: JobSpec, cancelled: bool) -> None:
    late = Found("7", state, ended=NOW - SETTLE_SECONDS - 1, nodes="node[1-2]")
    status = explain(spec, late, {}, None, cancelled, 0.0, NOW)
    assert status.final and status.code in (1, 4, 75, 124) and status.reason, status


def test_the_words_of_an_earlier_start_do_not_hide_how_this_one_ended() -> None:
    """Start 0 saved and was requeued; start 1 failed before it could write status.json."""
    saved = {"code": 75, "reason": "saved", "attempt": 1, "restart": 0}
    failed = Found("7", "FAILED", restarts=1, exit_code=2, ended=NOW - 1)
    ends = {rank: end(rank, 2, "no such data", restart=1) for rank in range(4)}
    assert told(failed, said=saved, ends=ends)[::2] == ("failed", 2)
    assert told(failed, said={**saved, "restart": 1}, ends=ends)[::2] == ("preempted", 75)
    older = {name: value for name, value in saved.items() if name != "restart"}
    assert told(failed, said=older, ends=ends)[::2] == ("preempted", 75), "of a run that does not count starts"


def test_the_node_that_failed_may_come_back() -> None:
    lately = Found("7", "NODE_FAIL", ended=NOW - 1, nodes="node2")
    assert told(lately) == ("restarting", "a node failed (node2): SLURM starts it again", 0)
    assert told(lately, cancelled=True)[0] == "cancelled"
    used = Found("7", "NODE_FAIL", ended=NOW - 1, nodes="node2", restarts=3)
    assert told(used) == (
        "lost",
        "a node failed (node2), and the job was not started again (max_restarts is used up)",
        4,
    )
    assert told(used, free={1})[0] == "restarting", "one of the three starts before had saved"
    never = Found("7", "PREEMPTED", ended=NOW - 1, requeue=False)
    assert told(never)[0] == "preempted"


def test_completed_is_not_believed_without_results() -> None:
    lately, late = Found("7", "COMPLETED", ended=NOW - 1), Found("7", "COMPLETED", ended=NOW - 100)
    some = {0: end(0, 0), 1: end(1, 0)}
    assert told(lately, ends=some)[:2] == ("running", "has ended; the results of ranks 2, 3 are not visible yet")
    assert told(late, ends=some)[:2] == ("failed", "SLURM says COMPLETED, but ranks 2, 3 left no result")
    assert told(late, ends={**some, 2: end(2, 0), 3: end(3, 0)})[0] == "succeeded"
    assert told(late, said={"code": 0, "reason": "complete"})[0] == "succeeded"
    old = {rank: end(rank, 0, restart=0) for rank in range(4)}
    again = Found("7", "COMPLETED", ended=NOW - 100, restarts=1)
    assert told(again, ends=old, spec=OWN)[0] == "failed", "notes of an earlier start do not count"


def test_the_cause_is_named_not_what_followed() -> None:
    failed = Found("7", "FAILED", ended=NOW, exit_code=1)
    ends = {
        0: end(0, 1, "step 4: rank 2 did not arrive (last seen at step 3)", time=10),
        2: end(2, 1, "ZeroDivisionError: division by zero", time=11), 3: end(3, 137, time=9),
    }  # fmt: skip
    assert told(failed, ends=ends) == ("failed", "rank 2 on node1: ZeroDivisionError: division by zero", 1)
    assert told(failed, ends={3: end(3, 137)})[1] == "rank 3 on node1: exit code 137"
    assert told(Found("7", "FAILED", ended=NOW, exit_code=2), said={"code": 2, "reason": "bad words"})[2] == 2
    assert told(Found("7", "OUT_OF_MEMORY", ended=NOW))[1].startswith("was killed for memory")


def test_what_slurm_does_not_know() -> None:
    assert told(None, since=NOW - 1)[:2] == ("pending", "SLURM does not know it yet")
    assert told(None)[0] == "lost"
    assert told(None, said={"code": 75, "reason": "saved"})[0] == "preempted"
    assert told(None, ends={rank: end(rank, 0) for rank in range(4)}, spec=OWN)[0] == "succeeded"


def test_reading_scontrol() -> None:
    line = (
        "JobId=12 ArrayJobId=10 ArrayTaskId=1 JobName=a JobState=PENDING Reason=BeginTime Requeue=1 Restarts=2 ExitCode=1:0 "
        "EndTime=1700000000 Partition=main NodeList=(null) Comment=lockstep:ab"
    )
    found = slurm_query.read(line)
    assert found == Found("10_1", "PENDING", "BeginTime", 2, 1, "", "main", True, None, "a", "lockstep:ab")
    assert slurm_query.read("No jobs in the system") is None
    ended = slurm_query.read("JobId=12 JobState=FAILED EndTime=1700000000 Requeue=0")
    assert ended is not None and ended.ended == 1700000000 and not ended.requeue


def test_the_last_error_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert _last_error([log], [0]) == ""
    log.write_bytes(b"begun\nTraceback\n  File x\nmod.OddError: a \x1b[31mred\x1b[0m thing\nsubmitit INFO - bye\n")
    assert _last_error([log], [0]) == "mod.OddError: a [31mred[0m thing"
    log.write_bytes(b"error: recipe: unknown setting\xff\n")
    assert _last_error([log], [0]).startswith("recipe: unknown setting")
    begun = log.stat().st_size
    with log.open("ab") as file:
        file.write(b"the next start\n")
    assert _last_error([log], [begun]) == "", "an earlier start's error is not this one's"


def test_folders_that_somebody_else_could_write(tmp_path: Path) -> None:
    good = private.make(tmp_path / "a/b")
    assert oct(good.stat().st_mode & 0o777) == "0o700"
    (tmp_path / "open").mkdir(mode=0o777)
    (tmp_path / "open").chmod(0o770)
    with pytest.raises(UserError, match=r"changed by other users \(mode 770\): chmod 700"):
        private.make(tmp_path / "open")
    (tmp_path / "link").symlink_to(good)
    with pytest.raises(UserError, match="is not a plain folder"):
        private.make(tmp_path / "link")
    if os.geteuid() == 0:
        (tmp_path / "theirs").mkdir(mode=0o700)
        os.chown(tmp_path / "theirs", 12345, 12345)
        with pytest.raises(UserError, match="belongs to user 12345"):
            private.make(tmp_path / "theirs")


def test_doctors_units() -> None:
    assert [seconds(text) for text in ("30:00", "12:30:00", "1-00:00:00", "infinite")] == [1800, 45000, 86400, 0]
    assert _gpus_in("gpu:a100:4(S:0-1),shm:1", None) == 4 and _gpus_in("gpu:a100:4,gpu:t4:2", "t4") == 2
    assert _gpus_in("gpu:4", "a100") == 0 and _gpus_in("(null)", None) == 0


def record_in(folder: Path, **changes: Any) -> Path:
    value = {
        "spec": SPEC.plain(), "hash": "x", "run_dir": str(folder), "submitit": str(folder), "job_id": "7", "created": "2026",
        "since": 0.0, "comment": "c", "array_name": "a", "element": None, "job": "good.1",
    }  # fmt: skip
    (folder / "job.json").write_text(json.dumps({name: v for name, v in (value | changes).items() if v != "gone"}))
    return folder


@pytest.mark.parametrize(
    "changes", [{"run_dir": "gone"}, {"spec": []}, {"since": "late"}, {"job_id": 7}, {"hash": None}]
)
def test_a_damaged_record_is_none(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert slurm_folder.Folder(record_in(tmp_path)).record() is not None
    assert slurm_folder.Folder(record_in(tmp_path, **changes)).record() is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"state": "failed", "reason": "x", "ranks": [1], "exit_code": 1}'])
def test_a_damaged_ending_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "ended.json").write_text(text)
    assert slurm_folder.Folder(tmp_path).ended() is None


def test_a_spec_of_another_version_is_one_line(tmp_path: Path) -> None:
    backend = SlurmBackend(tmp_path)
    folder = private.make(tmp_path / "a")
    record_in(folder, spec={**SPEC.plain(), "nodse": 2})
    with pytest.raises(UserError, match="nodse"):
        backend.status("a")


def test_a_huge_sweep_is_refused_before_it_is_made() -> None:
    values = {f"s{number}": list(range(40)) for number in range(8)}
    with pytest.raises(UserError, match="6553600000000 runs, more than 1000"):
        sweep.expand(SPEC, values)


@pytest.mark.parametrize("option", ["cpus_per_task", "gpus_per_node", "tasks_per_node", "timeout_min", "mem"])
def test_a_patch_of_what_the_spec_says_is_refused(option: str, tmp_path: Path) -> None:
    spec = JobSpec.of({**SPEC.plain(), "slurm": {"patch": {option: 5}}})
    with pytest.raises(UserError, match=r"slurm\.patch may not set"):
        render.script(spec, tmp_path)

"""The local backend's records: interrupted submissions, files of another version, an ASCII locale."""

from __future__ import annotations

import cProfile
import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import product
from tests.jobs.helpers import lockstep
from tests.processes import PYTHON, ROOT, clean_env, poll, run
from tests.product import JobSpec, UserError

pytestmark = pytest.mark.promise("local-jobs")
BOUND = 60
LONG = "import time; time.sleep(600)"
RECORDS = ("running.json", "supervisor.json", "ended.json", "job.json")


def _spec(name: str = "done", program: str = "print('hi')") -> JobSpec:
    return JobSpec(name=name, command=["python", "-c", program], max_restarts=0, ranks_per_node=1)


@pytest.fixture
def done(backend: Any) -> Path:
    """The folder of the job `done`. The jobs `done` and `other` have succeeded."""
    for job in ("done", "other"):
        backend.submit(_spec(job))
        assert backend.wait(job, BOUND).state == "succeeded"
    return Path(backend.folder / "done")


def _changed(file: Path, **values: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def test_a_folder_without_a_record_takes_no_name(backend: Any) -> None:
    """The disk was full, or the command was killed, before the record was written."""
    (backend.folder / "done").mkdir()
    (backend.folder / "done/.job.json.tmp").write_text("{")
    with pytest.raises(UserError, match="there is no local job done"):
        backend.status("done")
    submission = backend.submit(_spec())
    assert (submission.name, submission.created) == ("done", True)
    assert backend.wait("done", BOUND).state == "succeeded"


def test_a_run_directory_that_cannot_be_made_is_refused_at_once(backend: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    job = _spec().model_copy(update={"run_dir": str(tmp_path / "file/run")})
    with pytest.raises(UserError, match=r"run_dir: cannot make .*/file/run: "):
        backend.submit(job)
    assert not backend.list()
    rows = {row.name: row.result for row in backend.dry_run(job)}
    assert rows["run_dir"] == "missing", rows
    with pytest.raises(UserError, match="mode must be attach or replace, got 'new'"):
        backend.submit(JobSpec.of({"name": "here", "command": ["true"]}), mode="new")


def test_a_folder_of_something_else_is_not_touched(backend: Any) -> None:
    (backend.folder / "done").mkdir()
    (backend.folder / "done/thesis.txt").write_text("mine")
    with pytest.raises(UserError, match="does not hold a job"):
        backend.submit(_spec(), "replace")
    assert (backend.folder / "done/thesis.txt").read_text() == "mine"


def test_a_job_is_never_lost_while_it_is_submitted_or_ends(backend: Any) -> None:
    """Another shell queries the status all the time."""
    states, over = [], threading.Event()

    def ask() -> None:
        while not over.is_set():
            if (backend.folder / "done/job.json").exists():
                states.append(backend.status("done").state)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        backend.submit(_spec())
        assert backend.wait("done", BOUND).state == "succeeded"
        poll(lambda: "succeeded" in states, BOUND, "the other shell sees it, too")
    finally:
        over.set()
        thread.join()
    assert {"pending", "succeeded"} <= set(states) and "lost" not in states, set(states)


def test_a_submission_that_broke_off_leaves_no_job(backend: Any, done: Path) -> None:
    """The command was killed before it wrote the record, or before the supervisor read its start message."""
    for name in ("ended.json", "running.json"):
        (done / name).unlink()
    assert run([PYTHON, "-m", "lockstep.jobs.local.supervise", str(done)], clean_env()).code == 1, "it has not its word"
    assert not (done / "running.json").exists() and backend.status("done").state == "lost"
    (done / "job.json").unlink()
    assert backend.submit(_spec()).created and backend.wait("done", BOUND).state == "succeeded"


def test_a_locale_without_our_letters_ends_no_command(backend: Any, tmp_path: Path) -> None:
    backend.submit(_spec("bad", "print('größer', flush=True); raise SystemExit('error: zu groß – ☃')"))
    process = lockstep(tmp_path, "wait", "local", "bad", "--timeout", str(BOUND), encoding="ascii")
    assert process.returncode == 1 and "bad: failed" in process.stdout and "\\u2603" in process.stdout, process
    process = lockstep(tmp_path, "logs", "local", "bad", encoding="ascii")
    assert process.returncode == 0 and "gr\\xf6\\xdfer" in process.stdout and process.stdout.endswith("\\u2603\n"), (
        process
    )


DAMAGED = ["", "null", "[]", "{}", "3", '"x"', "{", "[" * 10_000, '{"pid": "x", "ticks": null}', '{"pid": 1}', '{"pid": null, "ticks": 3}',
           '{"pid": -1, "ticks": null}', '{"pid": 1e400, "ticks": 1}', '{"code": "0", "reason": 3}', '{"code": 0}',
           '{"code": true}', '{"code": 0, "reason": "", "job": "done"}',
           '{"spec": {"name": "done", "warp_drive": 9}}']  # fmt: skip


@pytest.mark.parametrize("name", [*RECORDS, "status.json"])
def test_a_damaged_record_hides_no_other_job_and_ends_no_process(backend: Any, done: Path, name: str) -> None:
    """Each record is damaged in each way. `list` still shows the other job, and commands of the damaged job still end."""
    folder = Path(json.loads((done / "job.json").read_text())["run_dir"]) if name == "status.json" else done
    folder.mkdir(parents=True, exist_ok=True)
    for text in DAMAGED:
        (folder / name).write_text(text)
        rows = {row.name: row.state for row in backend.list()}
        assert rows["other"] == "succeeded", (text, rows)
        if name != "job.json":
            assert "done" in rows, text
            backend.cancel("done")
            backend.status("done")


@pytest.mark.promise("alerts")
def test_status_says_which_rank_holds_the_others_up(backend: Any, done: Path) -> None:
    job = json.loads((done / "job.json").read_text())
    slow = {"rank": 3, "phase": "data", "share": 0.114}
    status = {"code": 0, "reason": "complete", "step": 9, "attempt": 1, "job": job["job"], "slow_rank": slow}
    Path(job["run_dir"]).mkdir(parents=True, exist_ok=True)
    (Path(job["run_dir"]) / "status.json").write_text(json.dumps(status))
    output = lockstep(done, "status", "local", "done").stdout
    assert "rank 3, in data: costs 11 % of every step\n" in output
    assert json.loads(lockstep(done, "status", "local", "done", "--json").stdout)["slow_rank"] == slow


@pytest.mark.promise("growth")
def test_500_jobs_are_listed_without_a_look_at_all_processes(backend: Any, done: Path) -> None:
    """The jobs have succeeded, or their processes have vanished. The test counts calls: load does not change them."""
    for number in range(499):
        folder = backend.folder / f"done-{number}"
        shutil.copytree(done, folder)
        for name in ("job.json", "ended.json"):
            _changed(folder / name, job=folder.name)
    for state in ("succeeded", "lost"):
        for folder in backend.folder.glob("done-*") if state == "lost" else ():
            (folder / "ended.json").unlink()
        profile = cProfile.Profile()
        rows = [row.state for row in profile.runcall(backend.list) if row.name.startswith("done-")]
        calls = {str(entry.code): entry.callcount for entry in profile.getstats()}
        listed = [count for code, count in calls.items() if "posix.listdir" in code or "posix.scandir" in code]
        assert rows == [state] * 499 and sum(calls.values()) < 2000 * 500 and sum(listed) < 10, (calls, listed)
    for folder in backend.folder.glob("done-*"):
        shutil.rmtree(folder)


@pytest.mark.promise("other-users")
@pytest.mark.parametrize("mode", [0o777, 0o770], ids=oct)
def test_a_folder_that_another_user_can_write_to_is_not_used(backend: Any, done: Path, mode: int) -> None:
    """With a planted record, another user could make `cancel` kill any process and `submit` run any command."""
    backend.folder.chmod(mode)
    uses: list[Callable[[], object]] = [
        lambda: backend.submit(_spec("third")), lambda: backend.status("done"), lambda: backend.cancel("done"), backend.list,
        lambda: list(backend.logs("done")),
    ]  # fmt: skip
    try:
        for use in uses:
            with pytest.raises(UserError, match="can be changed by other users"):
                use()
        assert not (backend.folder / "third").exists()
    finally:
        backend.folder.chmod(0o700)


def test_neither_another_machine_nor_an_earlier_submission_ends_a_job(
    backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another machine can only read the status. A record says that an earlier submission ended. Neither ends the present job."""
    folder = backend.folder / "long"
    backend.submit(_spec("long", LONG))
    poll((folder / "running.json").exists, BOUND, "the job")
    with monkeypatch.context() as patch:
        product.elsewhere(patch)
        status = backend.status("long")
        assert (status.state, "ask there" in status.reason) == ("running", True), status
        with pytest.raises(UserError, match="cancel it there"):
            backend.cancel("long")
        assert not backend.submit(_spec("long", LONG), "replace").created
    assert not (folder / "ended.json").exists()
    end = {"code": 75, "reason": "", "timed_out": False, "job": "long.before"}
    (folder / "ended.json").write_text(json.dumps(end))
    assert backend.status("long").state == "running"
    (folder / "ended.json").unlink()
    assert backend.cancel("long").state == "cancelled"


def test_the_example_driver_submits_again_after_a_preemption(backend: Any, tmp_path: Path) -> None:
    program = (
        f"import json, pathlib, sys; run = pathlib.Path({str(tmp_path / 'run')!r}); again = run.exists(); "
        "run.mkdir(exist_ok=True); (run / 'summary.json').write_text(json.dumps({'accuracy': 0.5})); sys.exit(75 * (not again))"
    )
    values = {
        "name": "again",
        "command": ["python", "-c", program],
        "max_restarts": 0,
        "run_dir": str(tmp_path / "run"),
    }
    (tmp_path / "job.yaml").write_text(json.dumps(values))
    command = [PYTHON, str(ROOT / "examples/driver.py"), "job.yaml", "--backend", "local", "--poll", "0.5"]
    done = run(command, clean_env(LOCKSTEP_HOME=str(tmp_path / "home")), cwd=tmp_path)
    assert done.code == 0 and "again: preempted" in done.output and "again  succeeded  0.5000" in done.output, done

"""The local backend's records: submissions that were broken off, files of another version, a locale without our letters."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
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


@pytest.fixture
def backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("LOCKSTEP_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "home/local").mkdir(mode=0o700, parents=True)
    found = product.local(tmp_path / "home/local")
    yield found
    for row in found.list():
        found.cancel(row.name)


def _spec(name: str = "done", program: str = "print('hi')") -> JobSpec:
    return JobSpec(name=name, command=["python", "-c", program], max_restarts=0, ranks_per_node=1)


@pytest.fixture
def done(backend: Any) -> Path:
    """The folder of a job that has succeeded; `other` has, too."""
    for job in ("done", "other"):
        backend.submit(_spec(job))
        assert backend.wait(job, BOUND).state == "succeeded"
    return Path(backend.folder / "done")


def _changed(file: Path, **values: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


@pytest.mark.parametrize("mode", ["attach", "replace", "new"])
def test_a_folder_without_a_record_takes_no_name(backend: Any, mode: Any) -> None:
    """The disk was full, or the command was killed, before the record was there."""
    (backend.folder / "done").mkdir()
    (backend.folder / "done/.job.json.tmp").write_text("{")
    with pytest.raises(UserError, match="there is no local job done"):
        backend.status("done")
    sent = backend.submit(_spec(), mode)
    assert (sent.name, sent.created) == ("done", True)
    assert backend.wait("done", BOUND).state == "succeeded"


def test_a_folder_of_something_else_is_not_touched(backend: Any) -> None:
    (backend.folder / "done").mkdir()
    (backend.folder / "done/thesis.txt").write_text("mine")
    with pytest.raises(UserError, match="does not hold a job"):
        backend.submit(_spec(), "replace")
    assert (backend.folder / "done/thesis.txt").read_text() == "mine"


def test_a_job_is_never_lost_while_it_is_submitted_or_ends(backend: Any) -> None:
    """Another shell asks all the time."""
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


def test_a_job_that_ends_between_two_questions_has_ended_and_is_not_lost(backend: Any) -> None:
    """Asked whether a job's processes live, the system answers when they have just ended, as a busy machine would."""

    def busy(folder: Path, lives: Callable[[Path], bool]) -> None:
        poll((folder / "ended.json").exists, BOUND, "the end of the job")
        poll(lambda: not lives(folder), BOUND, "the end of its processes")

    product.look_late(backend, busy)
    backend.submit(_spec())
    assert backend.status("done").state == "succeeded"


def test_a_submission_that_broke_off_before_its_supervisor_is_lost_after_a_minute(backend: Any, done: Path) -> None:
    for name in ("supervisor.json", "running.json", "ended.json"):
        (done / name).unlink()
    record = done / "job.json"
    os.utime(record)
    assert backend.status("done").state == "pending"
    os.utime(record, (record.stat().st_mtime - 61,) * 2)
    assert backend.status("done").state == "lost"


@pytest.mark.parametrize("spec", [None, {**_spec().record(), "warp_drive": 9}], ids=["damaged", "newer"])
def test_a_record_of_another_version_hides_no_other_job(backend: Any, done: Path, tmp_path: Path, spec: Any) -> None:
    _changed(done / "job.json", spec=spec)
    listed = lockstep(tmp_path, "list", "local", "--json")
    assert [row["name"] for row in json.loads(listed.stdout)] == ["other"]
    assert listed.stderr.count("\n") == 1 and ("warp_drive" if spec else "done") in listed.stderr, listed
    for command in ("status", "logs", "cancel"):
        told = lockstep(tmp_path, command, "local", "done")
        assert (told.returncode, told.stderr.count("\n")) == (2, 1), told


@pytest.mark.parametrize("encoding", ["latin-1", "ascii"])
def test_a_locale_without_our_letters_ends_no_command(backend: Any, tmp_path: Path, encoding: str) -> None:
    backend.submit(_spec("bad", "print('größer', flush=True); raise SystemExit('error: zu groß – ☃')"))
    told = lockstep(tmp_path, "wait", "local", "bad", "--timeout", str(BOUND), encoding=encoding)
    assert told.returncode == 1 and "bad: failed" in told.stdout and "\\u2603" in told.stdout, told
    told = lockstep(tmp_path, "logs", "local", "bad", encoding=encoding)
    assert told.returncode == 0 and told.stdout.endswith("\\u2603\n"), told
    assert ("größer" if encoding == "latin-1" else "gr\\xf6\\xdfer") in told.stdout
    env = clean_env(LOCKSTEP_HOME=str(tmp_path / "home"), PYTHONIOENCODING=f"{encoding}:strict")
    command = [PYTHON, "-c", product.PROGRAM, "logs", "local", "bad"]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=60, env=env, encoding=encoding)
    assert (process.returncode, process.stdout, process.stderr) == (0, told.stdout, ""), "the process agrees"


DAMAGED = ["", "null", "[]", "{}", "3", '"x"', "{", "[" * 10_000, '{"pid": "x", "ticks": null}', '{"pid": 1}', '{"pid": null, "ticks": 3}',
           '{"pid": -1, "ticks": null}', '{"pid": 1e400, "ticks": 1}', '{"code": "0", "reason": 3}', '{"code": 0}',
           '{"code": true}', '{"code": 0, "reason": "", "job": "done"}']  # fmt: skip


@pytest.mark.parametrize("name", [*RECORDS, "status.json"])
def test_a_damaged_record_hides_no_other_job_and_ends_no_process(backend: Any, done: Path, name: str) -> None:
    """Each file that a job leaves, damaged in each way, while another job is there: `list` shows both, or says which."""
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


def test_a_record_in_which_anything_is_missing_breaks_that_job_alone(done: Path, tmp_path: Path) -> None:
    """Or has another kind of value, or text that nothing can write: of two jobs one is always listed, without a traceback."""
    for name in RECORDS:
        whole = json.loads((done / name).read_text())
        for key, value in whole.items():
            others = ["", "\ud800", "\0", "\x1b[2J"] if name == "job.json" and isinstance(value, str) else []
            for other in (..., ["x"] if not isinstance(value, list) else 1.5, *others):
                record = {**whole, key: other} if other is not ... else {own: whole[own] for own in whole if own != key}
                (done / name).write_text(json.dumps(record))
                listed = lockstep(tmp_path, "list", "local", "--json")
                rows = {row["name"]: row["state"] for row in json.loads(listed.stdout)}
                assert listed.returncode == 0 and rows["other"] == "succeeded", (name, record, listed)
                assert "done" in rows or f"done/{name} is damaged" in listed.stderr or others, (name, record, listed)
                asked = lockstep(tmp_path, "status", "local", "done")
                assert asked.returncode in (0, 2, 4) and "Traceback" not in asked.stderr, (name, record, asked)
                assert "\x1b" not in asked.stdout + asked.stderr, (name, record, asked)
        (done / name).write_text(json.dumps(whole))


@pytest.mark.parametrize("kind", ["folder", "loop", "fifo", "zeros"])
def test_a_log_that_is_none_ends_in_a_line(backend: Any, tmp_path: Path, kind: str) -> None:
    backend.submit(_spec("done", "raise SystemExit(3)"))
    assert backend.wait("done", BOUND).state == "failed"
    log = backend.folder / "done/log.txt"
    log.unlink()
    {"folder": log.mkdir, "loop": lambda: log.symlink_to("log.txt"), "fifo": lambda: os.mkfifo(log),
     "zeros": lambda: log.symlink_to("/dev/zero")}[kind]()  # fmt: skip
    assert [row.state for row in backend.list()] == ["failed"]
    for words in (["status"], ["logs"], ["logs", "--tail", "3"], ["cancel"]):
        told = lockstep(tmp_path, words[0], "local", "done", *words[1:])
        assert "Traceback" not in told.stderr and told.stderr.count("\n") <= 1, (words, told)
        assert told.returncode == 2 or words[0] != "logs", (words, told)


@pytest.mark.parametrize("words", ["list local", "logs local a", "exec local a -- true"])
def test_a_home_that_is_no_folder_or_not_ours_ends_in_a_line(
    tmp_path: Path, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    for home in ("/dev/null", str(tmp_path / "file/below")):
        told = lockstep(tmp_path, *words.split(), LOCKSTEP_HOME=home)
        assert (told.returncode, told.stdout, told.stderr.count("\n")) == (
            2,
            "",
            1,
        ) and f"{home}/local" in told.stderr, told
    home = tmp_path / "HOME"
    (home / ".local/state/lockstep/local").mkdir(mode=0o700, parents=True)
    # Root without the right to read everything.
    root = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
    for closed in (home / ".local/state/lockstep/local", home):
        closed.chmod(0)
        command = [*root, PYTHON, "-c", product.PROGRAM, *words.split()]
        try:
            done = run(command, clean_env(HOME=str(home), LOCKSTEP_HOME=""), cwd=tmp_path)
        finally:
            closed.chmod(0o700)
        assert done.code == 2 and done.output.count("\n") == 1 and f"{home}/" in done.output, done
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 54321)  # which no table of users has, as in many containers
    told = lockstep(tmp_path, *words.split(), LOCKSTEP_HOME="")
    assert (told.returncode, told.stderr.count("\n")) == (2, 1) and "set LOCKSTEP_HOME" in told.stderr, told


@pytest.mark.promise("growth")
def test_500_jobs_are_listed_within_a_second(backend: Any, done: Path) -> None:
    """Of those whose processes are gone without a word, too: the processes of the machine are looked at once for all."""
    for number in range(499):
        folder = backend.folder / f"done-{number}"
        shutil.copytree(done, folder)
        for name in ("job.json", "ended.json"):
            _changed(folder / name, job=folder.name)
    for state, change in (
        ("succeeded", lambda _: None),
        ("lost", Path.unlink),
        ("lost", lambda path: path.write_text("{}")),
    ):
        for folder in backend.folder.glob("done-*"):
            change(folder / "ended.json")
        began = time.process_time()
        rows = [row.state for row in backend.list() if row.name.startswith("done-")]
        spent = time.process_time() - began
        assert rows == [state] * 499 and spent < 1, f"{spent:.2f} s"
    for folder in backend.folder.glob("done-*"):
        shutil.rmtree(folder)


@pytest.mark.promise("other-users")
@pytest.mark.parametrize("mode", [0o777, 0o770, 0o755], ids=oct)
def test_a_folder_that_somebody_else_could_write_is_not_used(backend: Any, done: Path, mode: int) -> None:
    """A record planted there would have `cancel` end somebody's process, and `submit` run somebody's command."""
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
    """Of the one process numbers mean nothing here; the other's end may be noted late, by whoever asked for it."""
    folder = backend.folder / "long"
    backend.submit(_spec("long", LONG))
    poll((folder / "running.json").exists, BOUND, "the job")
    with monkeypatch.context() as patch:
        product.elsewhere(patch)
        found = backend.status("long")
        assert (found.state, "ask there" in found.reason) == ("running", True), found
        with pytest.raises(UserError, match="cancel it there"):
            backend.cancel("long")
        assert not backend.submit(_spec("long", LONG), "replace").created
    assert not (folder / "ended.json").exists()
    end = {"code": 75, "reason": "", "timed_out": False, "job": "long.before"}
    (folder / "ended.json").write_text(json.dumps(end))
    assert backend.status("long").state == "running"
    (folder / "ended.json").unlink()
    assert backend.cancel("long").state == "cancelled"


def test_a_rank_that_has_printed_nothing_is_told_so(backend: Any, tmp_path: Path) -> None:
    spec = _spec(program="print('[rank 0] hi')").model_copy(update={"ranks_per_node": 2})
    backend.submit(spec)
    backend.wait("done", BOUND)
    for words, out, said in (
        (["--rank", "0"], "hi", ""),
        (["--rank", "1"], "", "rank 1 has printed nothing"),
        ([], "hi", ""),
    ):
        told = lockstep(tmp_path, "logs", "local", "done", *words)
        assert told.returncode == 0 and out in told.stdout and said in told.stderr, (words, told)
        assert bool(told.stderr) == bool(said), (words, told)

"""The local backend's records: submissions that were broken off, files of another version, a locale without our letters."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep.jobs.local import backend as local
from lockstep.jobs.local import supervise
from lockstep.jobs.local.backend import LocalBackend
from lockstep.jobs.private import make
from lockstep.jobs.slurm import folder as slurm_folder
from lockstep.jobs.spec.model import JobSpec
from lockstep.training.contract import UserError
from tests.jobs.helpers import Bare, lockstep
from tests.processes import PYTHON, ROOT, clean_env, poll, run

BOUND = 60


@pytest.fixture
def backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalBackend]:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    found = Bare(tmp_path / "home/local")
    yield found
    for row in found.list():
        found.cancel(row.name)


def _spec(name: str = "done", program: str = "print('hi')") -> JobSpec:
    return JobSpec(name=name, command=["python", "-c", program], max_restarts=0, ranks_per_node=1)


def _change(backend: LocalBackend, name: str, **values: Any) -> None:
    file = backend.folder / name / "job.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


@pytest.mark.parametrize("mode", ["attach", "replace", "new"])
def test_a_folder_without_a_record_takes_no_name(backend: LocalBackend, mode: Any) -> None:
    """The disk was full, or the command was killed, before the record was there."""
    (make(backend.folder) / "done").mkdir()
    (backend.folder / "done/.job.json.tmp").write_text("{")
    with pytest.raises(UserError, match="there is no local job done"):
        backend.status("done")
    sent = backend.submit(_spec(), mode)
    assert (sent.name, sent.created) == ("done", True)
    assert backend.wait("done", BOUND).state == "succeeded"


def test_a_folder_of_something_else_is_not_touched(backend: LocalBackend) -> None:
    (make(backend.folder) / "done").mkdir()
    (backend.folder / "done/thesis.txt").write_text("mine")
    with pytest.raises(UserError, match="does not hold a job: choose another name"):
        backend.submit(_spec(), "replace")
    assert (backend.folder / "done/thesis.txt").read_text() == "mine"


def test_a_job_is_never_lost_while_it_is_submitted_or_ends(backend: LocalBackend) -> None:
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


def test_a_submission_that_broke_off_before_its_supervisor_is_lost_after_a_minute(backend: LocalBackend) -> None:
    backend.submit(_spec())
    backend.wait("done", BOUND)
    for name in ("supervisor.json", "running.json", "ended.json"):
        (backend.folder / "done" / name).unlink()
    record = backend.folder / "done/job.json"
    os.utime(record)
    assert backend.status("done").state == "pending"
    os.utime(record, (record.stat().st_mtime - 61,) * 2)
    assert backend.status("done").state == "lost"


def test_a_record_of_another_version_hides_no_other_job(
    backend: LocalBackend, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("damaged", "good", "newer"):
        backend.submit(_spec(name))
        assert backend.wait(name, BOUND).state == "succeeded"
    _change(backend, "newer", spec={**_spec("newer").plain(), "warp_drive": 9})
    _change(backend, "damaged", spec=None)
    (backend.folder / "good/log.txt").unlink()
    assert [(row.name, row.state) for row in backend.list()] == [("good", "succeeded")]
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 2 and "damaged" in told[0] and "warp_drive" in told[1], told
    for name, ask in (
        ("newer", backend.status),
        ("damaged", backend.status),
        ("newer", backend.logs),
        ("newer", backend.cancel),
    ):
        with pytest.raises(UserError) as caught:
            ask(name)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("encoding", ["latin-1", "ascii"])
def test_a_locale_without_our_letters_ends_no_command(backend: LocalBackend, tmp_path: Path, encoding: str) -> None:
    home = str(tmp_path / "home")
    backend.submit(_spec("bad", "print('größer', flush=True); raise SystemExit('error: zu groß – ☃')"))
    done = lockstep(tmp_path, "wait", "local", "bad", "--timeout", str(BOUND), encoding=encoding, LOCKSTEP_HOME=home)
    assert done.returncode == 1 and "bad: failed" in done.stdout and "\\u2603" in done.stdout, done
    done = lockstep(tmp_path, "logs", "local", "bad", encoding=encoding, LOCKSTEP_HOME=home)
    assert done.returncode == 0 and done.stdout.endswith("\\u2603\n"), done
    assert ("größer" if encoding == "latin-1" else "gr\\xf6\\xdfer") in done.stdout
    program = "import sys; sys.argv[0] = 'lockstep'; from lockstep.jobs.cli.main import main; main()"
    process = subprocess.run(
        [PYTHON, "-c", program, "logs", "local", "bad"], cwd=tmp_path, capture_output=True, text=True, timeout=60,
        env=clean_env(LOCKSTEP_HOME=home, PYTHONIOENCODING=f"{encoding}:strict"), encoding=encoding,
    )  # fmt: skip
    assert (process.returncode, process.stdout, process.stderr) == (0, done.stdout, ""), "the process agrees"


def test_a_reader_that_has_gone_is_no_traceback() -> None:
    """`| head` that has seen enough: the pipe has no reader any more."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [PYTHON, "-m", "lockstep.training", "settings"]
    with os.fdopen(writer, "wb") as pipe:
        done = subprocess.run(
            command, env=clean_env(), cwd=ROOT, stdout=pipe, stderr=subprocess.PIPE, text=True, timeout=60
        )
    assert (done.returncode, done.stderr) == (141, ""), done


@pytest.mark.parametrize(
    "command", ["-m lockstep.training settings", "-c 'from lockstep.jobs.cli.main import main; main()' schema"]
)
def test_output_that_is_closed_is_no_traceback(command: str) -> None:
    done = subprocess.run(
        ["sh", "-c", f"{PYTHON} {command} >&-"],
        env=clean_env(),
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, ""), done


def test_a_full_disk_below_the_log_costs_no_training(tiny: list[str], tmp_path: Path) -> None:
    words = ["run", "smoke", "--run-dir", str(tmp_path / "run"), "--set", *tiny, "epochs=1"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [PYTHON, "-m", "lockstep.training", *words],
            env=clean_env(TMPDIR=str(tmp_path)),
            cwd=ROOT,
            stdout=full,
            stderr=full,
            timeout=120,
        )
    assert done.returncode == 0 and json.loads((tmp_path / "run/status.json").read_text())["code"] == 0


DAMAGED = ["", "{}", "[]", "null", '"x"', '{"code": "x", "attempt": 1, "step": 1}', '{"pid": "1", "ticks": 1}',
           '{"pid": 1234}', '{"pid": -1, "ticks": null}', '{"pid": 0, "ticks": null}', '{"code": -9999}', '{"code": null}',
           '{"code": true}', '{"code": 0, "reason": "", "job": "done"}']  # fmt: skip


@pytest.mark.parametrize("name", ["running.json", "supervisor.json", "ended.json", "status.json", "job.json"])
def test_a_damaged_record_hides_no_other_job_and_ends_no_process(backend: LocalBackend, name: str) -> None:
    """Each file that a job leaves, damaged in each way, while another job is there: `list` shows both, or says which."""
    for job in ("done", "other"):
        backend.submit(_spec(job))
        assert backend.wait(job, BOUND).state == "succeeded"
    run_dir = Path(json.loads((backend.folder / "done/job.json").read_text())["run_dir"])
    folder = run_dir if name == "status.json" else backend.folder / "done"
    folder.mkdir(parents=True, exist_ok=True)
    for text in DAMAGED:
        (folder / name).write_text(text)
        rows = {row.name: row.state for row in backend.list()}
        assert rows["other"] == "succeeded", (text, rows)
        if name != "job.json":
            assert "done" in rows, text
            backend.cancel("done")
            backend.status("done")


def _without(record: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The record without each of its keys, and with a value of another kind in its place."""
    for key in record:
        yield {name: value for name, value in record.items() if name != key}
        yield {**record, key: ["x"] if not isinstance(record[key], list) else 1.5}


def test_a_record_in_which_anything_is_missing_breaks_that_job_alone(backend: LocalBackend, tmp_path: Path) -> None:
    """By the command line: of two jobs one is always listed, and no command ends with a traceback."""
    home = str(tmp_path / "home")
    for job in ("done", "other"):
        backend.submit(_spec(job))
        assert backend.wait(job, BOUND).state == "succeeded"
    for name in ("supervisor.json", "running.json", "ended.json", "job.json"):
        file = backend.folder / "done" / name
        whole = json.loads(file.read_text())
        for record in _without(whole):
            file.write_text(json.dumps(record))
            listed = lockstep(tmp_path, "list", "local", "--json", LOCKSTEP_HOME=home)
            rows = {row["name"]: row["state"] for row in json.loads(listed.stdout)}
            assert listed.returncode == 0 and rows["other"] == "succeeded", (name, record, listed)
            assert "done" in rows or f"done/{name} is damaged" in listed.stderr, (name, record, listed)
            asked = lockstep(tmp_path, "status", "local", "done", LOCKSTEP_HOME=home)
            assert asked.returncode in (0, 2, 4) and "Traceback" not in asked.stderr, (name, record, asked)
        file.write_text(json.dumps(whole))


@pytest.mark.parametrize("value", ["", " ", "\ud800", "\0", "\x1b[2J"], ids=ascii)
def test_no_text_in_a_record_hides_other_jobs(backend: LocalBackend, tmp_path: Path, value: str) -> None:
    """Nor half a surrogate pair, which JSON can say and nothing can write."""
    for job in ("done", "other"):
        backend.submit(_spec(job))
        assert backend.wait(job, BOUND).state == "succeeded"
    record = json.loads((backend.folder / "done/job.json").read_text())
    for name in ("host", "job", "run_dir", "created", "hash"):
        (backend.folder / "done/job.json").write_text(json.dumps({**record, name: value}))
        (backend.folder / "done/ended.json").unlink(missing_ok=True)
        rows = {row.name: row.state for row in backend.list()}
        assert rows["other"] == "succeeded", (name, rows)
    (backend.folder / "done/job.json").write_text(json.dumps({**record, "run_dir": str(tmp_path / "run")}))
    (tmp_path / "run").mkdir()
    said = {"code": 1, "step": 1, "attempt": 1, "reason": value, "job": record["job"]}
    (tmp_path / "run/status.json").write_text(json.dumps(said))
    (backend.folder / "done/ended.json").unlink(missing_ok=True)
    assert {row.name for row in backend.list()} == {"done", "other"}
    done = lockstep(tmp_path, "status", "local", "done", LOCKSTEP_HOME=str(tmp_path / "home"))
    assert "Traceback" not in done.stderr and "\x1b" not in done.stdout, done


@pytest.mark.parametrize("kind", ["folder", "loop", "fifo", "zeros"])
def test_a_log_that_is_none_ends_in_a_line(backend: LocalBackend, tmp_path: Path, kind: str) -> None:
    backend.submit(_spec("done", "raise SystemExit(3)"))
    assert backend.wait("done", BOUND).state == "failed"
    log = backend.folder / "done/log.txt"
    log.unlink()
    {"folder": log.mkdir, "loop": lambda: log.symlink_to("log.txt"), "fifo": lambda: os.mkfifo(log),
     "zeros": lambda: log.symlink_to("/dev/zero")}[kind]()  # fmt: skip
    assert [row.state for row in backend.list()] == ["failed"]
    for words in (["status"], ["logs"], ["logs", "--tail", "3"], ["cancel"]):
        done = lockstep(tmp_path, words[0], "local", "done", *words[1:], LOCKSTEP_HOME=str(tmp_path / "home"))
        assert "Traceback" not in done.stderr and done.stderr.count("\n") <= 1, (words, done)
        assert done.returncode == 2 or words[0] != "logs", (words, done)


ASKED = ["list local", "status local a", "logs local a", "wait local a", "cancel local a", "exec local a -- true"]


@pytest.mark.parametrize("words", ASKED)
def test_a_home_that_is_no_folder_ends_in_a_line(tmp_path: Path, words: str) -> None:
    (tmp_path / "file").touch()
    for home in ("/dev/null", str(tmp_path / "file/below")):
        done = lockstep(tmp_path, *words.split(), LOCKSTEP_HOME=home)
        assert done.returncode == 2 and not done.stdout, done
        assert done.stderr == f"error: cannot look for jobs in {home}/local: Not a directory; set LOCKSTEP_HOME\n"


@pytest.mark.parametrize("closed", ["HOME", "HOME/.local/state/lockstep/local"])
def test_a_home_that_may_not_be_read_ends_in_a_line(tmp_path: Path, closed: str) -> None:
    home = tmp_path / "HOME"
    (home / ".local/state/lockstep/local").mkdir(mode=0o700, parents=True)
    (tmp_path / closed).chmod(0)
    # Root without the right to read everything.
    root = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
    command = [*root, PYTHON, "-c", "from lockstep.jobs.cli.main import main; main()"]
    env = {**clean_env(PYTHONPATH=str(ROOT), HOME=str(home)), "LOCKSTEP_HOME": ""}
    try:
        for words in ("list local", "status local a"):
            done = run([*command, *words.split()], env, cwd=tmp_path)
            assert done.code == 2 and done.output.count("\n") == 1, done
            assert f"cannot look for jobs in {home}/.local/state/lockstep/local: Permission denied" in done.output
    finally:
        (tmp_path / closed).chmod(0o700)


def test_a_user_without_a_home_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A number that no table of users has, as in many containers."""
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    done = lockstep(tmp_path, "list", "local", LOCKSTEP_HOME="")
    assert done.returncode == 2 and done.stderr == (
        "error: this user has no home folder to keep jobs in: set LOCKSTEP_HOME\n"
    )


@pytest.mark.parametrize("kind", ["ended", "broken", "damaged"])
def test_500_jobs_are_listed_within_a_second(backend: LocalBackend, kind: str) -> None:
    """Of those whose processes are gone without a word, too: the processes of the machine are looked at once for all."""
    backend.submit(_spec())
    assert backend.wait("done", BOUND).state == "succeeded"
    for number in range(499):
        folder = backend.folder / f"done-{number}"
        shutil.copytree(backend.folder / "done", folder)
        _change(backend, folder.name, job=folder.name)
        ended = json.loads((folder / "ended.json").read_text())
        (folder / "ended.json").write_text(json.dumps({**ended, "job": folder.name}))
    for folder in backend.folder.glob("done*"):
        if kind == "broken":
            (folder / "ended.json").unlink()
        if kind == "damaged":
            (folder / "ended.json").write_text("{}")
    began = time.process_time()
    rows = backend.list()
    spent = time.process_time() - began
    assert {row.state for row in rows} == {"succeeded" if kind == "ended" else "lost"} and len(rows) == 500
    assert spent < 1, f"{spent:.2f} s"
    for folder in backend.folder.glob("done-*"):
        shutil.rmtree(folder)


def test_a_damaged_ending_of_slurm_is_none(tmp_path: Path) -> None:
    part = {"name": "node", "ranks": [0], "state": "succeeded", "reason": "", "restarts": 0}
    good = {"state": "succeeded", "reason": "", "ranks": [part], "exit_code": 0}
    file = tmp_path / slurm_folder.ENDED
    file.write_text(json.dumps(good))
    assert slurm_folder.Folder(tmp_path).ended() == good
    for bad in ({**part, "x": 1}, {"name": "node"}, {**part, "restarts": "0"}, [], None):
        file.write_text(json.dumps({**good, "ranks": [bad]}))
        assert slurm_folder.Folder(tmp_path).ended() is None
    for text in DAMAGED:
        (tmp_path / "7_0_end.json").write_text(text)
        record = {"submitit": str(tmp_path), "job_id": "7", "run_dir": str(tmp_path), "job": "good.1"}
        found = slurm_folder.Notes(record, tmp_path).ends
        assert all(type(end["code"]) is int for end in found.values())


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o755], ids=oct)
def test_a_folder_that_somebody_else_could_write_is_not_used(backend: LocalBackend, mode: int) -> None:
    """A record planted there would have `cancel` end somebody's process, and `submit` run somebody's command."""
    backend.submit(_spec())
    backend.wait("done", BOUND)
    backend.folder.chmod(mode)
    try:
        for use in (
            lambda: backend.submit(_spec("other")), lambda: backend.status("done"), lambda: backend.cancel("done"), backend.list,
            lambda: list(backend.logs("done")),
        ):  # fmt: skip
            with pytest.raises(UserError, match="can be changed by other users"):
                use()
        assert [entry.name for entry in backend.folder.iterdir() if not entry.name.startswith(".")] == ["done"]
    finally:
        backend.folder.chmod(0o700)


def test_another_machine_on_the_same_home_ends_no_job(backend: LocalBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process numbers are another's: it may not call the job lost, note that, or signal anybody."""
    backend.submit(_spec("long", "import time; time.sleep(600)"))
    poll((backend.folder / "long/running.json").exists, BOUND, "the job")
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(local, "here", lambda: "other pid:[1]")
        elsewhere.setattr(local, "alive", lambda pid, ticks: False)
        elsewhere.setattr(local, "living", lambda job, looks: [])
        found = backend.status("long")
        assert (found.state, "ask there" in found.reason) == ("running", True), found
        with pytest.raises(UserError, match="cancel it there"):
            backend.cancel("long")
        assert not backend.submit(_spec("long", "import time; time.sleep(600)"), "replace").created
    assert not (backend.folder / "long/ended.json").exists()
    assert backend.cancel("long").state == "cancelled"


def test_an_end_of_an_earlier_submission_is_not_this_ones(backend: LocalBackend) -> None:
    """Somebody asked while the job was submitted again, and was slow to note how the last one had ended."""
    backend.submit(_spec("long", "import time; time.sleep(600)"))
    poll((backend.folder / "long/running.json").exists, BOUND, "the job")
    job = json.loads((backend.folder / "long/job.json").read_text())
    supervise.note_end(backend.folder / "long", {**job, "job": "long.before"}, 75)
    assert not (backend.folder / "long/ended.json").exists()
    (backend.folder / "long/ended.json").write_text(
        json.dumps({"code": 75, "reason": "", "timed_out": False, "job": "long.before"})
    )
    assert backend.status("long").state == "running"
    (backend.folder / "long/ended.json").unlink()


def test_a_refused_submission_takes_nothing_away(backend: LocalBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = JobSpec.of(
        {**_spec("done", "import sys; sys.exit(75)").plain(), "secrets": {"A_TOKEN": {"secret": "a", "key": "b"}}}
    )
    monkeypatch.setenv("A_TOKEN", "x")
    backend.submit(spec)
    assert backend.wait("done", BOUND).state == "preempted"
    monkeypatch.delenv("A_TOKEN")
    with pytest.raises(UserError, match="needs the secret A_TOKEN"):
        backend.submit(spec)
    assert backend.status("done").state == "preempted"


def test_a_job_that_submits_another_leaves_it_alone(backend: LocalBackend) -> None:
    words = f"from tests.jobs.helpers import Bare; from pathlib import Path; from lockstep.jobs.spec.model import JobSpec; " \
        f"Bare(Path({str(backend.folder)!r})).submit(JobSpec(name='inner', command=['python', '-c', 'import time; time.sleep(3)'], " \
        f"max_restarts=0, ranks_per_node=1))"  # fmt: skip
    backend.submit(_spec("outer", words))
    assert backend.wait("outer", 20).state == "succeeded"
    assert backend.wait("inner", BOUND).state == "succeeded"


def test_restarts_of_the_ranks_are_told_while_it_runs_and_afterwards(backend: LocalBackend, tmp_path: Path) -> None:
    """The launcher counts them into status.json, which this program writes in its place."""
    program = (
        "import json, os, pathlib, time\n"
        "run, go = pathlib.Path(os.environ['RUN']), pathlib.Path(os.environ['RUN'] + '/go')\n"
        "run.mkdir(parents=True, exist_ok=True)\n"
        "said = {'code': None, 'step': 7, 'attempt': 3, 'reason': 'running', 'job': os.environ['LOCKSTEP_JOB'], 'restart': 2}\n"
        "(run / 'status.json').write_text(json.dumps(said))\n"
        "while not go.exists(): time.sleep(0.02)\n"
    )
    run = tmp_path / "runs/again"
    spec = JobSpec(name="again", command=["python", "-c", program], max_restarts=0, ranks_per_node=1, run_dir=str(run),
                   env={"RUN": str(run)})  # fmt: skip
    backend.submit(spec)
    poll(lambda: backend.status("again").reason == "step 7, restart 2", BOUND, "the step, and that it was restarted")
    (run / "go").touch()
    found = backend.wait("again", BOUND)
    assert found.state == "succeeded" and [part.restarts for part in found.ranks] == [2]


def test_a_rank_that_has_printed_nothing_is_told_so(backend: LocalBackend, tmp_path: Path) -> None:
    spec = JobSpec(name="done", command=["python", "-c", "print('[rank 0] hi')"], max_restarts=0, ranks_per_node=2)
    backend.submit(spec)
    backend.wait("done", BOUND)
    for words, out, said in (
        (["--rank", "0"], "hi", ""),
        (["--rank", "1"], "", "rank 1 has printed nothing"),
        ([], "hi", ""),
    ):
        done = lockstep(tmp_path, "logs", "local", "done", *words, LOCKSTEP_HOME=str(tmp_path / "home"))
        assert done.returncode == 0 and out in done.stdout and said in done.stderr, (words, done)
        assert bool(done.stderr) == bool(said), (words, done)

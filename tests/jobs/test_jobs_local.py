"""The local backend's records: submissions that were broken off, files of another version, a locale without our letters."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs.backends.local import LocalBackend
from jobs.spec import JobSpec
from tests.processes import PYTHON, ROOT, clean_env, poll
from training.contract import UserError

BOUND = 60


@pytest.fixture
def backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalBackend]:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    found = LocalBackend(tmp_path / "home/local")
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
    (backend.folder / "done").mkdir(parents=True)
    (backend.folder / "done/.job.json.tmp").write_text("{")
    with pytest.raises(UserError, match="there is no local job done"):
        backend.status("done")
    sent = backend.submit(_spec(), mode)
    assert (sent.name, sent.created) == ("done", True)
    assert backend.wait("done", BOUND).state == "succeeded"


def test_a_folder_of_something_else_is_not_touched(backend: LocalBackend) -> None:
    (backend.folder / "done").mkdir(parents=True)
    (backend.folder / "done/thesis.txt").write_text("mine")
    with pytest.raises(UserError, match="holds no job: choose another name"):
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
    env = clean_env(LOCKSTEP_HOME=str(tmp_path / "home"), PYTHONIOENCODING=f"{encoding}:strict")

    def lockstep(*words: str) -> subprocess.CompletedProcess[str]:
        program = "import sys; sys.argv[0] = 'lockstep'; from jobs.cli import main; main()"
        return subprocess.run([PYTHON, "-c", program, *words], env=env, cwd=tmp_path, capture_output=True, text=True,
                              encoding="latin-1", timeout=60)  # fmt: skip

    backend.submit(_spec("bad", "print('größer'); raise SystemExit('error: zu groß – ☃')"))
    done = lockstep("wait", "local", "bad", "--timeout", str(BOUND))
    assert done.returncode == 1 and "Traceback" not in done.stderr and "bad: failed" in done.stdout, done
    done = lockstep("logs", "local", "bad")
    assert done.returncode == 0 and "\\u2603" in done.stdout, done
    assert lockstep("list", "local").returncode == 0


@pytest.mark.parametrize("shell", ["{0} settings | head -1; exit ${{PIPESTATUS[0]}}", "{0} settings >&-"])
def test_output_that_nobody_takes_is_no_traceback(shell: str) -> None:
    command = shell.format(f"{sys.executable} -m training")
    done = subprocess.run(
        ["bash", "-c", command], env=clean_env(), cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode in (0, 141) and "Traceback" not in done.stderr, done


def test_a_full_disk_below_the_log_costs_no_training(tiny: list[str], tmp_path: Path) -> None:
    words = ["run", "smoke", "--run-dir", str(tmp_path / "run"), "--set", *tiny, "epochs=1"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [PYTHON, "-m", "training", *words], env=clean_env(), cwd=ROOT, stdout=full, stderr=full, timeout=120
        )
    assert done.returncode == 0 and json.loads((tmp_path / "run/status.json").read_text())["code"] == 0

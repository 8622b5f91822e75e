"""Every process of a local job ends with the job: in another session, ignoring TERM, without the job's environment."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import product
from tests.processes import PYTHON, ROOT, clean_env, poll, processes, run
from tests.product import JobSpec

pytestmark = pytest.mark.promise("local-jobs")
BOUND = 60

# A rank that leaves the session and ignores TERM. Its child does the same, has an empty environment and no parent.
# Each writes its process id.
RANK = """
    import os, signal, subprocess, sys, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    folder, deep = sys.argv[1], sys.argv[2:] == ["deep"]
    if os.fork():
        if deep:
            os._exit(0)
        os.wait()
        sys.exit(0)
    os.setsid()
    if not deep:
        subprocess.run([sys.executable, __file__, folder, "deep"], env={}, check=True)
    with open(f"{folder}/{'deep' if deep else 'rank'}.new", "w") as file:
        file.write(str(os.getpid()))
    os.rename(file.name, file.name.removesuffix(".new"))
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def _clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    product.short_grace(monkeypatch)
    yield
    for name in ("rank", "deep"):
        with contextlib.suppress(OSError, ValueError):
            os.kill(int((tmp_path / name).read_text()), signal.SIGKILL)


def _start_deaf_job(backend: Any, tmp_path: Path, **more: str) -> list[int]:
    """Submits a job that ignores TERM, waits for its two processes, and returns their ids."""
    program = tmp_path / "rank.py"
    program.write_text(textwrap.dedent(RANK))
    words = [PYTHON, str(program), str(tmp_path)]
    backend.submit(JobSpec.of({"name": "deaf", "command": words, "max_restarts": 0, "grace_seconds": 5, **more}))
    for name in ("rank", "deep"):
        poll((tmp_path / name).exists, BOUND, f"the process {name}")
    return [int((tmp_path / name).read_text()) for name in ("rank", "deep")]


def _alive(pids: list[int]) -> list[int]:
    return sorted(pid for pid, state, *_ in processes() if pid in pids and state != "Z")


def _supervisor(backend: Any) -> int:
    return int(json.loads((backend.folder / "deaf/supervisor.json").read_text())["pid"])


@pytest.mark.parametrize("backend", ["itself", "launched"], indirect=True)
def test_a_cancelled_job_leaves_no_process(backend: Any, tmp_path: Path) -> None:
    pids = _start_deaf_job(backend, tmp_path)
    assert _alive(pids) == sorted(pids)
    status = backend.cancel("deaf")
    assert (status.state, _alive(pids)) == ("cancelled", []), status


def test_a_job_beyond_its_time_limit_leaves_no_process(backend: Any, tmp_path: Path) -> None:
    """The job's state becomes `timed_out` after its last process has ended."""
    pids = _start_deaf_job(backend, tmp_path, time_limit="10s")
    deadline = time.monotonic() + BOUND
    while not (status := backend.status("deaf")).final:
        assert time.monotonic() < deadline, status
        time.sleep(0.01)
    assert (status.state, status.code, _alive(pids)) == ("timed_out", 124, []), status


def test_without_its_supervisor_a_job_is_lost_and_its_launcher_ends(backend: Any, tmp_path: Path) -> None:
    _start_deaf_job(backend, tmp_path)
    launcher = json.loads((backend.folder / "deaf/running.json").read_text())["pid"]
    os.kill(_supervisor(backend), signal.SIGKILL)
    poll(lambda: _alive([launcher]) == [], BOUND, "the launcher ends")
    assert (status := backend.wait("deaf", BOUND)).state == "lost", status


def test_a_rank_whose_launcher_died_before_it_asked_ends_below_a_supervisor_too() -> None:
    """The rank's parent is then the supervisor, not init."""
    dead_launcher = subprocess.Popen(["true"])
    dead_launcher.wait()
    for launcher, output in ((dead_launcher.pid, ""), (os.getpid(), "begun\n")):
        words = ["-I", "-S", str(ROOT / "training/launch/exec_rank.py"), str(launcher), "echo", "begun"]
        assert run([PYTHON, *words], clean_env()).output == output


def test_a_job_that_another_one_has_submitted_outlives_its_cancellation(backend: Any, tmp_path: Path) -> None:
    program = "import os, time\nwhile not os.path.exists('go'): time.sleep(0.02)"
    words = (
        f"from tests import product; from pathlib import Path; import time; product.local(Path({str(backend.folder)!r})).submit("
        f"product.JobSpec(name='inner', command=['python', '-c', {program!r}], max_restarts=0, ranks_per_node=1)); "
        "time.sleep(600)"
    )
    backend.submit(JobSpec(name="outer", command=["python", "-c", words], max_restarts=0, ranks_per_node=1))
    poll((backend.folder / "inner/running.json").exists, BOUND, "the inner job")
    assert (backend.cancel("outer").state, backend.status("inner").state) == ("cancelled", "running")
    (tmp_path / "go").touch()
    assert backend.wait("inner", BOUND).state == "succeeded"

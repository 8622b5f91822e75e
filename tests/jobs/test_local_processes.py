"""Every process of a local job ends with it: in a session of its own, deaf to TERM, without the job's environment."""

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

import pytest

from lockstep.jobs import command
from lockstep.jobs.backend import Backend
from lockstep.jobs.local import processes
from lockstep.jobs.local.backend import LocalBackend
from lockstep.jobs.spec.model import JobSpec
from lockstep.training import contract
from lockstep.training.contract import UserError
from tests.jobs.helpers import Bare
from tests.processes import PYTHON, ROOT, clean_env, poll, run

BOUND = 60

# A rank that leaves the session, ignores TERM, and has a child that does the same with nothing in its environment and
# no parent. Each writes its number.
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


@pytest.fixture(params=["itself", "launched"])
def backend(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalBackend]:
    """Its command is the rank itself, or a launcher's."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "GRACE_MARGIN", -3)
    found = (Bare if request.param == "itself" else LocalBackend)(tmp_path / "home/local")
    yield found
    for name in ("rank", "deep"):
        with contextlib.suppress(OSError, ValueError):
            os.kill(int((tmp_path / name).read_text()), signal.SIGKILL)
    for row in found.list():
        found.cancel(row.name)


def _submitted(backend: Backend, tmp_path: Path, **more: str) -> list[int]:
    """The processes of a job that is deaf to TERM, once they are there."""
    program = tmp_path / "rank.py"
    program.write_text(textwrap.dedent(RANK))
    words = [PYTHON, str(program), str(tmp_path)]
    backend.submit(JobSpec.of({"name": "deaf", "command": words, "max_restarts": 0, "grace_seconds": 5, **more}))
    for name in ("rank", "deep"):
        poll((tmp_path / name).exists, BOUND, f"the process {name}")
    return [int((tmp_path / name).read_text()) for name in ("rank", "deep")]


def _alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if processes.alive(pid, None)]


def test_a_cancelled_job_leaves_no_process(backend: LocalBackend, tmp_path: Path) -> None:
    pids = _submitted(backend, tmp_path)
    assert _alive(pids) == pids
    found = backend.cancel("deaf")
    assert (found.state, _alive(pids)) == ("cancelled", []), found


def test_a_job_beyond_its_time_limit_leaves_no_process(backend: LocalBackend, tmp_path: Path) -> None:
    """It is called timed out when the last of them is gone, and not before."""
    pids = _submitted(backend, tmp_path, time_limit="4s" if isinstance(backend, Bare) else "25s")
    deadline = time.monotonic() + BOUND
    while not (found := backend.status("deaf")).final:
        assert time.monotonic() < deadline, found
        time.sleep(0.01)
    assert (found.state, _alive(pids)) == ("timed_out", []), found


@pytest.mark.parametrize("backend", ["itself"], indirect=True)
def test_a_job_without_its_supervisor_is_ended_by_the_command(backend: LocalBackend, tmp_path: Path) -> None:
    """What has left both the launcher and the job's environment behind is not found then: nobody else has it as a child."""
    pids = _submitted(backend, tmp_path)
    os.kill(_supervisor(backend), signal.SIGKILL)
    assert backend.cancel("deaf").state == "cancelled"
    assert _alive(pids[:1]) == []


@pytest.mark.parametrize("backend", ["itself"], indirect=True)
def test_cancel_says_what_does_not_end(backend: LocalBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A supervisor that is stopped cannot take its children's ends: what is not over is not called cancelled."""
    monkeypatch.setattr(processes, "KILL_SECONDS", 0.5)
    pids = _submitted(backend, tmp_path)
    supervisor = _supervisor(backend)
    os.kill(supervisor, signal.SIGSTOP)
    try:
        with pytest.raises(
            UserError, match=rf"^deaf has not ended: process {supervisor} \(python.*, state T\) is still running"
        ):
            backend.cancel("deaf")
        assert backend.status("deaf").state == "running"
    finally:
        os.kill(supervisor, signal.SIGCONT)
    assert (backend.wait("deaf", BOUND).state, _alive(pids)) == ("cancelled", [])


def test_a_rank_whose_launcher_died_before_it_asked_ends_below_a_supervisor_too() -> None:
    """It is no child of init then."""
    gone = subprocess.Popen(["true"])
    gone.wait()
    program = (
        "import os; from lockstep.training.launch.lifeline import end_with_launcher; end_with_launcher(os.environ)"
    )
    assert run([PYTHON, "-c", program], clean_env(**{contract.ENV_LAUNCHER: str(gone.pid)})).code == -signal.SIGTERM
    assert run([PYTHON, "-c", program], clean_env(**{contract.ENV_LAUNCHER: str(os.getpid())})).code == 0


@pytest.mark.parametrize("backend", ["itself"], indirect=True)
def test_a_job_that_a_cancelled_one_has_submitted_goes_on(backend: LocalBackend, tmp_path: Path) -> None:
    inner = "import time; time.sleep(600)"
    words = (
        f"from tests.jobs.helpers import Bare; from pathlib import Path; from lockstep.jobs.spec.model import JobSpec; import time; "
        f"Bare(Path({str(backend.folder)!r})).submit(JobSpec(name='inner', command=['python', '-c', {inner!r}], "
        f"max_restarts=0, ranks_per_node=1)); time.sleep(600)"
    )
    backend.submit(JobSpec(name="outer", command=["python", "-c", words], max_restarts=0, ranks_per_node=1))
    poll((backend.folder / "inner/running.json").exists, BOUND, "the inner job")
    assert backend.cancel("outer").state == "cancelled"
    assert backend.status("inner").state == "running"


def _supervisor(backend: LocalBackend) -> int:
    return int(json.loads((backend.folder / "deaf/supervisor.json").read_text())["pid"])

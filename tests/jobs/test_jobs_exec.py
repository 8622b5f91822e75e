"""`lockstep exec` as a person uses it: with a terminal and without, on this machine and in an emulated pod."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import termios
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from k8s_server import ApiServer

from tests import product
from tests.processes import PYTHON, ROOT, clean_env, poll, started
from tests.product import JobSpec
from tests.terminal import TRAPS, at_a_terminal, resize, until_shown

pytestmark = pytest.mark.promise("exec")
BOUND = 60
RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCKSTEP_SESSION": "{}"}
LAUNCHER = (
    "import os, subprocess; "
    f"subprocess.run(['sleep', '600'], env={{**os.environ, **{RANK!r}, 'LOCKSTEP_LAUNCHER': str(os.getpid())}})"
)


@dataclass
class Place:
    """A job `long` with one rank: the backend's name and the environment of `lockstep exec`."""

    name: str
    env: dict[str, str]

    def command(self, *words: str) -> list[str]:
        return [PYTHON, "-c", product.PROGRAM, "exec", self.name, "long", "--", *words]


@contextlib.contextmanager
def emulated_pod(folder: Path, patch: pytest.MonkeyPatch) -> Iterator[Place]:
    """Yields a pod whose only rank is a process of this machine."""
    with ApiServer() as server:
        env = clean_env(KUBECONFIG=str(server.kubeconfig(folder / "kubeconfig")), PATH=server.cluster.kubectl.path)
        patch.setenv("KUBECONFIG", env["KUBECONFIG"])
        backend = product.impatient_kubernetes()
        spec = {"name": "long", "command": ["true"], "image": "localhost:5000/a:1", "run_dir": "/runs/long"}
        backend.submit(JobSpec.of(spec))
        backend.api.close()
        marked = {**env, "LOCKSTEP_JOB": f"long-of-{os.getpid()}"}
        rank = subprocess.Popen(["sleep", "600"], env={**marked, **RANK, "LOCKSTEP_LAUNCHER": "1"}, cwd=folder)
        server.cluster.kubectl.put("long-worker-0", marked, folder)
        server.cluster.pod("long", "long-worker-0", {"phase": "Running"}, spec={"nodeName": "n"})
        try:
            yield Place("k8s", env)
        finally:
            rank.kill()
            rank.wait()


@pytest.fixture(params=["local", "k8s"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    if request.param != "local":
        with emulated_pod(tmp_path, monkeypatch) as target:
            yield target
        return
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    backend = product.local(tmp_path / "home/local")
    command = ["python", "-c", LAUNCHER]
    backend.submit(JobSpec(name="long", command=command, max_restarts=0, ranks_per_node=1, grace_seconds=5))
    target = Place("local", clean_env(LOCKSTEP_HOME=str(tmp_path / "home")))
    with contextlib.ExitStack() as after:
        after.callback(backend.cancel, "long")
        poll(
            lambda: subprocess.run(target.command("true"), env=target.env, capture_output=True).returncode == 0,
            BOUND,
            "it",
        )
        yield target


def test_without_a_terminal_ctrl_c_goes_to_the_command_here_and_ends_kubectl(place: Place) -> None:
    with started(place.command("sh", "-c", TRAPS), place.env, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=BOUND)
    if place.name == "local":
        assert (process.returncode, out, err) == (5, "got\n", "")
    else:
        assert process.returncode == 69 and "the command may still run there" in err, err


def test_a_terminal_has_its_size_its_keys_and_comes_back(place: Place) -> None:
    # The terminal's size is sent once the command runs, as `kubectl exec -it` does: it may arrive after the first line.
    until = "until [ \"$(stty size)\" = '{}' ]; do sleep 0.05; done; stty size; "
    words = f"test -t 0 && test -t 1 && test -t 2 && echo all; {until.format('33 77')} echo here; {until.format('20 50')} {TRAPS}"
    with at_a_terminal(place.command("sh", "-c", words), place.env) as (process, ours, theirs):
        before = termios.tcgetattr(theirs)
        shown = until_shown(ours, b"here", BOUND)
        assert b"all" in shown and b"33 77" in shown, shown
        resize(ours, 20, 50)
        assert b"20 50" in until_shown(ours, b"ready", BOUND)
        os.write(ours, b"\x03")
        until_shown(ours, b"got", BOUND)
        assert process.wait(BOUND) == 5
        assert termios.tcgetattr(theirs) == before, "the terminal is as it was"

"""`lockstep exec` as a person uses it: with a terminal and without, on this machine and in an emulated pod."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from k8s_exec import Container
from k8s_server import ApiServer

from lockstep.jobs.kubernetes.api import Api, load_configuration
from lockstep.jobs.kubernetes.backend import KubernetesBackend
from lockstep.jobs.spec.model import JobSpec
from lockstep.training.launch import beside
from tests.jobs.helpers import Bare
from tests.processes import PYTHON, ROOT, clean_env, poll
from tests.terminal import at_a_terminal, resize, until_shown

BOUND = 30
PROGRAM = "import sys; sys.argv[0] = 'lockstep'; from lockstep.jobs.cli.main import main; main()"
RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCKSTEP_SESSION": "{}"}
LAUNCHER = (
    "import os, subprocess; "
    f"subprocess.run(['sleep', '600'], env={{**os.environ, **{RANK!r}, 'LOCKSTEP_LAUNCHER': str(os.getpid())}})"
)
TRAPS = "trap 'echo got; exit 5' INT; echo ready; while :; do sleep 0.05; done"


def test_a_word_that_it_does_not_know_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    assert beside.main(["--rank", "first"]) == 2
    told = capfd.readouterr().err
    assert told.startswith("error: argument --rank: invalid int value: 'first' (see ") and told.count("\n") == 1


@dataclass
class Place:
    """A job `long` with one rank, and how the command line finds it."""

    name: str
    env: dict[str, str]
    server: ApiServer | None = None

    def command(self, *words: str) -> list[str]:
        return [PYTHON, "-c", PROGRAM, "exec", self.name, "long", "--", *words]

    @contextlib.contextmanager
    def started(self, *words: str, stdin: int = subprocess.PIPE) -> Iterator[subprocess.Popen[bytes]]:
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            self.command(*words), env=self.env, stdin=stdin, stdout=pipe, stderr=pipe, start_new_session=True
        )
        try:
            yield process
        finally:
            process.kill()
            process.communicate()


@contextlib.contextmanager
def emulated(folder: Path) -> Iterator[Place]:
    """A pod whose only rank is a process of this machine."""
    with ApiServer() as server:
        env = clean_env(KUBECONFIG=str(server.kubeconfig(folder / "kubeconfig")))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("KUBECONFIG", env["KUBECONFIG"])
            load, namespace = load_configuration(None)
            backend = KubernetesBackend(Api(load), namespace)
        backend.submit(
            JobSpec.of({"name": "long", "command": ["true"], "image": "registry.example/a:1", "run_dir": "/runs/long"})
        )
        marked = {**env, "LOCKSTEP_JOB": f"long-of-{os.getpid()}"}
        rank = subprocess.Popen(["sleep", "600"], env={**marked, **RANK, "LOCKSTEP_LAUNCHER": "1"}, cwd=folder)
        server.cluster.containers.there["long-worker-0"] = Container(marked, folder)
        meta = {"name": "long-worker-0", "labels": {"lockstep/job": "long"}}
        server.cluster.put("pods", {"metadata": meta, "spec": {"nodeName": "n"}, "status": {"phase": "Running"}})
        try:
            yield Place("k8s", env, server)
        finally:
            rank.kill()
            rank.wait()
            backend.api.close()


@pytest.fixture(params=["local", "k8s"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    if request.param != "local":
        with emulated(tmp_path) as found:
            yield found
        return
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    backend = Bare(tmp_path / "home/local")
    backend.submit(
        JobSpec(name="long", command=["python", "-c", LAUNCHER], max_restarts=0, ranks_per_node=1, grace_seconds=5)
    )
    found = Place("local", clean_env(LOCKSTEP_HOME=str(tmp_path / "home")))
    poll(
        lambda: subprocess.run(found.command("true"), env=found.env, capture_output=True).returncode == 0,
        BOUND,
        "the rank",
    )
    yield found
    backend.cancel("long")


def test_ctrl_c_goes_to_the_command_and_its_exit_code_is_the_exit_code(place: Place) -> None:
    with place.started("sh", "-c", TRAPS) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=BOUND)
    assert (process.returncode, out, err) == (5, b"got\n", b"")


def test_input_ends_where_it_ends(place: Place) -> None:
    """While the command runs, and with one that reads no more."""
    with place.started("cat") as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(b"one\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"one\n", "before the end of the input"
        out, err = process.communicate(b"\0\xff two", timeout=BOUND)
    assert (process.returncode, out, err) == (0, b"\0\xff two", b"")
    with place.started("sh", "-c", "exec <&-; echo done; exit 3") as process:  # and nobody ends its input
        assert process.stdout is not None and process.stdout.read() == b"done\n"
        assert process.wait(BOUND) == 3


def test_a_terminal_has_its_size_its_keys_and_comes_back(place: Place) -> None:
    words = (
        "test -t 0 && test -t 1 && test -t 2 && echo all; stty size; echo here; "
        f"until [ \"$(stty size)\" = '20 50' ]; do sleep 0.05; done; stty size; {TRAPS}"
    )
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


def test_output_that_goes_elsewhere_leaves_the_terminal_out(place: Place) -> None:
    """Standard input is a terminal and standard output a file: bytes as they are, and what is typed arrives."""
    ours, theirs = pty.openpty()
    try:
        with place.started("sh", "-c", "test -t 0 || echo none; head -n 1", stdin=theirs) as process:
            os.write(ours, b"typed\n")
            assert process.stdout is not None
            assert (process.stdout.read(), process.wait(BOUND)) == (b"none\ntyped\n", 0)
    finally:
        os.close(ours)
        os.close(theirs)


def test_a_command_is_no_process_of_the_job(place: Place, tmp_path: Path) -> None:
    """Nor does a run that it starts take itself for the job's."""
    done = subprocess.run(
        place.command("sh", "-c", "pwd; env"), env=place.env, capture_output=True, text=True, cwd="/", timeout=BOUND
    )
    folder, *lines = done.stdout.splitlines()
    names = {line.partition("=")[0] for line in lines}
    assert folder == str(tmp_path), "the rank's folder"
    assert {"RANK", "LOCKSTEP_RUN_DIR"} <= names and not {
        "LOCKSTEP_JOB",
        "LOCKSTEP_LAUNCHER",
        "LOCKSTEP_SESSION",
    } & names, names


def test_words_that_are_none_of_ours_need_two_dashes(tmp_path: Path) -> None:
    words = [sys.executable, "-c", PROGRAM, "exec", "local", "long"]
    for more, said in ((["ls", "-l"], "No such option"), ([], "Missing argument")):
        done = subprocess.run([*words, *more], env=clean_env(), capture_output=True, text=True, timeout=BOUND)
        assert done.returncode == 2 and said in done.stderr, done

"""What somebody on the network, or a file of somebody else's, can do to a run: nothing."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.events import events
from tests.processes import PYTHON, ROOT, clean_env, poll, require, run, started
from tests.ranks import training
from tests.runs import Job
from tests.warm.process import start
from training import contract
from training.contract import UserError
from training.models import build


def _listening(pids: list[int]) -> set[tuple[str, int]]:
    """(address, port) of each TCP socket on which one of these processes listens."""
    require(shutil.which("ss"), "needs ss (iproute2)")
    rows = subprocess.run(["ss", "-Hltnp"], capture_output=True, text=True, check=True, timeout=30).stdout.splitlines()
    found = set()
    for row in rows:
        if any(f"pid={pid}," in row for pid in pids):
            address, _, port = row.split()[3].rpartition(":")
            found.add((address.strip("[]"), int(port)))
    return found


@contextlib.contextmanager
def _held(job: Job, command: list[str]) -> Iterator[None]:
    """The job, standing still in its fifth step."""
    held = job.run_dir.parent / "held"
    fate = {"LOCKSTEP_TEST_FATE": "1:5:HOLD", "LOCKSTEP_TEST_HELD": str(held)}
    with started(command, job.env(**fate)):
        poll(held.exists, what="rank 1 in its fifth pass")
        yield


def test_a_run_on_one_machine_listens_on_loopback_only(job: Job) -> None:
    """The agent's store and the ranks' unpickle what they are sent; gloo and the metrics are nobody else's either."""
    with _held(job, job.command()):
        found = _listening(job.pids())
    assert len(found) >= 4, found  # the agent's store, the ranks' store, metrics of two ranks
    assert {address for address, _ in found} == {"127.0.0.1"}, found


def test_nothing_answers_another_network_namespace(job: Job) -> None:
    """As somebody on the network: no port of the machine's other address that the run has opened can be connected to."""
    require(os.geteuid() == 0 and shutil.which("ip"), "needs root and iproute2")
    name, number = f"lsd{os.getpid()}", os.getpid() % 250
    here, there = f"10.214.{number}.1", f"10.214.{number}.2"

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True, text=True)

    try:
        ip("netns", "add", name)
        ip("link", "add", f"{name}a", "type", "veth", "peer", "name", f"{name}b", "netns", name)
        ip("addr", "add", f"{here}/24", "dev", f"{name}a")
        ip("link", "set", f"{name}a", "up")
        ip("-n", name, "addr", "add", f"{there}/24", "dev", f"{name}b")
        ip("-n", name, "link", "set", f"{name}b", "up")
        with _held(job, job.command()), socket.create_server((here, 0)) as open_door:
            ports = sorted({port for _, port in _listening(job.pids())})
            assert len(ports) >= 4
            program = (
                "import socket, sys\n"
                "for port in sys.argv[2:]:\n"
                "    with socket.socket() as s:\n"
                "        s.settimeout(3)\n"
                "        print(port, s.connect_ex((sys.argv[1], int(port))) == 0)\n"
            )
            asked = [*map(str, ports), str(open_door.getsockname()[1])]
            done = run(["ip", "netns", "exec", name, PYTHON, "-c", program, here, *asked])
        answers = dict(line.split() for line in done.output.splitlines())
        assert answers.pop(asked[-1]) == "True", done.output  # the way there is open
        assert set(answers.values()) == {"False"}, done.output
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)
        subprocess.run(["ip", "link", "del", f"{name}a"], capture_output=True)


@pytest.mark.parametrize("model", ["subprocess:Popen", "os:system", "builtins:print", "pathlib:Path.touch"])
def test_only_a_network_is_called(model: str) -> None:
    with pytest.raises(UserError, match="expected a torch.nn.Module class|cannot import model"):
        build(model, {}, 10)


def test_a_run_directory_runs_no_code_of_its_own(job: Job, tmp_path: Path) -> None:
    """`evaluate` of a directory that somebody else may have written imports our models only, unless it is told to."""
    job.ranks = 1
    assert job.go().code == 0
    refused = training("evaluate", str(job.run_dir))
    assert refused.code == 2 and "names the model tests.nets:Dying" in refused.output, refused.output
    assert training("evaluate", str(job.run_dir), "--trust-model").code == 0
    (tmp_path / "evil.py").write_text("open('bomb-went-off', 'w')\n")
    run_file = job.run_dir / "run.yaml"
    run_file.write_text(run_file.read_text().replace("tests.nets:Dying", "evil:Net"))
    env = clean_env(PYTHONPATH=f"{ROOT}:{tmp_path}")
    for words in (["evaluate", str(job.run_dir)], ["export", str(job.run_dir), str(tmp_path / "w.pth")],
                  ["report", str(job.run_dir)]):  # fmt: skip
        run([PYTHON, "-m", "training", *words], env, cwd=tmp_path)
    assert not (tmp_path / "bomb-went-off").exists()


SLOW = """
import socket, sys, time
crowd = []
for _ in range(1100):
    s = socket.socket()
    s.settimeout(5)
    try:
        s.connect(("127.0.0.1", int(sys.argv[1])))
        s.send(b"GET /met")
    except OSError:
        pass
    crowd.append(s)
print("crowded", flush=True)
while True:  # a byte now and then: none of them is silent
    time.sleep(0.5)
    for s in crowd:
        try:
            s.send(b"x")
        except OSError:
            pass
"""


def test_a_crowd_of_slow_clients_costs_no_checkpoint(job: Job, tmp_path: Path) -> None:
    """1,100 connections that never end their request, to a process that may open 512 files."""
    job.ranks = 1
    held = tmp_path / "held"
    held.touch()
    fate = {"LOCKSTEP_TEST_FATE": "0:5:WAIT", "LOCKSTEP_TEST_HELD": str(held)}
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with job.started(**fate) as gang:
        poll(lambda: events(job.run_dir, "checkpoint_written"), what="a checkpoint")
        pid = gang.rank_pid(0)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (512, hard))
        port = json.loads(contract.endpoint_file(job.run_dir, 0).read_text())["port"]
        with started([PYTHON, "-c", SLOW, str(port)], clean_env()) as crowd:
            assert crowd.stdout is not None and crowd.stdout.readline() == "crowded\n"
            assert len(os.listdir(f"/proc/{pid}/fd")) < 200
            held.unlink()
            done = gang.wait(120)
    assert done.code == 0 and "warning" not in done.output, done.output
    assert job.steps()[0] == 24


ROUNDS = int(os.environ.get("LOCKSTEP_FRESH", "30"))  # a test's own environment no longer has it


def test_two_fresh_starts_at_once_never_share_a_directory(tmp_path: Path) -> None:
    """30 rounds (LOCKSTEP_FRESH for more): each ends with every directory owned by one start, and the loser is told."""
    program = (
        "import sys, pathlib, time\n"
        "from training import config\nfrom training.observe import rundir\n"
        "from training.contract import UserError\n"
        "rundir.LOCK_SECONDS = 0.3\n"
        "path = pathlib.Path(sys.argv[1])\n"
        "while not (path.parent / 'go').exists(): pass\n"
        "try:\n"
        "    run = rundir.RunDirectory.open(path, config.load('smoke'), True)\n"
        "    (run.path / 'owner').open('a').write(sys.argv[2])\n"
        "    time.sleep(0.6)\n"
        "    print('mine', (run.path / 'owner').read_text() == sys.argv[2])\n"
        "except UserError as error:\n"
        "    print('refused', error)\n"
    )
    for number in range(ROUNDS):
        folder = tmp_path / str(number)
        (folder / "run/checkpoints").mkdir(parents=True)
        with open(folder / "said", "wb") as said:
            both = [start(["-c", program, str(folder / "run"), name], clean_env(), said.fileno()) for name in "ab"]
            time.sleep(0.05)
            (folder / "go").touch()
            assert [process.wait(30) for process in both] == [0, 0]
        lines = (folder / "said").read_text().splitlines()
        assert "mine True" in lines and "mine False" not in lines, lines

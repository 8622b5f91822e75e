"""Another user of the same machine writes anything into every port of a run. The run ends right, or in a line, and runs no code of his."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.conftest import Undisturbed
from tests.faults.test_open_doors import _listening
from tests.processes import PYTHON, ROOT, assert_none_inside, clean_env, free_port, inside, poll, require, run
from tests.ranks import launching, of_node
from tests.runs import Job, assert_same

pytestmark = pytest.mark.promise("other-users")

ATTACK = r"""
import base64, contextlib, encodings.idna, json, os, pickle, socket, sys, threading, time
from datetime import timedelta
import torch.distributed as dist
marker = sys.argv[1]
os.setgroups([])
os.setgid(65534)
os.setuid(65534)

class Bomb:
    def __reduce__(self):
        return os.system, (f"id > {marker}",)

bomb = pickle.dumps(Bomb())
state = json.dumps({"version": 9, "round": "evil", "seats": [], "wanted": [], "master": ["evil", 1], "restarts": 0, "max_restarts": 0})
values = [
    bomb, base64.b64encode(bomb), state.encode(),
    f"{'0' * 64} {state}".encode(), b"\xff\x00\x1b[2J", b"", b"9" * 5000, b"x" * (4 << 20),
]
known = [*(f"lockstep/nodes/lockstep/{name}" for name in ("word", "open", "count")), *(
    f"{group}{name}/{number}" for group in ("", "default_pg/0/0/", "lockstep/nodes/lockstep/")
    for name in ("report", "lockstep/done", "lockstep/failed", "lockstep/ended", "lockstep/step") for number in range(2))]

def raw(host, port):
    for number in range(1000000):
        with contextlib.suppress(OSError), socket.create_connection((host, port), 1) as plain:
            plain.settimeout(0.1)
            plain.sendall(values[number % len(values)][:70000] + os.urandom(64))
            plain.recv(100)
        struck[host, port] = number + 1
        time.sleep(0.02)

def keys(host, port):
    # Where it is a store: a connection a round, and every key that is known or listed.
    for number in range(1000000):
        value = values[number % len(values)]
        with contextlib.suppress(RuntimeError, ValueError):
            store = dist.TCPStore(host, port, None, False, timedelta(seconds=2), wait_for_workers=False)
            listed = store.list_keys() if hasattr(store, "list_keys") else []
            for key in {*known, *listed} if len(value) < 1 << 20 else known[:3]:
                store.set(key, value)
            for key in listed[::7]:
                store.delete_key(key)
            written[host, port] = number + 1
        time.sleep(0.02)

struck, written = {}, {}

def count():
    while True:
        time.sleep(0.2)
        print(min(struck.values(), default=0), min(written.values(), default=0), len(written), flush=True)

threading.Thread(target=count, daemon=True).start()
print("ready", flush=True)
for line in sys.stdin:
    host, port = line.split()
    struck[host, int(port)] = 0
    for each in (raw, keys):
        threading.Thread(target=each, args=(host, int(port)), daemon=True).start()
"""
PAYLOADS = 8


class Attacker:
    """Strikes each port that these jobs listen on, from the moment that it is seen until the attacker is ended."""

    def __init__(self, process: subprocess.Popen[str], jobs: list[Job]) -> None:
        self._process, self._jobs = process, jobs
        self._over = threading.Event()
        self.rounds = self.writes = self.stores = 0
        self._threads = [threading.Thread(target=target, daemon=True) for target in (self._find, self._read)]

    def _find(self) -> None:
        addresses: set[tuple[str, int]] = set()
        assert self._process.stdin is not None
        while not self._over.wait(0.02):
            for host, port in _listening([pid for job in self._jobs for pid in inside(job.run_dir.parent)]) - addresses:
                addresses.add((host, port))
                host = "127.0.0.1" if host in ("*", "0.0.0.0") else host
                with contextlib.suppress(OSError):
                    print(host, port, file=self._process.stdin, flush=True)

    def _read(self) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(ValueError):
            for line in self._process.stdout:
                with contextlib.suppress(ValueError):  # torch's own lines are among them
                    self.rounds, self.writes, self.stores = map(int, line.split())

    @classmethod
    @contextlib.contextmanager
    def at(cls, marker: Path, *jobs: Job) -> Iterator[Attacker]:
        with (
            subprocess.Popen(
                [PYTHON, "-c", ATTACK, str(marker)], env=clean_env(), cwd=ROOT, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            ) as process
        ):  # fmt: skip
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            attacker = cls(process, list(jobs))
            for thread in attacker._threads:
                thread.start()
            try:
                yield attacker
            finally:
                attacker._over.set()
                process.kill()
                for thread in attacker._threads:
                    thread.join()


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """A file that the other user's code would create, in a folder where both users may write."""
    require(os.geteuid() == 0, "needs root, to become another user")
    folder = tmp_path / "everybodys"
    folder.mkdir()
    folder.chmod(0o777)
    return folder / "code-ran"


def _two_nodes() -> list[list[str]]:
    place = f"127.0.0.2:{free_port()}"
    return [[*of_node(number, place), "--grace", "10", "--join-timeout", "20"] for number in range(2)]


@pytest.mark.parametrize("early", [False, True], ids=["while it trains", "from the start"])
def test_what_another_user_writes_into_the_ports_of_a_run_runs_no_code_and_changes_nothing(
    early: bool, tmp_path: Path, data_root: Path, marker: Path, undisturbed: Undisturbed
) -> None:
    """Another user writes into every port of a job on one node and of a job on two. Where he comes before the ranks have met, he can
    end a job, but only with one of our messages. Otherwise both jobs end in the undisturbed weights."""
    held = tmp_path / "held"
    fate = {"LOCKSTEP_TEST_FATE": "1:5:WAIT", "LOCKSTEP_TEST_HELD": str(held), "LOCKSTEP_SECRET": "the job's own"}
    changes = {"collective_timeout": 20} if early else {}
    launchers = {"one": [["--ranks", "2"]], "two": _two_nodes()}
    jobs = {nodes: Job(tmp_path / nodes / "run", data_root, 2, **changes) for nodes in launchers}
    for job in jobs.values():
        job.run_dir.parent.mkdir()
    with contextlib.ExitStack() as stack:
        if not early:
            held.touch()
        attack = Attacker.at(marker, *jobs.values())
        attacker = stack.enter_context(attack) if early else None
        running = {
            nodes: [
                stack.enter_context(launching(*words, *job.words, env=job.env(**fate), cwd=job.run_dir.parent))
                for words in launchers[nodes]
            ]
            for nodes, job in jobs.items()
        }  # fmt: skip
        if attacker is None:
            for job in jobs.values():
                poll((job.run_dir / "checkpoints/step-00000004").exists, 200, "the run on its way")
            attacker = stack.enter_context(attack)
            # The ranks' store of each run, and the one where several nodes meet.
            poll(lambda: attacker.stores >= len(jobs) + 1, 200, "the stores")
            poll(lambda: min(attacker.rounds, attacker.writes) > PAYLOADS, 200, "each payload at each port")
            held.unlink()
        results = {nodes: [gang.wait(300) for gang in gangs] for nodes, gangs in running.items()}
    assert not marker.exists()
    for nodes, ends in results.items():
        output, failed = "".join(end.output for end in ends), any(end.code for end in ends)
        has_message = any(words in output for words in ("launch: ", "error: ", " did not arrive"))
        assert not failed or (early and has_message and "Traceback" not in output), output
        assert_none_inside(jobs[nodes].run_dir.parent)
        if not failed:
            assert_same(jobs[nodes].run_dir, undisturbed(2))


def test_an_address_that_another_user_wrote_into_the_store_is_one_line(job: Job) -> None:
    """Another user's key stands where gloo reads a peer's address, with a length that no memory holds. The ranks end with one line."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
    store.set("default_pg/0/0/0//cpu//0/1", b"9" * 5000)
    ranks = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    env = job.env(**ranks, MASTER_PORT=str(store.port), TORCHELASTIC_USE_AGENT_STORE="True")
    result = run([PYTHON, *job.program, *job.words], env, 120)
    assert result.code == 1 and "error: the ranks could not start together" in result.output, result.output
    assert "Traceback" not in result.output, result.output

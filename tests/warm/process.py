"""`start(words)`: `python WORDS`, forked from the server of this test session; the same to a test as a `subprocess.Popen`."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from tests.processes import ROOT, processes
from tests.warm import LAST

_BOUND = 120.0
"""Seconds for the server to load what it preloads, on a busy machine."""
SESSION = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()
"""The process of the test session: the one that has started this worker, or this one."""


class Process:
    """One process that the server has forked. `returncode` is None while it runs, −n where signal n ended it."""

    def __init__(self, words: list[str], told: int) -> None:
        self.args, self._told, self._heard = words, told, b""
        self.returncode: int | None = None
        line = self._line(time.monotonic() + _BOUND)
        kind, _, rest = line.partition(" ")
        if kind == "lost":
            os.close(told)
            raise ConnectionResetError("the server of ranks is gone")
        if kind != "started":
            raise RuntimeError(f"the server of ranks gave no process: {rest}")
        self.pid = int(rest)

    def _line(self, deadline: float | None) -> str:
        """The next line of the server about this process; TimeoutError where none comes until then."""
        while b"\n" not in self._heard:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([self._told], [], [], left)[0]:
                raise TimeoutError
            piece = os.read(self._told, 4096)
            if not piece:  # the server is gone, and with it who could tell
                return "lost"
            self._heard += piece
        line, _, self._heard = self._heard.partition(b"\n")
        return line.decode()

    def fileno(self) -> int:
        """Readable when it has ended, so that `select` waits for several at once."""
        return self._told

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        """The exit code. Raises `subprocess.TimeoutExpired`."""
        if self.returncode is None:
            try:
                line = self._line(None if timeout is None else time.monotonic() + timeout)
            except TimeoutError:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0) from None
            os.close(self._told)
            self.returncode = int(line.split()[1]) if line != "lost" else -signal.SIGKILL
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(self.pid, number)

    def end(self) -> None:
        """Ends it and what it has started in its session, whatever state they are in."""
        for pid in members(self.pid):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.wait(60)


def members(session: int) -> list[int]:
    """The processes of this session that have not ended."""
    return [pid for pid, state, _, group in processes() if group == session and state != "Z"]


class _Server:
    """The connection to a server of this test session, which all its test processes share: the first to ask starts it. It ends
    with the last of them, whatever ends them.

    Args:
        preload: a library that is loaded before all others, which no fork can make up for; "" for none.
    """

    def __init__(self, preload: str) -> None:
        # A name without a file; the server looks at who connects.
        session = hashlib.sha256(f"{ROOT} {SESSION} {preload}".encode()).hexdigest()[:16]
        self.name = f"\0lockstep-test-ranks-{session}"
        self.process: subprocess.Popen[bytes] | None = None
        """Of the test process that has started it."""
        self.requests = self._connected(preload)
        self.lock = threading.Lock()
        atexit.register(self.close)

    def _connected(self, preload: str) -> socket.socket:
        deadline = time.monotonic() + _BOUND
        while True:
            requests = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                requests.connect(self.name)
                return requests
            except ConnectionRefusedError:
                requests.close()
                if time.monotonic() > deadline:
                    raise
            self._start_server(preload)

    def _start_server(self, preload: str) -> None:
        """Unless another test process is about to."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            try:
                listener.bind(self.name)
            except OSError:
                time.sleep(0.01)
                return
            listener.listen(64)
            # More than one thread is loaded with, and the server may not have: OpenMP's, OpenBLAS's.
            one = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
            one["OMP_WAIT_POLICY"] = "PASSIVE"
            one |= {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "default", "CUDA_VISIBLE_DEVICES": ""}
            env = {**os.environ, **one}
            env.update({"LD_PRELOAD": preload} if preload else {})
            command = [sys.executable, "-u", "-m", "tests.warm.server", str(listener.fileno())]
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=env, pass_fds=[listener.fileno()], start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            )  # fmt: skip

    def fork(self, words: list[str], env: dict[str, str], output: int, error: int | None, cwd: Path) -> Process:
        """As `start`. Raises `ConnectionError` where the server is gone."""
        heard, told = os.pipe()
        with open(os.devnull, "rb") as nothing, self.lock:
            request = json.dumps({"words": words, "env": env, "cwd": str(cwd)}).encode()
            streams = [nothing.fileno(), output, output if error is None else error, told]
            try:
                socket.send_fds(self.requests, [request], streams)
            finally:
                os.close(told)
        return Process(words, heard)

    def close(self) -> None:
        """Returns when what it has forked for this test process is gone, and, after the last one, the server, too."""
        with contextlib.suppress(OSError):
            self.requests.shutdown(socket.SHUT_WR)
            last = self.requests.recv(16) == LAST
            if self.process is not None and last:
                self.process.wait(60)
            elif self.process is not None:
                self.process.returncode = 0  # it continues for the others: Python is not to warn of it
        self.requests.close()


_servers: dict[str, _Server] = {}
_starting = threading.Lock()


def _running(preload: str) -> _Server:
    with _starting:
        if preload not in _servers:
            _servers[preload] = _Server(preload)
        return _servers[preload]


def start(words: list[str], env: dict[str, str], output: int, error: int | None = None, cwd: Path = ROOT) -> Process:
    """Forks `python WORDS`, where WORDS are `-m MODULE …`, `-c CODE …` or `FILE …`, writing into these descriptors.

    Raises:
        RuntimeError: the server is gone, or was not fit to fork.
    """
    preload = env.get("LD_PRELOAD", "")
    for _ in range(2):
        server = _running(preload)
        try:
            return server.fork(words, env, output, error, cwd)
        except ConnectionError:  # its last test process left while this one came
            with _starting:
                if _servers.get(preload) is server:
                    del _servers[preload]
    raise RuntimeError("the server of ranks is gone")

"""`start(words)`: `python WORDS`, forked from a server of this test run; the same to a test as a `subprocess.Popen`."""

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
import weakref
from pathlib import Path

from tests.processes import ROOT, processes

_BOUND = 240.0
"""Seconds for the server to load what it preloads, on a busy machine."""


class Process:
    """One process that the server has forked. `returncode` is None while it runs, −n where signal n ended it."""

    def __init__(self, words: list[str], pipe: int) -> None:
        self.args, self._pipe, self._buffer = words, pipe, b""
        self._lock = threading.Lock()
        weakref.finalize(self, os.close, pipe)
        self.returncode: int | None = None
        line = self._line(time.monotonic() + _BOUND)
        kind, _, rest = line.partition(" ")
        if kind != "started":
            raise RuntimeError(f"the server of ranks gave no process: {line}")
        self.pid = int(rest)

    def _line(self, deadline: float | None) -> str:
        """The next line of the server about this process; TimeoutError where none comes until then."""
        while b"\n" not in self._buffer:
            remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([self._pipe], [], [], remaining)[0]:
                raise TimeoutError
            piece = os.read(self._pipe, 4096)
            if not piece:  # the server is gone, so no line comes
                return "lost"
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode()

    def fileno(self) -> int:
        """Readable when it has ended, so that `select` waits for several at once."""
        return self._pipe

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        """The exit code. Raises `subprocess.TimeoutExpired`."""
        if not select.select([self._pipe], [], [], None if timeout is None else max(0.0, timeout))[0]:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        with self._lock:  # another thread may wait for it, too
            if self.returncode is None:
                line = self._line(time.monotonic() + _BOUND)
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
    """A connection to the server of this test run: its first process that needs one starts it, the others use it, too.

    Args:
        preload: a library that is loaded before all others, which no fork can make up for; "" for none.
    """

    def __init__(self, preload: str) -> None:
        self.lock = threading.Lock()
        run = os.environ.get("PYTEST_XDIST_TESTRUNUID") or str(os.getpid())
        name = "\0lockstep-warm-" + hashlib.sha256(f"{ROOT} {run} {preload}".encode()).hexdigest()
        deadline = time.monotonic() + _BOUND
        while True:
            self.requests = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                self.requests.connect(name)
                break
            except ConnectionRefusedError:  # no server has the name, or it does not listen yet: hence the loop
                self.requests.close()
                assert time.monotonic() < deadline, "no server of ranks came"
                with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener, contextlib.suppress(OSError):
                    listener.bind(name)
                    listener.listen(64)
                    _start_server(listener, preload)
                time.sleep(0.01)
        atexit.register(self.close)

    def fork(self, words: list[str], env: dict[str, str], output: int, error: int | None, cwd: Path) -> Process:
        reader, writer = os.pipe()
        with open(os.devnull, "rb") as nothing, self.lock:
            request = json.dumps({"words": words, "env": env, "cwd": str(cwd)}).encode()
            streams = [nothing.fileno(), output, output if error is None else error, writer]
            try:
                socket.send_fds(self.requests, [request], streams)
            finally:
                os.close(writer)
        return Process(words, reader)

    def close(self) -> None:
        """Returns when the forks of this process are gone. The server ends with the last process that uses it."""
        with contextlib.suppress(OSError):  # the server is gone already
            self.requests.shutdown(socket.SHUT_WR)
            self.requests.settimeout(60)
            self.requests.recv(1)
        self.requests.close()


def _start_server(listener: socket.socket, preload: str) -> None:
    # OpenMP and OpenBLAS start threads when they load, and the server may have none.
    variables = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    variables["OMP_WAIT_POLICY"] = "PASSIVE"
    variables |= {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "default", "CUDA_VISIBLE_DEVICES": ""}
    env = {**os.environ, **variables}
    env.update({"LD_PRELOAD": preload} if preload else {})
    _started.append(
        subprocess.Popen(
            [sys.executable, "-u", "-m", "tests.warm.server", str(listener.fileno())], cwd=ROOT, env=env,
            pass_fds=[listener.fileno()], start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        )
    )  # fmt: skip


_servers: dict[str, _Server] = {}
_started: list[subprocess.Popen[bytes]] = []
_starting = threading.Lock()


def start(words: list[str], env: dict[str, str], output: int, error: int | None = None, cwd: Path = ROOT) -> Process:
    """Forks `python WORDS`, where WORDS are `-m MODULE …`, `-c CODE …` or `FILE …`, writing into these descriptors.

    Raises:
        RuntimeError: the server is gone, or was not fit to fork.
    """
    preload = env.get("LD_PRELOAD", "")
    with _starting:
        if preload not in _servers:
            _servers[preload] = _Server(preload)
    return _servers[preload].fork(words, env, output, error, cwd)

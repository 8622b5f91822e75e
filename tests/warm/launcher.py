"""python -m tests.warm.launcher launch …: `python -m lockstep.training launch …`, whose ranks are forked in place of started.

A launcher that is forked itself has everything imported. Before it has threads it forks a nursery, which forks the ranks. They are
separate processes, in their own sessions, and children of the launcher, as a nursery's orphans are given to it. They differ from ranks
of a launcher from a shell in command line and environment in /proc. So each has its rank as its name there.
"""

from __future__ import annotations

import ctypes
import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from tests import product
from tests.warm.server import become, leave, receive

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


class Rank:
    """A forked rank, to the launcher as a `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired([], timeout)
            time.sleep(0.001)
        return code


class Nursery:
    """Forks processes for this one. To be made while it has one thread."""

    def __init__(self) -> None:
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self.requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parent = os.getpid()
        if os.fork() == 0:
            self.requests.close()
            leave(_nursed(theirs, parent))
        theirs.close()

    def start(
        self, command: list[str], env: dict[str, str], out: IO[bytes] | int | None, errors: IO[bytes] | int | None
    ) -> Rank:
        """Starts `python …`, without Python's options except -u."""
        words = [word for word in command[1:3] if word != "-u"] + command[3:]
        blocked = [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())]
        request = json.dumps({"words": words, "env": env, "cwd": os.getcwd(), "blocked": blocked}).encode()
        files = [sys.stdin, sys.stdout if out is None else out, sys.stderr if errors is None else errors]
        socket.send_fds(self.requests, [request], [each if isinstance(each, int) else each.fileno() for each in files])
        return Rank(int(self.requests.recv(16)))


def _nursed(requests: socket.socket, parent: int) -> Callable[[], None]:
    """Returns in each rank, with the work of that rank; ends with the parent."""
    while True:
        message, streams = receive(requests)
        if not message:
            os._exit(0)
        reader, writer = os.pipe()
        if (between := os.fork()) == 0:
            if pid := os.fork():
                os.write(writer, str(pid).encode())
                os._exit(0)
            while os.getppid() != parent:
                time.sleep(0.001)
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # as exec_rank.py does
            request = json.loads(message)
            Path("/proc/self/comm").write_text(f"RANK={request['env']['RANK']}")
            task = become(request, streams)
            for name, number in (("stdout", 1), ("stderr", 2)):  # the server made its streams for a file
                setattr(sys, name, io.TextIOWrapper(io.FileIO(number, "w", closefd=False), line_buffering=True))
            return task
        os.waitpid(between, 0)
        requests.send(os.read(reader, 16))
        for each in (reader, writer, *streams):
            os.close(each)


def main(words: list[str]) -> None:
    nursery, popen = Nursery(), subprocess.Popen

    def started(command: list[str], **how: Any) -> Any:
        if command[5:6] == [sys.executable] and "RANK" in (how.get("env") or {}):
            return nursery.start(command[5:], how["env"], how.get("stdout"), how.get("stderr"))
        return popen(command, **how)

    subprocess.Popen = started  # type: ignore[assignment, misc]
    product.leave(product.program(words))


if __name__ == "__main__":
    main(sys.argv[1:])

"""The ranks of one node: processes that are started, watched and ended one by one, and whose output is copied in whole lines."""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TextIO

from lockstep.wire.progress import state_of
from lockstep.wire.signals import FORWARDED

from ..contract import ENV_REPLACEMENT
from ..limits import KILL_SECONDS, OUTPUT_LOOK_SECONDS, OUTPUT_SECONDS, POLL_SECONDS

MAX_LINE = 1 << 16
"""Characters of a line without an end (a progress bar that never breaks) that are kept back at most."""
_READ_BYTES = 1 << 20
"""Bytes of one look: a pipe holds no more, so one look takes all that was there."""


@dataclass(frozen=True)
class WorkerId:
    """A rank and the process in its place: 0 for the one that it was started with, or the number of the replacement."""

    rank: int
    replacement: int = 0


class Workers:
    """Starts each rank in its own process group, so that its data loaders end with it.

    Args:
        prefix: their lines begin with the rank.
        blocked: they inherit that signals wait until they catch them.
    """

    def __init__(self, command: list[str], *, prefix: bool, blocked: bool) -> None:
        self._command, self._prefix, self._blocked = command, prefix, blocked
        self._running: dict[WorkerId, subprocess.Popen[bytes]] = {}
        self._begun: set[WorkerId] = set()
        self._selector = selectors.DefaultSelector()
        """Of descriptors of the processes, which can be read when these have ended."""
        self._at_once = _has_descriptors()
        self._copies = Copies()

    @property
    def running(self) -> list[WorkerId]:
        return list(self._running)

    @property
    def fresh(self) -> bool:
        """None was started since the last `finish`."""
        return not self._begun

    def pids(self) -> list[int]:
        return [process.pid for process in self._running.values()]

    def match(self, wanted: Iterable[WorkerId], first: int, env: Mapping[str, str]) -> None:
        """Kills those that run and are not wanted, and starts those that are wanted and never ran. Raises `OSError`.

        Args:
            first: rank of this node, whose local rank is 0.
        """
        wanted = list(wanted)
        self.kill([worker for worker in self.running if worker not in wanted])
        new = [worker for worker in wanted if worker not in self._begun]
        if not new:
            return
        if not self._running:
            self._printed()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED if self._blocked else ())
        try:
            for worker in new:
                rank = str(worker.rank)
                of_rank = {"RANK": rank, "ROLE_RANK": rank, "LOCAL_RANK": str(worker.rank - first)}
                if worker.replacement:
                    of_rank[ENV_REPLACEMENT] = str(worker.replacement)
                self._start(worker, {**env, **of_rank})
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self._copies.begin()

    def _start(self, worker: WorkerId, env: Mapping[str, str]) -> None:
        out, errors = self._copies.pipes(worker.rank) if self._prefix else (None, None)
        try:
            process = subprocess.Popen(self._command, env=env, start_new_session=True, stdout=out, stderr=errors)
        finally:
            for descriptor in filter(None, (out, errors)):
                os.close(descriptor)
        self._running[worker] = process
        self._begun.add(worker)
        if self._at_once:
            self._selector.register(os.pidfd_open(process.pid), selectors.EVENT_READ, worker)

    def ended(self, seconds: float) -> dict[WorkerId, int]:
        """Returns the exit codes, as Python gives them, of processes that have ended: at once, and after this time at the latest."""
        codes: dict[WorkerId, int] = {}
        while workers := self._ended(seconds):
            codes.update(self.kill(workers))
            seconds = 0.0  # those that ended at the same moment
        return codes

    def _ended(self, seconds: float) -> list[WorkerId]:
        if self._at_once:
            return [key.data for key, _ in self._selector.select(seconds)]
        time.sleep(min(seconds, POLL_SECONDS))
        return [worker for worker, process in self._running.items() if process.poll() is not None]

    def kill(self, workers: Iterable[WorkerId]) -> dict[WorkerId, int]:
        """Kills the process groups of these, and returns their exit codes. A process that is not waited for keeps its number."""
        processes = {worker: self._running.pop(worker) for worker in workers}
        for process in processes.values():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        deadline = time.monotonic() + KILL_SECONDS
        for worker, process in processes.items():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            for key in [key for key in self._selector.get_map().values() if key.data == worker]:
                self._selector.unregister(key.fd)
                os.close(key.fd)
            self._copies.ended(worker.rank)
        codes = {worker: process.returncode for worker, process in processes.items()}
        return {worker: -signal.SIGKILL if code is None else code for worker, code in codes.items()}

    def terminate(self) -> None:
        """Asks all to end."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGTERM)

    def stopped(self) -> list[int]:
        """The ranks that stand stopped now; never any on other systems than Linux."""
        return [worker.rank for worker, process in self._running.items() if state_of(process.pid) == "T"]

    def finish(self) -> None:
        """All have ended: returns when what they have written is printed. The next ones are others."""
        self._printed()
        self._begun.clear()

    def _printed(self) -> None:
        self._copies.finish()
        self._copies = Copies()


def _has_descriptors() -> bool:
    """Whether the system has descriptors of processes: Linux from 5.3 on."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (OSError, AttributeError):
        return False
    return True


class _Pipe:
    """Of one rank, to its output or its errors."""

    def __init__(self, rank: int, out: TextIO) -> None:
        self.rank, self._out, self._begun = rank, out, ""
        self.ended = False
        """Its process has ended."""
        self._decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8")("replace"), translate=True)

    def take(self, data: bytes) -> None:
        """Prints the lines that are complete; with b"", which ends it, also the last one."""
        *lines, self._begun = (self._begun + self._decoder.decode(data, final=not data)).split("\n")
        if self._begun and (not data or len(self._begun) > MAX_LINE):
            lines, self._begun = [*lines, self._begun], ""
        for line in lines:
            # A full disk, a reader that left, closed (None): that costs this line, not the thread that brings the next ones.
            with contextlib.suppress(OSError, ValueError, AttributeError):
                self._out.write(f"[rank {self.rank}] {line}\n")
                self._out.flush()


class Copies:
    """Copies what ranks write into their pipes to this process's streams, each line with its rank, in a thread.

    No output that a rank wrote before its end is lost. The thread waits for no other process that keeps the pipe open.
    """

    def __init__(self) -> None:
        self._selector, self._changing = selectors.DefaultSelector(), threading.Lock()
        self._pipes: dict[int, list[_Pipe]] = {}
        """Rank → those of the process that was started last in its place."""
        self._thread: threading.Thread | None = None
        """None where there is no pipe left."""

    def pipes(self, rank: int) -> tuple[int, int]:
        """Descriptors for the output and the errors of a rank that is about to start: close them when it has."""
        writes, self._pipes[rank] = [], [_Pipe(rank, out) for out in (sys.stdout, sys.stderr)]
        for pipe in self._pipes[rank]:
            descriptor, other = os.pipe()
            with self._changing:
                self._selector.register(descriptor, selectors.EVENT_READ, pipe)
            writes.append(other)
        return writes[0], writes[1]

    def begin(self) -> None:
        """Ranks have started. Call it again when more have: the thread ends with the last pipe."""
        with self._changing:
            if self._thread is None:
                self._thread = threading.Thread(target=self._copy, name="output", daemon=True)
                self._thread.start()

    def ended(self, rank: int) -> None:
        """The process that was started last in this rank's place writes no more."""
        for pipe in self._pipes.get(rank, ()):
            pipe.ended = True

    def finish(self) -> None:
        """All ranks have ended: returns when what they have written is printed."""
        for rank in self._pipes:
            self.ended(rank)
        if (thread := self._thread) is not None:
            thread.join(OUTPUT_SECONDS)
        if thread is None or not thread.is_alive():
            self._selector.close()

    def _copy(self) -> None:
        while keys := self._open():
            ended = [key.fd for key in keys if key.data.ended]  # before the look: what they have written is there
            ready = {key.fd for key, _ in self._selector.select(0 if ended else OUTPUT_LOOK_SECONDS)}
            for key in keys:
                data = os.read(key.fd, _READ_BYTES) if key.fd in ready else b""
                if data:
                    key.data.take(data)
                if key.fd in ended or (key.fd in ready and not data):  # what has left the rank's group may write on
                    key.data.take(b"")
                    with self._changing:
                        self._selector.unregister(key.fd)
                    os.close(key.fd)

    def _open(self) -> list[selectors.SelectorKey]:
        with self._changing:
            if not (keys := list(self._selector.get_map().values())):
                self._thread = None
            return keys

"""The ranks of one node: processes that are started, watched, signalled and ended, and whose output is copied in whole lines.

`Workers` has the processes. `WorkerGroup` is what the launcher of every node does with them: it has the ranks run that the desired state
wants, and hands signals on to them. The first node's is the `Coordinator`, which decides. The others' is the `NodeAgent`.
"""

from __future__ import annotations

import argparse
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
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TextIO

import filelock

from lockstep.wire.hangs import Hangs
from lockstep.wire.progress import state_of
from lockstep.wire.signals import FORWARDED, PendingSignals

from .. import files
from ..contract import (
    ENV_LIVE,
    ENV_NOTE,
    ENV_REPLACEMENT,
    ENV_RESTARTS,
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_PREEMPTED,
    EXIT_TIMED_OUT,
    EXIT_USAGE,
    LOCK_FILE,
    STATUS_FILE,
    to_stderr,
)
from ..limits import KILL_SECONDS, NODE_LOOK_SECONDS, OUTPUT_LOOK_SECONDS, OUTPUT_SECONDS, POLL_SECONDS
from .ending import Attempts, too_early
from .nodes import DesiredState, Meeting, NodeSlot, WorkerId, size

MAX_LINE = 1 << 16
"""Characters of a line without an end (a progress bar that never breaks) that are kept back at most."""
_READ_BYTES = 1 << 20
"""Bytes of one look: a pipe holds no more, so one look takes all that was there."""


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
        """Waits for the descriptors of the processes, which can be read when these have ended."""
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
    """The pipe from one rank, for its output or its errors."""

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


class Interrupted(Exception):
    """A signal ends the launcher while no rank runs."""

    def __init__(self, number: int) -> None:
        super().__init__(f"signal {number}")
        self.number = signal.Signals(number)


class WorkerGroup:
    """The ranks of this node.

    Args:
        args: the launcher's flags, with the `command` of a rank. `ours`: the ranks are `python -m lockstep.training run`, which saves on
            a signal, and not an unknown program. `caught`: the signals that are caught. The ranks ignore the signals that this process
            ignores (nohup), too.
        hangs: looks for ranks that get no further.
    """

    def __init__(self, args: argparse.Namespace, meeting: Meeting, attempts: Attempts, hangs: Hangs) -> None:
        self.args, self.meeting, self.attempts, self._hangs = args, meeting, attempts, hangs
        self.workers = Workers(args.command, prefix=args.prefix, blocked=args.ours)
        self.signalled: int | None = None
        self.timed_out = False
        self.held = PendingSignals()
        """Signals for ranks that are starting."""
        self._waits = False
        """Ranks are about to start: a signal that is sent now would miss the last of them."""
        self._came: list[int] = []
        """Signals that came meanwhile."""
        self._reasons: list[str] = []
        """How ranks have failed, a sentence for each way."""
        self.has_begun = False
        """The ranks were started, or are about to be."""
        self.starts = attempts.used
        """How often the ranks were started before, by this launcher or one that it replaced."""

    def _begin(self) -> None:
        """The ranks are about to start."""
        os.environ[ENV_RESTARTS] = str(self.starts)
        self.has_begun = True
        self.starts += 1  # a change of membership counts here, and not as a restart
        earlier, self.held = self.held, PendingSignals(self.args.grace)  # from here on it takes what comes
        self.held.inherit(earlier)

    def _match(self, state: DesiredState, slot: NodeSlot) -> None:
        """Has the processes run that are wanted on this node, and no others. Their variables are torchrun's. Raises `OSError`."""
        world = str(size(state.seats))
        env = {
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", **os.environ, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": str(slot.ranks),
            "GROUP_RANK": str(state.seats.index(slot)), "GROUP_WORLD_SIZE": str(len(state.seats)),
            "ROLE_NAME": "rank", "ROLE_WORLD_SIZE": world,
            "MASTER_ADDR": state.master[0], "MASTER_PORT": str(state.master[1]), "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RUN_ID": self.meeting.job_id, "TORCHELASTIC_RESTART_COUNT": str(state.restarts),
            "TORCHELASTIC_MAX_RESTARTS": str(state.max_restarts),
        }  # fmt: skip
        if self.args.live:
            env[ENV_LIVE] = str(self.args.lost_seconds)
        wanted = [WorkerId(rank, replacement) for rank, replacement in state.wanted if rank in slot.span]
        self.workers.match(wanted, slot.first, env)

    def _send_what_came(self) -> None:
        """The ranks have started."""
        self._waits = False
        came, self._came = self._came, []
        for number in came:
            self._forward(number, None)

    def _ended(self) -> dict[WorkerId, tuple[int, bool]]:
        """Returns the processes that have ended since the last call: exit code, and whether by a signal that was handed on."""
        codes = self.workers.ended(NODE_LOOK_SECONDS)
        ended = {worker: (code, -code in self.held.delivered) for worker, code in codes.items()}
        self.held.release(self.workers.pids())
        return ended

    def _end_all(self) -> None:
        """Kills what runs, and prints what it has written."""
        self.workers.kill(self.workers.running)
        self.workers.finish()

    def catch(self, began: float) -> None:
        """Hands signals on to the ranks. Ends the ranks when the time limit, counted from `began`, is over, as TERM does."""
        handle(self.args.caught, self._forward)
        signal.signal(signal.SIGALRM, self._over)
        limit = self.args.time_limit
        signal.setitimer(signal.ITIMER_REAL, max(0.001, limit - (time.monotonic() - began)) if limit else 0)

    def _forward(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - the handler's signature
        if self._ends(number):
            self._begin_grace(number)
        self.held.send(self.workers.pids(), number)  # without one, for the ranks that start next

    def _begin_grace(self, number: int) -> None:
        """The ranks have this long from the first signal on."""
        if self.signalled is None:
            signal.signal(signal.SIGALRM, self._kill)
            signal.setitimer(signal.ITIMER_REAL, self.args.grace)
        self.signalled = number

    def _ends(self, number: int) -> bool:
        """Returns whether ranks end at this signal: what a program does with a USR1 is unknown."""
        return self.args.ours or number in (signal.SIGTERM, signal.SIGINT)

    def _over(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - the handler's signature
        self.timed_out = True
        self._forward(signal.SIGTERM, frame)

    def _kill(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - the handler's signature
        """The grace is over: kills the ranks that still run. Again and again: a rank may just be starting."""
        signal.setitimer(signal.ITIMER_REAL, 1)
        if pids := self.workers.pids():
            self.held.send(pids, signal.SIGKILL)

    def settled(self, code: int, codes: Mapping[int, int]) -> int:
        """Returns the exit code, where the ranks ended like that: a signal changes nothing any more.

        Args:
            code: of the ranks together.
            codes: rank → its exit code, of those that failed.
        """
        handle(self.args.caught, signal.SIG_IGN)
        if self.args.ours and code == EXIT_FAILED and (name := too_early(codes, self.signalled)):
            to_stderr(f"launch: {name} before any rank had started")
            code = EXIT_PREEMPTED
        signal.setitimer(signal.ITIMER_REAL, 0)
        if self.timed_out and code not in (EXIT_DONE, EXIT_USAGE):
            to_stderr(f"launch: the time limit of {self.args.time_limit} s is over")
            code = EXIT_TIMED_OUT
        if code != EXIT_DONE:
            self.note(code, "; ".join(self._reasons) or f"the ranks ended with exit code {code}")
        return code

    def note(self, code: int, reason: str) -> None:
        """Completes status.json of the run that rank 0 has noted, if rank 0 was killed before it could.

        Another launcher may have resumed the run: its rank 0 holds the lock then.
        """
        with contextlib.suppress(OSError, filelock.Timeout):
            run = Path(os.fsdecode(Path(os.environ[ENV_NOTE]).read_bytes()))
            with filelock.FileLock(run / LOCK_FILE, timeout=1):
                status = files.read_json(run / STATUS_FILE)
                if isinstance(status, dict) and status.get("code", code) is None:
                    files.replace_json(run / STATUS_FILE, {**status, "code": code, "reason": reason})


def handle(numbers: tuple[signal.Signals, ...], handler: Callable[..., Any] | signal.Handlers) -> None:
    for number in numbers:
        signal.signal(number, handler)


def nothing(number: int, frame: FrameType | None) -> None:
    """In place of SIG_IGN, which Python complains of where the signal has come already."""


def leave_while_waiting(number: int, frame: FrameType | None) -> NoReturn:  # noqa: ARG001
    for other in (*FORWARDED, signal.SIGALRM):  # the second of two at once would end what the first has begun
        if signal.getsignal(other) is leave_while_waiting:
            signal.signal(other, nothing)
    raise Interrupted(number)

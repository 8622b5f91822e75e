"""The ranks of one node: the launcher starts, watches, signals and ends their processes, and copies their output in whole lines.

`Workers` has the processes. `WorkerGroup` is the common part of every node's launcher: it runs the ranks of the desired state, and
forwards signals to them. On the first node it is the `Coordinator`, which decides, on the others the `NodeAgent`.
"""

from __future__ import annotations

import argparse
import codecs
import contextlib
import io
import os
import select
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
from lockstep.wire.progress import seen
from lockstep.wire.signals import FORWARDED, PendingSignals, signals_held_back

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
from ..limits import GRACE_SECONDS, KILL_SECONDS, OUTPUT_LOOK_SECONDS, OUTPUT_SECONDS, POLL_SECONDS
from .ending import Attempts, too_early
from .nodes import DesiredState, Meeting, NodeSlot, WorkerId, size

_READ_BYTES = 1 << 20
"""Bytes of one read: a pipe holds no more, so one read empties it."""
_WRITING = threading.Lock()
"""Held during a write to the output or the errors, which are often one file: a long text takes several system calls."""


class Workers:
    """The processes of the ranks, each in its own process group, so that its data loaders end with it.

    Args:
        prefix: whether the lines of output begin with the rank.
        blocked: whether the ranks inherit blocked signals, until they catch them.
    """

    def __init__(self, command: list[str], *, prefix: bool, blocked: bool) -> None:
        self._command, self._prefix, self._blocked = command, prefix, blocked
        self._running: dict[WorkerId, subprocess.Popen[bytes]] = {}
        self._begun: set[WorkerId] = set()
        self._output: dict[WorkerId, Output] = {}

    @property
    def running(self) -> list[WorkerId]:
        return list(self._running)

    @property
    def fresh(self) -> bool:
        """Whether no process was started since the last `finish`."""
        return not self._begun

    def pids(self) -> list[int]:
        return [process.pid for process in self._running.values()]

    def match(self, wanted: list[WorkerId], first: int, env: Mapping[str, str]) -> None:
        """Kills the running processes that are not wanted, and starts the wanted processes that never ran. Raises `OSError`.

        Args:
            first: the first rank of this node, whose local rank is 0.
        """
        self.kill([worker for worker in self.running if worker not in wanted])
        new = [worker for worker in wanted if worker not in self._begun]
        if not new:
            return
        if not self._running:
            self._printed()
        with signals_held_back() if self._blocked else contextlib.nullcontext():
            for worker in new:
                rank = str(worker.rank)
                of_rank = {"RANK": rank, "ROLE_RANK": rank, "LOCAL_RANK": str(worker.rank - first)}
                if worker.replacement:
                    of_rank[ENV_REPLACEMENT] = str(worker.replacement)
                self._start(worker, {**env, **of_rank})

    def _start(self, worker: WorkerId, env: Mapping[str, str]) -> None:
        out = errors = None
        if self._prefix:
            self._output[worker] = output = Output(worker.rank)
            out, errors = output.descriptors
        try:
            process = subprocess.Popen(self._command, env=env, start_new_session=True, stdout=out, stderr=errors)
        finally:
            for descriptor in filter(None, (out, errors)):
                os.close(descriptor)
        self._running[worker] = process
        self._begun.add(worker)

    def ended(self) -> dict[WorkerId, int]:
        """Returns process → exit code (Python's form) of processes that have ended, after a short sleep."""
        time.sleep(POLL_SECONDS)
        return self.kill([worker for worker, process in self._running.items() if process.poll() is not None])

    def kill(self, workers: Iterable[WorkerId]) -> dict[WorkerId, int]:
        """Kills the process groups of these workers, and returns their exit codes. A process keeps its id until it is waited for."""
        processes = {worker: self._running.pop(worker) for worker in workers}
        for process in processes.values():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        deadline = time.monotonic() + KILL_SECONDS
        for worker, process in processes.items():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            if worker in self._output:
                self._output[worker].end()
        codes = {worker: process.returncode for worker, process in processes.items()}
        return {worker: -signal.SIGKILL if code is None else code for worker, code in codes.items()}

    def terminate(self) -> None:
        """Sends TERM to all processes."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGTERM)

    def finish(self) -> None:
        """Waits, once all processes have ended, until their output is printed. Forgets them."""
        self._printed()
        self._begun.clear()

    def _printed(self) -> None:
        deadline = time.monotonic() + OUTPUT_SECONDS
        for output in self._output.values():
            output.end()
            output.wait(deadline)
        self._output.clear()


class Output:
    """Copies the output of a rank from its pipes to this process's streams, each line with the rank, in two threads.

    They lose no output that the rank wrote before its end. They wait for no other process that keeps a pipe open.
    """

    def __init__(self, rank: int) -> None:
        self._rank, self._ended = rank, threading.Event()
        self.descriptors: list[int] = []
        """Descriptors for the output and the errors of the rank. The caller closes them after the start."""
        self._threads: list[threading.Thread] = []
        for out in (sys.stdout, sys.stderr):
            descriptor, other = os.pipe()
            self.descriptors.append(other)
            self._threads.append(threading.Thread(target=self._copy, args=(descriptor, out), daemon=True))
            self._threads[-1].start()

    def end(self) -> None:
        """Notes that the rank has ended, and writes no more."""
        self._ended.set()

    def wait(self, deadline: float) -> None:
        """Waits until the output of the rank, which has ended, is printed, or until the deadline (`time.monotonic`)."""
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _copy(self, descriptor: int, out: TextIO) -> None:
        decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8")("replace"), translate=True)
        poll, over, begun = select.poll(), False, ""
        poll.register(descriptor, select.POLLIN)
        while not over:
            over = self._ended.is_set()  # before the look: the pipe has all that the rank has written
            ready = poll.poll(0 if over else 1000 * OUTPUT_LOOK_SECONDS)
            data = os.read(descriptor, _READ_BYTES) if ready else b""
            over = over or bool(ready and not data)
            *lines, begun = (begun + decoder.decode(data, final=over)).split("\n")
            if over and begun:
                lines.append(begun)
            # A full disk, a reader that left, closed (None): that costs these lines, not the next ones.
            with contextlib.suppress(OSError, ValueError, AttributeError), _WRITING:
                out.write("".join(f"[rank {self._rank}] {line}\n" for line in lines))
                out.flush()
        os.close(descriptor)


class Interrupted(Exception):
    """The end of the launcher by a signal while no rank runs."""

    def __init__(self, number: int) -> None:
        super().__init__(f"signal {number}")
        self.number = signal.Signals(number)


class WorkerGroup:
    """The ranks of this node, and the launcher's handling of signals.

    Args:
        args: the launcher's flags, with the `command` of a rank. `ours`: whether the ranks are `python -m lockstep.training run`, which
            saves on a signal, and not an unknown program. `caught`: the caught signals. The ranks ignore the signals that this process
            ignores (nohup), too.
        hangs: the watcher of ranks that make no progress.
    """

    def __init__(self, args: argparse.Namespace, meeting: Meeting, attempts: Attempts, hangs: Hangs) -> None:
        self.args, self.meeting, self.attempts, self._hangs = args, meeting, attempts, hangs
        self.workers = Workers(args.command, prefix=args.prefix, blocked=args.ours)
        self.signalled: int | None = None
        self.timed_out = False
        self.grace: float = args.grace or GRACE_SECONDS
        """Seconds that the ranks have after a signal (`_look_for_grace`)."""
        self.held = PendingSignals()
        """Signals for ranks that are starting."""
        self._waits = False
        """Whether ranks are about to start: a signal now would miss the last of them."""
        self._came: list[int] = []
        """Signals that came while `_waits` was set."""
        self._reasons: list[str] = []
        """A sentence for each way in which ranks have failed."""
        self.starts = attempts.used
        """Earlier starts of the ranks, by this launcher or one that it replaced."""

    def _begin(self) -> None:
        """Prepares a start of the ranks, and counts it. New signals wait in `held` from now on."""
        os.environ[ENV_RESTARTS] = str(self.starts)
        self.starts += 1
        earlier, self.held = self.held, PendingSignals(self.grace)  # from here on it takes what comes
        self.held.inherit(earlier)

    def _match(self, state: DesiredState, slot: NodeSlot) -> None:
        """Starts and kills processes so that the wanted processes of this node run, with torchrun's variables. Raises `OSError`."""
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
        """Sends the signals that came during the start to the ranks."""
        self._waits = False
        came, self._came = self._came, []
        for number in came:
            self._forward(number, None)

    def _ended(self) -> dict[WorkerId, tuple[int, bool]]:
        """Returns process → (exit code, whether a forwarded signal ended it), of processes that have ended since the last call."""
        codes = self.workers.ended()
        ended = {worker: (code, -code in self.held.delivered) for worker, code in codes.items()}
        self.held.release(self.workers.pids())
        return ended

    def _end_all(self) -> None:
        """Kills all running processes, and prints their output."""
        self.workers.kill(self.workers.running)
        self.workers.finish()

    def catch(self, began: float) -> None:
        """Forwards signals to the ranks from now on. Ends the ranks, as TERM does, at the time limit, counted from `began`."""
        handle(self.args.caught, self._forward)
        signal.signal(signal.SIGALRM, self._over)
        limit = self.args.time_limit
        signal.setitimer(signal.ITIMER_REAL, max(0.001, limit - (time.monotonic() - began)) if limit else 0)

    def _forward(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - the handler's signature
        if self._ends(number):
            self._begin_grace(number)
        self.held.send(self.workers.pids(), number)  # without one, for the ranks that start next

    def _begin_grace(self, number: int) -> None:
        """Begins the grace period of the ranks, at the first signal."""
        if self.signalled is None:
            signal.signal(signal.SIGALRM, self._kill)
            signal.setitimer(signal.ITIMER_REAL, min(self._look_for_grace(), 1 << 30))  # a timer takes no longer time
        self.signalled = number

    def _look_for_grace(self) -> float:
        """Returns `grace`, which becomes that of the run here if this is longer and the flag does not say otherwise."""
        if self.args.grace is None:
            folder = Path(os.environ[ENV_NOTE]).parent
            shown = [seen(folder, worker.rank, also_ending=True) for worker in self.workers.running]
            self.grace = max([self.grace, *(rank.about.grace for rank in shown if rank is not None)])
        return self.grace

    def _ends(self, number: int) -> bool:
        """Returns whether ranks end at this signal: the effect of USR1 on a user's program is unknown."""
        return self.args.ours or number in (signal.SIGTERM, signal.SIGINT)

    def _over(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - the handler's signature
        self.timed_out = True
        self._forward(signal.SIGTERM, frame)

    def _kill(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - the handler's signature
        """Kills the ranks that still run at the end of the grace period. Repeats it, since a rank may just be starting."""
        signal.setitimer(signal.ITIMER_REAL, 1)
        if pids := self.workers.pids():
            self.held.send(pids, signal.SIGKILL)

    def settled(self, code: int, codes: Mapping[int, int]) -> int:
        """Returns the launcher's exit code after the ranks' end, which no later signal changes.

        Args:
            code: the one exit code of the ranks.
            codes: rank → exit code of the failed ranks.
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
        """Completes status.json of the run that rank 0 has noted, if rank 0 was killed first.

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
    """Ignores a signal. Python complains of SIG_IGN if the signal has come already."""


def leave_while_waiting(number: int, frame: FrameType | None) -> NoReturn:  # noqa: ARG001
    for other in (*FORWARDED, signal.SIGALRM):  # the second of two at once would end what the first has begun
        if signal.getsignal(other) is leave_while_waiting:
            signal.signal(other, nothing)
    raise Interrupted(number)

"""`launch --live`: where a rank is lost, the others go on without it. One node.

A rank is lost when a signal has ended it that the launcher did not send, or when it stands stopped while others run. The launcher
kills its process group, whose data loaders hold its sockets, and says in the store, which it serves itself, who remains: a
*generation*. What the ranks make of that is theirs (`parallel/live.py`). All else that happens to a rank is as without `--live`: all end,
and start again from the last checkpoint.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import selectors
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed.elastic.multiprocessing import SignalException

from lockstep.training.contract import ENV_LIVE, ENV_REPLACEMENT, EXIT_DONE, EXIT_FAILED, EXIT_USAGE, to_stderr
from lockstep.training.launch.ending import FINAL, Attempts, deaths, exit_code, how, without_ended
from lockstep.training.launch.gang import STOP_SECONDS, Gang, interrupted
from lockstep.training.launch.lines import Copies
from lockstep.training.parallel import stores
from lockstep.training.parallel.exchange import named
from lockstep.wire.signals import FORWARDED

LOOK_SECONDS = 0.1
"""Between two looks at what ranks do. Their end is noticed at once, where the system has descriptors of processes (Linux)."""
POLL_SECONDS = 0.05
"""Elsewhere."""
KILL_SECONDS = 30.0
"""Bound on the end of a rank that was killed: one that waits for a device may not end."""
STORE_SECONDS = 60.0


class Supervisor(Gang):
    """Starts the ranks, each in a process group of its own, and watches them.

    Args:
        min_ranks: with fewer, none goes on.
        stopped_seconds: a rank that stands stopped is lost after this time.
        prefix: their lines begin with the rank.
        of_gang: `Gang`'s arguments.
    """

    def __init__(
        self, command: list[str], ranks: int, *, min_ranks: int, stopped_seconds: int, prefix: bool, **of_gang: Any
    ) -> None:
        super().__init__(**of_gang)
        self._command, self._ranks, self._min_ranks, self._prefix = command, ranks, min_ranks, prefix
        self._stopped_looks = round(stopped_seconds / LOOK_SECONDS)
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._spares: dict[int, subprocess.Popen[bytes]] = {}
        """Replacements of lost ranks that the others have not admitted yet, by the rank."""
        self._replacements = self._admissions = 0
        self._numbers: dict[int, int] = {}
        """Rank → the number of its last replacement."""
        self._selector = selectors.DefaultSelector()
        """Of descriptors of the processes, which can be read when these have ended."""
        self._at_once = _has_descriptors()
        self._came: list[int] = []
        """Signals that came while not all ranks were there."""
        self._waits = True
        """Not all are there."""
        self._run_id = uuid.uuid4().hex

    def run(self) -> dict[int, int]:
        """Returns when the ranks have ended for good: rank → exit code, of those that failed.

        Raises:
            OSError: a rank cannot be started.
            SignalException: a signal ends the launcher before the ranks have started.
        """
        self._restarts = 0
        try:
            while True:
                self._start(self._restarts)
                failed = self._watch()
                for rank in list(self._spares):
                    self._reap(rank)
                codes = {**failed, **self._end()}
                self._copies.finish()
                if not self.held.delivered:
                    codes = without_ended(codes, failed)
                if not codes or not self._start_again(codes, failed, self.attempts.left):
                    return codes
                self._count_restart()
        finally:
            for rank in [*self._running, *self._spares]:
                self._reap(rank)

    def _count_restart(self) -> None:
        self._restarts += 1
        self.attempts.restarted(self._restarts)

    def _pids(self) -> list[int]:
        return [process.pid for process in (*self._running.values(), *self._spares.values())]

    def _forward(self, number: int, frame: FrameType | None) -> None:
        if self._waits or not self._running:
            self._came.append(number)
        else:
            super()._forward(number, frame)

    def _start(self, restarts: int) -> None:
        if ends := [number for number in self._came if self._ends(number)]:
            raise SignalException(f"signal {ends[0]}", signal.Signals(ends[0]))
        self._waits = True
        self._all_ready = self._leaving = False
        self._generation, self._looks, self._next_look = 0, dict[int, int](), time.monotonic()
        self._replacements = self._admissions = 0
        self._store = stores.tcp_store("127.0.0.1", 0, serves=True, seconds=STORE_SECONDS)
        self._copies = Copies()
        with self._starting():
            self._env = {
                **os.environ, ENV_LIVE: "1", "WORLD_SIZE": str(self._ranks), "LOCAL_WORLD_SIZE": str(self._ranks),
                "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": self._run_id,
                "TORCHELASTIC_RESTART_COUNT": str(restarts),
            }  # fmt: skip
            for rank in range(self._ranks):
                self._running[rank] = self._spawn(rank)
        self._copies.begin()
        self.guarded(self._pids())
        self._waits = False
        came, self._came = self._came, []
        for number in came:
            self._forward(number, None)

    def _spawn(self, rank: int, **more: str) -> subprocess.Popen[bytes]:
        env = {**self._env, "RANK": str(rank), "LOCAL_RANK": str(rank), **more}
        out, errors = self._copies.pipes(rank) if self._prefix else (None, None)
        try:
            process = subprocess.Popen(self._command, env=env, start_new_session=True, stdout=out, stderr=errors)
        finally:
            for descriptor in filter(None, (out, errors)):
                os.close(descriptor)
        if self._at_once:
            self._selector.register(os.pidfd_open(process.pid), selectors.EVENT_READ, rank)
        return process

    def _replace(self, rank: int) -> None:
        """Starts a process in the place of a lost rank, which the others admit when it is prepared. It counts as a restart."""
        if self.attempts.left <= 0 or self.signalled is not None:
            return
        self._count_restart()
        self._replacements += 1
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED if self.ours else ())
        try:
            self._spares[rank] = self._spawn(rank, **{ENV_REPLACEMENT: str(self._replacements)})
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self._numbers[rank] = self._replacements

    def _admit(self) -> None:
        """Where the ranks ask for replacements, those that are prepared are among them from here on."""
        key = stores.admission(self._admissions + 1)
        if not self._generation or not self._store.check([key]):
            return
        self._admissions += 1
        prepared = [rank for rank in self._spares if self._store.check([stores.prepared(self._numbers[rank])])]
        generation = self._generation + 1
        for rank in prepared:
            self._running[rank] = self._spares.pop(rank)
            self._store.delete_key(stores.ended(rank))
            self._store.set(stores.admitted(self._numbers[rank]), f"{self._admissions} {generation}")
        self._store.set(f"{key}/answer", str(generation))
        self._announce()
        for rank in prepared:
            to_stderr(f"launch: rank {rank} was replaced: {len(self._running)} of {self._ranks} ranks train")

    def _announce(self) -> None:
        self._generation += 1
        # The first of them leads, so those that are admitted come last.
        self._store.set(stores.generation(self._generation), json.dumps(list(self._running)))
        self.guarded(self._pids())

    def _watch(self) -> dict[int, int]:
        """Returns when all ranks have ended well, or what is left of them has to end: rank → exit code, of those that failed."""
        while self._running:
            self._admit()
            ended = self._look()
            lost = {rank: code for rank, code in ended.items() if code < 0 and -code not in self.held.delivered}
            failed = any(code and rank not in lost for rank, code in ended.items())
            self._leaving = self._leaving or 0 in ended.values()
            lost.update(self._stopped())
            codes = {rank: code for rank, code in {**ended, **lost}.items() if code}
            for rank, code in codes.items():
                if code not in FINAL:  # else it has said why
                    self._store.set(stores.ended(rank), how(code))
            if failed or (lost and not self._go_on(lost)):
                return codes
        return {}

    def _go_on(self, lost: dict[int, int]) -> bool:
        """Tells those that remain to go on without these. False, with a word, where they cannot."""
        keys = [stores.ready(rank) for rank in range(self._ranks)]
        self._all_ready = self._all_ready or self._store.check(keys)
        left = list(self._running)
        if not self._all_ready:
            why = "not all ranks had begun"
        elif len(left) < self._min_ranks:
            why = f"{len(left)} would remain, and --min-ranks is {self._min_ranks}"
        elif self._leaving:
            why = "others have ended"
        else:
            self._announce()
            said = "; ".join(deaths(lost, None, lost))
            to_stderr(f"launch: {said}: {len(left)} of {self._ranks} ranks continue")
            for rank in sorted(lost):
                self._replace(rank)
            self.guarded(self._pids())
            return True
        to_stderr(f"launch: no rank continues without rank {named(sorted(lost))}: {why}")
        return False

    def _look(self) -> dict[int, int]:
        """Rank → exit code, of those that have ended: as soon as one has, and after `LOOK_SECONDS` at the latest."""
        found: dict[int, int] = {}
        seconds = LOOK_SECONDS
        while ranks := self._ended(seconds):
            for rank in ranks:
                spare, code = rank in self._spares, self._reap(rank)
                if not spare:  # what it was started with is right for the others
                    found[rank] = EXIT_FAILED if code == EXIT_USAGE and rank in self._numbers else code
                elif self.signalled is None:
                    to_stderr(f"launch: the replacement of rank {rank} {how(code)}: the others train on without it")
            seconds = 0.0  # those that ended at the same moment
        self.held.release(self._pids())
        return found

    def _ended(self, seconds: float) -> list[int]:
        if self._at_once:
            return [key.data for key, _ in self._selector.select(seconds)]
        time.sleep(min(seconds, POLL_SECONDS))
        every = {**self._running, **self._spares}
        return [rank for rank, process in every.items() if process.poll() is not None]

    def _reap(self, rank: int) -> int:
        """Its exit code; nothing is left of its process group. Until it is waited for, nobody else gets its number."""
        process = self._running.pop(rank, None) or self._spares.pop(rank)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(KILL_SECONDS)
        for key in [key for key in self._selector.get_map().values() if key.data == rank]:
            self._selector.unregister(key.fd)
            os.close(key.fd)
        self._copies.ended(rank)
        return -signal.SIGKILL if process.returncode is None else process.returncode

    def _stopped(self) -> dict[int, int]:
        """Ends the ranks that have stood stopped for too long, while others ran: rank → the code for that.

        Looks are counted: a clock would go on while this process is stopped itself.
        """
        if time.monotonic() < self._next_look:
            return {}
        self._next_look = time.monotonic() + LOOK_SECONDS
        still = [rank for rank, process in self._running.items() if _is_stopped(process.pid)]
        if len(still) == len(self._running):
            still = []  # somebody has suspended the job
        self._looks = {rank: self._looks.get(rank, 0) + 1 for rank in still}
        late = [rank for rank, looks in self._looks.items() if looks >= self._stopped_looks]
        for rank in late:
            self._reap(rank)
        return dict.fromkeys(late, -signal.SIGSTOP)

    def _end(self) -> dict[int, int]:
        """Ends the ranks that run: rank → exit code, of those that fail at it."""
        codes: dict[int, int] = {}
        for pid in self._pids():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGTERM)
        deadline = time.monotonic() + STOP_SECONDS
        while self._running and time.monotonic() < deadline:
            codes.update(self._look())
        codes.update((rank, self._reap(rank)) for rank in list(self._running))
        return {rank: code for rank, code in codes.items() if code}


def _has_descriptors() -> bool:
    """Whether the system has descriptors of processes: Linux from 5.3 on."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (OSError, AttributeError):
        return False
    return True


def _is_stopped(pid: int) -> bool:
    """Whether a process stands stopped (T in proc_pid_stat(5)); never on other systems than Linux."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"T"
    except (OSError, IndexError):
        return False


def run(
    args: argparse.Namespace, command: list[str], ranks: int, attempts: Attempts, caught: tuple[signal.Signals, ...],
    guarded: Callable[[Iterable[int]], None],
) -> int:  # fmt: skip
    """The exit code of the ranks."""
    supervisor = Supervisor(
        command, ranks, min_ranks=args.min_ranks, stopped_seconds=args.stopped_seconds, prefix=args.prefix,
        attempts=attempts, grace=args.grace, ours=args.command[0] == "run", caught=caught, guarded=guarded,
        time_limit=args.time_limit,
    )  # fmt: skip
    supervisor.catch()
    supervisor.limit(time.monotonic())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)  # they were held back until here
    try:
        codes = supervisor.run()
    except SignalException as error:
        return interrupted(error.sigval, args.time_limit, supervisor.timed_out, "the ranks had started")
    except OSError as error:
        to_stderr(f"launch: a rank cannot be started: {error.strerror}")
        return EXIT_FAILED
    return supervisor.settled(exit_code(codes.values()) if codes else EXIT_DONE, codes)

"""The ranks of one node: processes that are started, watched and ended one by one."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lockstep.wire.progress import state_of
from lockstep.wire.signals import FORWARDED

from ..contract import ENV_REPLACEMENT
from ..limits import KILL_SECONDS, POLL_SECONDS
from .lines import Copies


@dataclass(frozen=True)
class WorkerId:
    """A rank and the process in its place: 0 for the one that it was started with, or the number of the replacement."""

    rank: int
    replacement: int = 0


class Workers:
    """Each rank is a process group of its own, so that its data loaders end with it.

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
    def places(self) -> list[WorkerId]:
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
        self._kill([place for place in self.places if place not in wanted])
        new = [place for place in wanted if place not in self._begun]
        if not new:
            return
        if not self._running:
            self._printed()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED if self._blocked else ())
        try:
            for place in new:
                rank = str(place.rank)
                of_rank = {"RANK": rank, "ROLE_RANK": rank, "LOCAL_RANK": str(place.rank - first)}
                if place.replacement:
                    of_rank[ENV_REPLACEMENT] = str(place.replacement)
                self._start(place, {**env, **of_rank})
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self._copies.begin()

    def _start(self, place: WorkerId, env: Mapping[str, str]) -> None:
        out, errors = self._copies.pipes(place.rank) if self._prefix else (None, None)
        try:
            process = subprocess.Popen(self._command, env=env, start_new_session=True, stdout=out, stderr=errors)
        finally:
            for descriptor in filter(None, (out, errors)):
                os.close(descriptor)
        self._running[place] = process
        self._begun.add(place)
        if self._at_once:
            self._selector.register(os.pidfd_open(process.pid), selectors.EVENT_READ, place)

    def ended(self, seconds: float) -> dict[WorkerId, int]:
        """Exit codes, as Python gives them, of those that have ended: as soon as one has, and after this time at the latest."""
        found: dict[WorkerId, int] = {}
        while places := self._ended(seconds):
            found.update((place, self.kill(place)) for place in places)
            seconds = 0.0  # those that ended at the same moment
        return found

    def _ended(self, seconds: float) -> list[WorkerId]:
        if self._at_once:
            return [key.data for key, _ in self._selector.select(seconds)]
        time.sleep(min(seconds, POLL_SECONDS))
        return [place for place, process in self._running.items() if process.poll() is not None]

    def kill(self, place: WorkerId) -> int:
        """Its exit code; nothing is left of its process group. Until it is waited for, nobody else gets its number."""
        return self._kill([place])[place]

    def _kill(self, places: Iterable[WorkerId]) -> dict[WorkerId, int]:
        processes = {place: self._running.pop(place) for place in places}
        for process in processes.values():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        deadline = time.monotonic() + KILL_SECONDS
        for place, process in processes.items():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            for key in [key for key in self._selector.get_map().values() if key.data == place]:
                self._selector.unregister(key.fd)
                os.close(key.fd)
            self._copies.ended(place.rank)
        codes = {place: process.returncode for place, process in processes.items()}
        return {place: -signal.SIGKILL if code is None else code for place, code in codes.items()}

    def terminate(self) -> None:
        """Asks all to end."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGTERM)

    def kill_all(self) -> dict[WorkerId, int]:
        return self._kill(self.places)

    def stopped(self) -> list[int]:
        """The ranks that stand stopped now; never any on other systems than Linux."""
        return [place.rank for place, process in self._running.items() if state_of(process.pid) == "T"]

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

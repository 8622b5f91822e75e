"""What touches the disk, in a thread of its own: whoever trains or ends a run waits for a disk no longer than a bound."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

SECONDS = 2.0
"""For one thing, on a disk that has answered so far."""
MOST = 10_000
"""Things that wait for a disk that hangs; further ones are dropped."""


class Background:
    """Does things one after the other. A disk that is late is not waited for again before it has answered.

    Args:
        name: of the thread, a daemon: the process can end also where the disk never answers.
        late: called once when a thing takes too long.
    """

    def __init__(self, name: str, late: Callable[[], None]) -> None:
        self._name, self._late = name, late
        self._change = threading.Condition()
        self._waiting: dict[object, Callable[[], None]] = {}
        self._running = self._is_late = False
        self._thread: threading.Thread | None = None

    def run(self, task: Callable[[], None], key: object = None, seconds: float = SECONDS) -> bool:
        """Has the task done, which raises nothing, and waits for it. Returns whether everything is done by then.

        Args:
            key: a task of the same key that waits is dropped: this one replaces it.
            seconds: 0 waits for nothing.
        """
        with self._change:
            if len(self._waiting) < MOST or key in self._waiting:
                self._waiting[key if key is not None else object()] = task
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._thread.start()
            self._change.notify_all()
            if seconds == 0 or self._is_late:
                return False
            deadline = time.monotonic() + seconds
            while self._waiting or self._running:
                if not self._change.wait(max(0.0, deadline - time.monotonic())) and time.monotonic() >= deadline:
                    self._is_late = True
                    break
        if self._is_late:
            self._late()
        return not self._is_late

    def stop(self) -> None:
        """What has not been begun is dropped."""
        with self._change:
            self._waiting.clear()

    def _work(self) -> None:
        while True:
            with self._change:
                self._running = False
                if not self._waiting:
                    self._is_late = False
                self._change.notify_all()
                while not self._waiting:
                    self._change.wait()
                task = self._waiting.pop(next(iter(self._waiting)))
                self._running = True
            task()

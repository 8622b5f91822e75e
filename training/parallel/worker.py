"""A thread that calls functions one after the other, for checkpoints, the run directory and the trackers."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

R = TypeVar("R")


class Worker:
    """A thread that calls one function after the other, as long as the process lives.

    A loader forks its workers at the beginning of an epoch, while the last epoch is saved. A thread that started or ended then could
    leave a lock held in a worker (`parallel/process.py`), so no save starts or ends a thread. The thread is a daemon, so that the process
    can end even if the disk never answers; `Saver.close` is for every other end.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._process: int | None = None
        self._last: Future[Any] | None = None

    def begin(self) -> None:
        """Starts the thread, once in a process: a forked process has none of its parent's threads. Starts another thread if a disk blocks
        the present one."""
        if self._process != os.getpid() or self.is_busy:
            self._process, self._calls, self._last = os.getpid(), queue.SimpleQueue[Callable[[], None]](), None
            threading.Thread(target=self._work, args=(self._calls,), name=self._name, daemon=True).start()

    @property
    def is_busy(self) -> bool:
        """Whether a call is under way, or waits."""
        return self._last is not None and not self._last.done()

    def run(self, function: Callable[..., R], *arguments: Any) -> Future[R]:
        """Queues a call of a function. Returns a future of its result."""
        if self._process != os.getpid():
            self.begin()
        self._last = future = Future[R]()

        def answer() -> None:
            try:
                future.set_result(function(*arguments))
            except BaseException as error:  # noqa: BLE001 - `Future.result` raises it again
                future.set_exception(error)

        self._calls.put(answer)
        return future

    @staticmethod
    def _work(calls: queue.SimpleQueue[Callable[[], None]]) -> None:
        while True:
            calls.get()()

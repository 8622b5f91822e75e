"""Where the time of a step goes. The points are marked by the loop and by the sync strategies.

    begin ── data_wait ── data_ready ── forward + backward ── grad_ready ── sync_wait ── synced ── optimizer ── end

Step time alone hides a slow rank: all ranks wait for it and read the same. The time to `grad_ready` names it.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class StepClock:
    """Seconds of the last step by phase. The clock is injected, so that tests need not wait."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self.trained = 0.0
        """Seconds of training so far, evaluation and saving excluded; continues over restarts."""
        self.begin()

    def begin(self) -> None:
        self._begin = self._data = self._grad = self._synced = self._now()

    def data_ready(self) -> None:
        self._data = self._grad = self._synced = self._now()

    def grad_ready(self, at: float | None = None) -> None:
        """The rank's own gradients are complete (now, or at a time noted before): from here on it waits for others."""
        self._grad = self._synced = self._now() if at is None else at

    def synced(self) -> None:
        self._synced = self._now()

    def end(self) -> dict[str, float]:
        """Closes the step: {data_wait, grad_ready, sync_wait, step_duration} in seconds."""
        now = self._now()
        self.trained += now - self._begin
        return {
            "data_wait": self._data - self._begin,
            "grad_ready": self._grad - self._data,
            "sync_wait": self._synced - self._grad,
            "step_duration": now - self._begin,
        }

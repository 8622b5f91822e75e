"""How often to save: `checkpoint.every_seconds: auto`, by Young's and Daly's formula from what the run itself has measured.

A save costs `cost` seconds of training; a failure costs the work since the last one, half an interval on the average. The
two together are least where the interval is √(2 · cost · MTBF), with MTBF the mean time between failures.
"""

from __future__ import annotations

import math
import statistics
from collections import deque

PRIOR_SECONDS = 86_400.0
"""The prior: one failure in a day of training. The run's own failures are added to it. So a run without failures does not
get an infinite interval, and one failure in the first minute does not count as one failure per minute."""
LEAST_SECONDS, MOST_SECONDS = 30.0, 3600.0
"""Bounds of the interval. The first save comes after the least one: it measures what a save costs."""
WRITES = 2.0
"""An interval is at least this many times as long as the writing in the background, which takes part of the disk and the CPU."""
_LAST = 9
"""Saves whose median counts."""


class Interval:
    """The best seconds between two saves, so far.

    Args:
        failures: starts of the run so far that ended neither well nor with their state saved.
    """

    def __init__(self, failures: int) -> None:
        self.failures = max(0, failures)
        self._costs: deque[float] = deque(maxlen=_LAST)
        self._writes: deque[float] = deque(maxlen=_LAST)
        self.reported = False
        """Whether the run has reported the interval."""

    def stalled(self, seconds: float) -> None:
        """Records how many seconds a save has stopped the training."""
        self._costs.append(max(0.0, seconds))

    def written(self, seconds: float) -> None:
        """Records how many seconds the writing in the background took."""
        self._writes.append(max(0.0, seconds))

    @property
    def measured(self) -> bool:
        """Whether a save has been measured from its beginning to its end."""
        return bool(self._costs and self._writes)

    @property
    def cost(self) -> float:
        return statistics.median(self._costs) if self._costs else 0.0

    def mtbf(self, trained: float) -> float:
        """Mean seconds between failures. `trained`: seconds of training so far, of all attempts."""
        return (PRIOR_SECONDS + max(0.0, trained)) / (1 + self.failures)

    def seconds(self, trained: float) -> float:
        """Seconds between two saves. `trained`: as in `mtbf`."""
        best = math.sqrt(2 * self.cost * self.mtbf(trained))
        least = max(LEAST_SECONDS, WRITES * statistics.median(self._writes) if self._writes else 0.0)
        return min(max(best, least), max(MOST_SECONDS, least))

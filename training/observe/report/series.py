"""Long series of numbers in little memory, and fewer points of them that show the same.

A run of a million steps has a hundred thousand readings. As mappings they would take a kilobyte each, in columns 40 bytes;
and a chart that is 500 pixels wide shows no more than the least and the greatest of each pixel's.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

T = TypeVar("T")


class Reading(NamedTuple):
    """One number of a run; NaN where something was not given."""

    step: float
    epoch: float
    time: float
    value: float


class Series:
    """Readings in the order in which they were made; of what was read again at the same step, the last counts."""

    def __init__(self) -> None:
        self._columns = [array("d") for _ in Reading._fields]

    def add(self, step: float | None, epoch: float | None, time: float, value: float | None) -> None:
        for column, number in zip(self._columns, (step, epoch, time, value)):
            column.append(math.nan if number is None else number)

    def fewer(self, most: int) -> list[Reading]:
        """At most `most` readings by step, the least and the greatest among them."""
        steps = self._columns[0]
        # NaN is in no order with numbers: those without a step are one place, before all others.
        order = sorted(range(len(steps)), key=lambda at: -math.inf if math.isnan(steps[at]) else steps[at])
        kept = array("q", _last_of_each(order, steps))
        return [self._at(index) for index in thinned(kept, most, self._columns[3].__getitem__)]

    def _at(self, index: int) -> Reading:
        return Reading(*(column[index] for column in self._columns))


def _last_of_each(order: list[int], steps: array[float]) -> Iterator[int]:
    """Of indices that are sorted by step, the last one of each step."""
    for at, index in enumerate(order):
        following = steps[order[at + 1]] if at + 1 < len(order) else None
        same = following is not None and (following == steps[index] or math.isnan(following))  # those without are one
        if not same:
            yield index


def thinned(points: Sequence[T], most: int, height: Callable[[T], float | None]) -> list[T]:
    """At most `most` of the points, in their order: the first, the last, and the lowest and the highest of each stretch.

    Args:
        most: at least 4.
        height: of a point; None or NaN where it has none.
    """
    if len(points) <= most:
        return list(points)
    inner, stretches = len(points) - 2, (most - 2) // 2
    chosen = [points[0]]
    for number in range(stretches):
        low, high = 1 + number * inner // stretches, 1 + (number + 1) * inner // stretches
        known = [(value, at) for at in range(low, high) if (value := height(points[at])) is not None and value == value]
        # Of equal ones the first and the last.
        ends = {min(known)[1], max(known)[1]} if known else {low}
        chosen += [points[at] for at in sorted(ends)]
    return [*chosen, points[-1]]

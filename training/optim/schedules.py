"""Learning-rate schedules, in epochs (they hold at every batch size and world size) or in steps."""

from __future__ import annotations

from collections.abc import Sequence


def piecewise_linear(points: Sequence[tuple[float, float]], when: float) -> float:
    """The factor at `when` (fractions of an epoch count): linear between points, flat outside, 1 without points."""
    if not points:
        return 1.0
    if when <= points[0][0]:
        return points[0][1]
    for (x0, y0), (x1, y1) in zip(points, points[1:]):  # noqa: RUF007 - a pair of points reads better so
        if when <= x1:
            return y0 + (y1 - y0) * (when - x0) / (x1 - x0)
    return points[-1][1]

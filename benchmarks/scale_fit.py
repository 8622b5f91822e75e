"""How does it grow? The law that fits counts over numbers of ranks best, by least squares: constant, log n, n, n log n, n²."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

LAWS: dict[str, Callable[[float], float]] = {
    "constant": lambda _: 0.0, "log n": math.log2, "n": lambda n: n, "n log n": lambda n: n * math.log2(n),
    "n²": lambda n: n * n,
}  # fmt: skip
"""Slowest first. Each is fitted as a + b·law(n), with b ≥ 0."""
ENOUGH = 0.02
"""A slower law is taken where its residual is at most this much larger than the best one's."""


@dataclass(frozen=True, slots=True)
class Fit:
    law: str
    a: float
    b: float
    residual: float
    """Root mean square of the relative differences between the law and what was counted."""

    def at(self, n: float) -> float:
        return self.a + self.b * LAWS[self.law](n)

    def __str__(self) -> str:
        told = f"{self.a:.3g}" if self.law == "constant" else f"{self.a:.3g} + {self.b:.3g}·{self.law}"
        return f"{told} (residual {self.residual:.1%})"


def fit(points: Mapping[int, float]) -> Fit:
    """The law of counts by number of ranks. Least squares of relative differences, so that small numbers count, too."""
    values = {n: float(y) for n, y in points.items()}
    if not any(values.values()):
        return Fit("constant", 0.0, 0.0, 0.0)
    found = [_fitted(name, values) for name in LAWS]
    best = min(one.residual for one in found)
    return next(one for one in found if one.residual <= best + ENOUGH)


def _fitted(name: str, values: Mapping[int, float]) -> Fit:
    law = LAWS[name]
    smallest = min((abs(y) for y in values.values() if y), default=1.0)
    rows = [(law(n), y, 1.0 / max(abs(y), smallest) ** 2) for n, y in values.items()]
    total = sum(w for _, _, w in rows)
    x_mean, y_mean = sum(w * x for x, _, w in rows) / total, sum(w * y for _, y, w in rows) / total
    spread = sum(w * (x - x_mean) ** 2 for x, _, w in rows)
    b = sum(w * (x - x_mean) * (y - y_mean) for x, y, w in rows) / spread if spread else 0.0
    b = max(b, 0.0)
    a = y_mean - b * x_mean
    residual = math.sqrt(sum(w * (y - a - b * x) ** 2 for x, y, w in rows) / len(rows))
    return Fit(name, a, b, residual)


ORDER = tuple(LAWS)


def within(found: Fit, most: str) -> bool:
    """Whether it grows no faster than the law `most`."""
    return ORDER.index(found.law) <= ORDER.index(most)

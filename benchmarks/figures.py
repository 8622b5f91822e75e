"""A measured figure: its spread, an interval for its median, whether it meets a target, and whether it became worse.

The interval is the one between two order statistics (Conover, Practical Nonparametric Statistics, 3.2). It holds whatever
the noise looks like, if the rounds are independent, and needs at least six of them for 95 %.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.measure import RESULTS, Load, write
from lockstep.training.contract import UserError

CONFIDENCE = 0.95
HOW = ("rounds", "out", "check", "job")
"""Arguments that do not change what is measured."""
Better = Literal["less", "more"]


@dataclass(frozen=True, slots=True)
class Figure:
    median: float
    quartiles: tuple[float, float]
    interval: tuple[float, float] | None
    """Holds the true median with 95 %. None: there are fewer than six values."""
    n: int
    unit: str
    better: Better

    def __str__(self) -> str:
        shown = f"{self.median:.4g} {self.unit}".rstrip()
        spread = " … ".join(f"{value:.4g}" for value in self.quartiles)
        bounds = f"[{self.interval[0]:.4g}, {self.interval[1]:.4g}]" if self.interval else "too few for an interval"
        return f"{shown:>16}   {bounds:>22}   quartiles {spread}, n = {self.n}"

    def meets(self, target: float) -> Literal["met", "missed", "open"]:
        """`open`: the interval holds the target, so this run cannot tell."""
        low, high = self.interval or (-math.inf, math.inf)
        if self.better == "more":
            low, high, target = -high, -low, -target
        return "met" if high <= target else "missed" if low > target else "open"

    def is_worse_than(self, other: Figure) -> bool:
        """Whether the intervals are apart, and this one on the bad side."""
        if self.interval is None or other.interval is None:
            return False
        return self.interval[0] > other.interval[1] if self.better == "less" else self.interval[1] < other.interval[0]


def figure(values: Sequence[float], unit: str = "", better: Better = "less") -> Figure:
    """Of one value a round. Raises `ValueError` for none at all."""
    ordered = sorted(values)
    if not ordered:
        raise ValueError("a figure needs at least one value")
    first, _, third = statistics.quantiles(ordered, n=4, method="inclusive") if len(ordered) > 1 else [ordered[0]] * 3
    return Figure(
        statistics.median(ordered), (first, third), interval(ordered), len(ordered), unit, better,
    )  # fmt: skip


def interval(ordered: Sequence[float]) -> tuple[float, float] | None:
    """The narrowest pair of equally far order statistics that holds the median with 95 %. None: no pair does."""
    n, below, rank = len(ordered), 0.0, 0
    while (below := below + math.comb(n, rank) / 2**n) <= (1 - CONFIDENCE) / 2:
        rank += 1  # `below`: the chance that at most `rank` values are smaller than the median
    return (ordered[rank - 1], ordered[n - rank]) if rank else None


def ratios(times: Mapping[str, Sequence[float]], numerator: str, denominator: str, better: Better = "less") -> Figure:
    """Of time(numerator) / time(denominator), round by round."""
    return figure([a / b for a, b in zip(times[numerator], times[denominator])], "×", better)


def options(parser: argparse.ArgumentParser, rounds: int) -> None:
    parser.add_argument("--rounds", type=int, default=rounds, help="paired rounds (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="the file of the result (default: in benchmarks/results)")
    parser.add_argument("--check", action="store_true", help="compare with the recorded result, and record nothing")


class Run:
    """One run of a benchmark, from its start to its record.

    Raises:
        UserError: `--check`, and nothing is recorded, or it was recorded on another kind of machine or with other settings.
    """

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        self._name, self._out, self._load = name, args.out, Load()
        self._path = args.out or RESULTS / f"{name}.json"
        self._settings = json.loads(
            json.dumps({key: value for key, value in vars(args).items() if key not in HOW}, default=str)
        )
        self._recorded = recorded(self._path, self._load.about, self._settings) if args.check else None

    def finish(self, figures: Mapping[str, Figure], values: Mapping[str, Any]) -> int:
        """Prints the figures; then records them, or with `--check` names those that are worse than the recorded ones.

        Returns:
            The exit code: 1 where `--check` found a figure that is worse beyond both intervals.
        """
        about = {**self._load.about, **self._load.taken()}
        others = f"others took {about['others']:.1%} of the CPU time"
        print(f"{about['cpu']}, {about['cores']} cores, torch {about['torch']}; {'BUSY: ' * about['busy']}{others}")
        for row, found in figures.items():
            print(f"  {row:44} {found}")
        if self._recorded is None:
            rows = {row: asdict(found) for row, found in figures.items()}
            result = {"machine": about, "settings": self._settings, "figures": rows, **values}
            print(f"written to {write(self._name, result, self._out)}")
            return 0
        for row, why in not_compared(self._recorded, figures).items():
            print(f"not compared: {row}: {why}")
        worse = compared(self._recorded, figures)
        for row, old in worse.items():
            print(f"worse: {row}: {figures[row]}\n{'recorded:':>{len(row) + 8}} {old}")
        print(f"{len(worse)} of {len(figures)} figures are worse than in {self._path}, beyond their intervals")
        return 1 if worse else 0


def recorded(path: Path, about: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Figure]:
    """The figures of a result. Raises `UserError` where there are none of this kind of machine and these settings."""
    try:
        result = json.loads(path.read_text())
        kind, rows, then = result["machine"], result["figures"], result.get("settings")
    except OSError:
        raise UserError(f"{path}: no such record: run once without --check") from None
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{path}: no record with figures: run once without --check") from None
    for key in ("cpu", "cores"):
        if kind[key] != about[key]:
            raise UserError(
                f"{path} was measured on another kind of machine ({kind['cpu']}, {kind['cores']} cores; this one:"
                f" {about['cpu']}, {about['cores']}): record here first, with --out FILE, then --check --out FILE"
            )
    if then is None:
        print(f"{path} does not say with which settings it was measured: they must have been these")
        then = settings
    for key in sorted(then.keys() | settings.keys()):
        if then.get(key) != settings.get(key):
            raise UserError(
                f"{path} was measured with --{key.replace('_', '-')} {then.get(key)}, this run has {settings.get(key)}: "
                "take the same, or another record with --out FILE"
            )
    found = {}
    for name, row in rows.items():
        pairs = {key: tuple(row[key]) if row[key] else None for key in ("quartiles", "interval")}
        found[name] = Figure(**{**row, **pairs})
    return found


def not_compared(old: Mapping[str, Figure], new: Mapping[str, Figure]) -> dict[str, str]:
    """Figure → why a comparison says nothing of it."""
    found = {}
    for name in dict.fromkeys((*old, *new)):
        if name not in old or name not in new:
            found[name] = f"only in the {'record' if name in old else 'new run'}"
        elif old[name].interval is None or new[name].interval is None:
            side = "the record" if old[name].interval is None else "the new run"
            found[name] = (
                f"{side} has {old[name].n if side == 'the record' else new[name].n} values, an interval needs six"
            )
    return found


def compared(old: Mapping[str, Figure], new: Mapping[str, Figure]) -> dict[str, Figure]:
    """The recorded figures than which the new ones are worse."""
    return {name: old[name] for name, found in new.items() if name in old and found.is_worse_than(old[name])}

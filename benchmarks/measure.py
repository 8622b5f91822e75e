"""How the benchmarks measure: variants take turns in one process, and medians and ratios of the same round count.

The interval of a figure is the one between two order statistics (Conover, Practical Nonparametric Statistics, 3.2). It holds whatever
the noise looks like, if the rounds are independent, and needs at least six of them for 95 %.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

import torch

RESULTS = Path(__file__).parent / "results"

BUSY = 0.05
"""A run is marked as busy where others took more of the machine's CPU time than this share."""


def interleaved(
    variants: Mapping[str, Callable[[], Any]], rounds: int, warm_up: int | None = 1
) -> dict[str, list[float]]:
    """Seconds of each variant in each round, A B C A B C …; the order turns every round, so that none is always first.

    Args:
        warm_up: rounds before the first that counts. None: until every variant is `steady`; not in ranks that
            communicate, where each would decide for itself.
    """
    names = list(variants)

    def run(name: str) -> float:
        began = time.perf_counter()
        variants[name]()
        return time.perf_counter() - began

    warm: dict[str, list[float]] = {name: [] for name in names}
    while len(warm[names[0]]) < warm_up if warm_up is not None else not all(map(steady, warm.values())):
        for name in names:
            warm[name].append(run(name))
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            times[name].append(run(name))
    return times


def steady(values: Sequence[float], most: int = 20) -> bool:
    """Whether the last three values are within 5 % of the three before, by their medians; after `most` values, yes."""
    if len(values) < 6:
        return False
    return len(values) >= most or abs(statistics.median(values[-3:]) / statistics.median(values[-6:-3]) - 1) <= 0.05


class Load:
    """How much of the machine's CPU time others take while this process and its children measure."""

    def __init__(self) -> None:
        self.about = machine()
        self._began = self._now()

    def taken(self) -> dict[str, Any]:
        """`others`: their share of all cores since the start; `busy`: whether it is above `BUSY`."""
        (seconds, used, own), (then, used_then, own_then) = self._now(), self._began
        all_of_it = (seconds - then) * (os.cpu_count() or 1)
        others = max(0.0, (used - used_then) - (own - own_then)) / all_of_it if all_of_it > 0 else 0.0
        return {"others": round(others, 4), "busy": others > BUSY}

    def _now(self) -> tuple[float, float, float]:
        """Seconds: of the clock, of CPU time that the machine used or its host took away, and of ours."""
        return time.monotonic(), _used(), _own()


def _used() -> float:
    try:
        user, nice, system, _, _, irq, softirq, steal, *_ = map(int, Path("/proc/stat").read_text().split()[1:11])
    except (OSError, ValueError):
        return 0.0  # not Linux: the load at the start is all that is told
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _own() -> float:
    """CPU seconds of the processes of this session that live, and of their children that have ended."""
    found = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if int(fields[3]) == os.getsid(0):
            found += sum(map(int, fields[11:15]))
    return found / os.sysconf("SC_CLK_TCK")


def machine() -> dict[str, Any]:
    model = next(
        (line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")), platform.machine()
    )
    return {
        "cpu": model, "cores": len(os.sched_getaffinity(0)), "torch": str(torch.__version__),
        "python": platform.python_version(), "date": datetime.now(timezone.utc).isoformat(timespec="minutes"),
        "load_at_start": round(os.getloadavg()[0], 2),
    }  # fmt: skip


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []


def write(name: str, value: dict[str, Any], out: Path | None = None) -> Path:
    """Writes a result as JSON: `benchmarks/results/NAME.json`, or where `out` says."""
    path = out or RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1) + "\n")
    return path


CONFIDENCE = 0.95
HOW = ("rounds", "out")
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


class Run:
    """One run of a benchmark, from its start to its record."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        self._name, self._out, self._load = name, args.out, Load()
        settings = {key: value for key, value in vars(args).items() if key not in HOW}
        self._settings = json.loads(json.dumps(settings, default=str))

    def finish(self, figures: Mapping[str, Figure], values: Mapping[str, Any]) -> int:
        """Prints the figures and records them. Returns the exit code."""
        about = {**self._load.about, **self._load.taken()}
        others = f"others took {about['others']:.1%} of the CPU time"
        print(f"{about['cpu']}, {about['cores']} cores, torch {about['torch']}; {'BUSY: ' * about['busy']}{others}")
        for row, found in figures.items():
            print(f"  {row:44} {found}")
        rows = {row: asdict(found) for row, found in figures.items()}
        result = {"machine": about, "settings": self._settings, "figures": rows, **values}
        print(f"written to {write(self._name, result, self._out)}")
        return 0

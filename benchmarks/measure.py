"""How the benchmarks measure: variants take turns in one process, and medians and ratios of the same round count."""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import statistics
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

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
        inside = variants[name]()
        seconds = time.perf_counter() - began
        return float(inside) if isinstance(variants[name], Worker) else seconds

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


def forget(folder: Path) -> None:
    """Throws the files of a folder out of the page cache (Linux). What a process has mapped stays."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())  # what is not written yet stays, too
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


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
    """CPU seconds of this process, of those below it, and of their children that have ended."""
    children: dict[int, list[int]] = {}
    ticks: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        pid = int(path.parent.name)
        children.setdefault(int(fields[1]), []).append(pid)
        ticks[pid] = sum(map(int, fields[11:15]))
    ours, found = [os.getpid()], 0
    while ours:
        pid = ours.pop()
        found += ticks.get(pid, 0)
        ours += children.get(pid, [])
    return found / os.sysconf("SC_CLK_TCK")


class Worker:
    """A variant in a process of its own, for what is process-wide: allocator, threads, another project's modules.

    Args:
        build: importable function that returns the callable to time; it runs in the worker.
    """

    def __init__(self, build: Callable[..., Callable[..., Any]], *args: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, build, args), daemon=True)
        self._process.start()
        theirs.close()
        self._answer()

    def __call__(self) -> float:
        """Runs the callable once and returns its seconds, taken inside the worker. Raises `RuntimeError` where it failed."""
        return self.run()[0]

    def run(self, *args: Any) -> tuple[float, Any]:
        """The seconds of one call with `args`, and what it gave back. Raises `RuntimeError` where it failed."""
        self._pipe.send(args)
        return self._answer()

    def _answer(self) -> tuple[float, Any]:
        try:
            kind, seconds, value = self._pipe.recv()
        except EOFError:
            raise RuntimeError("a worker ended without an answer (out of memory?)") from None
        if kind == "failed":
            raise RuntimeError(value)
        return float(seconds), value

    def close(self) -> None:
        self._pipe.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()


def _serve(pipe: Any, build: Callable[..., Callable[..., Any]], args: tuple[Any, ...]) -> None:
    try:
        run = build(*args)
        pipe.send(("ready", 0.0, None))
        while True:
            words = pipe.recv()
            began = time.perf_counter()
            value = run(*words)
            pipe.send(("done", time.perf_counter() - began, value))
    except EOFError:
        pass
    except Exception:  # noqa: BLE001 - told to the parent
        pipe.send(("failed", 0.0, traceback.format_exc()))


def ratio(times: Mapping[str, list[float]], numerator: str, denominator: str) -> float:
    """Median over the rounds of time(numerator) / time(denominator): above 1, the denominator is faster."""
    return statistics.median(a / b for a, b in zip(times[numerator], times[denominator]))


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

"""How the benchmarks measure: variants take turns in one process, and medians and ratios of the same round count."""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import statistics
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import date
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def interleaved(variants: Mapping[str, Callable[[], Any]], rounds: int, warm_up: int = 1) -> dict[str, list[float]]:
    """Seconds of each variant in each round, A B C A B C …; the order turns every round, so that none is always first."""
    names = list(variants)
    for _ in range(warm_up):
        for name in names:
            variants[name]()
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            began = time.perf_counter()
            inside = variants[name]()
            seconds = time.perf_counter() - began
            times[name].append(inside if isinstance(variants[name], Worker) else seconds)
    return times


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
        "python": platform.python_version(), "date": date.today().isoformat(),  # noqa: DTZ011 - the user's own day
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

"""python benchmarks/metrics.py [--rounds 15] [--steps 600] [--out FILE] [--check]

What the metrics cost: the calls of one step (its clock's among them), a scrape, and whole runs with and without metrics in
turns. While a run with metrics trains, it is scraped once a second, 15 times as often as usual, and its textfile is written
as often; a run without has neither server nor textfile, and its step clock and metrics are told nothing.

Exits with 1 where a bound does not hold: 0.5 % of a 10 ms step, 100 series, 5 ms a scrape. The runs have none: they show
whether the sum of it all can be told from the machine's noise.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from prometheus_client.exposition import choose_encoder

from benchmarks import figures
from lockstep.training import config, contract
from lockstep.training.contract import user_errors
from lockstep.training.observe.clock import StepClock
from lockstep.training.observe.exporter import Exporter
from lockstep.training.observe.metrics import Metrics
from lockstep.training.parallel.world import World

STEP_SECONDS = 0.010
"""The step that the cost is compared with."""
SHARE, SERIES, SCRAPE_SECONDS = 0.005, 100, 0.005
"""The bounds."""
WITHOUT = "run-without-metrics"
"""First word of this program when it is an arm of its own comparison."""
OPENMETRICS = "application/openmetrics-text;version=1.0.0"


def calls(repeats: int) -> dict[str, Any]:
    """Seconds of what one step adds, of rendering all series, and of a scrape over HTTP; medians."""
    with tempfile.TemporaryDirectory() as folder:
        exporter = Exporter(config.Metrics(port=0), World(), Path(folder), {})
        try:
            return _calls(exporter.metrics, Path(folder), repeats)
        finally:
            exporter.close(0)


def _calls(metrics: Metrics, run_dir: Path, repeats: int) -> dict[str, Any]:
    clock = StepClock()
    metrics.describe("smoke", "flat", 2, contract.VERSION, attempt=1, step=0, planned=1, preemptions=0)
    metrics.reading(1.0, 1.0)
    metrics.checkpoint_written(0.1)
    metrics.accuracy(0.5)
    step, bare, render, scrape = [], [], [], []
    for number in range(repeats):
        began = time.perf_counter()
        metrics.alive()
        clock.begin()
        clock.data_ready()
        clock.grad_ready()
        clock.synced()
        clock.end()
        metrics.step(clock.measured(), number, 0.1, 64, number)
        step.append(time.perf_counter() - began)
        began = time.perf_counter()
        bare.append(time.perf_counter() - began)
        if number % 100 == 0:
            began = time.perf_counter()
            choose_encoder(OPENMETRICS)[0](metrics.registry)
            render.append(time.perf_counter() - began)
            scrape.append(_scraped(run_dir))
    series = [line for line in metrics.text().decode().splitlines() if not line.startswith("#")]
    cost = statistics.median(step) - statistics.median(bare)
    return {
        "step_seconds": cost, "share_of_10_ms": cost / STEP_SECONDS, "render_seconds": statistics.median(render),
        "scrape_seconds": statistics.median(scrape), "series": len(series),
    }  # fmt: skip


def exceeded(cost: dict[str, Any]) -> list[str]:
    """A sentence for each bound that does not hold."""
    found = []
    if cost["share_of_10_ms"] > SHARE:
        found.append(f"a step's calls take {cost['share_of_10_ms']:.2%} of a 10 ms step, the bound is {SHARE:.1%}")
    if cost["series"] > SERIES:
        found.append(f"a rank has {cost['series']} series, the bound is {SERIES}")
    if cost["scrape_seconds"] > SCRAPE_SECONDS:
        found.append(
            f"a scrape takes {cost['scrape_seconds'] * 1e3:.1f} ms, the bound is {SCRAPE_SECONDS * 1e3:.0f} ms"
        )
    return found


def _scraped(run_dir: Path) -> float:
    """Seconds of one scrape of rank 0."""
    where = json.loads(contract.endpoint_file(run_dir, 0).read_text())
    request = urllib.request.Request(f"http://127.0.0.1:{where['port']}/metrics", headers={"Accept": OPENMETRICS})
    began = time.perf_counter()
    with urllib.request.urlopen(request, timeout=10) as answer:
        answer.read()
    return time.perf_counter() - began


def _scrape(run_dir: Path, ended: threading.Event, seconds: list[float]) -> None:
    while not ended.wait(1.0):
        with contextlib.suppress(OSError, ValueError):
            seconds.append(_scraped(run_dir))


def _run_without(words: list[str]) -> None:
    """`python -m lockstep.training WORDS` whose step clock only counts the seconds of training, and whose metrics hear nothing."""

    def nothing(*_: Any) -> None:
        pass

    for owner, names in (
        (StepClock, ("data_ready", "grad_ready", "synced", "waited")),
        (Metrics, ("alive", "step", "reading")),
    ):
        for name in names:
            setattr(owner, name, nothing)
    StepClock.measured = lambda self: []  # type: ignore[method-assign]  # noqa: ARG005
    sys.argv[1:] = words
    runpy.run_module("lockstep.training", run_name="__main__", alter_sys=True)


def train(folder: Path, name: str, steps: int, enabled: bool, scrapes: list[float]) -> float:
    """Seconds a step of one run, from its first to its last event; evaluation happens once, at the end of both."""
    run_dir = folder / name
    arm = ["-m", "lockstep.training"] if enabled else [__file__, WITHOUT]
    words = [
        sys.executable, *arm, "run", "smoke", "--run-dir", str(run_dir), "--set", f"data.root={folder}",
        "data.source=synthetic", f"data.options={{n: {steps * 16}, n_test: 16, size: 32}}", "global_batch_size=16",
        "model_options={width: 0.0625}", "epochs=1", "schedule=[]", "threads=1", "device=cpu", "metrics.port=0",
        "metrics.textfile_seconds=1", f"metrics.enabled={str(enabled).lower()}",
    ]  # fmt: skip
    ended = threading.Event()
    scraper = threading.Thread(target=_scrape, args=(run_dir, ended, scrapes))
    if enabled:
        scraper.start()
    try:
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": os.getcwd()})
    finally:
        ended.set()
        if enabled:
            scraper.join()
    events = [json.loads(line) for line in (run_dir / contract.EVENTS_FILE).read_text().splitlines()]
    at = {event["event"]: event["time"] for event in events}
    return (at["epoch"] - at["prepared"]) / steps


def main() -> int:
    if sys.argv[1:2] == [WITHOUT]:
        _run_without(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    figures.options(parser, rounds=15)
    parser.add_argument("--steps", type=int, default=600)
    args = parser.parse_args()
    measured = figures.Run("metrics", args)
    cost = calls(20_000)
    times: dict[str, list[float]] = {"with": [], "without": []}
    scrapes: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        train(Path(folder), "warm-up", args.steps, True, [])
        for number in range(args.rounds):
            for name in ("with", "without") if number % 2 else ("without", "with"):
                times[name].append(train(Path(folder), f"{name}-{number}", args.steps, name == "with", scrapes))
    print(f"a step's calls: {cost['step_seconds'] * 1e6:.1f} µs, {cost['share_of_10_ms']:.3%} of a 10 ms step")
    print(f"a scrape: {cost['scrape_seconds'] * 1e3:.2f} ms over HTTP, of which {cost['render_seconds'] * 1e3:.2f} ms to render "
          f"{cost['series']} series")  # fmt: skip
    rows = {
        f"step, {name} metrics": figures.figure([1e3 * value for value in values], "ms")
        for name, values in times.items()
    }
    rows["step, with / without metrics"] = figures.ratios(times, "with", "without")
    if scrapes:
        rows["a scrape while training"] = figures.figure([1e3 * value for value in scrapes], "ms")
    broken = exceeded(cost)
    code = measured.finish(rows, {"calls": cost, "exceeded": broken, "runs": times, "scrapes": scrapes})
    for sentence in broken:
        print(f"error: {sentence}", file=sys.stderr)
    return 1 if broken else code


if __name__ == "__main__":
    with user_errors():
        sys.exit(main())

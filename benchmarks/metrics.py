"""python benchmarks/metrics.py [--repeats 20000] [--out FILE]

What the metrics cost: the calls of one step (its clock's among them), and a scrape; medians.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.measure import machine, write
from lockstep.training import config, contract
from lockstep.training.observe.metrics import Exporter, Metrics
from lockstep.training.observe.steps import StepClock
from lockstep.training.parallel.world import World


def calls(repeats: int) -> dict[str, Any]:
    """Seconds of what one step adds, and of a scrape over HTTP; medians."""
    with tempfile.TemporaryDirectory() as folder:
        exporter = Exporter(config.Metrics(), World(), Path(folder), {"LOCKSTEP_METRICS_PORT": "0"})
        try:
            assert exporter._server is not None
            return _calls(exporter.metrics, exporter._server.server_port, repeats)
        finally:
            exporter.close()


def _calls(metrics: Metrics, port: int, repeats: int) -> dict[str, Any]:
    clock = StepClock(World().device)
    metrics.set("info", 1, "smoke", "flat", "2", contract.VERSION)
    for name in ("attempt", "step", "steps_planned", "loss", "grad_norm"):
        metrics.set(name, 0.5)
    metrics.checkpoint_written(0.1)
    step, scrape = [], []
    for number in range(repeats):
        began = time.perf_counter()
        metrics.alive()
        clock.begin()
        clock.data_ready()
        clock.grad_ready()
        clock.synced()
        clock.end()
        metrics.step_done(number, clock.measured(), 64, number)
        step.append(time.perf_counter() - began)
        if number % 100 == 0:
            scrape.append(_scraped(port))
    series = [line for line in metrics.text().decode().splitlines() if not line.startswith("#")]
    cost = statistics.median(step)
    return {
        "step_seconds": cost, "share_of_10_ms": cost / 0.010, "scrape_seconds": statistics.median(scrape),
        "series": len(series),
    }  # fmt: skip


def _scraped(port: int) -> float:
    """Seconds of one scrape of rank 0."""
    openmetrics = {"Accept": "application/openmetrics-text;version=1.0.0"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers=openmetrics)
    began = time.perf_counter()
    with urllib.request.urlopen(request, timeout=10) as answer:
        answer.read()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20_000, help="steps; one in a hundred is followed by a scrape")
    parser.add_argument("--out", type=Path, help="the file of the result (default: in benchmarks/results)")
    args = parser.parse_args()
    about, cost = machine(), calls(args.repeats)
    print(f"a step's calls: {cost['step_seconds'] * 1e6:.1f} µs, {cost['share_of_10_ms']:.3%} of a 10 ms step")
    print(f"a scrape: {cost['scrape_seconds'] * 1e3:.2f} ms over HTTP for {cost['series']} series")
    print(f"written to {write('metrics', {'machine': about, 'calls': cost}, args.out)}")


if __name__ == "__main__":
    main()

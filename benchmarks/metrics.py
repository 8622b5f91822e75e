"""python benchmarks/metrics.py [--repeats 20000] [--out FILE]

What the metrics cost: the calls of one step (its clock's among them), and a scrape; medians. Exits with 1 where a bound does
not hold: 0.5 % of a 10 ms step, 100 series, 5 ms a scrape.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from prometheus_client.exposition import choose_encoder

from benchmarks.measure import machine, write
from lockstep.training import config, contract
from lockstep.training.observe.clock import StepClock
from lockstep.training.observe.exporter import Exporter
from lockstep.training.observe.metrics import Metrics
from lockstep.training.parallel.world import World

STEP_SECONDS = 0.010
"""The step that the cost is compared with."""
SHARE, SERIES, SCRAPE_SECONDS = 0.005, 100, 0.005
"""The bounds."""
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
    clock = StepClock(World().device)
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
    share, series, scrape = cost["share_of_10_ms"], cost["series"], cost["scrape_seconds"]
    found = {
        f"a step's calls take {share:.2%} of a 10 ms step, the bound is {SHARE:.1%}": share > SHARE,
        f"a rank has {series} series, the bound is {SERIES}": series > SERIES,
        f"a scrape takes {scrape * 1e3:.1f} ms, the bound is {SCRAPE_SECONDS * 1e3:.0f} ms": scrape > SCRAPE_SECONDS,
    }
    return [sentence for sentence, holds in found.items() if holds]


def _scraped(run_dir: Path) -> float:
    """Seconds of one scrape of rank 0."""
    where = json.loads(contract.endpoint_file(run_dir, 0).read_text())
    request = urllib.request.Request(f"http://127.0.0.1:{where['port']}/metrics", headers={"Accept": OPENMETRICS})
    began = time.perf_counter()
    with urllib.request.urlopen(request, timeout=10) as answer:
        answer.read()
    return time.perf_counter() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20_000, help="steps; one in a hundred is followed by a scrape")
    parser.add_argument("--out", type=Path, help="the file of the result (default: in benchmarks/results)")
    args = parser.parse_args()
    about, cost = machine(), calls(args.repeats)
    print(f"a step's calls: {cost['step_seconds'] * 1e6:.1f} µs, {cost['share_of_10_ms']:.3%} of a 10 ms step")
    print(f"a scrape: {cost['scrape_seconds'] * 1e3:.2f} ms over HTTP, of which {cost['render_seconds'] * 1e3:.2f} ms to render "
          f"{cost['series']} series")  # fmt: skip
    broken = exceeded(cost)
    print(f"written to {write('metrics', {'machine': about, 'calls': cost, 'exceeded': broken}, args.out)}")
    for sentence in broken:
        print(f"error: {sentence}", file=sys.stderr)
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())

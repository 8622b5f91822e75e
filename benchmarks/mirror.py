"""python benchmarks/mirror.py URL [--rounds 60] [--steps 1500] [--out FILE]

What it costs rank 0 that the run directory is copied into a bucket: the CPU time of one sending, and how long it takes in its thread, after
so many further steps of two ranks. URL: s3://…, gs://…, az://…; an empty prefix.
"""

from __future__ import annotations

import argparse
import json
import math
import secrets
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.measure import Run, figure, options
from lockstep.training.bucket import Bucket, Head, explained
from lockstep.training.config import Metrics
from lockstep.training.contract import user_errors
from lockstep.training.observe.exporter import Exporter
from lockstep.training.observe.mirror import SECONDS, Mirror
from lockstep.training.parallel.world import World

STEP = {
    "event": "step", "time": 1795738835.567, "attempt": 1, "lr": 0.05, "train_loss": 2.2947907521000253, "grad_norm": 0.12745380614009705,
    "data_wait": 0.000146, "grad_ready": 0.002278, "sync_wait": 0.00222, "step_duration": 0.005186,
}  # fmt: skip
"""As a run writes it; each has another number."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", metavar="URL")
    parser.add_argument("--steps", type=int, default=1500, help="of a round (default: %(default)s)")
    options(parser, 60)
    args = parser.parse_args()
    run, cpu, took = Run("mirror", args), list[float](), list[float]()
    with tempfile.TemporaryDirectory() as folder, user_errors():
        run_dir, head = Path(folder), Head(run=secrets.token_hex(16), holder=secrets.token_hex(16), commit="0" * 32)
        bucket = Bucket(args.url)
        with explained("URL cannot be used"):
            bucket.put(head.snapshots[0], b"")  # else what fails later is a warning
        mirror = Mirror(bucket, lambda: head, run_dir, lambda: math.inf)
        exporter = Exporter(Metrics(port=0), World(), run_dir, {})
        (run_dir / "metrics").mkdir(exist_ok=True)
        for number in range(args.rounds + 1):
            steps = range(number * args.steps, (number + 1) * args.steps)
            with (run_dir / "events.jsonl").open("a") as file:
                file.writelines(json.dumps({**STEP, "step": step}) + "\n" for step in steps)
            (run_dir / "status.json").write_text(json.dumps({"step": steps.stop}))
            for rank in range(2):
                (run_dir / f"metrics/rank-{rank:05d}.prom").write_bytes(exporter.metrics.text() + b"# %d\n" % number)
            began, began_cpu = time.perf_counter(), time.process_time()
            mirror.send()
            took.append(time.perf_counter() - began)
            cpu.append(time.process_time() - began_cpu)
        exporter.close(0)
    rows = {
        "CPU time of a sending": figure([seconds * 1e3 for seconds in cpu[1:]], "ms"),
        f"share of the {SECONDS:g} s until the next one": figure([seconds / SECONDS for seconds in cpu[1:]]),
        "a sending": figure([seconds * 1e3 for seconds in took[1:]], "ms"),
    }
    return run.finish(rows, {})


if __name__ == "__main__":
    sys.exit(main())

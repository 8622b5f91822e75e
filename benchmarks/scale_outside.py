"""What the commands outside a job cost: python -m benchmarks.scale_outside [--ranks 1024] [--events 100000] [--jobs 1000]

CPU-seconds and peak memory of each command, from the kernel's accounts of its process (docs/explanation/scale.md).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from benchmarks import large_run

LOCKSTEP = [sys.executable, "-c", "from lockstep.jobs.cli.main import main; main()"]

_MEASURED = """
import resource, subprocess, sys
code = subprocess.run(sys.argv[1:], stderr=subprocess.STDOUT).returncode
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(code, used.ru_utime + used.ru_stime, used.ru_maxrss, file=sys.stderr)
"""


class Cost(NamedTuple):
    code: int
    cpu: float
    """Seconds, user and system."""
    rss: int
    """Bytes of memory at the most."""
    lines: int
    """That it printed."""


def cost(words: list[str], **env: str) -> Cost:
    """Runs a command to its end. Raises nothing: the exit code says how it went."""
    with tempfile.TemporaryFile() as output:
        # A process begins with the peak memory of the one that started it: a small one stands between.
        done = subprocess.run(
            [sys.executable, "-c", _MEASURED, *words], stdout=output, stderr=subprocess.PIPE, text=True,
            env={**os.environ, **env}, check=True,
        )  # fmt: skip
        output.seek(0)
        printed = output.read()
    code, cpu, rss = done.stderr.splitlines()[-1].split()
    return Cost(int(code), float(cpu), int(rss) << 10, printed.count(b"\n"))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--events", type=int, default=100_000)
    parser.add_argument("--jobs", type=int, default=1000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run = large_run.run_directory(folder / "run", args.ranks, args.events, slow=args.ranks // 2)
        small = large_run.run_directory(folder / "small", 2, 100)
        large_run.local_jobs(folder / "home", args.jobs)
        large_run.local_jobs(folder / "empty", 1)
        report = [sys.executable, "-m", "lockstep.training", "report"]
        rows = {
            "top --once, 2 ranks": cost([*LOCKSTEP, "top", str(small), "--once", "--every", "0.2"]),
            f"top --once, {args.ranks} ranks": cost([*LOCKSTEP, "top", str(run), "--once", "--every", "0.2"]),
            "report, 2 ranks, 100 readings": cost([*report, str(small), "--out", str(folder / "small.html")]),
            f"report, {args.ranks} ranks, {args.events} readings": cost(
                [*report, str(run), "--out", str(folder / "run.html")]
            ),
            "list local, 1 job": cost([*LOCKSTEP, "list", "local"], LOCKSTEP_HOME=str(folder / "empty")),
            f"list local, {args.jobs} jobs": cost([*LOCKSTEP, "list", "local"], LOCKSTEP_HOME=str(folder / "home")),
            f"status local, of {args.jobs} jobs": cost(
                [*LOCKSTEP, "status", "local", "job-7"], LOCKSTEP_HOME=str(folder / "home")
            ),
        }
        for what, found in rows.items():
            print(
                f"{what:40} exit code {found.code}, {found.cpu:6.2f} CPU-s, {found.rss / 2**20:6.0f} MiB, {found.lines} lines"
            )
        print(f"{'run.html':40} {(folder / 'run.html').stat().st_size / 2**20:.2f} MiB")


if __name__ == "__main__":
    main()

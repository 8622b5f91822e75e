"""Drives jobs from Python: submit, wait, print the accuracy, submit again after a preemption, run a sweep.

    python examples/driver.py job.yaml                                  # on SLURM; --backend local on this machine
    python examples/driver.py job.yaml --sweep lr=0.001,0.002 --profile gpu-cluster

On SLURM it runs on a machine of the cluster.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Literal

from lockstep.jobs import Job, JobSpec, submit, sweep
from lockstep.jobs.spec.model import load_profile
from lockstep.jobs.status import Status, columns, say
from lockstep.training.contract import UserError


def follow(job: Job, spec: JobSpec, backend: str, tries: int, poll: float) -> tuple[Job, Status]:
    """The job's final status. A job that was preempted for good is submitted again, at most `tries` times; it resumes."""
    shown = ""
    while True:
        found = job.wait(poll)  # a controller that is away for a while does not end it
        line = f"{job.name}: {found.state}{f' – {found.reason}' if found.reason else ''}"
        if line != shown:
            say(line)
            shown = line
        if found.state == "preempted" and tries > 0:
            tries -= 1
            job = submit(spec, backend, "replace")
        elif found.final or found.state == "unschedulable":
            return job, found


def explain(job: Job, found: Status) -> None:
    """The last lines of the rank that failed first."""
    rank = next((int(word) for before, word in zip(found.reason.split(), found.reason.split()[1:]) if before == "rank"
                 and word.isdigit()), 0)  # fmt: skip
    for line in list(job.logs(rank))[-20:]:
        say(f"  [rank {rank}] {line}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("file", type=Path, help="a job file")
    parser.add_argument("--backend", default="slurm")
    parser.add_argument("--profile", help="a cluster profile")
    parser.add_argument("--sweep", action="append", default=[], metavar="NAME=A,B,…")
    parser.add_argument("--replace", action="store_true", help="submit a finished job again; its run directory stays")
    parser.add_argument("--tries", type=int, default=3, help="how often to submit again after a preemption")
    parser.add_argument("--poll", type=float, default=5.0, help="seconds between two looks")
    args = parser.parse_args()
    spec = JobSpec.load(args.file, below=load_profile(args.profile) if args.profile else None)
    specs = sweep.expand(spec, sweep.parse(args.sweep)) if args.sweep else [spec]
    mode: Literal["attach", "replace"] = "replace" if args.replace else "attach"
    jobs = sweep.submit(spec, specs, args.backend, mode) if args.sweep else [submit(spec, args.backend, mode)]
    rows, code = [], 0
    for one, job in zip(specs, jobs):
        last, found = follow(job, one, args.backend, args.tries, args.poll)
        accuracy = last.summary().get("accuracy") if found.state == "succeeded" else None
        rows.append((one.name, found.state, "" if accuracy is None else f"{accuracy:.4f}"))
        if found.state != "succeeded":
            code = code or found.code or 1
            explain(last, found)
    for line in columns(("NAME", "STATE", "accuracy"), rows):
        say(line)
    return code


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)

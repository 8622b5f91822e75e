"""python benchmarks/failure.py [--on local] [--job FILE] [--kind rank] [--rounds 7] [--node-down CMD --node-up CMD] [--out FILE]

What a failure costs, in parts: from the SIGKILL of a rank, of a launcher or of a node to the first step after it, and to the
step where it struck. One job, killed once a round; it is started again by its launcher, by its cluster, or, where
neither does that, by submitting it at once.

The parts, each until the last rank has done it: *noticed* (to the first line of the new processes: the others leave, the
launcher or the cluster starts the ranks, the nodes meet), *imports*, *ranks meet*, *restored* (the state, up to the first batch),
*first step*, *replayed* (the steps since the last checkpoint).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import figures
from lockstep.jobs import Job, JobSpec, submit
from lockstep.training.contract import UserError, user_errors

LOOP = Path(__file__).with_name("failure_loop.py")
EVERY = 20
"""Steps between two checkpoints."""
APART = 31
"""Steps between two failures: they strike 11, 2, 13, 4, … steps after a checkpoint."""
SECONDS = 0.05
"""Of a step."""
PATIENCE = 600.0
"""Seconds that a job may need to train again."""
PARTS = ("noticed", "imports", "ranks meet", "restored", "first step", "replayed")


class Mark(NamedTuple):
    name: str
    rank: int
    pid: int
    at: float
    """Seconds since 1970, of the rank's own clock: nodes of another machine must agree on the time."""
    step: int


def marks(lines: list[str]) -> set[Mark]:
    """Those in a job's log, of whichever rank."""
    found = set()
    for line in lines:
        _, word, rest = line.partition("MARK ")
        if word:
            with contextlib.suppress(ValueError, TypeError):  # cut off by the kill
                found.add(Mark(*json.loads(rest)))
    return found


def parts(killed: Mark, seen: set[Mark]) -> dict[str, float] | None:
    """The seconds of each of `PARTS`, and the steps that were lost. None: the step of the failure is not reached again."""
    after = [mark for mark in seen if mark.at > killed.at]
    born = {mark.pid for mark in after if mark.name == "begun"}
    steps = sorted((mark.at, mark.step) for mark in after if mark.name == "step" and mark.pid in born)
    reached = next((at for at, step in steps if step >= killed.step), None)
    if reached is None:
        return None
    first, number = steps[0]
    times = [killed.at]
    for name in ("begun", "imported", "joined", "restored"):
        times.append(max(mark.at for mark in after if mark.name == name and mark.at <= first))
    times += [first, reached]
    found = {name: end - begin for name, begin, end in zip(PARTS, times, times[1:])}
    return {**found, "steps lost": killed.step - (number - 1)}


def launched(
    ranks: int, steps: int, every: str, seconds: float, kind: str, fates: Sequence[int] = (), megabytes: int = 0
) -> set[Mark]:
    """The marks of a run of `failure_loop.py` under this machine's launcher, to its last step. Raises `UserError` where it fails."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(LOOP, folder)
        launch = ["-m", "lockstep.training", "launch", "--ranks", str(ranks)]
        launch += ["--max-restarts", str(2 * len(fates)), "--"]
        words = [LOOP.name, str(steps), every, str(seconds), kind, *map(str, fates)]
        variables = {"PYTHONPATH": str(LOOP.parents[1]), "FAILURE_MEGABYTES": str(megabytes)}
        job = subprocess.Popen(
            [sys.executable, *launch, sys.executable, *words], cwd=folder, env={**os.environ, **variables},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            said, problem = job.communicate(timeout=3600)
        except subprocess.TimeoutExpired:
            raise UserError("the job has not ended within an hour") from None
        finally:
            job.kill()  # its ranks end with it
            job.wait()
    if job.returncode:
        raise UserError(f"the job ended with {job.returncode}: {said[-1000:]}{problem[-2000:]}")
    return marks(said.splitlines())


class Watched:
    """A job, and all marks that it has printed; a log may begin anew when the job does."""

    def __init__(self, spec: JobSpec, backend: str) -> None:
        self.spec, self.backend = spec, backend
        self.job: Job = submit(spec, backend, "replace")
        self.seen: set[Mark] = set()

    def look(self) -> None:
        """Starts the job again where it has ended before its time."""
        with contextlib.suppress(UserError):  # it has no log yet
            self.seen |= marks(list(self.job.logs()))
        status = self.job.status()
        if status.final and status.state != "succeeded":
            self.job = submit(self.spec, self.backend, "replace")

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        """The first value of `condition` that is not None. Raises `UserError` after `PATIENCE`."""
        deadline = time.monotonic() + PATIENCE
        while (found := condition()) is None:
            if time.monotonic() > deadline:
                raise UserError(f"{what} did not come within {PATIENCE:g} s: {self.job.status().reason}")
            self.look()
            time.sleep(0.2)
        return found

    def killed(self, step: int) -> Mark | None:
        return next((mark for mark in self.seen if mark.name == "killed" and mark.step == step), None)

    def trained(self, step: int) -> Mark | None:
        return next((mark for mark in self.seen if mark.name == "step" and mark.step >= step), None)


def fail(watched: Watched, step: int, down: str, up: str) -> dict[str, float]:
    """One failure. A node's comes from outside, and its commands count as *noticed*; the others are the training's own."""
    if not down:
        killed = watched.until(lambda: watched.killed(step), f"the failure at step {step}")
        return watched.until(lambda: parts(killed, watched.seen), "the steps after it")
    watched.until(lambda: watched.trained(step), f"step {step}")
    began = time.time()
    subprocess.run(down.replace("{name}", watched.spec.name), shell=True, check=True, stdout=subprocess.DEVNULL)
    watched.look()
    reached = max(mark.step for mark in watched.seen if mark.name == "step" and mark.at < began)
    if up:
        subprocess.run(up, shell=True, check=True, stdout=subprocess.DEVNULL)
    return watched.until(lambda: parts(Mark("killed", 0, 0, began, reached), watched.seen), "the steps after it")


def spec_of(args: argparse.Namespace, code: str) -> JobSpec:
    """The job: `--job`, or two ranks of one node, with the training of this benchmark."""
    here = {"ranks_per_node": 2, "run_dir": f"{code}/run"}
    given = JobSpec.load(args.job).plain() if args.job else here
    fates = [str(APART * (number + 1)) for number in range(args.rounds)]
    steps = str(APART * (args.rounds + 2) + (2000 if args.node_down else 0))
    command = ["python", LOOP.name, steps, str(EVERY), str(SECONDS), args.kind, *fates]
    known = {name: value for name, value in given.items() if name not in ("recipe", "overrides", "shards")}
    name = f"failure-{secrets.token_hex(3)}"  # a run of its own
    return JobSpec.of({**known, "name": name, "command": command, "code": code, "max_restarts": 5 * args.rounds})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    figures.options(parser, rounds=7)
    parser.add_argument("--on", default="local", help="the backend (default: %(default)s)")
    parser.add_argument("--job", help="a job file whose nodes, image and limits are used")
    parser.add_argument("--kind", default="rank", choices=("rank", "launcher", "node"))
    parser.add_argument(
        "--node-down", default="", help="the command that ends a node, with --kind node; {name}: the job's name"
    )
    parser.add_argument("--node-up", default="", help="the command that brings it back")
    args = parser.parse_args()
    if (args.kind == "node") != bool(args.node_down):
        raise UserError("--kind node needs --node-down, and no other kind takes it")
    if args.kind == "launcher" and args.on in ("compose", "k8s"):
        raise UserError(
            f"--on {args.on}: in a container the launcher is process 1, which no KILL from inside reaches: take --kind node"
        )
    measured = figures.Run(f"failure-{args.on}-{args.kind}", args)
    rounds: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(LOOP, folder)
        watched = Watched(spec_of(args, folder), args.on)
        try:
            for number in range(args.rounds):
                rounds.append(fail(watched, APART * (number + 1), args.node_down, args.node_up))
                print(" ".join(f"{name} {value:.2f}" for name, value in rounds[-1].items()), flush=True)
        finally:
            watched.job.cancel()
    rows = {name: figures.figure([found[name] for found in rounds], "s") for name in PARTS}
    whole = [sum(found[name] for name in PARTS[:-1]) for found in rounds]
    rows["to the first step"] = figures.figure(whole, "s")
    rows["steps lost"] = figures.figure([found["steps lost"] for found in rounds])
    return measured.finish(rows, {"every_steps": EVERY, "step_seconds": SECONDS, "rounds": rounds})


if __name__ == "__main__":
    with user_errors():
        sys.exit(main())

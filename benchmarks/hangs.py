"""python -m benchmarks.hangs [--rounds 20] [--launcher lockstep|torchrun|both] [--quiet-jobs 8 --quiet-minutes 25]

Is the rank that hangs named, and after how many seconds? Each round starts a job of four ranks (`tests/faults/hanging.py`), and lets one of
them, drawn by the seed, hang after a step that is drawn, too. The kinds take turns: a lock, a data loader, SIGSTOP, a full pipe, an
endless loop in C that holds the interpreter's lock, a disk (an ext4 on a loop device that is stopped by fsfreeze; needs root), a
collective that the others do not make. (One of another shape does not hang: gloo ends the ranks.)

*right*: it was named, alone, with what it does. Of collectives that differ there is no one to blame: the rank has to be named at its own
line.
*seconds*: without a step when it was named.

The quiet jobs train the smoke recipe at the same time, with evaluations, saves and data loaders: each name there is a false alarm.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.measure import Run, figure, options
from lockstep.training import files
from lockstep.training.contract import user_errors

ROOT = Path(__file__).parents[1]
RANKS = 4
BOUND = 120.0
"""Seconds for a job to be named, from its start."""
DOES = {
    "lock": "waits", "loader": "waits for its data loader", "stop": "stands stopped", "pipe": "waits", "loop": "computes",
    "disk": "waits for a disk or a device", "order": "waits for others",
}  # fmt: skip
"""What is said of the rank that hangs so."""
LAUNCHERS = {
    "lockstep": ["lockstep.training", "launch", "--ranks", str(RANKS), "--grace", "5", "--", sys.executable],
    "torchrun": ["torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)],
}


@contextlib.contextmanager
def disk(folder: Path) -> Iterator[Path]:
    """A separate file system, mounted there."""
    image, place = folder / "disk.img", folder / "disk"
    image.write_bytes(b"")
    os.truncate(image, 16 << 20)
    place.mkdir()
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    subprocess.run(["mount", "-o", "loop", image, place], check=True)
    try:
        yield place
    finally:
        subprocess.run(["fsfreeze", "--unfreeze", place], capture_output=True, check=False)
        subprocess.run(["umount", "--lazy", place], check=True)


@contextlib.contextmanager
def started(words: list[str], output: Path, **more: str) -> Iterator[subprocess.Popen[bytes]]:
    """Ended with all that it has started."""
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "CUDA_VISIBLE_DEVICES": "",
        "LOCKSTEP_METRICS_PORT": "0",
        "OMP_NUM_THREADS": "1",
        **more,
    }
    with (
        output.open("wb") as file,
        subprocess.Popen(
            [sys.executable, "-m", *words], env=env, stdout=file, stderr=file, start_new_session=True
        ) as process,
    ):
        try:
            yield process
        finally:
            for number, seconds in ((signal.SIGTERM, 20), (signal.SIGKILL, 20)):
                with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                    os.killpg(process.pid, number)
                    process.wait(seconds)


def events(run_dir: Path) -> list[dict[str, Any]]:
    """Those that say that a rank hangs."""
    with contextlib.suppress(OSError):
        lines = (run_dir / "events.jsonl").read_text().splitlines()
        return [event for line in lines if (event := json.loads(line))["event"] == "hang"]
    return []


def one(launcher: str, kind: str, rank: int, step: int, folder: Path) -> dict[str, Any]:
    """A job with a rank that hangs: what was said, whether that is right, and when."""
    run_dir, place = folder / "run", contextlib.nullcontext(folder) if kind != "disk" else disk(folder)
    script = [str(ROOT / "tests/faults/hanging.py"), str(run_dir), f"{kind}:{rank}:{step}"]
    with place as there, started([*LAUNCHERS[launcher], *script], folder / "output", DISK=str(there)) as process:
        deadline = time.monotonic() + BOUND
        while not (found := events(run_dir)) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.2)
        told = [json.loads(line) for line in (run_dir / "hang.jsonl").read_text().splitlines()] if found else []
        if kind == "disk":
            subprocess.run(["fsfreeze", "--unfreeze", there], capture_output=True, check=False)
    row: dict[str, Any] = {
        "launcher": launcher,
        "kind": kind,
        "rank": rank,
        "step": step,
        "right": False,
        "said": "",
        "seconds": None,
    }
    if not found:
        return {**row, "said": (folder / "output").read_text(errors="replace")[-500:]}
    standing = {one["rank"]: one for line in told for one in line["ranks"]}
    mine, others = standing.get(rank), [one["where"] for number, one in standing.items() if number != rank]
    differ = DOES[kind] == "waits for others"
    alone = mine is not None and (mine["where"] not in others if differ else found[0]["ranks"] == [rank])
    right = mine is not None and alone and mine["what"] == DOES[kind]
    return {**row, "right": right, "said": found[0]["reason"], "seconds": found[0]["seconds"]}


def quiet(jobs: int, minutes: float, folder: Path) -> dict[str, Any]:
    """Concurrent jobs in which no rank hangs: the false alarms."""
    settings = [
        "epochs=1000000",
        "evaluate.every=5",
        "checkpoint.every_steps=200",
        "log.every=1000",
    ]
    with contextlib.ExitStack() as stack:
        began = time.monotonic()
        for number in range(jobs):
            run = ["run", "smoke", "--run-dir", str(folder / f"quiet-{number}"), "--set", *settings]
            launch = ["lockstep.training", "launch", "--ranks", "2", "--time-limit", str(int(60 * minutes)), *run]
            stack.enter_context(started(launch, folder / f"output-{number}"))
        load = []
        while time.monotonic() - began < 60 * minutes:
            time.sleep(5)
            load.append(os.getloadavg()[0])
        said = [files.read_json(folder / f"quiet-{number}/status.json") for number in range(jobs)]
        steps = [one["step"] if isinstance(one, dict) else 0 for one in said]
        alarms = [event for number in range(jobs) for event in events(folder / f"quiet-{number}")]
    return {"jobs": jobs, "minutes": minutes, "load": round(sum(load) / len(load), 1), "steps": steps, "alarms": alarms}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options(parser, 20)
    parser.add_argument("--launcher", choices=(*LAUNCHERS, "both"), default="lockstep")
    parser.add_argument(
        "--kinds", nargs="+", choices=DOES, default=[kind for kind in DOES if kind != "disk" or os.geteuid() == 0]
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quiet-jobs", type=int, default=8)
    parser.add_argument("--quiet-minutes", type=float, default=0, help="of each job; 0: none is started")
    args = parser.parse_args()
    run, drawn, rows, values = Run("hangs", args), random.Random(args.seed), [], {}
    for number in range(args.rounds):
        kind, rank, step = args.kinds[number % len(args.kinds)], drawn.randrange(RANKS), drawn.randrange(5, 60)
        for launcher in LAUNCHERS if args.launcher == "both" else [args.launcher]:
            folder = Path(tempfile.mkdtemp(prefix="hangs-"))
            rows.append(row := one(launcher, kind, rank, step, folder))
            print(
                f"{'right' if row['right'] else 'WRONG'}  {launcher} {kind} rank {rank} step {step}: {row['said']}",
                flush=True,
            )
            shutil.rmtree(folder, ignore_errors=True)
    if args.quiet_minutes:
        with tempfile.TemporaryDirectory(prefix="hangs-", ignore_cleanup_errors=True) as place:
            values["quiet"] = quiet(args.quiet_jobs, args.quiet_minutes, Path(place))
            print(values["quiet"])
    figures = {}
    for launcher in LAUNCHERS:
        if mine := [row for row in rows if row["launcher"] == launcher]:
            print(f"{launcher}: {sum(row['right'] for row in mine)} of {len(mine)} right")
            if seconds := [row["seconds"] for row in mine if row["seconds"] is not None]:
                figures[f"{launcher}, seconds to the name"] = figure(seconds, "s")
    return run.finish(figures, {"rounds": rows, **values})


if __name__ == "__main__":
    with user_errors():
        sys.exit(main())

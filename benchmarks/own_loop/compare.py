"""python -m benchmarks.own_loop.compare: one training loop with a Session, Lightning Fabric and Accelerate, disturbed.

The loop is `examples/plain.py` on two ranks, 75 steps, saved every 10. At its 38th step one rank is killed, or gets a signal, or the
disk of the checkpoints is full from then on; then the same command is started again, with a disk that has room. Told for each: the
launcher's exit code, the seconds from the signal until no process is left, how many steps were taken a second time, and whether the last
weights are those of the undisturbed run to the bit. Needs the extra `peers`, and root for the disk (a small tmpfs).
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import machine, write

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
STEPS, AT, BOUND = 75, 38, 180
SCRIPTS = {
    "Session": ROOT / "examples/own_loop.py",
    "Fabric": HERE / "fabric_loop.py",
    "Accelerate": HERE / "accelerate_loop.py",
}
FATES = ("KILL", "TERM", "HUP", "DISK")
BALLAST = "ballast"


def changed_lines(script: Path) -> int:
    """Lines that were added or replaced, seen from `examples/plain.py`; the docstring does not count."""
    plain, own = ((ROOT / "examples/plain.py").read_text().splitlines()[1:], script.read_text().splitlines()[1:])
    return sum(line.startswith("+ ") and line != "+ " for line in difflib.ndiff(plain, own))


def command(peer: str, folder: Path) -> list[str]:
    words = [str(HERE / "fated.py"), str(SCRIPTS[peer]), str(folder)]
    if peer == "Session":
        lockstep = [str(Path(sys.executable).parent / "lockstep"), "run", "--ranks", "2", "--run-dir", str(folder)]
        return [*lockstep, "--set", "checkpoint.every_steps=10", "--", sys.executable, *words]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *words]


def start(peer: str, folder: Path, fate: str = "") -> dict[str, Any]:
    """One start to its end."""
    told, once, steps = (folder.with_suffix(f".{name}") for name in ("told", "once", "steps"))
    told.unlink(missing_ok=True)
    steps.write_text("0")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]), "OMP_NUM_THREADS": "1",
           "FATE": fate, "FATE_ONCE": str(once), "FATE_TOLD": str(told), "FATE_STEPS": str(steps),
           "FATE_BALLAST": str(folder / BALLAST)}  # fmt: skip
    done = subprocess.run(
        command(peer, folder), env=env, cwd=folder.parent, capture_output=True, text=True, timeout=BOUND
    )
    ended = time.time()
    return {
        "code": done.returncode, "steps": int(steps.read_text()), "said": (done.stdout + done.stderr).splitlines()[-3:],
        "seconds": round(ended - float(once.read_text()), 1) if fate else None,
        "weights": told.read_text() if told.exists() else None,
    }  # fmt: skip


@contextlib.contextmanager
def disk_of(folder: Path, fate: str) -> Iterator[None]:
    """A file system that a fate may fill."""
    if fate != "DISK":
        yield
        return
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def measure(peer: str, folder: Path, fates: Sequence[str]) -> dict[str, Any]:
    calm = folder / f"{peer}-calm"
    calm.mkdir()
    reference = start(peer, calm)
    if reference["code"] != 0 or reference["steps"] != STEPS:
        raise RuntimeError(f"{peer}, undisturbed: {reference}")
    result: dict[str, Any] = {"changed_lines": changed_lines(SCRIPTS[peer])}
    for fate in fates:
        run = folder / f"{peer}-{fate}"
        run.mkdir()
        with disk_of(run, fate):
            first = start(peer, run, f"1:{AT}:{fate}")
            (run / BALLAST).unlink(missing_ok=True)
            again = start(peer, run)
        result[fate] = {
            "exit_code": first["code"], "seconds_to_end": first["seconds"], "exit_code_again": again["code"],
            "steps_first": first["steps"], "steps_repeated": first["steps"] + again["steps"] - STEPS,
            "same_weights": (again["weights"] or first["weights"]) == reference["weights"],
        }  # fmt: skip
        if again["code"]:
            result[fate]["said"] = again["said"]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--loops", nargs="+", choices=list(SCRIPTS), default=list(SCRIPTS))
    parser.add_argument("--fates", nargs="*", choices=FATES, default=FATES)
    parser.add_argument("--out", type=Path, help="the file of the result (default: in benchmarks/results)")
    args = parser.parse_args()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored, by the loops too
    with tempfile.TemporaryDirectory() as folder:
        found = {peer: measure(peer, Path(folder), args.fates) for peer in args.loops}
    result = {"machine": machine(), "steps": STEPS, "signal_at": AT, "saved_every": 10, "loops": found}
    print(json.dumps(result, indent=2))
    print(f"written to {write('own_loop', result, args.out)}")


if __name__ == "__main__":
    main()

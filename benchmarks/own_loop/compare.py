"""python -m benchmarks.own_loop.compare: one training loop with a Session, Lightning Fabric and Accelerate, disturbed.

The loop is `examples/plain.py` on two ranks, 75 steps, saved every 10. One rank is killed, or gets a signal, at its 38th step; then the
same command is started again. Told for each: the launcher's exit code, the seconds from the signal until no process is left, how many steps
were taken a second time, and whether the last weights are those of the undisturbed run to the bit. Needs the extra `peers`.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
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
FATES = ("KILL", "TERM", "HUP")


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
    told, once = folder.with_suffix(".told"), folder.with_suffix(".once")
    told.unlink(missing_ok=True)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]), "OMP_NUM_THREADS": "1",
           "FATE": fate, "FATE_ONCE": str(once), "FATE_TOLD": str(told)}  # fmt: skip
    done = subprocess.run(
        command(peer, folder), env=env, cwd=folder.parent, capture_output=True, text=True, timeout=BOUND
    )
    ended = time.time()
    found = json.loads(told.read_text()) if told.exists() else {}
    seconds = ended - float(once.read_text()) if fate and once.exists() else None
    return {"code": done.returncode, "seconds": seconds, **found, "said": (done.stdout + done.stderr)[-2000:]}


def measure(peer: str, folder: Path, fates: Sequence[str]) -> dict[str, Any]:
    calm = folder / f"{peer}-calm"
    calm.mkdir()
    reference = start(peer, calm)
    if reference["code"] != 0 or reference.get("steps") != STEPS:
        raise RuntimeError(f"{peer}, undisturbed: {reference}")
    result: dict[str, Any] = {"changed_lines": changed_lines(SCRIPTS[peer])}
    for fate in fates:
        run = folder / f"{peer}-{fate}"
        run.mkdir()
        first = start(peer, run, f"1:{AT}:{fate}")
        again = start(peer, run)
        # Negative where the ranks left together a step or two behind the signal.
        repeated = max(0, AT + again["steps"] - STEPS) if "steps" in again else None
        result[fate] = {
            "exit_code": first["code"], "seconds_to_end": round(first["seconds"], 1) if first["seconds"] else None,
            "exit_code_again": again["code"], "steps_repeated": repeated,
            "same_weights": again.get("weights") == reference["weights"],
        }  # fmt: skip
        if again["code"]:
            result[fate]["said"] = again["said"].splitlines()[-3:]
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

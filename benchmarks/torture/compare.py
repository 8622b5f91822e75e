"""python -m benchmarks.torture.compare --python PYTHON: `lockstep torture` of one small training with Lockstep and four other libraries.

Each script is what the library's documentation writes for a training that resumes (in its first line: which page). PYTHON has
lightning, accelerate and transformers. The same faults, in the same order, at steps and saves that the seed draws.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.measure import machine, write

HERE = Path(__file__).parent
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts")
LAUNCH = ("-m", "lockstep.training", "launch", "--ranks", "2", "--max-restarts", "3")
PEERS: dict[str, tuple[str, ...]] = {
    "Session": (*LAUNCH, "--no-prefix", "--", sys.executable, "session.py"),
    "torchrun": (*TORCHRUN, "3", "plain_torch.py"),
    "Lightning": (*TORCHRUN, "3", "lightning_trainer.py"),
    "Accelerate": (*TORCHRUN, "3", "accelerate_loop.py"),
    "Transformers": (*TORCHRUN, "3", "transformers_trainer.py"),
}  # fmt: skip
"""What follows the interpreter."""
VERSIONS = """
import importlib.metadata, importlib.util, json
names = ("torch", "lightning", "accelerate", "transformers")
print(json.dumps({name: importlib.metadata.version(name) for name in names if importlib.util.find_spec(name)}))
"""
FAULTS = ("kill-rank", "kill-launcher", "kill-all", "term", "disk-full")
KEPT = ("fault", "moment", "done", "codes", "weights", "steps_repeated", "steps_lost", "steps_alone", "seconds_lost")
BOUND = 3600


def tortured(peer: str, python: str, seed: int, cases: int) -> dict[str, Any]:
    words = [str(HERE / word) if word.endswith(".py") else word for word in PEERS[peer]]
    command = [sys.executable if peer == "Session" else python, *words, "{run}"]
    options = [
        "--json", "--seed", str(seed), "--cases", str(cases), "--faults", ",".join(FAULTS), "--moments", "step,save",
        "--grace-seconds", "60", "--weights", "{run}/final.pt",
        "--steps-pattern", r"step (\d+) loss",
    ]  # fmt: skip
    torture = [sys.executable, "-m", "lockstep", "torture", *options, "--", *command]
    done = subprocess.run(torture, capture_output=True, text=True, timeout=BOUND, check=False)
    if done.returncode == 2:
        raise RuntimeError(f"{peer}: {done.stderr}")
    told = json.loads(done.stdout)
    return {
        "undisturbed": told["undisturbed"], "seed": seed,
        "cases": [
            {**{name: case[name] for name in KEPT}, "left": len(case["left"]), "held": not case["problems"]} for case in told["cases"]
        ],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--python", default=sys.executable, help="an interpreter that has the other libraries")
    parser.add_argument("--peers", nargs="+", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=len(FAULTS))
    parser.add_argument("--out", type=Path, help="the file of the result (default: in benchmarks/results)")
    args = parser.parse_args()
    versions = json.loads(
        subprocess.run([args.python, "-c", VERSIONS], capture_output=True, text=True, check=True).stdout
    )
    found = {peer: tortured(peer, args.python, args.seed, args.cases) for peer in args.peers}
    for peer, told in found.items():
        print(peer, *(f"{case['fault']} {case['codes']} {case['weights']}" for case in told["cases"]), sep="\n  ")
    print(f"written to {write('torture', {'machine': machine(), 'versions': versions, 'peers': found}, args.out)}")


if __name__ == "__main__":
    main()

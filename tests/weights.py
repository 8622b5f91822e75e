"""python -m tests.weights TABLE [--write] [--few]

Trains smoke, resnet9 and mlp for 8 steps on generated data. Each sync strategy runs on 1, 2 and 3 ranks, once in one go and
once killed and resumed. Compares the sha256 of the final weights with TABLE, a JSON file, or writes it. Moving code
changes no bit: record before the first move, compare after each. The hashes hold for one machine and one build of torch.

`--few` takes twelve of the cases. Exit code 0: all are equal; 1: some differ, and are named.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from tests import product
from tests.processes import clean_env, poll
from tests.warm.gang import running

COMMON = [
    "epochs=2", "uneven=weight", "evaluate.every=2", "checkpoint.every_steps=3", "schedule=[]",
]  # fmt: skip
RECIPES = {
    "smoke": [
        "global_batch_size=96", "data.source=synthetic", "data.options={n: 380, n_test: 20, size: 8, noise: 1.5}", "augment.crop=1",
    ],
    "resnet9": [
        "global_batch_size=12", "data.source=synthetic", "data.options={n: 46, n_test: 5, size: 32, noise: 1.5}", "lr=0.0001",
    ],
    "mlp": ["global_batch_size=12", "data.options={n: 51, features: 64, informative: 32, redundant: 32, classes: 4}", "lr=0.01"],
}  # fmt: skip
OWN = {product.POWERSGD: "sync.options={rank: 1, start: 2}"}
STRATEGIES = [name for name in product.strategies() if name != product.DATA_PARALLEL]
Case = tuple[str, int, str, str]
"""Recipe, ranks, strategy, `plain` or `resumed`."""


def cases(few: bool) -> list[Case]:
    every = list(itertools.product(RECIPES, (1, 2, 3), STRATEGIES, ("plain", "resumed")))
    return every[:: len(every) // 12][:12] if few else every


def _words(case: Case, run_dir: Path, data: Path) -> list[str]:
    recipe, _, strategy, _ = case
    settings = [f"data.root={data}", *COMMON, *RECIPES[recipe], f"sync.name={strategy}"]
    settings += [OWN[strategy]] if strategy in OWN else []
    return ["-m", "lockstep.training", "run", recipe, "--run-dir", str(run_dir), "--set", *settings]


def digest(run_dir: Path) -> str:
    """sha256 over names, shapes and bytes of the weights and their average in the newest checkpoint."""
    shared = product.newest_checkpoint(run_dir)["shared"]
    total = hashlib.sha256()
    for part in ("model", "average"):
        for name, tensor in sorted(shared[part].items()):
            total.update(f"{part}.{name} {list(tensor.shape)} {tensor.dtype}".encode())
            total.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def run(case: Case, data: Path) -> str:
    """Returns the case's hash. Raises `AssertionError` with the ranks' output where a start fails."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        words, env = [_words(case, run_dir, data)] * case[1], clean_env(LOCKSTEP_THREADS="1")
        if case[3] == "resumed":
            with running(words, env) as gang:
                poll(lambda: list((run_dir / "checkpoints").glob("step-*")), 120, f"a checkpoint of {case}")
                gang.send_signal(signal.SIGKILL)
        with running(words, env) as gang:
            result = gang.wait(300)
        assert result.code == 0, f"{case}: {result.output}"
        assert ("Resuming at step" in result.output) == (case[3] == "resumed"), f"{case}: {result.output}"
        return digest(run_dir)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[2] if __doc__ else None)
    parser.add_argument("table", type=Path)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--few", action="store_true")
    args = parser.parse_args()
    expected = {} if args.write else json.loads(args.table.read_text())
    digests: dict[str, str] = {}
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as data, ThreadPoolExecutor(2) as pool:
        chosen = cases(args.few)
        for case, result in zip(chosen, pool.map(lambda case: run(case, Path(data)), chosen)):
            digests[" ".join(map(str, case))] = result
    if args.write:
        args.table.write_text(json.dumps(digests, indent=0) + "\n")
    different = [name for name, value in digests.items() if not args.write and expected.get(name) != value]
    different += [
        f"{name}: not as in one go" for name, value in digests.items()
        if name.endswith("resumed") and digests.get(name.replace("resumed", "plain"), value) != value
    ]  # fmt: skip
    print("\n".join(different) or f"{len(digests)} cases equal", f"({time.monotonic() - began:.0f} s)")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())

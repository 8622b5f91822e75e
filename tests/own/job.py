"""Starts a job of `loop.py`, and reads its checkpoints."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests import product
from tests.processes import ROOT, Result, clean_env, poll
from tests.warm.gang import GRACE, running

SCRIPT = str(ROOT / "tests/own/loop.py")


class OwnJob:
    """`variables` go into the environment of every start."""

    def __init__(
        self, run_dir: Path, ranks: int, kind: str = "batches", *words: str, grace: float = GRACE, **variables: str
    ) -> None:
        self.run_dir, self.ranks, self.grace = run_dir, ranks, grace
        self.words = [SCRIPT, str(run_dir), kind, "checkpoint.every_steps=4", "checkpoint.keep=50", *words]
        self.variables = {"LOCKSTEP_THREADS": "1", **variables}

    def started(self, **extra: str) -> Any:
        """Forks the ranks. No process of theirs is left at the end."""
        return running([self.words] * self.ranks, clean_env(**{**self.variables, **extra}), self.grace)

    def go(self, timeout: float = 240, **extra: str) -> Result:
        """Starts the job once, and waits for its end."""
        with self.started(**extra) as gang:
            done = gang.wait(timeout)
            poll(lambda: not gang.pids(), what="the end of every process")
        return done

    def leaves(self) -> dict[str, torch.Tensor]:
        """Returns every tensor, array and number of the newest checkpoint, by its path. Leaves out texts and times."""
        return leaves(newest(self.run_dir))


def script(ranks: int, code: str, run_dir: Path, *words: str, **variables: str) -> Result:
    """Runs a script, given as text, on forked ranks."""
    with running([["-c", code, str(run_dir), *words]] * ranks, {"LOCKSTEP_THREADS": "1", **variables}) as started:
        return started.wait(240)


def scripts(ranks: int, code: str, *cases: tuple[object, ...]) -> list[Result]:
    """Runs a script on forked ranks once for each list of words, one after the other in the same processes."""
    with tempfile.TemporaryDirectory() as folder:
        program = [
            "-m",
            "tests.own.several",
            folder,
            code,
            json.dumps([[str(word) for word in words] for words in cases]),
        ]
        with running([program] * ranks, clean_env(LOCKSTEP_THREADS="1")) as started:
            done = started.wait(240)
        assert done.code == 0, done.output
        results = []
        for number in range(len(cases)):
            codes = {int((Path(folder) / f"{number}-{rank}").read_text()) for rank in range(ranks)}
            code_of_all = next((each for each in (2, 75, 1) if each in codes), 0)
            results.append(Result(code_of_all, (Path(folder) / str(number)).read_text()))
        return results


def newest(run_dir: Path) -> dict[str, Any]:
    """Returns the newest checkpoint of a run, verified."""
    return product.checkpoint(run_dir / f"checkpoints/step-{product.checkpoint_steps(run_dir)[0]:08d}")


def shared(run_dir: Path) -> dict[str, Any]:
    """Returns what the ranks share in the newest checkpoint: `model`, `average`, `optimizer`, …"""
    state: dict[str, Any] = newest(run_dir)["shared"]
    return state


def assert_weights(run_dir: Path, expected: dict[str, torch.Tensor], kind: str = "model", atol: float = 1e-10) -> None:
    """Asserts that the newest checkpoint's weights are near `expected`."""
    weights = shared(run_dir)[kind]
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(weights[name], tensor, rtol=0, atol=atol, msg=f"{run_dir}: {kind}: {name}")


def leaves(tree: Any, place: str = "") -> dict[str, torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return {place: tree}
    if isinstance(tree, (int, float, np.ndarray)) and not place.startswith(PER_START):
        return {place: torch.as_tensor(tree)}
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, (list, tuple)) else ()
    return {name: leaf for key, value in items for name, leaf in leaves(value, f"{place}/{key}").items()}


PER_START = ("/shared/trained_seconds", "/shared/history")
"""Times and counts of starts."""


def assert_same(job: OwnJob, reference: OwnJob) -> None:
    """Compares weights, optimizer, average, statistics, generators and values, to the bit."""
    actual, expected = job.leaves(), reference.leaves()
    assert actual.keys() == expected.keys() and len(actual["/ranks/0/rng/python/1"]) == 625  # Python's generator
    different = [name for name, leaf in actual.items() if not torch.equal(leaf, expected[name])]
    assert different == [], f"{job.words} on {job.ranks} ranks"

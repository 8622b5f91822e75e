"""A small run that is disturbed: its settings, how it ended, and the files that it left."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from tests import product
from tests.processes import LAUNCH, Result, assert_none_inside, clean_env, inside, poll, rank_of, run
from tests.ranks import launching
from tests.warm.gang import GRACE, Gang, running

FINAL = 24
"""Steps of the whole run."""
LOSSY_START: dict[str, dict[str, object]] = {product.POWERSGD: {"sync.options": "{rank: 1, start: 3}"}}
"""Options of the strategies whose defaults would do nothing special in so short a run."""
PER_START = ("/shared/trained_seconds", "/shared/history")
"""Places of a checkpoint with times and counts of starts."""


def small(data_root: Path | str, **changes: object) -> list[str]:
    """3 epochs × 8 steps of a small network on synthetic 8×8 images; about a second of training."""
    values = {
        "data.root": data_root, "data.source": "synthetic", "data.options": "{n: 192, n_test: 50, size: 8, noise: 1.5}",
        "augment.crop": 1, "augment.flip": "random", "model": "tests.nets:SmallConv", "model_options": "{}", "precision": "float64",
        "global_batch_size": 24, "uneven": "drop", "epochs": 3, "evaluate.every": 1, "loss.reduction": "mean",
        "optim.name": "sgd", "lr": 0.05, "bias_lr_factor": 1, "weight_decay": 0, "schedule": "[]", **changes,
    }  # fmt: skip
    return [f"{name}={value}" for name, value in values.items()]


def settings(data_root: Path, **changes: object) -> list[str]:
    """The same in float32 with a network that can be disturbed, and a checkpoint every second step."""
    values = {
        "model": "tests.nets:Dying", "precision": "float32", "evaluate.batch_size": 8, "checkpoint.every_steps": 2,
        "sync.name": "flat", "ema.decay": 0.9, "ema.every": 3,
    }  # fmt: skip
    return ["--set", *small(data_root, **{**values, **changes})]


class Job:
    """One job of a test. Its forked ranks are known by their sessions, those of a launcher by their current folder."""

    program: tuple[str, ...] = ("-m", "lockstep.training")
    """What Python starts, before `words`."""

    def __init__(self, run_dir: Path, data_root: Path, ranks: int = 2, **changes: object) -> None:
        self.run_dir, self.ranks = run_dir, ranks
        self.words = ["run", "smoke", "--run-dir", str(run_dir), *settings(data_root, **changes)]

    def env(self, **extra: str) -> dict[str, str]:
        """One thread, alone or among others: bit-identity asks for the same number."""
        return clean_env(LOCKSTEP_TEST_RUN=str(self.run_dir), **{"LOCKSTEP_THREADS": "1", **extra})

    def command(self, *launch: str) -> list[str]:
        """Under the real launcher."""
        return [*LAUNCH, "--ranks", str(self.ranks), "--grace", "20", *launch, *self.words]

    @contextlib.contextmanager
    def started(self, grace: float = GRACE, **fate: str) -> Iterator[Gang]:
        """Its ranks, forked. Nothing of them is left at the end."""
        with running([[*self.program, *self.words]] * self.ranks, self.env(**fate), grace) as gang:
            yield gang

    def go(self, timeout: float = 240, grace: float = GRACE, **fate: str) -> Result:
        """One start of forked ranks, to its end; none of them leaves a process behind."""
        with self.started(grace, **fate) as gang:
            result = gang.wait(timeout)
            poll(lambda: not gang.pids(), what="the end of every process")
        self._assert_clean(result)
        return result

    @contextlib.contextmanager
    def launched(self, *launch: str, **fate: str) -> Iterator[Gang]:
        """A forked launcher, the first process of the gang, and its ranks. After a test that went well nothing of them may be left."""
        folder = self.run_dir.parent
        with launching(
            "--ranks", str(self.ranks), "--grace", "20", *launch, *self.words, env=self.env(**fate), cwd=folder
        ) as gang:
            yield gang
            assert_none_inside(folder)

    def launch(self, *launch: str, timeout: float = 240, **fate: str) -> Result:
        """One start under the launcher, from a shell, to its end; afterwards nothing of it may be left."""
        result = run(self.command(*launch), self.env(**fate), timeout, self.run_dir.parent)
        assert_none_inside(self.run_dir.parent)
        self._assert_clean(result)
        return result

    def _assert_clean(self, result: Result) -> None:
        if result.code == 0:  # the files of an earlier, killed start are removed
            assert {path.name for path in self.run_dir.glob("**/.*")} <= {".lock"}

    def rank_pid(self, rank: int) -> int | None:
        return next((pid for pid in inside(self.run_dir.parent) if rank_of(pid) == rank), None)

    def steps(self) -> list[int]:
        """The steps of the checkpoints that verify, newest first."""
        return product.checkpoint_steps(self.run_dir)


def tensors(run_dir: Path, step: int = FINAL) -> dict[str, torch.Tensor]:
    """Returns every tensor, array and number of a checkpoint by its place: weights, averages, moments, buffers, generators, a strategy's
    memory. Leaves out texts and times."""
    return _leaves(product.checkpoint(run_dir / f"checkpoints/step-{step:08d}"))


def _leaves(tree: object, place: str = "") -> dict[str, torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return {place: tree}
    if isinstance(tree, (int, float, np.ndarray)) and not place.startswith(PER_START):
        return {place: torch.as_tensor(tree)}
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, (list, tuple)) else ()
    return {name: leaf for key, value in items for name, leaf in _leaves(value, f"{place}/{key}").items()}


def assert_same(run_dir: Path, undisturbed: dict[str, torch.Tensor]) -> None:
    """Asserts that everything in the last checkpoint is equal bit for bit."""
    actual = tensors(run_dir)
    assert actual.keys() == undisturbed.keys() and len(actual["/ranks/0/rng/python/1"]) == 625  # Python's generator
    assert [name for name in actual if not torch.equal(actual[name], undisturbed[name])] == []

"""A small run that is disturbed: its settings, how it ended, and the files that it left."""

from __future__ import annotations

import contextlib
import os
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path

import torch

from tests import product
from tests.processes import LAUNCH, Result, clean_env, poll, processes, run
from tests.warm.gang import GRACE, Gang, running

FINAL = 24
"""Steps of the whole run."""
LOSSY_START: dict[str, dict[str, object]] = {product.POWERSGD: {"sync.options": "{rank: 1, start: 3}"}}
"""Options of the strategies whose defaults would do nothing special in so short a run."""


def settings(data_root: Path, **changes: object) -> list[str]:
    """3 epochs × 8 steps on 8×8 images, a checkpoint every second step; about a second of training."""
    values = {
        "data.root": data_root, "data.source": "synthetic", "data.options": "{n: 192, n_test: 50, size: 8, noise: 1.5}",
        "data.num_shards": 3, "augment.crop": 1, "augment.flip": "random", "model": "tests.nets:Dying",
        "model_options": "{}", "global_batch_size": 24, "uneven": "drop", "epochs": 3, "evaluate.every": 1,
        "evaluate.batch_size": 8, "checkpoint.every_steps": 2, "sync.name": "flat", "ema.decay": 0.9, "ema.every": 3,
        "loss.reduction": "mean", "optim.name": "sgd", "lr": 0.05, "bias_lr_factor": 1, "weight_decay": 0,
        "schedule": "[]", **changes,
    }  # fmt: skip
    return ["--set", *(f"{name}={value}" for name, value in values.items())]


class Job:
    """One job of a test. Its forked ranks are known by their sessions, those of a launcher by a mark in their environment."""

    def __init__(self, run_dir: Path, data_root: Path, ranks: int = 2, **changes: object) -> None:
        self.run_dir, self.ranks = run_dir, ranks
        self.mark = uuid.uuid4().hex
        self.words = ["run", "smoke", "--run-dir", str(run_dir), *settings(data_root, **changes)]

    def env(self, **extra: str) -> dict[str, str]:
        """One thread, alone or among others: bit-identity asks for the same number."""
        return clean_env(
            LOCKSTEP_TEST_MARK=self.mark, LOCKSTEP_TEST_RUN=str(self.run_dir), **{"LOCKSTEP_THREADS": "1", **extra}
        )

    def command(self, *launch: str) -> list[str]:
        """Under the real launcher."""
        return [*LAUNCH, "--ranks", str(self.ranks), "--grace", "20", *launch, *self.words]

    @contextlib.contextmanager
    def started(self, grace: float = GRACE, **fate: str) -> Iterator[Gang]:
        """Its ranks, forked. Nothing of them is left at the end."""
        with running([["-m", "lockstep.training", *self.words]] * self.ranks, self.env(**fate), grace) as gang:
            yield gang

    def go(self, timeout: float = 240, grace: float = GRACE, **fate: str) -> Result:
        """One start of forked ranks, to its end; none of them leaves a process behind."""
        with self.started(grace, **fate) as gang:
            done = gang.wait(timeout)
            poll(lambda: not gang.pids(), what="the end of every process")
        self._assert_clean(done)
        return done

    def launch(self, *launch: str, timeout: float = 240, **fate: str) -> Result:
        """One start under the real launcher, to its end; afterwards nothing of it may be left."""
        done = run(self.command(*launch), self.env(**fate), timeout)
        self.assert_gone()
        self._assert_clean(done)
        return done

    def _assert_clean(self, done: Result) -> None:
        if done.code == 0:  # whatever an earlier, killed start left behind is cleaned up
            assert {path.name for path in self.run_dir.glob("**/.*")} <= {".lock"}

    def pids(self) -> list[int]:
        """Processes that carry the mark."""
        found = []
        for pid, state, _, _ in processes():
            with contextlib.suppress(OSError):
                if state != "Z" and self.mark.encode() in Path(f"/proc/{pid}/environ").read_bytes():
                    found.append(pid)
        return found

    def rank_pid(self, rank: int) -> int | None:
        for pid in self.pids():
            try:
                if f"\0RANK={rank}\0".encode() in b"\0" + Path(f"/proc/{pid}/environ").read_bytes():
                    return pid
            except OSError:
                continue
        return None

    def assert_gone(self) -> None:
        try:
            poll(lambda: not self.pids(), what="the end of every process")
        finally:
            for pid in self.pids():
                os.kill(pid, signal.SIGKILL)

    def steps(self) -> list[int]:
        """The steps of the checkpoints that verify, newest first."""
        return product.checkpoint_steps(self.run_dir)


def tensors(run_dir: Path, step: int = FINAL) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint by its place: weights, averages, moments, buffers, generators, a strategy's memory."""
    found: dict[str, torch.Tensor] = {}

    def walk(value: object, place: str) -> None:
        if isinstance(value, torch.Tensor):
            found[place] = value
        elif isinstance(value, dict):
            for name, inner in value.items():
                walk(inner, f"{place}.{name}")
        elif isinstance(value, (list, tuple)):
            for number, inner in enumerate(value):
                walk(inner, f"{place}.{number}")

    walk(product.checkpoint(run_dir / "checkpoints" / f"step-{step:08d}"), "")
    return found


def assert_same(run_dir: Path, undisturbed: dict[str, torch.Tensor]) -> None:
    """Bit for bit, in everything that is saved."""
    found = tensors(run_dir)
    assert found.keys() == undisturbed.keys() and found
    assert [name for name in found if not torch.equal(found[name], undisturbed[name])] == []

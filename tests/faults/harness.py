"""A small run that is disturbed: what it is told, how it ended, and what it left behind."""

from __future__ import annotations

import os
import signal
import uuid
from pathlib import Path

import torch

from tests.processes import PYTHON, Result, clean_env, poll, run
from training import checkpoint

FINAL = 24


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
    """One job of a test: its processes carry a mark in their environment, so that an orphan is found."""

    def __init__(self, run_dir: Path, data_root: Path, ranks: int = 2, **changes: object) -> None:
        self.run_dir, self.ranks = run_dir, ranks
        self.mark = uuid.uuid4().hex
        self.words = ["run", "smoke", "--run-dir", str(run_dir), *settings(data_root, **changes)]

    def env(self, **extra: str) -> dict[str, str]:
        return clean_env(LOCKSTEP_TEST_MARK=self.mark, LOCKSTEP_TEST_RUN=str(self.run_dir), **extra)

    def command(self, *launch: str) -> list[str]:
        prefix = [PYTHON, "-m", "training"]
        if self.ranks == 1 and not launch:
            return [*prefix, *self.words]
        return [*prefix, "launch", "--ranks", str(self.ranks), "--grace", "20", *launch, *self.words]

    def go(self, *launch: str, timeout: float = 120, **fate: str) -> Result:
        """One start, to its end; afterwards nothing of it may be left."""
        done = run(self.command(*launch), self.env(**fate), timeout)
        self.assert_gone()
        if done.code == 0:  # whatever an earlier, killed start left behind is cleaned up
            assert {path.name for path in self.run_dir.glob("**/.*")} <= {".lock"}
        return done

    def pids(self) -> list[int]:
        """Processes that carry the mark."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    marked = self.mark.encode() in (entry / "environ").read_bytes()
                    state = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0]
                except (OSError, IndexError):
                    continue
                if marked and state != "Z":
                    found.append(int(entry.name))
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
            poll(lambda: not self.pids(), 10, "the end of every process")
        finally:
            for pid in self.pids():
                os.kill(pid, signal.SIGKILL)

    def steps(self) -> list[int]:
        """The steps of the checkpoints that verify, newest first."""
        steps = []
        for path in checkpoint.candidates(self.run_dir / "checkpoints"):
            checkpoint.verify(path)
            steps.append(checkpoint.step_of(path))
        return steps


def final_tensors(run_dir: Path) -> dict[str, torch.Tensor]:
    """Weights, averages, momentum, batch statistics and generators of the last checkpoint."""
    tree = checkpoint.load(run_dir / "checkpoints" / f"step-{FINAL:08d}")
    shared = tree["shared"]
    tensors = {f"model.{name}": tensor for name, tensor in shared["model"].items()}
    tensors |= {f"average.{name}": tensor for name, tensor in shared["average"].items()}
    for index, entry in shared["optimizer"]["state"].items():
        tensors |= {f"optimizer.{index}.{name}": v for name, v in entry.items() if isinstance(v, torch.Tensor)}
    for number, rank in enumerate(tree["ranks"]):
        tensors |= {f"rank{number}.{name}": tensor for name, tensor in rank["buffers"].items()}
        tensors[f"rank{number}.rng"] = rank["rng"]["torch"]
    return tensors


def assert_same(run_dir: Path, undisturbed: dict[str, torch.Tensor]) -> None:
    """Bit for bit."""
    found = final_tensors(run_dir)
    assert found.keys() == undisturbed.keys()
    assert [name for name in found if not torch.equal(found[name], undisturbed[name])] == []

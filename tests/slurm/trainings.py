"""Small trainings for tests on SLURM, the same in every test. A test can hold a training at a pass."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tests.events import events, weights_digest
from tests.processes import clean_env, poll
from tests.product import JobSpec, Status
from tests.ranks import gang
from tests.slurm.conftest import Bench

EPOCHS = 5
SETTINGS: dict[str, Any] = {
    "data.source": "synthetic", "data.options": {"n": 192, "n_test": 50, "size": 8, "noise": 1.5},
    "augment.crop": 1, "model": "tests.nets:Held", "model_options": {}, "global_batch_size": 24, "uneven": "drop",
    "epochs": EPOCHS, "precision": "float64", "evaluate.every": EPOCHS, "loss.reduction": "mean", "optim.name": "sgd",
    "lr": 0.05, "bias_lr_factor": 1, "weight_decay": 0, "schedule": [], "checkpoint.every_steps": 10, "log.every": 1,
    "threads": 1,
}  # fmt: skip


def train_here(run: Path, ranks: int, *words: str, timeout: float = 180) -> Path:
    """Trains the smoke recipe with the settings `words` on ranks of this machine, without SLURM."""
    env = clean_env(TMPDIR=str(run.parent))  # a killed launcher, as after an interrupted test, leaves a folder
    done = gang(ranks, "run", "smoke", "--run-dir", str(run), "--set", *words, env=env, timeout=timeout)
    assert done.code == 0, done.output
    return run


class Hold:
    """Holds all jobs with `env` at a training pass; see `tests.nets.Held`."""

    def __init__(self, path: Path, at: int = 5) -> None:
        self.path = path
        self.env = {"LOCKSTEP_TEST_HOLD": str(path)}
        self.at(at)

    def at(self, number: int) -> None:
        """From now on holds every job at this training pass of its start."""
        self.number = number
        fresh = self.path.with_suffix(".new")
        fresh.write_text(str(number))
        os.replace(fresh, self.path)

    def wait(self) -> None:
        """Waits until a job is held there."""
        marker = Path(f"{self.path}.held")
        poll(lambda: marker.exists() and marker.read_text() == str(self.number), 90, f"training pass {self.number}")

    def let_go(self) -> None:
        self.path.unlink()


def training(bench: Bench, name: str, epochs: int = 2, **more: Any) -> JobSpec:
    """Returns a training on 2 nodes × 1 rank."""
    overrides = {
        **SETTINGS, "epochs": epochs, "evaluate.every": epochs, "data.root": str(bench.data_root), **more.pop("overrides", {}),
    }  # fmt: skip
    return JobSpec.of(
        {
            "name": name, "recipe": "smoke", "nodes": 2, "run_dir": str(bench.folder / name), "grace_seconds": 5, "cpus": 1,
            "overrides": overrides, "memory": "2Gi", **more,
        }
    )  # fmt: skip


class Training:
    """Submits a training, and holds it at its training pass `at` until the test releases it."""

    def __init__(self, bench: Bench, name: str, at: int = 5, epochs: int = EPOCHS, **more: Any) -> None:
        self.bench, self.name, self.run = bench, name, bench.folder / name
        self.hold = Hold(bench.folder / f"{name}.hold", at)
        self.spec = training(bench, name, epochs, **{"max_restarts": 4, "env": self.hold.env, **more})
        bench.backend.submit(self.spec)
        self.job_id = bench.job_id(name)

    def ends_like(self, undisturbed: Path) -> Status:
        self.hold.let_go()
        status = self.bench.wait(self.name, 150)
        log = "\n".join([*self.bench.backend.logs(self.name), *self.bench.cluster.log_lines(self.job_id)])
        assert (status.state, status.code) == ("succeeded", 0), f"{status}\n{log}"
        assert weights_digest(self.run) == weights_digest(undisturbed)
        return status

    def await_checkpoint(self, step: int) -> None:
        """Waits for the checkpoint on the disk: it gets its name when it is complete."""
        poll((self.run / f"checkpoints/step-{step:08d}").exists, 60, f"the checkpoint of step {step}")

    def saves(self, times: int) -> None:
        """Waits for the checkpoint after the n-th signal."""
        poll(lambda: len(self.saved_at()) == times, 60, "the signal and the checkpoint")

    def attempts(self) -> int:
        return max((event["attempt"] for event in events(self.run)), default=0)

    def saved_at(self) -> list[int]:
        return [event["step"] for event in events(self.run, "preempted") if event["saved"]]

    def resumed_at(self) -> list[int]:
        return [event["step"] for event in events(self.run, "resumed")]


def setting_words(values: dict[str, Any]) -> list[str]:
    """The values as words of a command line."""
    return [f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in values.items()]

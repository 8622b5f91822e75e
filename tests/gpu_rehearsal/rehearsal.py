"""`rehearsed(folder, words)`: ranks over the stand-in, forked from a warm server that has it preloaded."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tests import runs
from tests.gpu_rehearsal.build import stand_in
from tests.processes import clean_env, free_port
from tests.warm.process import Process, start

RANK = ["-m", "tests.gpu_rehearsal.rank"]


@functools.cache
def preload() -> str:
    return str(stand_in())


def environment(devices: int, **extra: str) -> dict[str, str]:
    """Returns the variables of a process that sees so many GPUs of the stand-in."""
    env = clean_env(LD_PRELOAD=preload(), STANDIN_DEVICES=str(devices), LOCKSTEP_THREADS="1", **extra)
    del env["CUDA_VISIBLE_DEVICES"]
    return env


@dataclass
class Rank:
    """A rank's process, its output, and its log and counts after its end."""

    process: Process
    folder: Path
    number: int

    @property
    def code(self) -> int | None:
        return self.process.poll()

    @property
    def output(self) -> str:
        return (self.folder / f"output.{self.number}").read_text(errors="backslashreplace")

    @functools.cached_property
    def log(self) -> list[str]:
        """Returns the stand-in's lines, without the number of their thread."""
        path = self.folder / f"log.{self.number}"
        return [line.partition(" ")[2] for line in path.read_text().splitlines()] if path.exists() else []

    @functools.cached_property
    def counts(self) -> dict[str, dict[str, int]]:
        counts: dict[str, dict[str, int]] = json.loads((self.folder / f"found.{self.number}").read_text())
        compared = [what for what in counts["step"] if "closeness.py:fingerprint" in what]
        # The replicas are compared once a start, and at a save before that; not at every step.
        assert all(counts["step"].pop(what) <= 2 for what in compared), compared
        return counts

    def lines(self, what: str) -> list[str]:
        return [line for line in self.log if line.split(" ")[0] == what]


@dataclass
class Gang:
    ranks: list[Rank] = field(default_factory=list)

    def wait(self, timeout: float = 120) -> list[int]:
        """Returns the exit codes when all ranks have ended. Fails with their output if they do not end in time."""
        deadline = time.monotonic() + timeout
        while running := [rank.process for rank in self.ranks if rank.code is None]:
            ended = select.select(running, [], [], max(0.0, deadline - time.monotonic()))[0]
            assert ended, f"still running after {timeout} s:\n{self.output}"
        return [rank.process.returncode or 0 for rank in self.ranks]

    @property
    def output(self) -> str:
        return "\n".join(f"--- rank {rank.number}\n{rank.output}" for rank in self.ranks)

    def assert_sound(self, refused: Sequence[int] = ()) -> None:
        """Checks every run: each rank uses one device, breaks no rule of CUDA, and starts no kernel without a computation.

        Args:
            refused: ranks whose captures were broken, as the test wants it.
        """
        for rank in self.ranks:
            assert bool(rank.lines("VIOLATION")) == (rank.number in refused), rank.lines("VIOLATION")
            assert rank.lines("KERNEL") == [] and rank.lines("NOT-SUPPORTED") == []
            assert rank.lines("PAGEABLE-IN-CAPTURE") == []
            assert rank.counts["failures"] == []
            assert len(rank.lines("CONTEXT")) <= 1, f"contexts on several devices: {rank.lines('CONTEXT')}"
            assert not [line for line in rank.lines("CAPTURE") if "ends nodes=0 " in line], "an empty graph"


@contextlib.contextmanager
def rehearsing(
    folder: Path,
    words: Sequence[str],
    ranks: int = 2,
    devices: int = 2,
    each: Sequence[dict[str, str]] | None = None,
    program: Sequence[str] = RANK,
    **extra: str,
) -> Iterator[Gang]:
    """Starts ranks, and kills them at the end.

    Args:
        folder: for their logs and outputs.
        devices: GPUs of the machine.
        each: the variables of each rank, where a launcher sets others than `RANK`, `WORLD_SIZE`, …
    """
    folder.mkdir(parents=True, exist_ok=True)
    port = str(free_port())
    if each is None:
        each = [
            {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}
            for rank in range(ranks)
        ]
    gang = Gang()
    try:
        for number, variables in enumerate(each):
            files = {"STANDIN_LOG": folder / f"log.{number}", "REHEARSAL_FOUND": folder / f"found.{number}"}
            for path in files.values():
                path.unlink(missing_ok=True)
            env = environment(
                devices, OMP_NUM_THREADS="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=port, TORCH_FR_DUMP_ON_TIMEOUT="0",
                **{name: str(path) for name, path in files.items()},
            )  # fmt: skip
            env.update({**extra, **variables})
            output = os.open(folder / f"output.{number}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            try:
                gang.ranks.append(Rank(start([*program, *words], env, output), folder, number))
            finally:
                os.close(output)
        yield gang
    finally:
        for rank in gang.ranks:
            rank.process.end()


def rehearsed(
    folder: Path, words: Sequence[str], timeout: float = 120, refused: Sequence[int] = (), **options: object
) -> Gang:
    """Runs ranks to their end. All have to exit with 0 and be sound."""
    with rehearsing(folder, words, **options) as gang:  # type: ignore[arg-type]
        assert set(gang.wait(timeout)) == {0}, gang.output
    gang.assert_sound(refused)
    return gang


def settings(data_root: Path, **changes: object) -> list[str]:
    """A run of 2 epochs × 4 steps of a small network. `settings(…, sync__name="ddp")`."""
    values: dict[str, object] = {
        "data.options": "{n: 96, n_test: 20, size: 8, noise: 1.5}", "model": "tests.nets:SmallConv", "epochs": 2,
        "checkpoint.every_steps": 1000, "optim.name": "nesterov", "ema.decay": 0, "channels_last": "false",
        "metrics.enabled": "false", "device": "cuda",
    }  # fmt: skip
    values.update({name.replace("__", "."): value for name, value in changes.items()})
    return runs.settings(data_root, **values)


STEPS = 8
"""Steps of the run that `settings` describes."""


def trained(
    folder: Path, data_root: Path, *, steps: int = STEPS, options: dict[str, object] | None = None, **changes: object
) -> tuple[Gang, dict[str, torch.Tensor]]:  # fmt: skip
    """Trains to the end; returns the gang and every tensor of the last checkpoint but the states of generators."""
    words = ["run", "smoke", "--run-dir", str(folder / "run"), *settings(data_root, **changes)]
    gang = rehearsed(folder, words, **(options or {}))  # type: ignore[arg-type]
    return gang, saved(folder / "run", steps)


def saved(run_dir: Path, step: int = STEPS) -> dict[str, torch.Tensor]:
    state = {name: tensor for name, tensor in runs.tensors(run_dir, step).items() if "/rng" not in name}
    assert state
    return state


def differing(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    """Returns the names of tensors that differ in a bit."""
    assert actual.keys() == expected.keys()
    return [name for name in actual if not torch.equal(actual[name], expected[name])]

"""What every attempt at a run has, of a recipe or of a loop of one's own: settings, ranks, run directory, state, metrics."""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lockstep.training.checkpoint.score import Scores
from lockstep.training.checkpoint.state import TrainState
from lockstep.training.config import RunSettings
from lockstep.training.contract import EXIT_FAILED, EXIT_USAGE, UserError
from lockstep.training.data.shards import CorruptShard
from lockstep.training.models.arithmetic import float32_on_gpus
from lockstep.training.observe.console import Console
from lockstep.training.observe.exporter import Exporter
from lockstep.training.observe.metrics import Metrics
from lockstep.training.observe.rundir import RunDirectory
from lockstep.training.parallel import process
from lockstep.training.parallel.exchange import failing_together
from lockstep.training.parallel.world import World, set_threads


@dataclass(slots=True, kw_only=True)
class RunContext(ABC):
    """One attempt, ready for its first step. `run` is None on ranks that write nothing."""

    config: RunSettings
    world: World
    run: RunDirectory | None
    attempt: int
    state: TrainState
    console: Console
    exporter: Exporter
    scores: Scores = field(init=False)

    def __post_init__(self) -> None:
        self.scores = Scores(self.state.history, self.config.checkpoint.keep_best)

    @property
    @abstractmethod
    def steps_done(self) -> int:
        """Optimizer steps of the run so far."""

    @property
    def metrics(self) -> Metrics:
        return self.exporter.metrics

    def event(self, kind: str, **values: Any) -> None:
        if self.run is not None and self.world.leader:
            self.run.event(kind, **values)


@dataclass(frozen=True, slots=True)
class Opened:
    """A run's directory, locked, where this rank has one; its metrics; and a sentence with the threads of a rank."""

    run: RunDirectory | None
    exporter: Exporter
    threads: str


@contextlib.contextmanager
def opened(config: RunSettings, world: World, run_dir: Path, fresh: bool | str) -> Iterator[Opened]:
    """Opens the run directory and serves the metrics. Both stay open, unless the block raises. Collective.

    Raises:
        UserError: on all ranks, where any of them cannot go on.
    """
    threads = set_threads(world, config.threads, os.environ)
    _deterministic(config)
    _arithmetic(config)
    if world.device.type == "cpu":
        process.keep_freed()
    run: RunDirectory | None = None
    exporter: Exporter | None = None
    try:
        with failing_together(world):
            if world.leader or (config.checkpoint.write == "node" and world.local_rank == 0):
                run = RunDirectory.open(run_dir, config, fresh)
        # Only now: a directory that is refused stays untouched. First where it is cleared of what earlier attempts left.
        for sweeps in (True, False):
            with failing_together(world):
                if sweeps == (run is not None):
                    exporter = Exporter(config.metrics, world, run_dir, os.environ, sweeps)
        assert exporter is not None
        yield Opened(run, exporter, threads)
    except BaseException as error:
        code = EXIT_USAGE if isinstance(error, UserError) else EXIT_FAILED
        if exporter is not None:
            note_corrupt_shard(exporter.metrics, error)
            exporter.close(code)
        if run is not None:
            run.status(code, str(error) or type(error).__name__, run.step_before)
            run.close()
        raise


def note_corrupt_shard(metrics: Metrics, error: BaseException) -> None:
    """Counts a damaged shard among the causes of an error that ends the run."""
    if isinstance(error, CorruptShard) or isinstance(error.__cause__, CorruptShard):
        metrics.corrupt_file("shard")


def _deterministic(config: RunSettings) -> None:
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if torch.are_deterministic_algorithms_enabled() != config.deterministic:  # the call imports torch's compiler
        torch.use_deterministic_algorithms(config.deterministic)


def _arithmetic(config: RunSettings) -> None:
    float32_on_gpus(config.tf32)
    torch.backends.cudnn.benchmark = config.cudnn_benchmark

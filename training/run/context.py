"""What every part of an attempt at a run shares: settings, ranks, run directory, state, metrics."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lockstep.training.checkpoint.kept import Kept
from lockstep.training.checkpoint.score import Scores
from lockstep.training.checkpoint.state import TrainState
from lockstep.training.config import RunSettings
from lockstep.training.data.shards import CorruptShard
from lockstep.training.observe.console import Console
from lockstep.training.observe.exporter import Exporter
from lockstep.training.observe.metrics import Metrics
from lockstep.training.observe.rundir import RunDirectory
from lockstep.training.parallel.world import World


@dataclass(slots=True, kw_only=True)
class RunContext:
    """One attempt, ready for its first step. `run` is None on ranks that write nothing."""

    config: RunSettings
    world: World
    run: RunDirectory | None
    attempt: int
    state: TrainState
    console: Console
    exporter: Exporter
    progressed: bool = False
    """A step was made, or an epoch ended, in this attempt."""
    scores: Scores = field(init=False)

    def __post_init__(self) -> None:
        self.scores = Scores(self.state.history, self.config.checkpoint.keep_best)

    @property
    def kept(self) -> Kept:
        return self.state.kept

    @property
    def steps_done(self) -> int:
        """Optimizer steps of the run so far."""
        return self.state.kept.steps

    @property
    def metrics(self) -> Metrics:
        return self.exporter.metrics

    def event(self, kind: str, **values: Any) -> None:
        if self.run is not None and self.world.leader:
            self.run.event(kind, **values)


def note_corrupt_shard(metrics: Metrics, error: BaseException) -> None:
    """Counts a damaged shard among the causes of an error that ends the run."""
    if isinstance(error, CorruptShard) or isinstance(error.__cause__, CorruptShard):
        metrics.corrupt_file("shard")

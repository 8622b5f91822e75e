"""What every part of an attempt at a run shares: settings, ranks, run directory, state, metrics."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..checkpoint.kept import Kept
from ..checkpoint.object_store import ObjectStore
from ..checkpoint.score import Scores
from ..checkpoint.state import TrainState
from ..config import Config, RunSettings
from ..contract import REPORT_FILE
from ..data.shards import CorruptShard
from ..limits import REPORT_SECONDS
from ..observe.console import Console
from ..observe.exporter import Exporter
from ..observe.goodput import GoodputRecorder
from ..observe.metrics import Metrics
from ..observe.rundir import RunDirectory
from ..parallel.world import World


@dataclass(slots=True, kw_only=True)
class RunContext:
    """One attempt, ready for its first step. `run` is None on ranks that write nothing."""

    config: RunSettings
    world: World
    path: Path
    """Of the run directory, which rank 0 has open."""
    run: RunDirectory | None
    attempt: int
    state: TrainState
    console: Console
    exporter: Exporter
    goodput: GoodputRecorder
    objects: ObjectStore | None = None
    """On the rank that writes, where `checkpoint.to` says so."""
    left: Callable[[], float]
    """Seconds until this process must have ended; infinite where nobody has asked it to."""
    progressed: bool = False
    """A step was made, or an epoch ended, in this attempt."""
    scores: Scores = field(init=False)
    _untold: deque[tuple[int, Any, Callable[[RunDirectory], None]]] = field(default_factory=deque)
    """What rank 0 has written of late, or was about to, as this rank would write it."""

    def __post_init__(self) -> None:
        self.scores = Scores(self.state.history, self.config.checkpoint.keep_best)

    @property
    def kept(self) -> Kept:
        return self.state.kept

    @property
    def steps_done(self) -> int:
        """Optimizer steps of the run so far."""
        return self.state.kept.steps

    def loss_weight(self, samples: float, divisor: Any) -> Any:
        """Returns this rank's share of what a step's sum of losses is divided by, for the mean loss that the run shows: of the divisor,
        if there is one. A recipe shows the mean over its samples, also if it minimises a sum."""
        if divisor is None or isinstance(self.config, Config):
            return samples
        return divisor if self.world.leader or self.state.of_all else 0.0

    @property
    def metrics(self) -> Metrics:
        return self.exporter.metrics

    def event(self, kind: str, **values: Any) -> None:
        self.write(lambda run: run.event(kind, **values), _key({"event": kind, **values}))

    def write(self, action: Callable[[RunDirectory], None], key: Any = None) -> None:
        """Rank 0 does it, in the run directory. Where it is lost, the rank in its place does again what may not have been done.

        Args:
            key: of an event, by which one that is there already is known (`take_over`).
        """
        if self.run is not None:
            action(self.run)
        elif self.world.live is not None:
            done = self.world.live.done
            while self._untold and self._untold[0][0] < done - 1:  # no rank is two calls behind
                self._untold.popleft()
            self._untold.append((done, key, action))

    def write_report(self) -> None:
        """Rank 0 writes report.html, when the others have written what goes into it. An error here does not change how the run ended."""
        if self.run is None or not self.config.log.report:
            return
        run = self.run

        def write() -> None:
            try:
                from ..observe import report

                report.write([run.path], run.path / REPORT_FILE)
            except Exception as error:  # noqa: BLE001
                self.console.warn(f"no {REPORT_FILE}: {error}")

        run.disk.run(write, seconds=REPORT_SECONDS)

    def forget_untold(self) -> None:
        """What this rank has told before it was one of the others."""
        self._untold.clear()

    def take_over(self) -> None:
        """Rank 0 was lost, and this one is in its place: it has the run directory from here on. Raises `UserError`."""
        self.run = run = RunDirectory.take_over(self.path, self.attempt, self.state.history["failures"])
        run.told = self.console.on_status
        run.listeners.append(self.console.on_event)
        self.goodput.take_over(run)
        if (url := self.config.checkpoint.to) is not None:
            self.objects = ObjectStore(url)
            self.objects.take_over(run.path)
        there = [_key(event) for event in run.last_events()]
        for _, key, action in self._untold:
            if key is None or key not in there:
                action(run)
        self._untold.clear()


_KEYS = ("step", "epoch", "batch", "path", "name")
"""What tells an event of a kind from the others of that kind."""


def _key(event: dict[str, Any]) -> tuple[Any, ...]:
    return (event.get("event"), *(event.get(name) for name in _KEYS), sorted(event.get("values") or ()))


def note_corrupt_shard(metrics: Metrics, error: BaseException) -> None:
    """Counts a damaged shard among the causes of an error that ends the run."""
    if isinstance(error, CorruptShard) or isinstance(error.__cause__, CorruptShard):
        metrics.corrupt_file("shard")

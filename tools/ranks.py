"""Reads the metrics of a run's ranks, from the textfiles that they write every few seconds.

reader = Reader(Path("runs/smoke"))
before, after = reader.read(), reader.read()
for rank in reader.judged(before, after): …       # step, samples/s, shares of a step, the slow rank
"""

from __future__ import annotations

import contextlib
import math
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.training import contract, files
from lockstep.training.contract import UserError, printable
from lockstep.wire.hangs import of_run
from lockstep.wire.status import slow_rank_of

_MAX_BYTES = 4 << 20
_SINGLE = frozenset({
    "step", "steps_planned", "loss", "logged", "finished", "attempt", "last_step_timestamp_seconds",
    "samples_total", "process_resident_memory_bytes", "step_duration_seconds_sum", "step_duration_seconds_count",
    "data_wait_seconds_sum", "grad_ready_seconds_sum", "sync_wait_seconds_sum",
})  # fmt: skip
_LINE = re.compile(r'(?m)^training_(\w+)\{(?:name="([^"]*)",)?rank=.*\} (\S+)$')
"""A line of Prometheus' text format, as a rank writes it: name, label `name`, value."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One rank's metrics (names without `training_`) at one time."""

    rank: int
    values: dict[str, float]
    at: float
    """Unix time of the textfile."""


@dataclass(slots=True)
class Rank:
    """One rank between two snapshots. Shares are of step time, 0 to 1; None if no step was seen."""

    rank: int
    step: int
    steps_planned: int | None
    images_per_second: float | None
    step_seconds: float | None
    data_wait: float | None
    compute: float | None
    sync_wait: float | None
    rest: float | None
    loss: float | None
    logged: dict[str, float]
    """Last value of each number that the script has logged."""
    memory_bytes: float | None
    seconds_since_step: float | None
    exit_code: int | None
    straggler: dict[str, Any] | None = None
    """The phase in which this rank delays the others, and the cost (`slow_rank_of`)."""
    hang: str | None = None
    """The activity of a rank that hangs."""


class Reader:
    """The reader of a run directory's ranks. Raises `UserError` if the directory does not hold a run."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        if not (run_dir / contract.RUN_FILE).is_file():
            raise UserError(
                f"{run_dir} does not hold a run (no {contract.RUN_FILE}): give the run directory, e.g. runs/smoke; "
                "a run that is starting writes it once its ranks have met"
            )

    def read(self) -> dict[int, Snapshot]:
        """Returns the newest snapshot of every rank."""
        snapshots = {}
        for path in sorted((self.run_dir / contract.METRICS).glob("rank-*.prom")):
            digits = path.stem.removeprefix("rank-")
            with contextlib.suppress(OSError, ValueError):
                values, at = parse(files.read(path, _MAX_BYTES).decode()), path.stat().st_mtime
                if digits.isascii() and digits.isdigit():
                    snapshots[int(digits)] = Snapshot(int(digits), values, at)
        return snapshots

    def judged(self, before: dict[int, Snapshot], after: dict[int, Snapshot]) -> list[Rank]:
        """Returns each rank's work between two readings, and the verdict on ranks that hang."""
        ranks = [_rank(before.get(number), snapshot) for number, snapshot in sorted(after.items())]
        hang = of_run(self.run_dir)
        named = {one.rank: one for one in hang.named} if hang is not None else {}
        status = files.read_json(self.run_dir / contract.STATUS_FILE)
        straggler = slow_rank_of(status)
        locked = files.is_locked(self.run_dir / contract.LOCK_FILE)
        code = status.get("code") if isinstance(status, dict) else None
        for rank in ranks:
            if straggler is not None and straggler["rank"] == rank.rank:
                rank.straggler = straggler
            if type(code) is int and (after[rank.rank].values.get("finished") == 1 or not locked):
                rank.exit_code = code  # the rank has ended, or was killed
            if (one := named.get(rank.rank)) is not None and rank.exit_code is None:
                rank.hang = printable(one.activity)
        return ranks


def parse(text: str) -> dict[str, float]:
    """Returns the finite single values in a rank's textfile. Raises `ValueError` if there is none."""
    values = {}
    for name, label, number in _LINE.findall(text):
        with contextlib.suppress(ValueError):
            if name in _SINGLE and math.isfinite(value := float(number)):
                values[f"logged/{label}" if name == "logged" else name] = value
    if not values:
        raise ValueError("not the metrics of a rank")
    return values


def _rank(before: Snapshot | None, after: Snapshot) -> Rank:
    """Returns a rank's work between two readings; since the rank's start if it made no step in between, or is new."""
    new, old = after.values, before.values if before is not None else {}
    steps, seconds = "step_duration_seconds_count", after.at - before.at if before is not None else 0.0
    moved = new.get(steps, 0.0) > old.get(steps, 0.0) and old.get("attempt") == new.get("attempt")
    if not (moved and seconds > 0):  # no step between the two: values of the whole attempt
        old, seconds = {}, 0.0

    def gained(name: str) -> float:
        return new.get(name, 0.0) - old.get(name, 0.0)

    count, spent = gained(steps), gained("step_duration_seconds_sum")
    shares: list[float | None] = [None] * 4
    if count > 0 and spent > 0:
        phases = [gained(f"{phase}_seconds_sum") / spent for phase in ("data_wait", "grad_ready", "sync_wait")]
        shares = [*phases, max(0.0, 1.0 - sum(phases))]
    last = new.get("last_step_timestamp_seconds")
    if moved and last is not None and "last_step_timestamp_seconds" in old:
        # The time from step to step, because readings come in the middle of steps.
        seconds = gained("last_step_timestamp_seconds") or seconds
    ended = new.get("finished") == 1
    return Rank(
        rank=after.rank, step=int(new.get("step", 0)), steps_planned=int(new["steps_planned"]) if "steps_planned" in new else None,
        images_per_second=gained("samples_total") / (seconds or spent) if count > 0 and spent > 0 else None,
        step_seconds=spent / count if count > 0 else None,
        data_wait=shares[0], compute=shares[1], sync_wait=shares[2], rest=shares[3], loss=new.get("loss"),
        logged={name.removeprefix("logged/"): value for name, value in new.items() if name.startswith("logged/")},
        memory_bytes=new.get("process_resident_memory_bytes"),
        seconds_since_step=None if last is None or ended else max(0.0, time.time() - last),
        exit_code=None,
    )  # fmt: skip

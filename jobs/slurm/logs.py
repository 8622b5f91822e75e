"""The ranks' logs of a SLURM job, as they grow."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jobs.lines import begin, shares
from jobs.slurm.folder import log
from jobs.status import Unreachable

_NOISE = re.compile(r"submitit [A-Z]+ \(\d{4}-")
_NOISY_BYTES = re.compile(_NOISE.pattern.encode())


def lines(
    record: dict[str, Any], ranks: list[int], prefix: bool, ended: Callable[[], bool], interval: float,
    last: int | None = None,
) -> Iterator[str]:  # fmt: skip
    """Lines without submitit's own, with `[rank N]` before them where `prefix` says so, until the job has ended.

    Args:
        last: begin so many lines before the end. They have no times, so each rank has an equal share of them.
    """
    read = dict.fromkeys(ranks, 0) if last is None else _places(record, ranks, last)
    rests = dict.fromkeys(ranks, b"")
    while True:
        try:
            over = ended()  # asked before reading, so that nothing is missed
        except Unreachable:
            over = False
        for rank in ranks:
            more = _since(log(record, rank), read[rank])
            read[rank] += len(more)
            *whole, rests[rank] = (rests[rank] + more).split(b"\n")
            if over and rests[rank]:
                whole.append(rests[rank])
            for line in (raw.decode(errors="replace") for raw in whole):
                if not _NOISE.match(line):
                    yield f"[rank {rank}] {line}" if prefix else line
        if over:
            return
        time.sleep(interval)


def _places(record: dict[str, Any], ranks: list[int], last: int) -> dict[int, int]:
    """Where each rank's log is to be read from, for `last` lines in all."""

    def place(rank: int, count: int) -> tuple[int, int]:
        try:
            return begin(log(record, rank), count, lambda head: not _NOISY_BYTES.match(head))
        except OSError:
            return 0, 0

    given = shares([place(rank, last)[1] for rank in ranks], last)
    return {rank: place(rank, count)[0] for rank, count in zip(ranks, given)}


def _since(path: Path, offset: int) -> bytes:
    """What a file has got since `offset`; nothing while it is not there."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read()
    except OSError:
        return b""

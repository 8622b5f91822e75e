"""The ranks' logs of a SLURM job, as they grow."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jobs.slurm.folder import log
from jobs.status import Unreachable

_PIECE = 1 << 20
_NOISE = re.compile(r"submitit [A-Z]+ \(\d{4}-")


def lines(
    record: dict[str, Any], ranks: list[int], prefix: bool, ended: Callable[[], bool], interval: float
) -> Iterator[str]:  # fmt: skip
    """Lines without submitit's own, with `[rank N]` before them where `prefix` says so, until the job has ended."""
    read = dict.fromkeys(ranks, 0)
    rests = dict.fromkeys(ranks, b"")
    while True:
        try:
            over = ended()  # asked before reading, so that nothing is missed
        except Unreachable:
            over = False
        for rank in ranks:
            for more in _since(log(record, rank), read[rank]):
                read[rank] += len(more)
                *whole, rests[rank] = (rests[rank] + more).split(b"\n")
                yield from _told(whole, rank, prefix)
            if over and rests[rank]:
                yield from _told([rests[rank]], rank, prefix)
        if over:
            return
        time.sleep(interval)


def _told(lines: list[bytes], rank: int, prefix: bool) -> Iterator[str]:
    for line in (raw.decode(errors="replace") for raw in lines):
        if not _NOISE.match(line):
            yield f"[rank {rank}] {line}" if prefix else line


def _since(path: Path, offset: int) -> Iterator[bytes]:
    """What a file has got since `offset`, in pieces; nothing while it is not there."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            while piece := file.read(_PIECE):
                yield piece
    except OSError:
        return

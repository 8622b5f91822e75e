"""The ranks' logs of a SLURM job, as they grow."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import PurePath
from typing import Any

from lockstep.jobs.lines import Pieces, shares
from lockstep.jobs.slurm.folder import log
from lockstep.jobs.slurm.transport.base import Transport
from lockstep.jobs.status import Disconnected, Unreachable

NOISE = r"submitit [A-Z]+ \([0-9]{4}-"
"""What submitit's own lines begin with."""


def lines(
    transport: Transport, record: dict[str, Any], ranks: list[int], prefix: bool, ended: Callable[[], bool],
    interval: float, lost_after: float, last: int | None = None,
) -> Iterator[str]:  # fmt: skip
    """Lines without submitit's own, with `[rank N]` before them where `prefix` says so, until the job has ended.

    A connection that was lost is taken up again where it was, for `lost_after` seconds. Raises `Unreachable` then.

    Args:
        last: begin this many lines before the end. They have no times, so each rank has an equal share of them.
    """
    files = {rank: log(record, rank) for rank in ranks}
    read = dict.fromkeys(ranks, 0) if last is None else _places(transport, files, last)
    pieces = {rank: Pieces(b"\n") for rank in ranks}
    heard = time.monotonic()
    while True:
        try:
            over = ended()  # asked before reading, so that nothing is missed
        except Unreachable:
            over = False
        try:
            found = transport.since({files[rank]: read[rank] for rank in ranks})
            heard = time.monotonic()
        except Disconnected:
            if time.monotonic() - heard >= lost_after:
                raise
            time.sleep(interval)
            continue
        more = any(found.values())
        for rank in ranks:
            new = found[files[rank]]
            read[rank] += len(new)
            whole = list(pieces[rank].of(new))
            if over and not more and (rest := pieces[rank].rest()):
                whole.append(rest)
            for line in (raw.decode(errors="replace") for raw in whole):
                if not re.match(NOISE, line):
                    yield f"[rank {rank}] {line}" if prefix else line
        if over and not more:
            return
        if not more:
            time.sleep(interval)


def _places(transport: Transport, files: dict[int, PurePath], last: int) -> dict[int, int]:
    """Where each rank's log is to be read from, for `last` lines in all."""
    there = transport.ends(dict.fromkeys(files.values(), last), NOISE)
    given = dict(zip(files.values(), shares([there[path][1] for path in files.values()], last)))
    there |= transport.ends({path: count for path, count in given.items() if count < there[path][1]}, NOISE)
    return {rank: there[path][0] for rank, path in files.items()}

"""The ranks' logs of a SLURM job, as they grow."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from typing import Any

from jobs.slurm.folder import log
from jobs.slurm.transport.base import Transport
from jobs.status import Disconnected, Unreachable

_NOISE = re.compile(r"submitit [A-Z]+ \(\d{4}-")


def lines(
    transport: Transport, record: dict[str, Any], ranks: list[int], prefix: bool, ended: Callable[[], bool],
    interval: float, lost_after: float,
) -> Iterator[str]:  # fmt: skip
    """Lines without submitit's own, with `[rank N]` before them where `prefix` says so, until the job has ended.

    A connection that was lost is taken up again where it was, for `lost_after` seconds. Raises `Unreachable` then.
    """
    files = {rank: log(record, rank) for rank in ranks}
    read = dict.fromkeys(ranks, 0)
    rests = dict.fromkeys(ranks, b"")
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
            *whole, rests[rank] = (rests[rank] + new).split(b"\n")
            if over and not more and rests[rank]:
                whole.append(rests[rank])
            for line in (raw.decode(errors="replace") for raw in whole):
                if not _NOISE.match(line):
                    yield f"[rank {rank}] {line}" if prefix else line
        if over and not more:
            return
        if not more:
            time.sleep(interval)

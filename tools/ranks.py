"""Reads the metrics of a run's ranks, from their servers or from the textfiles that they leave.

reader = Reader(Path("runs/smoke"))
before, after = reader.read(), reader.read()
for rank in reader.judged(before, after): …       # step, samples/s, shares of a step, the slow rank
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.training import contract, files
from lockstep.training.contract import UserError, printable
from lockstep.wire.hangs import of_run
from lockstep.wire.status import slow_rank_of

TIMEOUT = 2.0
_MAX_BYTES = 4 << 20
_SINGLE = frozenset(
    f"training_{name}" for name in (
        "step", "steps_planned", "loss", "logged", "finished", "exit_code", "attempt", "last_step_timestamp_seconds",
        "samples_total", "process_resident_memory_bytes", "step_duration_seconds_sum", "step_duration_seconds_count",
        "data_wait_seconds_sum", "grad_ready_seconds_sum", "sync_wait_seconds_sum",
    )
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One rank's metrics (names without `training_`) at one time."""

    rank: int
    values: dict[str, float]
    at: float
    """Unix time."""
    source: str
    """`live` or `textfile`."""


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
    source: str
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
        """Returns the newest snapshot of every rank. Reads the textfiles of ranks that do not answer."""
        ranks = {_number(path) for folder in (contract.ENDPOINTS, contract.METRICS)
                 for path in (self.run_dir / folder).glob("rank-*.*")}  # fmt: skip
        numbers = sorted(ranks - {None})  # type: ignore[type-var]
        if not numbers:
            return {}
        with ThreadPoolExecutor(min(len(numbers), 32)) as pool:
            found = [snapshot for snapshot in pool.map(self._rank, numbers) if snapshot is not None]
        return {snapshot.rank: snapshot for snapshot in found}

    def judged(self, before: dict[int, Snapshot], after: dict[int, Snapshot]) -> list[Rank]:
        """Returns each rank's work between two readings, and the verdict on ranks that hang."""
        ranks = [_rank(before.get(number), snapshot) for number, snapshot in sorted(after.items())]
        hang = of_run(self.run_dir)
        named = {one.rank: one for one in hang.named} if hang is not None else {}
        status = files.read_json(self.run_dir / contract.STATUS_FILE)
        straggler = slow_rank_of(status)
        locked = files.is_locked(self.run_dir / contract.LOCK_FILE)
        code = status.get("code") if isinstance(status, dict) and not locked else None
        ended = code if type(code) is int else None
        for rank in ranks:
            if straggler is not None and straggler["rank"] == rank.rank:
                rank.straggler = straggler
            if rank.exit_code is None and rank.source == "textfile" and ended is not None:
                rank.exit_code = ended  # the rank was killed
            if (one := named.get(rank.rank)) is not None and rank.exit_code is None:
                rank.hang = printable(one.activity)
        return ranks

    def _rank(self, rank: int) -> Snapshot | None:
        path = contract.textfile(self.run_dir, rank)
        try:
            written, at = files.read(path, _MAX_BYTES).decode(), path.stat().st_mtime
        except (OSError, ValueError):
            written, at = "", 0.0
        where = files.read_json(contract.endpoint_file(self.run_dir, rank), limit=4096)
        where = where if isinstance(where, dict) else {}
        host, port = where.get("host"), where.get("port")
        if isinstance(host, str) and type(port) is int and 0 < port < 65536 and self._may_ask(host, port, rank):
            try:
                # A killed rank's file stays, and another run, or another user, may have its port by now.
                served = _fetch(host, port, where.get("id"))
                if not written or _whose(served) == _whose(written):
                    return Snapshot(rank, parse(served), time.time(), "live")
            except (OSError, ValueError):
                pass  # the rank has just ended, a firewall blocks, or another server has the port
        try:
            return Snapshot(rank, parse(written), at, "textfile") if written else None
        except ValueError:
            return None

    def _may_ask(self, host: str, port: int, rank: int) -> bool:
        """Returns whether the reader may connect. On this machine, only the rank's user or root may listen on the port. For another
        machine, we or root must have written the address."""
        try:
            owner = contract.endpoint_file(self.run_dir, rank).stat().st_uid
        except OSError:
            return False
        if host in ("127.0.0.1", "::1", "localhost", socket.gethostname()):
            return _listeners(port) <= {owner, 0}
        return owner in (os.geteuid(), 0)


def _listeners(port: int) -> set[int]:
    """Returns the users who listen on a port of this machine; empty: unknown."""
    users = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError), open(f"/proc/self/net/{table}", encoding="ascii") as lines:
            for line in lines:
                _, local, _, state, *_, user = line.split()[:8]
                if state == "0A" and int(local.rpartition(":")[2], 16) == port:
                    users.add(int(user))
    return users


def _number(path: Path) -> int | None:
    digits = path.stem.removeprefix("rank-")
    return int(digits) if digits.isascii() and digits.isdigit() else None


def _whose(text: str) -> tuple[str, ...] | None:
    """Returns the run and the rank of metrics, from their first line with both; None without such a line."""
    found = re.search(r'\{(?=[^}]*\brun="((?:[^"\\]|\\.)*)")(?=[^}]*\brank="(\d+)")', text)
    return found.groups() if found else None


def _fetch(host: str, port: int, rank_id: object) -> str:
    """Returns the answer to GET /metrics from the server with that id. Takes `TIMEOUT` at most, without proxy and redirects.

    Raises `OSError`, `ValueError`.
    """
    deadline = time.monotonic() + TIMEOUT
    host = "127.0.0.1" if host == socket.gethostname() else host
    data = bytearray()
    with socket.create_connection((host, port), TIMEOUT) as connection:
        connection.sendall(b"GET /metrics HTTP/1.0\r\nConnection: close\r\n\r\n")
        while chunk := connection.recv(1 << 16):
            data += chunk
            left = deadline - time.monotonic()
            if len(data) > _MAX_BYTES or left <= 0:
                raise ValueError(f"more than {_MAX_BYTES} bytes, or than {TIMEOUT:g} s")
            connection.settimeout(left)
    head, _, body = bytes(data).partition(b"\r\n\r\n")
    if not re.match(rb"HTTP/1\.[01] 200 ", head):
        raise ValueError("no metrics")
    said = re.search(rf"(?mi)^{contract.RANK_HEADER}: (\S+)\s*$", head.decode("latin-1"))
    if rank_id != (said[1] if said else None):
        raise ValueError("another rank's")
    return body.decode()


def parse(text: str) -> dict[str, float]:
    """Returns the finite single values of a rank's metrics. Raises `ValueError` for text that is not in Prometheus' format."""
    from prometheus_client.parser import text_string_to_metric_families

    # Of more than a hundred lines, mostly histograms' buckets, fifteen are needed. The parser takes microseconds for each line.
    wanted = [line for line in text.splitlines() if re.split(r"[ {]", line, maxsplit=1)[0] in _SINGLE]
    if not wanted:
        raise ValueError("not the metrics of a rank")
    values = {}
    try:
        for family in text_string_to_metric_families("\n".join([*wanted, ""])):
            for sample in family.samples:
                value = float(sample.value)
                name = sample.name.removeprefix("training_")
                if sample.name in _SINGLE and math.isfinite(value):
                    values[name if name != "logged" else f"logged/{sample.labels.get('name', '')}"] = value
    except Exception as error:  # noqa: BLE001 - the parser raises whatever a damaged text makes it trip over
        raise ValueError(f"not Prometheus' text format: {error}") from None
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
        rank=after.rank, step=int(new.get("step", 0)), steps_planned=_whole(new.get("steps_planned")),
        images_per_second=gained("samples_total") / (seconds or spent) if count > 0 and spent > 0 else None,
        step_seconds=spent / count if count > 0 else None,
        data_wait=shares[0], compute=shares[1], sync_wait=shares[2], rest=shares[3], loss=new.get("loss"),
        logged={name.removeprefix("logged/"): value for name, value in new.items() if name.startswith("logged/")},
        memory_bytes=new.get("process_resident_memory_bytes"),
        seconds_since_step=None if last is None or ended else max(0.0, time.time() - last),
        exit_code=_whole(new.get("exit_code")) if ended else None, source=after.source,
    )  # fmt: skip


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)

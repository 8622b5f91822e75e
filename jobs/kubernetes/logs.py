"""Logs of a rank, wherever its pod is: through Pending, across restarts, without a line twice."""

from __future__ import annotations

import queue
import re
import threading
import time
from collections import deque
from collections.abc import Iterator
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, Protocol

from lockstep.training.contract import UserError

from ..logs import PREFIX, Stamped, of_rank
from ..manifest import get
from ..status import FINAL, Unreachable
from .observe import ApiError, host, state_of
from .render import CONTAINERS

if TYPE_CHECKING:
    from ..backend import JobRecord
    from .api import Api

SILENCE = 300.0
"""Seconds without a line after which a stream is opened anew: a dead connection looks like silence."""


LogCursor = tuple[str, str]
"""The position up to which a pod's log has been read: the pod's uid, and the time of the last line."""


class Queries(Protocol):
    """The part of the backend that a reader asks. `interval` and `lost_after` are seconds."""

    api: Api
    namespace: str
    interval: float
    lost_after: float

    def find(self, name: str) -> JobRecord | None: ...
    def pods(self, job: dict[str, Any]) -> list[dict[str, Any]]: ...
    def pod(self, job: dict[str, Any], host: str) -> dict[str, Any] | None: ...


class Reader:
    """Follows the pods of one job. An outage of the server ends it after the backend's `lost_after` seconds."""

    def __init__(self, backend: Queries, known: JobRecord) -> None:
        self.backend, self.known = backend, known
        self._stop = threading.Event()
        self._gone_since: float | None = None

    def lines(self, hosts: list[str], rank: int | None, follow: bool, last: int | None = None) -> Iterator[str]:
        """Yields the lines of `hosts`, of one rank or of all. `last`: begin this many lines before the end of each log."""
        seen: dict[str, LogCursor] = {}

        def own(pod: dict[str, Any]) -> Iterator[str]:
            # The server knows no ranks, so all lines are read to find those of one rank.
            for stamp, line in self._once(pod, False, "", max(last, 1) if rank is None and last is not None else None):
                seen[host(pod)] = str(get(pod, "metadata", "uid")), stamp
                yield from _pick(iter((line,)), host(pod), rank)

        if not follow or last is not None:
            oldest_first = sorted(self._of(hosts), key=lambda pod: str(get(pod, "metadata", "creationTimestamp")))
            for pod in sorted(oldest_first, key=host):  # the newest of a host comes last
                yield from own(pod) if last is None else deque(own(pod), last)
        if follow:
            yield from self._follow_all(hosts, rank, seen)

    def _of(self, hosts: list[str]) -> list[dict[str, Any]]:
        """Returns the pods of these hosts. Requests a single pod alone: a job may have a thousand others."""
        if len(hosts) == 1:
            pod = self.backend.pod(self.known.handle, hosts[0])
            return [] if pod is None else [pod]
        wanted = set(hosts)
        return [pod for pod in self.backend.pods(self.known.handle) if host(pod) in wanted]

    def _follow_all(self, hosts: list[str], rank: int | None, seen: dict[str, LogCursor]) -> Iterator[str]:
        merged: queue.Queue[tuple[str, Any]] = queue.Queue(maxsize=10_000)

        def work(name: str) -> None:
            try:
                for line in _pick(self._follow(name, *seen.get(name, ("", ""))), name, rank):
                    merged.put(("line", line))
                merged.put(("end", None))
            except Exception as error:  # noqa: BLE001 - carried to the thread that reads
                merged.put(("end", error))

        for name in hosts:
            threading.Thread(target=work, args=(name,), daemon=True).start()
        try:
            left = len(hosts)
            while left:
                kind, value = merged.get()
                if kind == "line":
                    yield value
                elif value is not None:
                    raise value
                else:
                    left -= 1
        finally:
            self._stop.set()

    def _follow(self, name: str, uid: str, last: str) -> Iterator[str]:
        """Yields the lines of a host's pods that are later than the position."""
        silent_since = None
        while not self._stop.is_set():
            try:
                over = self._over()  # queried before the pod, so that the last lines are read after the end
                pod = self.backend.pod(self.known.handle, name)
                if pod is not None and get(pod, "status", "phase") not in ("Pending", None):
                    if get(pod, "metadata", "uid") != uid:
                        uid, last = str(get(pod, "metadata", "uid")), ""
                    for stamp, line in self._once(pod, not over, last):
                        last = stamp or last
                        yield line
                if over:
                    return
                silent_since = None
            except Unreachable:
                silent_since = silent_since or time.monotonic()
                if time.monotonic() - silent_since >= self.backend.lost_after:
                    raise
            self._stop.wait(self.backend.interval)

    def _over(self) -> bool:
        """Returns whether the job has ended, or has been gone for a while. Another job may have its name by now."""
        live = self.backend.find(self.known.name)
        if live is not None and get(live.handle, "metadata", "uid") == get(self.known.handle, "metadata", "uid"):
            self._gone_since = None
            return state_of(live.handle) in FINAL
        self._gone_since = self._gone_since or time.monotonic()
        return time.monotonic() - self._gone_since > min(self.backend.lost_after, 30)

    def _once(self, pod: dict[str, Any], follow: bool, after: str, last: int | None = None) -> Iterator[Stamped]:
        """Yields (time stamp, line) of a container: the lines later than `after`, and at most the last `last` lines."""
        path = f"/api/v1/namespaces/{self.backend.namespace}/pods/{get(pod, 'metadata', 'name')}/log"
        container = CONTAINERS[self.known.handle["kind"]]
        query = {"container": container, "timestamps": "true", "follow": "true" if follow else None}
        since, stamp = after.partition(".")[0] + "Z" if after else None, ""
        try:
            for text in self.backend.api.log(path, SILENCE if follow else 30, sinceTime=since, tailLines=last, **query):
                first, _, line = text.partition(" ")
                written = _utc(first)
                stamp, line = (written, line) if written else (stamp, text)  # a kubelet's own messages have no time
                if not after or stamp > after:
                    yield stamp, line
        except ApiError as error:
            if error.status not in (400, 404):  # the container has not started, or is gone
                raise UserError(f"cannot read the log of {get(pod, 'metadata', 'name')}: {error.message}") from None


_STAMP = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)", re.ASCII)


def _utc(stamp: str) -> str:
    """Returns an RFC 3339 time as UTC with nine decimals, so that texts sort like times; "" if `stamp` is no time."""
    match = _STAMP.fullmatch(stamp)
    if match is None:
        return ""
    seconds, fraction, zone = match.groups()
    if zone != "Z":  # a runtime stamps with its node's offset
        try:
            there = datetime.fromisoformat(seconds + zone)
            seconds = there.astimezone(timezone.utc).replace(tzinfo=None).isoformat()
        except (ValueError, OverflowError):
            return ""
    return f"{seconds}.{fraction or '':0<9}"


def _pick(lines: Iterator[str], name: str, rank: int | None) -> Iterator[str]:
    for line in lines:
        picked = of_rank(line, rank)
        if picked is not None:
            yield picked if rank is not None or PREFIX.match(line) else f"[{name}] {line}"

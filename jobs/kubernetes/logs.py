"""Logs of a rank, wherever its pod is: through Pending, across restarts, without a line twice."""

from __future__ import annotations

import queue
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from lockstep.training.contract import UserError

from ..logs import PREFIX, Stamped, merge_tail, of_rank
from ..manifest import get
from ..status import Unreachable
from .api import Api
from .observe import ApiError, host

SILENCE = 300.0
"""Seconds without a line after which a stream is opened anew: a dead connection looks like silence."""


LogCursor = tuple[str, str]
"""The position up to which a pod's log has been read: the pod's uid, and the time of the last line."""


@dataclass
class Reader:
    """Follows the pods of one job.

    Args:
        pods: lists the job's pods.
        pod: returns the pod of one host; None if there is none.
        over: returns whether the job has ended, or is lost.
        interval: seconds between two queries for a pod that has not started.
        patience: seconds without an answer of the server after which following ends with an error.
    """

    api: Api
    namespace: str
    pods: Callable[[], list[dict[str, Any]]]
    pod: Callable[[str], dict[str, Any] | None]
    over: Callable[[], bool]
    interval: float
    container: str
    patience: float
    _stop: threading.Event = field(default_factory=threading.Event)

    def lines(self, hosts: list[str], rank: int | None, follow: bool) -> Iterator[str]:
        """Yields the lines of `hosts`, of one rank or of all."""
        if not follow:
            for pod in sorted(self._of(hosts), key=host):
                yield from _pick((line for _, line in self._once(pod, False, "")), host(pod), rank)
            return
        yield from self._follow_all(hosts, rank, {})

    def tail(self, hosts: list[str], rank: int | None, follow: bool, count: int) -> Iterator[str]:
        """Yields the last `count` lines of `hosts` by their times, of one rank or of all; with `follow`, also all later lines."""
        seen: dict[str, LogCursor] = {}
        pods = sorted(self._of(hosts), key=_age)  # the newest of a host comes last

        def own(pod: dict[str, Any]) -> Iterator[Stamped]:
            # The server knows no ranks, so all lines are read to find those of one rank.
            for stamp, line in self._once(pod, False, "", max(count, 1) if rank is None else None):
                seen[host(pod)] = str(get(pod, "metadata", "uid")), stamp
                yield from ((stamp, picked) for picked in _pick(iter((line,)), host(pod), rank))

        yield from (line for _, line in merge_tail(map(own, pods), count))
        if follow:
            yield from self._follow_all(hosts, rank, seen)

    def _of(self, hosts: list[str]) -> list[dict[str, Any]]:
        """Returns the pods of these hosts. Requests a single pod alone: a job may have a thousand others."""
        if len(hosts) == 1:
            pod = self.pod(hosts[0])
            return [] if pod is None else [pod]
        wanted = set(hosts)
        return [pod for pod in self.pods() if host(pod) in wanted]

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
                over = self.over()  # queried before the pod, so that the last lines are read after the end
                pod = self.pod(name)
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
                if time.monotonic() - silent_since >= self.patience:
                    raise
            self._stop.wait(self.interval)

    def _once(self, pod: dict[str, Any], follow: bool, after: str, last: int | None = None) -> Iterator[Stamped]:
        """Yields (time stamp, line) of a container: the lines later than `after`, and at most the last `last` lines."""
        path = f"/api/v1/namespaces/{self.namespace}/pods/{get(pod, 'metadata', 'name')}/log"
        query = {"container": self.container, "timestamps": "true", "follow": "true" if follow else None}
        since, stamp = after.partition(".")[0] + "Z" if after else None, ""
        try:
            for text in self.api.log(path, SILENCE if follow else 30, sinceTime=since, tailLines=last, **query):
                first, _, line = text.partition(" ")
                written = _utc(first)
                stamp, line = (written, line) if written else (stamp, text)  # a kubelet's own messages have no time
                if not after or stamp > after:
                    yield stamp, line
        except ApiError as error:
            if error.status not in (400, 404):  # the container has not started, or is gone
                raise UserError(f"cannot read the log of {get(pod, 'metadata', 'name')}: {error.message}") from None


def _age(pod: dict[str, Any]) -> tuple[str, str]:
    return host(pod), str(get(pod, "metadata", "creationTimestamp"))


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

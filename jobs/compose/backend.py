"""The Compose backend: nodes are containers of one machine. The engine's labels are its only memory.

The spec stands in a label of each node's container, so that status, logs and cancel work from any shell that reaches
the engine. A job that was cancelled has a labelled, empty volume beside it, because labels cannot change.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Iterator
from queue import Queue
from typing import Any

from jobs import backend as base
from jobs import records
from jobs.backend import Listed, Mode, Status, Submitted
from jobs.checks import lint
from jobs.compose import engine
from jobs.compose import render as rendering
from jobs.compose.observe import explain, started
from jobs.kubernetes.pod import GRACE_MARGIN
from jobs.manifest import HASH, JOB, MANAGED, SPEC, Manifest, get, to_yaml
from jobs.spec.model import JobSpec
from training import contract
from training.contract import UserError

CANCELLED = "lockstep/cancelled"
OURS = tuple(f"{key}={value}" for key, value in MANAGED.items())
_PREFIX = re.compile(r"\[rank (\d+)\] ")

Nodes = list[Manifest]  # named here, because `list` is a method below


class ComposeBackend:
    """See `base.Backend`.

    Args:
        interval: seconds between two looks.
    """

    name = "compose"

    def __init__(self, interval: float = 0.5) -> None:
        self.interval = interval

    def submit(self, spec: JobSpec, mode: Mode = "attach") -> Submitted:
        found = lint.errors(lint.lint(spec, [rendering.render(spec)]))
        if found:
            more = f" (and {len(found) - 1} more: see `lockstep lint --backend compose`)" if len(found) > 1 else ""
            raise UserError(f"{spec.name}: {found[0]}{more}")
        _check_secrets(spec)
        engine.check_built(spec.image)
        nodes = self._nodes(spec.name)
        if nodes:
            was, status = get(nodes[0], "Config", "Labels", HASH), self._status(spec.name, nodes)
            decided = base.decide(spec.name, mode, status, was, lambda: self._spec_of(nodes[0]), spec)
            if decided == "attach":
                self._up(spec)  # brings a node back that was lost
                return Submitted(spec.name, False, self._where(spec.name))
            if decided == "new":
                name = base.next_name(spec.name, {row.name for row in self.list()})
                return self._up(spec.model_copy(update={"name": name, "run_dir": None}))
            self._remove(spec.name)
        return self._up(spec)

    def _up(self, spec: JobSpec) -> Submitted:
        file = rendering.render(spec)
        self._make_volumes(file)
        name = rendering.project(spec.name)
        engine.compose(name, to_yaml([file]), "up", "--detach", "--no-build", "--no-recreate", "--pull", "missing")
        return Submitted(spec.name, True, self._where(spec.name))

    @staticmethod
    def _make_volumes(file: Manifest) -> None:
        for volume in (file.get("volumes") or {}).values():
            if isinstance(volume, dict) and volume.get("external"):
                engine.docker("volume", "create", "--label", OURS[0], str(volume["name"]))

    def prepare(self, spec: JobSpec) -> Submitted:
        """Writes the shards, and returns when they are there. Raises `UserError`."""
        file = rendering.render_prepare(spec)
        _check_secrets(spec)
        engine.check_built(spec.image)
        self._make_volumes(file)
        where = f"{spec.shard_folder} on {file['name']}"
        try:
            engine.compose(str(file["name"]), to_yaml([file]), "run", "--rm", "-T", "prepare", timeout=6 * 3600)
        except engine.EngineError as error:
            if "exists already" not in str(error):
                raise
            return Submitted(str(file["name"]), False, where)
        finally:
            engine.docker("compose", "-p", str(file["name"]), "down", "--timeout", "5")
        return Submitted(str(file["name"]), True, where)

    def status(self, name: str) -> Status:
        return self._status(name, self._require(name))

    def _status(self, name: str, nodes: Nodes) -> Status:
        cancelled = bool(engine.volumes(f"{CANCELLED}={name}"))
        return explain(nodes, self._parsed(nodes[0]), self._said(nodes), cancelled)

    def _said(self, nodes: Nodes) -> dict[str, Any] | None:
        """status.json of this job, which is trusted above exit codes; not one of an earlier job."""
        spec = self._parsed(nodes[0])
        if spec is None:
            return None
        found = engine.read_file(str(nodes[0]["Id"]), f"{spec.run_directory}/{contract.STATUS_FILE}")
        if found is None or found[1] < int(min(map(started, nodes))):  # tar keeps whole seconds
            return None
        try:
            value = json.loads(found[0])
        except ValueError:
            return None
        return value if records.fits(value, records.STATUS) else None

    def logs(self, name: str, rank: int | None = None, follow: bool = False) -> Iterator[str]:
        nodes = self._require(name)
        spec = self._parsed(nodes[0])
        total = len(nodes) * (spec.ranks if spec else 1)
        if rank is not None and not 0 <= rank < total:
            raise UserError(f"{name} has the ranks 0 … {total - 1}, got {rank}")
        if rank is not None and spec is not None and spec.elastic is None:
            nodes = [nodes[rank // spec.ranks]]  # elsewhere the rank may be on any of them: its prefix tells
        return self._lines(name, [str(node["Id"]) for node in nodes], rank, follow)

    def _lines(self, name: str, ids: base.Lines, rank: int | None, follow: bool) -> Iterator[str]:
        if not follow:
            for line in (line for id in ids for _, line in engine.log_lines(id, follow=False)):
                if (found := _of_rank(line, rank)) is not None:
                    yield found
            return
        lines: Queue[str | Exception | None] = Queue()
        for id in ids:
            threading.Thread(target=self._follow, args=(name, id, lines), daemon=True).start()
        left = len(ids)
        while left:
            item = lines.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                left -= 1
            elif (found := _of_rank(item, rank)) is not None:
                yield found

    def _follow(self, name: str, id: str, lines: Queue[str | Exception | None]) -> None:
        """One node's output until the job ends, across restarts of the node. An error goes to who reads `lines`."""
        last = ""
        try:
            while True:
                over = self.status(name).final  # asked before reading, so that nothing is missed
                since = last  # within one reading the two streams may come out of order, or at one time
                for time, line in engine.log_lines(id, not over, since):
                    if time > since:
                        lines.put(line)
                        last = max(last, time)
                if over:
                    break
                threading.Event().wait(self.interval)
            lines.put(None)
        except Exception as error:  # noqa: BLE001 - in a thread: without it the reader would wait for ever
            lines.put(error)

    def wait(self, name: str, timeout: float, seen: base.Seen = base.unseen) -> Status:
        return base.poll(lambda: self.status(name), timeout, self.interval, seen)

    def cancel(self, name: str) -> Status:
        nodes = self._require(name)
        found = self._status(name, nodes)
        if found.final:
            return found
        spec = self._parsed(nodes[0])
        grace = (spec.grace_seconds if spec else 60) + GRACE_MARGIN
        marker = f"{rendering.project(name)}-cancelled"
        engine.docker("volume", "create", "--label", f"{CANCELLED}={name}", "--label", OURS[0], marker)
        ids = [str(node["Id"]) for node in nodes]
        engine.docker("stop", "--time", str(grace), *ids, timeout=grace + engine.TIMEOUT)
        return self.wait(name, 10)

    def _remove(self, name: str) -> None:
        """Removes the job's containers and network. Volumes stay: they hold runs and data."""
        engine.docker("compose", "-p", rendering.project(name), "down", "--timeout", "10", timeout=300)
        for marker in engine.volumes(f"{CANCELLED}={name}"):
            engine.docker("volume", "rm", marker)

    def list(self) -> list[Listed]:
        jobs: dict[str, Nodes] = {}
        for node in engine.containers(*OURS, JOB):
            jobs.setdefault(str(get(node, "Config", "Labels", JOB)), []).append(node)
        rows = []
        for name, nodes in sorted(jobs.items()):
            created = min(str(node["Created"]) for node in nodes).partition(".")[0] + "+00:00"
            rows.append(Listed(name, self._status(name, _sorted(nodes)).state, len(nodes), created))
        return rows

    def live(self, name: str) -> dict[str, Any]:
        return self._spec_of(self._require(name)[0])

    def drift(self, spec: JobSpec) -> base.Lines:
        """Limits changed by `docker update`, and images whose name now means other bytes."""
        wanted = rendering.render(spec)["services"]
        found = []
        for node, service in zip(self._require(spec.name), wanted.values()):
            limits = {"Memory": service.get("mem_limit"), "NanoCpus": round(float(service.get("cpus", 0)) * 1e9)}
            live = {key: get(node, "HostConfig", key) for key in limits}
            found += base.missing_from(limits, live, str(get(node, "Config", "Hostname")))
        return found

    def summary(self, name: str) -> dict[str, Any]:
        nodes = self._require(name)
        spec = self._parsed(nodes[0])
        path = f"{spec.run_directory}/{contract.SUMMARY_FILE}" if spec else contract.SUMMARY_FILE
        found = engine.read_file(str(nodes[0]["Id"]), path)
        if found is None:
            raise UserError(f"{path} is not there yet: {name} is {self._status(name, nodes).state}")
        value = json.loads(found[0])
        return value if isinstance(value, dict) else {}

    def _nodes(self, name: str) -> Nodes:
        if not re.fullmatch(r"[a-z][a-z0-9-]{0,62}", name):
            raise UserError(f"{name!r} is not a job's name (lower-case letters, digits and -)")
        return _sorted(engine.containers(*OURS, f"{JOB}={name}"))

    def _require(self, name: str) -> Nodes:
        found = self._nodes(name)
        if not found:
            raise UserError(f"there is no compose job {name}: see `lockstep list compose`")
        return found

    @staticmethod
    def _spec_of(node: Manifest) -> dict[str, Any]:
        try:
            value = json.loads(get(node, "Config", "Labels", SPEC) or "{}")
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}

    def _parsed(self, node: Manifest) -> JobSpec | None:
        """The spec the job was made from; None where it is from another version."""
        try:
            return JobSpec.model_validate(self._spec_of(node))
        except ValueError:
            return None

    @staticmethod
    def _where(name: str) -> str:
        return f"compose project {rendering.project(name)}"


def _sorted(nodes: Nodes) -> Nodes:
    return sorted(nodes, key=lambda node: int(get(node, "Config", "Labels", rendering.NODE) or 0))


def _check_secrets(spec: JobSpec) -> None:
    missing = [name for name in spec.secrets if name not in os.environ]
    if missing:
        raise UserError(
            f"the job needs the secret {missing[0]}: set it in the environment, Compose takes it from there"
        )


def _of_rank(line: str, rank: int | None) -> str | None:
    """The line, or None where it is another rank's. One rank's lines lose their prefix."""
    if rank is None:
        return line
    match = _PREFIX.match(line)
    return line[match.end() :] if match and int(match[1]) == rank else None

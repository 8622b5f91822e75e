"""The Compose backend: nodes are containers of one machine. The engine's labels are its only memory.

The spec stands in a label of each node's container, so that status, logs and cancel work from any shell that reaches
the engine.
$LOCKSTEP_HOME/compose holds only a lock: one command of a user submits at a time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import secrets
import time
from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import Any

from lockstep.training import contract, files
from lockstep.wire import hangs

from .. import records, snapshots
from ..backend import Cluster, JobRecord, Submission
from ..logs import Stamped, of_rank
from ..manifest import HASH, JOB, MANAGED, Manifest, get, size_in_bytes, spec_in, to_yaml
from ..process import Streams, exec_command, run
from ..spec.model import GRACE_MARGIN, JobSpec, code_identity
from ..status import Check, JobSummary, Result, Status, SubmitResult
from . import engine
from . import render as rendering
from .status import moment, status_from_containers

CODE = "lockstep/code"
"""Label of the volume with a job's code; its value is the job's name."""
OURS = tuple(f"{key}={value}" for key, value in MANAGED.items())


class ComposeBackend(Cluster):
    """A backend whose nodes are containers of this machine. See `Backend`.

    Args:
        interval: seconds between two queries.
    """

    name = "compose"
    rules = rendering.RULES

    def __init__(self, interval: float = 0.5) -> None:
        self.interval = interval
        # A lock, because `up` treats the containers of a concurrent submission as its own.
        self.lock = partial(records.locked, records.home() / "compose", engine.UP_SECONDS)

    @classmethod
    def manifests(cls, spec: JobSpec) -> list[Manifest]:
        return [rendering.render(spec)]

    @classmethod
    def doctor(cls, spec: JobSpec | None, **place: str | None) -> list[Check]:  # noqa: ARG003 - the engine is this machine's
        """Returns checks of what would keep a job from running here. If the engine does not answer, no further check follows."""
        try:
            about = json.loads(engine.docker("info", "--format", "{{json .}}"))
            if about.get("ServerErrors"):
                raise engine.EngineError(" ".join(about["ServerErrors"]))
            version = engine.docker("compose", "version", "--short").strip()
        except (engine.EngineError, ValueError) as error:
            return [Check("engine", "missing", str(error))]
        limited = about.get("MemoryLimit") and about.get("CpuCfsQuota")
        rows = [
            Check("engine", "ok", f"{about.get('Name')}, Docker {about.get('ServerVersion')}, {about.get('Driver')}"),
            Check("compose", "ok", version),
            Check("limits", "ok", f"memory and cpus, cgroup version {about.get('CgroupVersion')}")
            if limited
            else Check("limits", "warning", "the engine cannot limit memory and cpus (rootless without cgroup v2?)"),
        ]
        return rows if spec is None else [*rows, *_check_job(spec, about)]

    def find(self, name: str, submitting: bool = False) -> JobRecord | None:  # noqa: ARG002 - no other process removes a job
        nodes = engine.containers(*OURS, f"{JOB}={name}")
        return _known(name, nodes) if nodes else None

    def attach(self, job: Submission, known: JobRecord) -> SubmitResult:
        """Starts lost nodes again."""
        self.check_secrets(job.spec)
        gone = [node for node in known.handle if get(node, "State", "Status") in ("exited", "dead")]
        self._up(job, known.handle)
        restarted = tuple(str(get(node, "Config", "Hostname")) for node in gone)
        return SubmitResult(known.name, False, known.where, restarted)

    def preflight(self, job: Submission) -> list[Check]:
        return [*self.doctor(job.spec), Check("start", "ok", "at once")]

    def create(self, job: Submission, old: JobRecord | None) -> SubmitResult:
        name = job.spec.name
        if old is not None:
            self._remove(name)
        _remove_code(name)  # an interrupted submission may have left a volume
        self._up(job)
        return SubmitResult(name, True, _where(name))

    def _up(self, job: Submission, there: list[Manifest] | None = None) -> None:
        (file,) = job.manifests
        for key, volume in (file.get("volumes") or {}).items():
            if isinstance(volume, dict) and volume.get("external") and key != rendering.CODE:
                engine.docker("volume", "create", "--label", OURS[0], str(volume.get("name", key)))
        self._bring_code(job.spec)
        up = ("up", "--detach", "--no-build", "--no-recreate", "--pull", "missing")
        words = ("compose", "-p", str(file["name"]), "-f", "-", "--progress", "quiet", *up)
        secret = {contract.ENV_SECRET: _secret(there or [])}
        engine.docker(*words, stdin=to_yaml([file]).encode(), timeout=engine.UP_SECONDS, env=secret)

    @staticmethod
    def _bring_code(spec: JobSpec) -> None:
        """Copies the archive of the job's code into its own volume, before any node exists. An existing job has the volume."""
        if spec.code is None or engine.volumes(f"{CODE}={spec.name}"):
            return
        label, identity = f"{CODE}={spec.name}", code_identity(spec)
        volume = rendering.code_volume(spec)
        engine.docker("volume", "create", "--label", OURS[0], "--label", label, volume)
        try:
            engine.write_volume(volume, str(spec.image), "part-000", snapshots.packed(identity), label)
        except BaseException:
            _remove_code(spec.name)
            raise

    def observe(self, known: JobRecord) -> Status:
        nodes, spec = known.handle, known.spec
        run_status = self._run_status(nodes, spec)
        status = status_from_containers(nodes, spec, run_status)
        return dataclasses.replace(status, **records.about_time(run_status))

    def _run_status(self, nodes: list[Manifest], spec: JobSpec) -> records.RunStatus | None:
        """Returns status.json of this job, which takes precedence over exit codes; None if an earlier job wrote the file."""
        file = engine.read_file(str(nodes[0]["Id"]), f"{spec.run_directory}/{contract.STATUS_FILE}")
        if file is None or file[1] < min(moment(get(node, "State", "StartedAt")) for node in nodes):
            return None  # tar stores whole seconds, so both are whole
        with contextlib.suppress(ValueError):
            run_status = records.RunStatus.parse(files.parsed(file[0]))
            lines = engine.read_file(str(nodes[0]["Id"]), f"{spec.run_directory}/{contract.HANG_FILE}")
            if run_status is not None and lines is not None and (hang := hangs.read_hangs(lines[0])) is not None:
                return run_status.model_copy(update={"hang": hang.said})
            return run_status
        return None

    def stream(self, known: JobRecord, rank: int | None, follow: bool, last: int | None) -> Iterator[str]:
        seen = dict.fromkeys(_ids(known, rank), "")
        while True:
            ended = not follow or self.status(known.name).final  # queried before the read, so that no line is missed
            sources = [_unseen(id, seen, rank) for id in seen]
            for source in sources:
                yield from (line for _, line in (source if last is None else deque(source, last)))
            if ended:
                return
            last = None
            time.sleep(self.interval)

    def exec(self, known: JobRecord, rank: int, command: list[str], streams: Streams) -> int:
        (place,) = _ids(known, rank)
        terminal = ["--tty"] if streams.terminal else []
        words = ["docker", "exec", "--interactive", *terminal, place]
        words += exec_command("python", rank, command, known.spec.run_directory)
        return run(words, streams)

    def stop(self, known: JobRecord) -> Status:
        self._remove(known.name, known.spec.grace_seconds + GRACE_MARGIN)
        return Status("cancelled", "cancelled; its containers had the grace period to save")

    def _remove(self, name: str, grace: int = 10) -> None:
        """Ends and removes the job's containers, and its network. Volumes stay: they hold runs and data."""
        words = ("compose", "-p", rendering.project(name), "down", "--timeout", str(grace))
        engine.docker(*words, timeout=grace + 2 * engine.TIMEOUT)
        _remove_code(name)

    def list(self) -> list[JobSummary]:
        jobs: dict[str, list[Manifest]] = {}
        for node in engine.containers(*OURS, JOB):
            jobs.setdefault(str(get(node, "Config", "Labels", JOB)), []).append(node)
        return [*self._summaries(itertools.starmap(_known, sorted(jobs.items())))]


def _known(name: str, nodes: list[Manifest]) -> JobRecord:
    nodes = sorted(nodes, key=lambda node: int(get(node, "Config", "Labels", rendering.NODE) or 0))
    labels = get(nodes[0], "Config", "Labels")
    created = min(str(node["Created"]) for node in nodes).partition(".")[0] + "+00:00"
    return JobRecord(name, get(labels, HASH), spec_in(labels), nodes, _where(name), len(nodes), created=created)


def _remove_code(name: str) -> None:
    """Removes the volume with a job's code, and a container that was filling the volume when its command was killed."""
    for container in engine.containers(f"{CODE}={name}"):
        engine.docker("rm", "--force", str(container["Id"]))
    for volume in engine.volumes(f"{CODE}={name}"):
        engine.docker("volume", "rm", volume)


def _ids(known: JobRecord, rank: int | None) -> list[str]:
    """Returns the containers that a rank may be in, or all containers."""
    nodes = known.handle if rank is None else [known.handle[rank // known.spec.ranks]]
    return [str(node["Id"]) for node in nodes]


def _unseen(id: str, seen: dict[str, str], rank: int | None) -> Iterator[Stamped]:
    """Yields a container's lines that are later than `seen`, of one rank or of all. Saves the last time in `seen`."""
    since = seen[id]  # the two streams may be out of order within one read, or have the same time
    for moment_of, line in engine.log_lines(id, since):
        if moment_of > since:
            seen[id] = max(seen[id], moment_of)
            if (own := of_rank(line, rank)) is not None:
                yield moment_of, own


def _where(name: str) -> str:
    return f"compose project {rendering.project(name)}"


BACKEND = ComposeBackend


def _secret(there: list[Manifest]) -> str:
    """Returns the secret by which the nodes authenticate each other: that of existing nodes, else the user's, else a new one."""
    marks = [str(word) for node in there for word in get(node, "Config", "Env") or ()]
    given = [value for name, _, value in (mark.partition("=") for mark in marks) if name == contract.ENV_SECRET]
    return next(filter(None, [*given, os.environ.get(contract.ENV_SECRET)]), "") or secrets.token_hex(32)


def _check_job(spec: JobSpec, about: dict[str, Any]) -> Iterator[Check]:
    if spec.image is None:
        yield Check("image", "missing", "image is not set: add it to the job")
    elif engine.image(spec.image) is None:
        advice = "submit pulls it (make image-cpu builds lockstep:cpu)"
        yield Check("image", "warning", f"{spec.image} is not here: {advice}")
    else:
        yield Check("image", "ok", spec.image)
    memory, needed = int(about.get("MemTotal") or 0), spec.nodes * size_in_bytes(spec.memory)
    detail = f"{spec.nodes} × {spec.memory} of {memory / (1 << 30):.1f} GiB"
    yield Check("memory", "ok" if needed <= memory else "missing", detail)
    cores = int(about.get("NCPU") or 0)
    enough: Result = "missing" if spec.cpus > cores else "warning" if spec.nodes * spec.cpus > cores else "ok"
    yield Check("cpus", enough, f"{spec.nodes} × {spec.cpus:g} of {cores}")  # a node with more cannot be created
    if spec.gpus:
        ready = "nvidia" in (about.get("Runtimes") or {}) or bool(about.get("CDISpecDirs"))
        detail = f"{spec.nodes} × {spec.gpus} of this machine" if ready else "install the NVIDIA container toolkit"
        yield Check("gpus", "ok" if ready else "missing", detail)
    for secret in spec.secrets:
        there = secret in os.environ
        yield Check("secret", "ok" if there else "missing", secret if there else f"set {secret} in the environment")

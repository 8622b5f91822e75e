"""Base class of backends: the shared flow of submit, wait and cancel, and the methods that a backend implements.

The flow owns secrets, the state machine of a name (attach, replace, new), the bounded wait and the filter of ranks. A backend
implements find, create, observe, stream, stop, list, exec and preflight, and, if it can, connect and attach. A backend that hands a
manifest to a cluster is a `Cluster`. One contract test covers all of them.

    backend.submit(spec)                 # idempotent by name and hash of the spec
    backend.status("smoke")              # Status(state, reason, ranks, exit_code)
    backend.wait("smoke", timeout=60)    # bounded, always
"""

from __future__ import annotations

import abc
import contextlib
import functools
import importlib
import json
import operator
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from typing_extensions import Self

from lockstep.training import contract, files
from lockstep.training.config import settings
from lockstep.training.contract import UserError

from . import records, snapshots
from .lint import Finding, Rules, refuse, volume_of
from .manifest import Manifest, changes, to_yaml
from .process import Streams
from .spec.model import JobSpec, preparation, prepares
from .status import (
    RESUMABLE,
    Check,
    JobSummary,
    LoggedOut,
    Status,
    StatusCallback,
    SubmitResult,
    Unreachable,
    answered_within,
    note,
    warn,
)

BACKENDS = {
    "local": "lockstep.jobs.local",
    "k8s": "lockstep.jobs.kubernetes",
    "slurm": "lockstep.jobs.slurm",
    "compose": "lockstep.jobs.compose",
}
"""Name → package with a module `backend`, whose `BACKEND` is a `Backend`."""
ALIASES = {"kubernetes": "k8s"}
Mode = Literal["attach", "replace"]
"""Action if a job has the name: attach to the same job, or replace a finished job."""
QUERY_SECONDS = 2.0
"""Seconds for the last query, after the end of a wait."""
SUMMARY_LINES = 1000
"""Number of rank 0's last lines in which the summary is searched."""


@dataclass(frozen=True)
class JobRecord:
    """A job that a backend knows."""

    name: str
    hash: str | None
    """Hash of the submitted spec; None if Lockstep did not create the job."""
    plain: dict[str, Any]
    """The submitted spec, as plain values."""
    handle: Any
    """The backend's own description of the job."""
    where: str
    """Place of the job, for people."""
    nodes: int | None = None
    """Number of nodes; None: as many as the spec says."""
    run_dir: str | None = None
    """Run directory of the job, if this machine sees it."""
    created: str = ""
    """Time of the job's submission or creation, for people."""

    @functools.cached_property
    def spec(self) -> JobSpec:
        """The spec. Raises `UserError` if the record is damaged, or of another version."""
        return JobSpec.recorded(self.name, self.plain)

    @property
    def world_size(self) -> int:
        """Number of ranks. Raises as `spec`."""
        return (self.nodes or self.spec.nodes) * self.spec.ranks

    def differences(self, spec: JobSpec) -> list[str]:
        """Returns `setting: submitted → spec` for each difference."""
        return [*map(str, changes(self.spec.comparable(), spec.comparable()))]


@dataclass(frozen=True)
class Submission:
    """A job that is read, checked, rendered, linted and ready to be sent."""

    spec: JobSpec
    runs: Sequence[JobSpec] = ()
    """Elements of an array; empty for a single job."""
    manifests: list[Manifest] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)


class Backend(abc.ABC):
    """One place where jobs run. All methods that take a name raise `UserError` for a job that does not exist."""

    name: ClassVar[str]
    places: ClassVar[Mapping[str, str]] = {}
    """Flags that name the place of the cluster → the same settings of job.yaml."""
    secrets_from: ClassVar[str | None] = "set it in the environment"
    """Source of the values of `secrets`, as advice; None if the cluster stores them."""
    arrays: ClassVar[bool] = False
    """Whether `create` takes all runs of a sweep as one."""
    given_place: Mapping[str, str] = {}
    """Flags of `places` that were given, with their values."""
    lock: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    """Returns the lock that is held while a job is submitted."""
    scope: str = ""
    """Part of the cluster that contains the jobs, as the end of "there is no job NAME"."""
    interval: float = 1.0
    """Seconds between two queries."""
    lost_after: float = 0.0
    """Seconds for which a wait survives a missing job or a cluster that does not answer; 0: the first time is an error."""
    survived: ClassVar[tuple[type[UserError], ...]] = (Unreachable,)
    """Errors that a wait survives for `lost_after` seconds."""

    # Methods that a backend implements.

    @classmethod
    def connect(cls, **place: str | None) -> Self:  # noqa: ARG003 - most need no such flags
        """Returns the backend, ready for queries. Raises `UserError` if there are no credentials."""
        return cls()

    @abc.abstractmethod
    def find(self, name: str, submitting: bool = False) -> JobRecord | None:
        """Returns the job of that name; None if there is none. Raises `UserError` if its record is damaged.

        Args:
            submitting: the caller holds the lock, so no other process submits. The call waits for a job that is being removed.
        """

    @abc.abstractmethod
    def create(self, job: Submission, old: JobRecord | None) -> SubmitResult:
        """Starts the job. `old`: the finished job of this name that the new job replaces."""

    def attach(self, job: Submission, known: JobRecord) -> SubmitResult:
        """Adds the missing parts of a job that is under way."""
        return SubmitResult(job.spec.name, False, known.where)

    @abc.abstractmethod
    def observe(self, known: JobRecord) -> Status:
        """Returns the current status. Raises `Unreachable`, `UserError`."""

    @abc.abstractmethod
    def stream(self, known: JobRecord, rank: int | None, follow: bool, last: int | None) -> Iterator[str]:
        """Yields the job's lines: of one rank, or of all with `[rank 5] ` before each line. `last`: begin this many lines before the
        end of each log."""

    @abc.abstractmethod
    def exec(self, known: JobRecord, rank: int, command: list[str], streams: Streams) -> int:
        """Runs a command on a rank's node, in its folder and with its environment. Returns the command's exit code.

        Raises:
            UserError: the rank does not run.
            Unreachable: the connection was lost.
        """

    @abc.abstractmethod
    def stop(self, known: JobRecord) -> Status:
        """Ends the job, with its grace period to save."""

    @abc.abstractmethod
    def preflight(self, job: Submission) -> list[Check]:
        """Returns the checks of a new job. The row `start` says when the job starts: `warning`, not at once; `missing`, not at all.

        Raises:
            UserError: the cluster refuses the job.
            Unreachable: the cluster does not answer.
        """

    # The flow.

    def _summaries(
        self, jobs: Iterable[JobRecord], observe: Callable[[JobRecord], Status] | None = None
    ) -> Iterator[JobSummary]:
        """Yields the rows of `list`, without those of damaged records, which it warns of."""
        for known in jobs:
            try:
                state = (observe or self.observe)(known).state
                yield JobSummary(known.name, state, known.nodes or 1, known.created)
            except Unreachable:
                raise
            except UserError as error:
                warn(str(error))

    @classmethod
    def at(cls, spec: JobSpec | None, **flags: str | None) -> Self:
        """Returns the backend at the place that the flags name, or else the spec."""
        place = {flag: flags.get(flag) for flag in cls.places}
        if spec is not None:
            place = {flag: place[flag] or operator.attrgetter(setting)(spec) for flag, setting in cls.places.items()}
        opened = cls.connect(**place)
        opened.given_place = {flag: value for flag, value in place.items() if value}
        return opened

    @classmethod
    def login(cls, host: str | None) -> str | None:  # noqa: ARG003 - of most backends nothing is on another machine
        """Returns the machine that runs a command in place of this one; None if the command runs here.

        Args:
            host: the machine that a flag or the spec names, if any.
        """
        return None

    def submit(self, spec: JobSpec, mode: Mode = "attach") -> SubmitResult:
        """Starts the job, or attaches to the same job. Raises `UserError` if another or a finished job has the name."""
        return self._submit([spec], mode)[0]

    def sweep(self, name: str, specs: list[JobSpec], mode: Mode = "attach") -> list[SubmitResult]:
        """Submits the runs of a sweep: as one job array, all new or all the same as before, or else one by one.

        Raises:
            UserError: no run was submitted; or the cluster refused a run, and a warning names the runs before it.
        """
        if not self.arrays:
            return self._submit(specs, mode)
        specs = snapshots.snapshot_all(specs)
        whole = self.prepared(specs[0].model_copy(update={"name": name}), specs)
        refuse({name: whole.findings}, self.name)
        with self.lock():
            if self.find(name) is not None:
                raise UserError(f"{name} is already the name of a job: choose another --name for the sweep")
            existing = [(spec, *self._existing(spec, mode)) for spec in specs]
            there = [(spec, known) for spec, known, status in existing if known is not None and status is not None]
            if 0 < len(there) < len(specs):
                name = there[0][0].name
                raise UserError(f"{name} of this sweep is running already: wait for it, or choose another --name")
            if not there:
                self.check_secrets(whole.spec)
                self.create(whole, None)
            done = [self.attach(Submission(spec), known) for spec, known in there]
            for spec in specs:
                records.remember(self.name, spec.name, self.given_place)
            return done or [SubmitResult(spec.name, True, self.require(spec.name).where) for spec in specs]

    def prepared(self, spec: JobSpec, runs: Sequence[JobSpec] = ()) -> Submission:
        """Returns the submission of a job. `spec` is that of the whole array, if there are `runs`."""
        return Submission(spec, runs)

    def prepared_all(self, specs: list[JobSpec]) -> Sequence[Submission]:
        """Returns the submissions of a job, or of the runs of a sweep that are submitted one by one."""
        return [self.prepared(spec) for spec in specs]

    def _submit(self, specs: list[JobSpec], mode: Mode) -> list[SubmitResult]:
        """Decides about all jobs before it creates one."""
        if any(spec.code is not None for spec in specs):
            specs = snapshots.snapshot_all(specs)
        jobs, done = self.prepared_all(specs), list[SubmitResult]()
        refuse({job.spec.name: job.findings for job in jobs}, self.name)
        with self.lock():
            decided = [(job, *self._existing(job.spec, mode)) for job in jobs]
            for job, _, under_way in decided:
                if under_way is None:
                    self.check_secrets(job.spec)
            try:
                for job, known, under_way in decided:
                    if known is None or under_way is None:
                        done.append(self.create(job, known))
                    else:
                        done.append(self.attach(job, known))
                    records.remember(self.name, job.spec.name, self.given_place)
            except UserError:
                if done:
                    warn(f"submitted before the error: {', '.join(one.name for one in done)}")
                raise
        return done

    def check_secrets(self, spec: JobSpec) -> None:
        """Raises `UserError` if the value of a secret is missing."""
        missing = [name for name in spec.secrets if name not in os.environ]
        if missing and self.secrets_from is not None:
            raise UserError(f"the job needs the secret {missing[0]}: {self.secrets_from}")

    def _existing(self, spec: JobSpec, mode: Mode) -> tuple[JobRecord | None, Status | None]:
        """Returns the job of that name, and its status if it is under way: then the submission attaches to it, otherwise it replaces it.
        Changes nothing.

        Raises:
            UserError: the job prevents the submission, or there is no such mode.
        """
        if mode not in get_args(Mode):
            raise UserError(f"mode must be {' or '.join(get_args(Mode))}, got {mode!r}")
        known = self.find(spec.name, submitting=True)
        if known is None:
            return None, None
        _check_ours(known)
        status = self.observe(known)
        if mode == "replace" and status.final:
            return known, None
        started_over = spec.fresh is not None and not status.final and known.plain.get("fresh") != spec.fresh
        if not known.spec.same_job(spec, self.name) or started_over:
            changed = "; ".join(known.differences(spec)[:8])
            raise UserError(
                f"{spec.name} exists with another spec ({changed}): choose another name, "
                "or cancel it and submit with --replace"
            )
        if status.final and status.state not in RESUMABLE:
            why = f" ({status.reason})" if status.reason else ""
            raise UserError(
                f"{spec.name} has already finished: {status.state}{why}: "
                "--replace submits it again under this name (its run directory stays)"
            )
        return known, None if status.final else status

    def dry_run(self, spec: JobSpec, mode: Mode = "attach") -> list[Check]:
        """Returns checks that say whether the job would start, when, and why not. Sends nothing. Raises `Unreachable`."""
        try:
            job = self.prepared(snapshots.resolve(spec)[0])
            refuse({job.spec.name: job.findings}, self.name)
            self.check_secrets(job.spec)
            known, status = self._existing(job.spec, mode)
            if status is not None:
                return [Check("job", "note", f"is there already, with the same spec: {status.state}")]
            place = "new" if known is None else "takes the place of an earlier one"
            return [Check("job", "ok", place), *self.preflight(job)]
        except Unreachable:
            raise
        except UserError as error:
            return [Check("job", "missing", str(error))]

    def require(self, name: str) -> JobRecord:
        """Returns the job of that name. Raises `UserError` if there is none, or Lockstep did not make it."""
        records.check_name(name)
        known = self.find(name)
        if known is None:
            raise UserError(f"there is no {self.name} job {name}{self.scope}: see `lockstep list {self.name}`")
        _check_ours(known)
        return known

    def status(self, name: str) -> Status:
        return self.observe(self.require(name))

    def logs(self, name: str, rank: int | None = None, follow: bool = False, last: int | None = None) -> Iterator[str]:
        """Yields the lines of one rank, or of all with `[rank 5] ` before each line. With `follow`, ends with the job.

        Args:
            last: begin this many lines before the end of each log: of a pod, a container, a task, or the local job.
        """
        known = self.require(name)
        _check_rank(known, rank)
        return self.stream(known, rank, follow, last)

    def execute(self, name: str, command: list[str], rank: int = 0, streams: Streams | None = None) -> int:
        """Runs a command on the node of a running job's rank, and returns its exit code.

        Raises:
            UserError: there is no such job or rank, the job is not ours, or the rank has not started or has ended.
            Unreachable: the connection was lost.
        """
        known = self.require(name)
        _check_rank(known, rank)
        status = self.observe(known)
        if status.state not in ("running", "restarting"):
            raise UserError(f"{name} does not run: {status.state}{f' ({status.reason})' if status.reason else ''}")
        return self.exec(known, rank, command, streams or Streams())

    def wait(self, name: str, timeout: float, seen: StatusCallback | None = None) -> Status:
        """Returns the final status, or the status at the timeout (seconds). `seen` gets every status during the wait, and the last.

        If a job is gone or its node does not answer for `lost_after` seconds, the job is lost. If the cluster does not answer
        for this time, the wait ends with an error: only an answer of the cluster makes a job lost.

        Raises:
            Unreachable: the cluster did not answer for `lost_after` seconds, or never answered.
        """
        deadline = time.monotonic() + timeout
        known, answered = False, None
        status = Status("pending", "")  # nothing else is known before the first answer
        trouble: tuple[bool, float] | None = None  # (whether this is an outage, start time)
        while True:
            problem, outage = "", False
            try:
                with answered_within(max(deadline - time.monotonic(), QUERY_SECONDS)):
                    # A name that never existed is the caller's mistake, not a lost job.
                    job = self.find(name) if known and self.lost_after else self.require(name)
                    if job is not None:
                        known = True
                        status, answered = self.observe(job), time.monotonic()
                        problem = "" if status.final else status.unreachable_node
                    else:
                        problem = "it is gone from the cluster"
            except self.survived as error:
                unanswered = isinstance(error, Unreachable)
                if not self.lost_after or (answered is None and (isinstance(error, LoggedOut) or not unanswered)):
                    raise
                problem, outage = str(error), True
                if answered is not None:
                    last = f"{status.state} ({status.reason})" if status.reason else status.state
                    problem += f"; {time.monotonic() - answered:.0f} s ago the job was {last}"
                elif isinstance(error, Unreachable):
                    status = error.status or status
                if answered is None and trouble is None:
                    warn(f"{problem}; waiting")
            now = time.monotonic()
            left = deadline - now
            if not problem:
                trouble = None
            elif trouble is None or trouble[0] != outage:  # after an outage a cluster is slow to see its nodes again
                trouble = outage, now
            too_long = trouble is not None and now - trouble[1] >= self.lost_after
            if outage and (too_long or (not known and left <= 0)):
                raise Unreachable(problem)
            shown = replace(status, reason=problem) if problem else status
            if too_long:
                shown = replace(status, state="lost", reason=f"{problem} (for {self.lost_after:g} s)")
            if seen is not None and known:
                seen(shown)
            if shown.final or left <= 0:
                return shown
            time.sleep(min(self.interval, left))

    def cancel(self, name: str) -> Status:
        """Ends a job, with its grace period to save. A finished job stays unchanged."""
        known = self.require(name)
        status = self.observe(known)
        return status if status.final else self.stop(known)

    def drift(self, spec: JobSpec) -> list[str]:
        """Returns `setting: submitted → now` for the job of that name."""
        return self.require(spec.name).differences(snapshots.resolve(spec)[0])

    def summary(self, name: str) -> dict[str, Any]:
        """Returns `summary.json` of the finished run. If this machine does not see the file, reads the values that rank 0 printed.

        Raises:
            UserError: the run has not written a summary yet.
        """
        known = self.require(name)
        value = files.read_json(Path(known.run_dir) / contract.SUMMARY_FILE) if known.run_dir else self._printed(known)
        if not isinstance(value, dict):
            place = f"in {known.run_dir}" if known.run_dir else "that its logs still have"
            raise UserError(f"{name} has not written a summary {place}: it is {self.observe(known).state}")
        return value

    def _printed(self, known: JobRecord) -> dict[str, Any] | None:
        last = None
        for line in self.stream(known, 0, False, SUMMARY_LINES):  # the log of a long run may have a gigabyte
            if '"done"' in line:
                with contextlib.suppress(ValueError):
                    event = json.loads(line)
                    last = event if isinstance(event, dict) and event.get("event") == "done" else last
        return last and {key: item for key, item in last.items() if key not in ("event", "time", "attempt")}

    @abc.abstractmethod
    def list(self) -> list[JobSummary]: ...  # the last method: after it, `list` in this class is no type


class Cluster(Backend):
    """A backend that hands a manifest to a cluster. The class methods ask none: same spec, same bytes."""

    rules: ClassVar[Rules[Any]]
    """The lint rules that read `manifests`."""

    @classmethod
    @abc.abstractmethod
    def manifests(cls, spec: JobSpec) -> list[Manifest]:
        """Returns the manifests that `lockstep render` prints, in order. Lint reads them."""

    @classmethod
    @abc.abstractmethod
    def doctor(cls, spec: JobSpec | None, **place: str | None) -> list[Check]:
        """Returns checks of what would keep a job from running there."""

    @classmethod
    def render(cls, spec: JobSpec, runs: list[JobSpec]) -> str:  # noqa: ARG003 - for a backend with arrays
        """Returns the output of `lockstep render` for a job, or for the runs of a sweep."""
        return to_yaml([manifest for run in runs for manifest in cls.manifests(run)])

    @classmethod
    def lint(cls, spec: JobSpec) -> list[Finding]:
        """Returns the findings for a job, before its submission."""
        spec, _ = snapshots.resolve(spec)
        return cls.rules.apply(spec, cls.manifests(spec))

    @classmethod
    def preparation(cls, spec: JobSpec) -> JobSpec:
        """Returns the job that writes the recipe's shards once. Raises `UserError`."""
        own = preparation(spec)
        if not spec.shards_in_a_bucket and volume_of(spec, str(spec.shards)) is None:
            raise UserError(f"shards {spec.shards} is not on a volume: add one to volumes")
        return own

    def has_shards(self, spec: JobSpec) -> bool | None:  # noqa: ARG002 - for a backend that sees the folder
        """Returns whether the recipe's shards are written; None: they cannot be seen from here."""
        return None

    def prepare(self, spec: JobSpec) -> SubmitResult:
        """Submits the job that writes the shards. Without sight of them, not after an equal job that succeeded. Raises `UserError`."""
        own, written = self.preparation(spec), self.has_shards(spec)
        if written:
            return SubmitResult(own.name, False, f"the shards are in {spec.shard_folder}")
        own = self.prepared(own).spec
        known = self.find(own.name)
        if known is not None:
            if not prepares(known.plain.get("command")):
                raise UserError(
                    f"`lockstep prepare` uses the name {own.name}, and another job has it: remove that job, or rename this one"
                )
            if written is None and known.spec.same_job(own, self.name) and self.observe(known).state == "succeeded":
                note(
                    f"{own.name} has written the shards ({known.where}): to write others, rename the job, or change its `shards`"
                )
                return SubmitResult(own.name, False, known.where)
        return self.submit(own, "replace")

    def prepared(self, spec: JobSpec, runs: Sequence[JobSpec] = ()) -> Submission:
        manifests = self.manifests(spec)
        return Submission(spec, runs, manifests, self.rules.apply(spec, manifests))


def backend_of(name: str) -> type[Backend]:
    """Returns the backend of that name; imports only this backend. Raises `UserError` for an unknown name."""
    name = ALIASES.get(name, name)
    if name not in BACKENDS:
        raise UserError(f"unknown backend {name!r}{settings.nearest(name, BACKENDS)}")
    kind: type[Backend] = importlib.import_module(f"{BACKENDS[name]}.backend").BACKEND
    return kind


def _check_ours(known: JobRecord) -> None:
    if known.hash is None:
        raise UserError(f"lockstep did not make {known.name}, and leaves it alone: choose another name")


def _check_rank(known: JobRecord, rank: int | None) -> None:
    """Raises `UserError` for a rank that the job does not have, and if the job's spec is of another version."""
    total = known.world_size
    if rank is not None and not 0 <= rank < total:
        raise UserError(f"{known.name} has the ranks 0 … {total - 1}, got {rank}")

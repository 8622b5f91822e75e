"""What happens to a job from `submit` to its end, the same on every backend, and what a backend supplies for it.

The flow owns: secrets, the state machine of a name (attach, replace, new), waiting with a bound, the filter of ranks. A
backend supplies find, create, observe, stream, stop and list, and where it can tail and exec; one that hands a manifest to a cluster is a
`lockstep.jobs.cluster.Cluster`. One contract test holds all of them to it.

    backend.submit(spec)                 # idempotent by name and hash of the spec
    backend.status("smoke")              # Status(state, reason, ranks, exit_code)
    backend.wait("smoke", timeout=60)    # bounded, always
"""

from __future__ import annotations

import abc
import contextlib
import itertools
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, ClassVar, Literal

from typing_extensions import Self

from lockstep.jobs import logs
from lockstep.jobs.code import store
from lockstep.jobs.manifest import differences
from lockstep.jobs.process import Streams
from lockstep.jobs.spec.model import JobSpec
from lockstep.jobs.status import GOES_ON, Disconnected, Listed, LoggedOut, Observer, Status, Submitted, Unreachable
from lockstep.jobs.terminal import warn
from lockstep.training import contract, files
from lockstep.training.contract import UserError

Mode = Literal["attach", "replace", "new"]
"""What to do about a job of the same name: attach to the same one, replace a finished one, or take a numbered name."""
Lines = list[str]  # these are named here, because `list` is a method of every backend
Specs = list[JobSpec]
Sent = list[Submitted]
LOOK_SECONDS = 2.0
"""What a last look may take, after the end of a wait."""


@dataclass(frozen=True, slots=True)
class Found:
    """A job that a backend knows."""

    name: str
    hash: str | None
    """Of the spec that it was submitted with; None where lockstep has not made it."""
    plain: dict[str, Any]
    """That spec, as plain values."""
    record: Any
    """What the backend itself knows it by."""

    @property
    def spec(self) -> JobSpec | None:
        """None where the record is damaged, or of another version."""
        try:
            return JobSpec.recorded(self.name, self.plain)
        except UserError:
            return None

    def beside(self, spec: JobSpec) -> tuple[dict[str, Any], dict[str, Any]]:
        """Its spec and another one, as plain values that can be compared."""
        own = self.spec
        if own is None:
            return self.plain, spec.record()
        return own.comparable(), spec.comparable()


class Backend(abc.ABC):
    """One place where jobs run. All methods that take a name raise `UserError` for a job that does not exist."""

    name: ClassVar[str]
    places: ClassVar[Mapping[str, str]] = {}
    """Flags that say where the cluster is → the settings of job.yaml that say it, too."""
    secrets_from: ClassVar[str | None] = "set it in the environment"
    """Where the values of `secrets` come from, as advice; None where the cluster keeps them."""
    carries_code: ClassVar[bool] = False
    """Whether `create` brings the spec's code to the ranks."""
    interval: float = 1.0
    """Seconds between two looks."""
    lost_after: float = 0.0
    """Seconds without an answer after which a job that is waited for counts as lost; 0: the first one is an error."""
    survived: ClassVar[tuple[type[UserError], ...]] = (Unreachable,)
    """Errors that a wait goes on from until then."""

    # What a backend supplies.

    @classmethod
    def connect(cls, **place: str | None) -> Self:  # noqa: ARG003 - most need no such flags
        """The backend, ready for questions. Raises `UserError` where there are no credentials."""
        return cls()

    @abc.abstractmethod
    def find(self, name: str) -> Found | None:
        """The job of that name; None where there is none. Raises `UserError` where its record is damaged."""

    @abc.abstractmethod
    def create(self, spec: JobSpec, old: Found | None) -> Submitted:
        """Starts the job. `old`: the finished one of this name whose place it takes."""

    @abc.abstractmethod
    def observe(self, found: Found) -> Status:
        """Where it stands now. Raises `Unreachable`, `UserError`."""

    @abc.abstractmethod
    def stream(self, found: Found, spec: JobSpec | None, rank: int | None, follow: bool) -> Iterator[str]:
        """Its lines: of one rank, or of all with `[rank 5] ` before each."""

    @abc.abstractmethod
    def stop(self, found: Found) -> Status:
        """Ends it with its grace, so that it can save."""

    @abc.abstractmethod
    def list(self) -> list[Listed]: ...

    @abc.abstractmethod
    def where(self, found: Found) -> str:
        """Where it is to be found, for people."""

    # What a backend may do otherwise.

    def tail(self, found: Found, spec: JobSpec | None, rank: int | None, follow: bool, count: int) -> Iterator[str]:
        """`stream`, beginning `count` lines before the end."""
        if follow:
            raise UserError(f"the {self.name} backend follows a job from its first line: leave out --tail, or --follow")
        return logs.last(self.stream(found, spec, rank, False), count)

    def exec(self, found: Found, spec: JobSpec | None, rank: int, command: Lines, streams: Streams) -> int:  # noqa: ARG002
        """Runs a command beside a rank, in its folder and with its environment. Returns the command's exit code.

        Raises:
            UserError: the rank does not run.
            Unreachable: the connection was lost.
        """
        raise UserError(f"the {self.name} backend cannot run a command beside a rank")

    def refuse(self, spec: JobSpec) -> None:  # noqa: B027 - where any job can run there is nothing to refuse
        """Raises `UserError` for a job that could not run there."""

    def exclusive(self) -> contextlib.AbstractContextManager[None]:
        """Held while a job is submitted."""
        return contextlib.nullcontext()

    def no_such(self, name: str) -> UserError:
        return UserError(f"there is no {self.name} job {name}: see `lockstep list {self.name}`")

    def taken(self) -> set[str]:
        """Names that a new job cannot have."""
        return {row.name for row in self.list()}

    def settled(self, found: Found) -> Found | None:
        """The job of that name, once nobody is taking it away any more."""
        return found

    def standing(self, found: Found) -> Status:
        """`observe` for who holds `exclusive`: nobody else is submitting."""
        return self.observe(found)

    def attach(self, found: Found, spec: JobSpec) -> Submitted:
        """The same job is there already. Raises `UserError` where it cannot be gone on with."""
        return Submitted(spec.name, False, self.where(found))

    def gone_on(self, found: Found, spec: JobSpec) -> Found:  # noqa: ARG002 - most can go on from anywhere
        """The job that ended with its state saved, and is submitted again. Raises `UserError` where it cannot go on."""
        return found

    def world(self, found: Found, spec: JobSpec | None) -> int:
        """Number of ranks."""
        spec = spec or JobSpec.recorded(found.name, found.plain)
        return spec.nodes * spec.ranks

    def within(self, seconds: float) -> contextlib.AbstractContextManager[None]:  # noqa: ARG002 - for one that asks a network
        """Inside it, a question to the cluster fails after this many seconds without an answer."""
        return contextlib.nullcontext()

    def pause(self, found: Found | None, seconds: float) -> None:  # noqa: ARG002 - for a backend that can watch it
        """Until the job may have changed, at most `seconds`."""
        time.sleep(min(self.interval, seconds))

    def trouble(self, status: Status) -> str:  # noqa: ARG002 - most believe what they are told
        """What keeps the status from being believed."""
        return ""

    def changes(self, found: Found, spec: JobSpec) -> Lines:  # noqa: ARG002 - where nothing but the record exists
        """What somebody has changed in the submitted job since: `place: submitted → live`."""
        return []

    @classmethod
    def serve(cls, source: IO[bytes]) -> object:  # noqa: ARG003 - for one that is reached through another machine
        """The answer to a request from elsewhere, as plain values. Raises `UserError`."""
        raise UserError(f"the {cls.name} backend is not asked from elsewhere")

    # The flow.

    def submit(self, spec: JobSpec, mode: Mode = "attach") -> Submitted:
        """Starts the job, or attaches to the same one. Raises `UserError` for another or a finished one."""
        (spec,) = self.with_code([spec])
        self.refuse(spec)
        return self._submit(spec, mode)

    def with_code(self, specs: Specs) -> Specs:
        """The specs with what their folders of code hold now, of which a copy is kept. Raises `UserError`."""
        if not self.carries_code and any(spec.code is not None for spec in specs):
            raise UserError(
                f"the {self.name} backend does not carry code to the ranks: put the code into an image, and remove `code` from the job"
            )
        return store.all_kept(specs)

    def _submit(self, spec: JobSpec, mode: Mode) -> Submitted:
        with self.exclusive():
            placed = self.place(spec, mode)
            if isinstance(placed, Submitted):
                return placed
            self.check_secrets(spec)
            return self.create(*placed)

    def sweep(self, name: str, specs: Specs, mode: Mode = "attach") -> Sent:
        """Submits the runs of a sweep, one by one where the backend has no arrays. Raises `UserError` before the first."""
        del name
        specs = self.with_code(specs)
        for spec in specs:
            self.refuse(spec)
        return [self._submit(spec, mode) for spec in specs]

    def check_secrets(self, spec: JobSpec) -> None:
        """Raises `UserError` where the value of a secret cannot be had."""
        missing = [name for name in spec.secrets if name not in os.environ]
        if missing and self.secrets_from is not None:
            raise UserError(f"the job needs the secret {missing[0]}: {self.secrets_from}")

    def place(self, spec: JobSpec, mode: Mode) -> tuple[JobSpec, Found | None] | Submitted:
        """What is to be created, and in whose place; or the same job, where it is there already."""
        found = self.find(spec.name)
        if found is None:
            return spec, None
        if mode == "new":
            return spec.model_copy(update={"name": next_name(spec.name, self.taken()), "run_dir": None}), None
        settled = self.settled(found)
        if settled is None:
            return spec, None
        found = settled
        if found.hash is None:
            raise UserError(f"{spec.name} exists, and lockstep did not make it: choose another name")
        status = self.standing(found)
        if mode == "replace" and status.final:
            return spec, found
        started_over = spec.fresh is not None and not status.final and found.plain.get("fresh") != spec.fresh
        own = found.spec
        # Where it can be read, by its settings: defaults may have changed since, and the hash knows only what was set.
        same = found.hash == spec.hash() if own is None else own.same_job(spec, self.name)
        if not same or started_over:
            changed = "; ".join(differences(*found.beside(spec))[:8]) or "an earlier version of the same settings"
            raise UserError(
                f"{spec.name} exists with another spec ({changed}): choose another name, --new for a numbered one, "
                "or cancel it and submit with --replace"
            )
        if not status.final:
            return self.attach(found, spec)
        if status.state not in GOES_ON:
            why = f" ({status.reason})" if status.reason else ""
            raise UserError(
                f"{spec.name} has already finished: {status.state}{why}: "
                "--replace submits it again under this name (its run directory stays), --new under a numbered one"
            )
        return spec, self.gone_on(found, spec)

    def require(self, name: str) -> Found:
        """The job of that name. Raises `UserError` where there is none."""
        found = self.find(name)
        if found is None:
            raise self.no_such(name)
        return found

    def status(self, name: str) -> Status:
        return self.observe(self.require(name))

    def logs(self, name: str, rank: int | None = None, follow: bool = False, last: int | None = None) -> Iterator[str]:
        """Lines of one rank, or of all with `[rank 5] ` before each. Following ends with the job.

        Args:
            last: begin this many lines before the end: of that rank's, or of all ranks' together.
        """
        found = self.require(name)
        spec = self._spec_with(found, rank)
        if last is not None:
            return self.tail(found, spec, rank, follow, last)
        return self.stream(found, spec, rank, follow)

    def _spec_with(self, found: Found, rank: int | None) -> JobSpec | None:
        """The job's spec. Raises `UserError` where it has no such rank."""
        spec = found.spec
        total = self.world(found, spec)
        if rank is not None and not 0 <= rank < total:
            raise UserError(f"{found.name} has the ranks 0 … {total - 1}, got {rank}")
        return spec

    def execute(self, name: str, command: Lines, rank: int = 0, streams: Streams | None = None) -> int:
        """Runs a command beside a rank of a job that runs, and returns its exit code.

        Raises:
            UserError: no such job or rank, one that is not ours, has not started or has ended.
            Unreachable: the connection was lost.
        """
        found = self.require(name)
        if found.hash is None:
            raise UserError(f"lockstep did not make {name}, and leaves it alone")
        spec = self._spec_with(found, rank)
        absent = self.observe(found).absent(rank)
        if absent:
            raise UserError(f"{name} {absent}")
        return self.exec(found, spec, rank, command, streams or Streams())

    def wait(self, name: str, timeout: float, seen: Observer | None = None) -> Status:
        """The final status, or the one at the timeout (seconds). `seen` gets every status on the way, and the last.

        What does not answer, is gone or is not to be believed for `lost_after` seconds is lost.
        """
        deadline = time.monotonic() + timeout
        known: Found | None = None
        status: Status | None = None
        bad_since: float | None = None
        while True:
            problem, way = "", None
            try:
                with self.within(max(deadline - time.monotonic(), LOOK_SECONDS)):
                    job = self.find(name)
                    if job is not None:
                        known = job
                        status = self.observe(job)
                        problem = "" if status.final else self.trouble(status)
                    elif known is None or not self.lost_after:
                        raise self.no_such(name)  # a name that never was is the caller's mistake, not a lost job
                    else:
                        problem = "it is gone from the cluster"
            except self.survived as error:
                if not self.lost_after or (
                    status is None and (isinstance(error, LoggedOut) or not isinstance(error, Unreachable))
                ):
                    raise
                problem, way = str(error), error if isinstance(error, (Disconnected, LoggedOut)) else None
                if status is None and bad_since is None:
                    warn(f"{problem}; waiting")
            now = time.monotonic()
            bad_since = (bad_since or now) if problem else None
            lost = bad_since is not None and now - bad_since >= self.lost_after
            if known is None:
                if lost or now >= deadline:
                    raise way or Unreachable(problem)
                self.pause(known, deadline - now)
                continue
            status = status or Status("running", "")  # it was submitted, and nobody says otherwise
            if lost and way is not None:
                raise way
            if lost:
                status = replace(status, state="lost", reason=f"{problem} (for {self.lost_after:g} s)")
            elif problem:
                status = replace(status, reason=problem)
            if seen is not None:
                seen(status)
            left = deadline - now
            if status.final or left <= 0:
                return status
            with self.within(left):
                self.pause(known, left)

    def cancel(self, name: str) -> Status:
        """Ends a job with its grace, so that it can save. A finished one is left as it is."""
        found = self.require(name)
        if found.hash is None:
            raise UserError(f"lockstep did not make {name}, and leaves it alone")
        status = self.observe(found)
        return status if status.final else self.stop(found)

    def drift(self, spec: JobSpec) -> Lines:
        """`setting: submitted → now` of the job of that name; where none differs, its `changes`."""
        found = self.require(spec.name)
        spec, _ = store.pinned(spec)
        return differences(*found.beside(spec)) or self.changes(found, spec)

    def summary(self, name: str) -> dict[str, Any]:
        """`summary.json` of the finished run. Raises `UserError` where there is none yet."""
        found = self.require(name)
        path = Path(found.record["run_dir"]) / contract.SUMMARY_FILE
        value = files.read_json(path)
        if not isinstance(value, dict):
            raise UserError(f"{path} is not there yet: {name} is {self.observe(found).state}")
        return value


def check_name(name: str) -> None:
    """Raises `UserError` for what cannot be a job's name."""
    if not re.fullmatch(r"[a-z][a-z0-9-]{0,62}", name):
        raise UserError(f"{name!r} is not a job name (lower-case letters, digits and -)")


def next_name(name: str, taken: set[str]) -> str:
    """`name-v2`, or the first number that is free. `name-2` is what a sweep calls one of its runs."""
    versions = (f"-v{number}" for number in itertools.count(2))
    free = (f"{name[: 63 - len(end)].rstrip('-')}{end}" for end in versions)
    return next(found for found in free if found not in taken)

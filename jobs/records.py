"""Records of jobs in $LOCKSTEP_HOME, in folders that only the user can write.

Jobs are executed and unpickled from these folders, so each of them must belong to the user, with mode 700.

A record is validated before use. A full disk, another version or another program may have written it, and one damaged file must not
hide other jobs.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import os
import re
import stat
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from typing_extensions import Self

from lockstep.training import contract, files
from lockstep.training.contract import UserError
from lockstep.wire import hangs
from lockstep.wire.status import slow_rank_of

from .status import Unreachable, warn

JOB = "job.json"
"""The record of a job, in the job's folder."""


def home() -> Path:
    """Returns the folder of this user's jobs, with a folder for each backend. Raises `UserError`."""
    try:
        return Path(os.environ.get("LOCKSTEP_HOME") or Path.home() / ".local/state/lockstep")
    except RuntimeError:  # no HOME and no name of the user, as in many containers
        raise UserError("this user has no home folder to keep jobs in: set LOCKSTEP_HOME") from None


def folder(backend: str) -> Path:
    """Returns the folder of a backend's jobs; the nodes of a SLURM cluster must see this folder. Raises `UserError`."""
    return home().absolute() / backend


def now() -> str:
    """Returns the current time in UTC, as ISO 8601, for a record."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def remember(backend: str, name: str, place: Mapping[str, str]) -> None:
    """Saves the place of a job, for commands with the job's name. Without place flags, removes an earlier note.

    On a machine that cannot save the note, later commands need the flags.
    """
    with contextlib.suppress(UserError, OSError):
        path = home() / "places" / backend / f"{name}.json"
        if place:
            make(path.parent)
            files.replace_json(path, dict(place))
        else:
            path.unlink(missing_ok=True)


def place_of(backend: str, name: str) -> dict[str, str]:
    """Returns flag → value of the job's last submission from this machine; {} if it had no such flags."""
    place: Any = None
    with contextlib.suppress(UserError, OSError):
        path = home() / "places" / backend / f"{name}.json"
        if path.parent.name == backend:  # the name is not a path
            check(path.parent)
            place = files.read_json(path)
    texts = isinstance(place, dict) and all(isinstance(value, str) for value in place.values())
    return place if texts else {}


def make(folder: Path) -> Path:
    """Creates the folder if it is missing, checks it, and returns it. Raises `UserError`."""
    with keeping(folder):
        for place in (*reversed(folder.absolute().parents), folder):  # `parents=True` leaves their mode to the umask
            place.mkdir(exist_ok=True, mode=0o700)
        check(folder)
    return folder


@contextlib.contextmanager
def keeping(
    place: Path, failure: str = "cannot keep jobs in", advice: str = "set LOCKSTEP_HOME"
) -> Iterator[None]:  # fmt: skip
    """Raises `UserError` in place of an `OSError` of the block, which writes records: what failed, the place, the reason, advice."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{failure} {place}: {error.strerror}; {advice}") from None


def make_parents(run_dir: Path) -> None:
    """Creates the folders above a run directory; the run creates the directory itself. Raises `UserError` if a folder cannot be created."""
    with keeping(run_dir, "run_dir: cannot make", "choose another run_dir"):
        run_dir.parent.mkdir(parents=True, exist_ok=True)


def check(folder: Path) -> None:
    """Refuses a folder that another user could have put a payload into. Raises `UserError`, `OSError`."""
    about = folder.lstat()
    mode = stat.S_IMODE(about.st_mode)
    if not stat.S_ISDIR(about.st_mode):
        raise UserError(
            f"{folder} is not a plain folder (a link?): jobs are run from the files in it; set LOCKSTEP_HOME"
        )
    if about.st_uid != os.geteuid():
        raise UserError(
            f"{folder} belongs to user {about.st_uid}: jobs are run from the files in it; set LOCKSTEP_HOME"
        )
    if mode & 0o077:
        raise UserError(f"{folder} can be changed by other users (mode {mode:o}): chmod 700 it")


@contextlib.contextmanager
def locked(folder: Path, seconds: float) -> Iterator[None]:
    """Holds the folder's lock. Raises `UserError` if another command holds the lock for `seconds`, or the folder is not writable."""
    import filelock

    with keeping(folder):
        try:
            with filelock.FileLock(make(folder) / ".lock", timeout=seconds):
                yield
        except filelock.Timeout:
            raise UserError(f"{folder} is locked by another lockstep command: wait for it") from None


# The bounds of amounts in a spec and in the record of a job. They stand here because a supervisor reads records, and no spec.
MAX_GPUS = 64
"""Largest number of GPUs in a node."""
Nodes = Annotated[int, Field(ge=1, le=10000)]
Gpus = Annotated[int, Field(ge=0, le=MAX_GPUS)]
RanksPerNode = Annotated[int, Field(ge=1, le=256)]
MaxRestarts = Annotated[int, Field(ge=0, le=1000)]
GraceSeconds = Annotated[int, Field(ge=5, le=3600)]

R = TypeVar("R", bound="Record")
_MAX_BYTES = 4 << 20
"""Size of a record at most: far above what one has."""
_FOR_A_WHILE = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Errors of a file system, or of a process, that pass. A record that cannot be read for one of them is not damaged."""


def job_record(folder: Path, name: str, kind: type[R]) -> R | None:
    """Returns the record of a job in the folder of a backend; None if there is no job of that name.

    Raises:
        UserError: the record is damaged, or another user could have put it there.
        Unreachable: the file system does not answer now.
    """
    check_name(name)
    return _read(folder / name / JOB, kind) if _is_there(folder) else None


def _read(file: Path, kind: type[R]) -> R | None:
    """Returns the record of a job in a folder that was checked. Raises as `job_record`."""
    for _ in range(2):  # the first read may come while another command replaces the folder
        if not os.path.lexists(file):
            return None
        with contextlib.suppress(OSError, ValueError), _answering(file):
            check(file.parent)
            if (record := kind.parse(files.parsed(files.read(file, _MAX_BYTES)))) is not None:
                return record
    if os.path.lexists(file):
        raise UserError(f"{file} is damaged, or of another version: remove its folder")
    return None


@contextlib.contextmanager
def _answering(path: Path) -> Iterator[None]:
    """Raises `Unreachable` for an error that a shared file system has for a while, such as a handle that is stale."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FOR_A_WHILE:
            raise
        raise Unreachable(f"{path} cannot be read now: {error.strerror}: try again") from None


def job_records(folder: Path, kind: type[R]) -> Iterator[tuple[str, R]]:
    """Yields name and record of each job in the folder of a backend. Warns of a damaged one. Raises `UserError`."""
    for name in sorted(os.listdir(folder)) if _is_there(folder) else ():
        if not name.startswith(".") and os.path.lexists(folder / name / JOB):
            try:
                check_name(name)
                if (record := _read(folder / name / JOB, kind)) is not None:
                    yield name, record
            except UserError as error:
                warn(str(error))


def _is_there(folder: Path) -> bool:
    """Returns whether there is the folder of a backend, which is checked. Raises `UserError` where it cannot be read."""
    with keeping(folder, "cannot look for jobs in"), contextlib.suppress(FileNotFoundError):
        with _answering(folder):
            check(folder)
        if not os.access(folder, os.R_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return True
    return False


Identifier = Annotated[str, StringConstraints(pattern=r"^[^\x00]*[^\s\x00][^\x00]*$")]
"""Key of processes, folders and machines. An empty key would match all of them."""


class Record(BaseModel):
    """A record in a JSON file."""

    model_config = ConfigDict(strict=True, frozen=True, defer_build=True)  # most commands read no record

    @classmethod
    def parse(cls, value: Any) -> Self | None:
        """Returns the record that a plain value holds; None where a key is missing or a value has another type."""
        try:
            return cls.model_validate(value)
        except ValueError:  # pydantic's
            return None

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """Returns the record in a file; None where the file is missing or damaged."""
        return cls.parse(files.read_json(path))

    def write(self, path: Path) -> None:
        """Writes the record to a file. Raises `OSError`."""
        files.replace_json(path, self.model_dump(exclude_unset=True))


class Goodput(Record):
    """The use of a run's time, over all attempts."""

    fraction: float
    """The productive part of the wall clock."""
    lost_to_restarts: float
    """The part of the wall clock that restarts have lost."""
    restarts: int


class RunStatus(Record):
    """status.json of a run."""

    code: int | None
    step: int
    attempt: int
    reason: str
    job: str = ""
    restart: int | None = None
    ranks: list[int] = []
    """Numbers of ranks: now, and at the start. Empty unless ranks were lost and the others continue."""
    goodput: Goodput | None = None
    slow_rank: dict[str, Any] | None = None
    hang: str = ""
    """A sentence about the rank that makes no progress (hang.jsonl)."""


class Process(Record):
    """A supervisor or a launcher, which can be signalled: never a group (0, −1, …) nor init."""

    pid: int = Field(gt=1)
    ticks: int | None


class LocalEnd(Record):
    """The end of a local job."""

    code: int | None
    reason: str
    timed_out: bool
    job: Identifier


class LocalJob(Record):
    """job.json of a local job."""

    spec: dict[str, Any]
    hash: str
    run_dir: Identifier
    command: list[str]
    env: dict[str, str]
    time_limit: float
    grace: float
    created: str
    job: Identifier
    host: Identifier


class TaskResult(Record):
    """The end of a SLURM task, as the task itself has noted it."""

    code: int
    rank: int | None = None
    reason: str = ""
    restart: int = 0
    host: str | None = None
    time: float = 0


class RecordedSpec(Record):
    """The settings of a submitted job that its status and its end need; any version of Lockstep may have written it.

    By these numbers a status is decided, and its nodes are listed. So they have the bounds of the settings.
    """

    model_config = ConfigDict(extra="allow")

    nodes: Nodes
    gpus: Gpus
    ranks_per_node: RanksPerNode | None
    recipe: str | None
    max_restarts: MaxRestarts
    grace_seconds: GraceSeconds
    time_limit: str = Field(pattern=r"^[0-9dhms]{2,28}$")
    live: bool = False

    @property
    def ranks(self) -> int:
        """Ranks a node."""
        return self.ranks_per_node or self.gpus or 1


class SlurmJob(Record):
    """job.json of a SLURM job; `job_id` is None until sbatch has answered."""

    spec: RecordedSpec
    hash: str
    run_dir: Identifier
    submitit: Identifier
    job_id: Identifier | None
    created: str
    since: float
    comment: str
    array_name: str
    element: int | None = None
    job: Identifier

    def numbered(self, number: str) -> SlurmJob:
        """Returns the record with its job id. `number` is the id of the job, or of its array."""
        return self.model_copy(update={"job_id": number if self.element is None else f"{number}_{self.element}"})

    def file(self, what: str) -> Path:
        """Returns a file of this job next to submitit's: `123_0_log.out`, or a task's note such as `123_cancelled`."""
        return Path(self.submitit) / f"{self.job_id}_{what}"

    def notes(self, begin: str, end: str = "") -> dict[int, Path]:
        """Returns the files of this job whose names are `begin`, a number, and `end`, by that number."""
        first = self.file(begin)
        found = first.parent.glob(f"{first.name}*{end}")
        paths = {path.name.removeprefix(first.name).removesuffix(end): path for path in found}
        return {int(number): path for number, path in paths.items() if number.isdecimal()}


def submission_id(name: str) -> str:
    """Returns the id of one submission: its ranks have it in their environment, and write it into status.json."""
    return f"{name}.{uuid.uuid4().hex[:12]}"


def check_name(name: str) -> None:
    """Raises `UserError` if `name` cannot be a job's name."""
    if not re.fullmatch(r"[a-z][a-z0-9-]{0,62}", name):
        raise UserError(f"{name!r} is not a job name (lower-case letters, digits and -)")


def restarts(reported: RunStatus | None) -> int:
    """Returns how often the launcher has started the ranks again, from a run's status.json."""
    return max(0, reported.restart or 0) if reported is not None else 0


def progress(reported: RunStatus | None, again: int | None = None, where: str = "", state: str = "") -> str:
    """Returns how far a running job is, from its status.json: the step, some seconds old at most, and the restarts.

    Args:
        again: restarts of the job, if the cluster counts them.
        where: the nodes that the job runs on.
        state: the cluster's word for the job's state.
    """
    again = restarts(reported) if again is None else again
    begin = "starting" if reported is None else step(reported)
    end = "" if reported is None else trouble(reported)
    return f"{begin}{where}{f', restart {again}' if again else ''}{state}{end}"


def trouble(reported: RunStatus) -> str:
    """Returns how the attempt has ended; for an attempt that runs, which rank hangs."""
    if reported.code == contract.EXIT_DONE:
        return ", ending"
    if reported.code is not None:  # the job restarts itself unless it is over
        return f", the attempt has ended: {contract.printable(reported.reason).removesuffix(f': {contract.RUN_AGAIN}')}"
    return f"; {contract.printable(reported.hang)}" if reported.hang else ""


def step(reported: RunStatus) -> str:
    lost = ", {} of {} ranks".format(*reported.ranks) if len(reported.ranks) == 2 else ""
    return f"step {reported.step}{lost}"


def about_time(reported: RunStatus | None) -> dict[str, Any]:
    """Returns the goodput and the slow rank from a run's status.json. None if the run reports nothing (yet)."""
    if reported is None:
        return {"goodput": None, "slow_rank": None}
    shares = None if reported.goodput is None else reported.goodput.model_dump()
    return {"goodput": shares, "slow_rank": slow_rank_of({"slow_rank": reported.slow_rank})}


def reported(run_dir: Path, job: str) -> RunStatus | None:
    """Returns status.json of this submission, which takes precedence over exit codes; None if the file is missing, or another run's."""
    status = RunStatus.read(run_dir / contract.STATUS_FILE)
    if status is None or status.job != job:
        return None
    hang = hangs.of_run(run_dir)
    return status if hang is None else status.model_copy(update={"hang": hang.said})

"""Records of jobs in $LOCKSTEP_HOME, in folders that only the user can write.

Jobs are executed and unpickled from these folders, so only the user may write to them and to their parents. Then a path that was
checked can be opened by its name.

A record is validated before use. A full disk, another version or another program may have written it, and one damaged file must not
hide other jobs.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import stat
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from typing_extensions import NotRequired, TypedDict

from lockstep.training import contract, files
from lockstep.training.contract import UserError
from lockstep.wire import hangs
from lockstep.wire.status import slow_rank_of

_MOST_LINKS = 40


def home() -> Path:
    """Where the jobs of this user are kept, a folder a backend. Raises `UserError`."""
    try:
        return Path(os.environ.get("LOCKSTEP_HOME") or Path.home() / ".local/state/lockstep")
    except RuntimeError:  # no HOME, and a user of a number only, as in many containers
        raise UserError("this user has no home folder to keep jobs in: set LOCKSTEP_HOME") from None


def remember(backend: str, name: str, place: Mapping[str, str]) -> None:
    """Notes where a job was submitted to, for commands with its name; nothing where that was not said.

    A machine that cannot keep it needs the flags again.
    """
    with contextlib.suppress(UserError, OSError):
        path = home() / "places" / backend / f"{name}.json"
        if place:
            make(path.parent)
            files.replace_json(path, dict(place))
        else:
            path.unlink(missing_ok=True)


def place_of(backend: str, name: str) -> dict[str, str]:
    """Flag → value of where a job was last submitted to from here; {} where that was not said."""
    place: Any = None
    with contextlib.suppress(UserError, OSError):
        path = home() / "places" / backend / f"{name}.json"
        if path.parent.name == backend:  # the name is not a path
            check(path.parent)
            place = files.read_json(path)
    texts = isinstance(place, dict) and all(isinstance(value, str) for value in place.values())
    return place if texts else {}


def make(folder: Path) -> Path:
    """The folder, made where it is missing, and checked. Raises `UserError`."""
    try:
        _way(folder.absolute().parent, make=True)
        folder.mkdir(exist_ok=True, mode=0o700)
        own(folder)
    except OSError as error:
        raise UserError(f"cannot keep jobs in {folder}: {error.strerror}; set LOCKSTEP_HOME") from None
    return folder


def make_way(run_dir: Path) -> None:
    """Makes the folders above a run directory, which the run itself makes. Raises `UserError` if that cannot be."""
    try:
        run_dir.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"run_dir: cannot make {run_dir}: {error.strerror}; choose another run_dir") from None


def check(folder: Path) -> None:
    """Refuses a folder that somebody else could have put a payload into. Raises `UserError`, `OSError`."""
    _way(folder.absolute().parent)
    own(folder)


def own(folder: Path) -> None:
    """`check` of a folder in one that was checked. Raises `UserError`, `OSError`."""
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


def _judge_step(folder: Path, owner: int, mode: int, me: int, group_is_mine: bool = False) -> None:
    """Refuses a folder on the way in which somebody else could rename what comes next. Raises `UserError`."""
    if owner not in (0, me):
        raise UserError(
            f"{folder} belongs to user {owner}, who can put other jobs in the place of yours: set LOCKSTEP_HOME to a "
            "folder below such as only you and root can write"
        )
    # In a folder with the sticky bit only its owner renames what is somebody else's.
    if mode & 0o022 and not mode & stat.S_ISVTX and (mode & 0o002 or not group_is_mine):
        raise UserError(
            f"{folder} can be changed by other users (mode {mode:o}), who can put other jobs in the place of yours: "
            f"chmod go-w {folder}, or set LOCKSTEP_HOME to a folder below such as only you and root can write"
        )


def _way(folder: Path, make: bool = False) -> None:
    """Judges each folder from / to this one, and each link between them. `make`: those that are missing are made.

    From above: what was judged can be renamed by nobody else while the next one is looked at.
    """
    me, at, left, links = os.geteuid(), Path("/"), list(folder.parts[1:])[::-1], 0
    _step(at, at.lstat(), me)
    while left:
        name = left.pop()
        if name == "..":
            at = at.parent
            continue
        place = at / name
        try:
            about = place.lstat()
        except FileNotFoundError:
            if not make:
                raise
            place.mkdir(mode=0o700, exist_ok=True)
            about = place.lstat()
        if not stat.S_ISLNK(about.st_mode):
            _step(place, about, me)
            at = place
            continue
        links += 1
        if links > _MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(folder))
        _judge_step(place, about.st_uid, 0, me)
        target = Path(os.readlink(place))
        at = Path("/") if target.is_absolute() else at
        left += [part for part in target.parts if part != "/"][::-1]


def _step(place: Path, about: os.stat_result, me: int) -> None:
    if not stat.S_ISDIR(about.st_mode):
        raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(place))
    mode = stat.S_IMODE(about.st_mode)
    _judge_step(place, about.st_uid, mode, me, bool(mode & 0o020) and _is_mine(about.st_gid, me))


def _is_mine(group: int, me: int) -> bool:
    """Whether it is this user's private group, as many systems give one to each, with a umask of 002."""
    import grp
    import pwd

    try:
        user, named = pwd.getpwuid(me), grp.getgrgid(group)
    except KeyError:
        return False
    return me != 0 and user.pw_gid == group and named.gr_name == user.pw_name and {*named.gr_mem} <= {user.pw_name}


@contextlib.contextmanager
def locked(folder: Path, seconds: float) -> Iterator[None]:
    """The folder's lock. Raises `UserError`: another command holds it for longer than that, or nothing can be written there."""
    import filelock

    try:
        with filelock.FileLock(make(folder) / ".lock", timeout=seconds):
            yield
    except filelock.Timeout:
        raise UserError(f"{folder} is locked by another lockstep command: wait for it") from None
    except OSError as error:
        raise UserError(f"cannot keep jobs in {folder}: {error.strerror}; set LOCKSTEP_HOME") from None


R = TypeVar("R")


class Goodput(TypedDict):
    """Where the time of a run went, over all attempts."""

    fraction: float
    """Of its wall clock, that was productive."""
    lost_to_restarts: float
    """Of its wall clock, too."""
    restarts: int
    began: NotRequired[float]
    """Seconds since the epoch, by the clock of its machine, at which the first attempt's launcher was started."""


class Said(TypedDict):
    """status.json of a run."""

    code: int | None
    step: int
    attempt: int
    reason: str
    job: NotRequired[str]
    restart: NotRequired[int]
    ranks: NotRequired[list[int]]
    """How many there are and were, where some were lost and the others train on."""
    goodput: NotRequired[Goodput]
    slow_rank: NotRequired[dict[str, Any]]
    hang: NotRequired[str]
    """What is said of a rank that gets no further (hang.jsonl)."""


class Standing(TypedDict):
    """What a rank does, as its node says it (`lockstep.wire.hangs`)."""

    rank: int
    what: str
    where: str
    waits: bool
    stacks: str
    loaders: str
    pid: int
    step: int | None


class Process(TypedDict):
    """A supervisor or a launcher."""

    pid: int
    ticks: int | None


class Ended(TypedDict):
    """How a local job ended."""

    code: int | None
    reason: str
    timed_out: bool
    job: str


class LocalJob(TypedDict):
    """job.json of a local job."""

    spec: dict[str, Any]
    hash: str
    run_dir: str
    command: list[str]
    env: dict[str, str]
    time_limit: float
    grace: float
    created: str
    job: str
    host: str


class Note(TypedDict):
    """What a task of SLURM says of its rank's end."""

    code: int
    rank: NotRequired[int]
    reason: NotRequired[str]
    restart: NotRequired[int]
    host: NotRequired[str]
    time: NotRequired[float]


class SlurmPart(TypedDict):
    """A node in the recorded end of a SLURM job."""

    name: str
    ranks: list[int]
    state: str
    reason: str
    restarts: int


class SlurmEnded(TypedDict):
    """How a SLURM job ended."""

    state: str
    reason: str
    ranks: list[SlurmPart]
    exit_code: int | None
    goodput: NotRequired[dict[str, Any] | None]
    slow_rank: NotRequired[dict[str, Any] | None]


class SlurmJob(TypedDict):
    """job.json of a SLURM job; `job_id` is None until sbatch has answered."""

    spec: dict[str, Any]
    hash: str
    run_dir: str
    submitit: str
    job_id: str | None
    created: str
    since: float
    comment: str
    array_name: str
    element: NotRequired[int | None]
    job: str


_FOUND_BY = ("job", "host", "run_dir", "submitit", "job_id")
"""Processes, folders and machines are found by these. An empty one would find all of them."""
_SHAPES: dict[type[Any], Any] = {}


def _shape(kind: type[Any]) -> Any:
    if kind not in _SHAPES:
        from pydantic import TypeAdapter  # a supervisor needs it at the end of its job only

        _SHAPES[kind] = TypeAdapter(kind)
    return _SHAPES[kind]


def parse(value: Any, kind: type[R]) -> R | None:
    """The record that a plain value holds; None where a key is missing, a value has another type, or a name is blank."""
    try:
        record: R = _shape(kind).validate_python(value, strict=True)
    except ValueError:  # pydantic's
        return None
    words = (value[name] for name in _FOUND_BY if isinstance(value.get(name), str))
    return None if any(not word.strip() or "\0" in word for word in words) else record


def read(path: Path, kind: type[R]) -> R | None:
    """The record in a JSON file; None where the file is missing or damaged."""
    return parse(files.read_json(path), kind)


def process(path: Path) -> Process | None:
    """A process that can be asked for and signalled: never a group (0, −1, …) nor init."""
    record = read(path, Process)
    return record if record is not None and record["pid"] > 1 else None


def identity(name: str) -> str:
    """Returns the id of one submission: its ranks have it in their environment, and write it into status.json."""
    return f"{name}.{uuid.uuid4().hex[:12]}"


def check_name(name: str) -> None:
    """Raises `UserError` for what cannot be a job's name."""
    if not re.fullmatch(r"[a-z][a-z0-9-]{0,62}", name):
        raise UserError(f"{name!r} is not a job name (lower-case letters, digits and -)")


def next_name(name: str, taken: Callable[[str], bool]) -> str:
    """`name-v2`, or the first number that is free. `name-2` is what a sweep calls one of its runs."""
    versions = (f"-v{number}" for number in itertools.count(2))
    free = (f"{name[: 63 - len(end)].rstrip('-')}{end}" for end in versions)
    return next(numbered for numbered in free if not taken(numbered))


def restarts(said: Said | None) -> int:
    """How often the launcher has started the ranks again, from a run's status.json."""
    return max(0, said.get("restart", 0)) if said is not None else 0


def progress(said: Said | None) -> str:
    """Returns how far a running job is, from its status.json: the step, at most some seconds old, and its restarts."""
    if said is None:
        return "starting"
    return step(said) + (f", restart {again}" if (again := restarts(said)) else "") + trouble(said)


def trouble(said: Said) -> str:
    """Returns how the attempt has ended; of one that runs, which rank hangs."""
    if said["code"] == contract.EXIT_DONE:
        return ", ending"
    if said["code"] is not None:  # a job that is not over starts again by itself
        return f", the attempt has ended: {contract.printable(said['reason']).removesuffix(f': {contract.RUN_AGAIN}')}"
    return f"; {contract.printable(text)}" if (text := said.get("hang", "")) else ""


def step(said: Said) -> str:
    lost = ", {} of {} ranks".format(*ranks) if len(ranks := said.get("ranks", [])) == 2 else ""
    return f"step {said['step']}{lost}"


def about_time(said: Said | None, submitted: float | None, placed: float | None = None) -> dict[str, Any]:
    """What a run's status.json says of its time, for `Status`, and what only the dispatcher sees: how long its first start took. None where
    the run says nothing (yet).

    The run's own sums are of a monotonic clock. These seconds are differences of clocks of the wall of several machines, and so in no sum.

    Args:
        submitted: when the job was, in seconds since the epoch. A run that is older than its job has begun in an earlier one.
        placed: when it had its machines; anything but a time between the submission and the start is that of a later start.
    """
    shares: dict[str, Any] | None = None
    if said is not None and "goodput" in said:
        shares = {**said["goodput"]}
        began = shares.pop("began", None)
        if began is not None and submitted is not None and began >= submitted:
            shares["before_start"] = round(began - submitted, 1)
            if placed is not None and int(submitted) <= placed <= began:  # clusters tell whole seconds
                shares["queued"] = round(max(0.0, placed - submitted), 1)
    return {"goodput": shares, "slow_rank": slow_rank_of(said)}


def said(run_dir: Path, job: str) -> Said | None:
    """Returns status.json of this submission, which counts above exit codes; None for one of another run in the directory."""
    status = read(run_dir / contract.STATUS_FILE, Said)
    if status is None or status.get("job") != job:
        return None
    if (told := hangs.of_run(run_dir)) is not None:
        status["hang"] = told.said
    return status

"""Names, ports and exit codes that `jobs/` (outside the job) and `training/` (inside it) share.

Standard library only, so that both sides import it at no cost.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import os
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

VERSION = "0.1.0"

BUCKET_URL = r"(s3|gs|az)://[A-Za-z0-9][A-Za-z0-9._-]{1,221}(/[A-Za-z0-9][A-Za-z0-9._=-]*)+/?"
"""A bucket with a prefix, as a regular expression."""

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
"""Wrong usage, config or data. Running it again gives the same error, so a retry is pointless."""
EXIT_UNREACHABLE = 69
"""A cluster or a bucket does not answer, or not with sense: try again later (sysexits.h: EX_UNAVAILABLE). Never from a job itself."""
EXIT_PREEMPTED = 75
"""The state is saved; run the same command again to resume (sysexits.h: EX_TEMPFAIL)."""
RUN_AGAIN = "run the same command again to resume"
"""How the reason of such an ending ends, for people who start the command themselves."""
EXIT_TIMED_OUT = 124
"""The job's time limit is over (as timeout(1) says it)."""
EXIT_NO_READER = 141
"""The reader of a command's output has left (128 + SIGPIPE, as in a shell)."""

ENV_THREADS = "LOCKSTEP_THREADS"
ENV_METRICS_PORT = "LOCKSTEP_METRICS_PORT"
ENV_METRICS_ADDRESS = "LOCKSTEP_METRICS_ADDRESS"
"""Address that the metrics servers listen on. The images set it to `any`: a container's loopback cannot be reached from
outside."""
ENV_LAUNCHER = "LOCKSTEP_LAUNCHER"
"""Process id of the launcher. It marks the processes of its ranks."""
ENV_RESTARTS = "LOCKSTEP_RESTARTS"
"""How often the launcher has started the ranks before, for whatever reason; set by `python -m lockstep.training launch`."""
ENV_LIVE = "LOCKSTEP_LIVE"
"""Set for the ranks of `launch --live`: the remaining ranks continue after one is lost."""
ENV_NOTE = "LOCKSTEP_NOTE"
"""File in a folder of the launcher's, into which rank 0 writes the path of its run directory."""
ENV_PROGRAM = "LOCKSTEP_PROGRAM"
"""The name by which a command of `python -m lockstep.training` was called, if it was another one: its help and its errors use it."""
ENV_JOB = "LOCKSTEP_JOB"
"""Identity of the submitted job that the ranks belong to; the run's status.json carries it."""
ENV_CODE = "LOCKSTEP_CODE"
"""Identity of the user's own code that the ranks run; run.yaml records it."""
ENV_SESSION = "LOCKSTEP_SESSION"
"""The settings that a job gives the `Session` of its program (`lockstep.wire.payload`)."""
ENV_RUN_DIR = "LOCKSTEP_RUN_DIR"
"""The run directory of the job, for a command that `lockstep exec` runs next to one of its ranks."""
ENV_SECRET = "LOCKSTEP_SECRET"  # noqa: S105 - a variable's name
"""A secret that all nodes of a job share. The launchers sign their messages with this key.
The ranks do not get it."""
ENV_TORTURE = "LOCKSTEP_TORTURE"
"""Marks the processes that `lockstep torture` has started: it signals no others."""
ENV_REPLACEMENT = "LOCKSTEP_REPLACEMENT"
"""Set by `launch --live` for a process in the place of a lost rank: its number among these, from 1."""
OF_A_JOB = (
    ENV_JOB,
    ENV_LAUNCHER,
    ENV_RESTARTS,
    ENV_LIVE,
    ENV_REPLACEMENT,
    ENV_NOTE,
    ENV_CODE,
    ENV_SESSION,
    ENV_RUN_DIR,
)
"""Variables that mark the processes of a job. A job that these processes submit does not inherit them."""
ENV_DEBUG = "LOCKSTEP_DEBUG"
"""With any value, an error of one line has its traceback before it."""
ENV_REVISION = "LOCKSTEP_REVISION"
"""The source's revision, where it was installed without its history (container images)."""

RANK_NAMES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
"""Variables in which launchers give a process its rank; the first that is set counts."""

METRICS_PORT = 9470
"""Base port of the metrics servers, plus the local rank. 9400 belongs to dcgm-exporter."""
MASTER_PORT = 29500

RUN_FILE = "run.yaml"
STATUS_FILE = "status.json"
LOCK_FILE = ".lock"
"""Rank 0 holds its lock as long as it lives."""
EVENTS_FILE = "events.jsonl"
TIME_FILE = "time.jsonl"
SUMMARY_FILE = "summary.json"
HANG_FILE = "hang.jsonl"
"""The verdicts on ranks that hang (`lockstep/wire/hangs.py`)."""
REPORT_FILE = "report.html"
CHECKPOINTS = "checkpoints"
METRICS = "metrics"
MOST_NAMED = 8
"""Up to this many ranks a message names one by one; more are shown as ranges."""

RUN_ENVIRONMENT = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS",
    "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_NNODES",
    "CUDA_VISIBLE_DEVICES", "CUBLAS_WORKSPACE_CONFIG", ENV_THREADS, ENV_METRICS_PORT, ENV_RESTARTS, ENV_CODE,
)  # fmt: skip
"""The only environment variables that `run.yaml` records: an allowlist, so that no secret reaches a file."""


def first_of(names: Sequence[str], most: int = 1) -> str:
    """Returns the first names as text, at most `most`, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def named(ranks: Sequence[int]) -> str:
    """Ranks as text: `1, 5`; for many ranks their ranges, `0–511, 700`, at most `MOST_NAMED` of them."""
    if len(ranks) <= MOST_NAMED:
        return ", ".join(map(str, ranks))
    ranges: list[list[int]] = []
    for rank in ranks:
        if ranges and rank == ranges[-1][1] + 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    parts = [str(low) if low == high else f"{low}–{high}" for low, high in ranges[:MOST_NAMED]]
    left = sum(high - low + 1 for low, high in ranges[MOST_NAMED:])
    return ", ".join(parts) + (f" and {left} more" if left else "")


def printable(text: str) -> str:
    """Returns one line with visible control codes: a name in a file must not move the cursor, rename the window or end the line."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() or letter == "\t" else _visible(letter) for letter in text)


def _visible(letter: str) -> str:
    code = ord(letter)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def rank_of(env: Mapping[str, str]) -> str:
    """Returns the rank that the launcher gave this process, to choose the rank that prints. `world.detect` checks the value."""
    return next((env[name] for name in RANK_NAMES if name in env), "0")


def say(text: str, error: bool = False) -> None:
    """Prints a line, control codes made visible, on standard output or standard error. If that cannot be written, the training continues,
    and no exit code changes."""
    stream = sys.stderr if error else sys.stdout
    try:
        if stream is not None:  # print(file=None) would write into the answer
            print(printable(text) + "\n", end="", file=stream, flush=True)  # one write: ranks share the output
    except (OSError, ValueError):  # full, without a reader, closed: perhaps only now
        atexit.unregister(_flush_or_drop)
        atexit.register(_flush_or_drop)


to_stderr = functools.partial(say, error=True)
"""Prints a line on standard error, as `say`."""


def _flush_or_drop() -> None:
    """Writes what the streams hold, and drops what they cannot write: Python would try again at its end, and exit with 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's text, or the name of its class."""
    return (str(error) or type(error).__name__).splitlines()[0]


def print_error(error: UserError) -> None:
    """Prints what was wrong, one line; before it the traceback, where `LOCKSTEP_DEBUG` asks for it. What all ranks have, rank 0 prints."""
    if error.shared and rank_of(os.environ) != "0":
        return
    if os.environ.get(ENV_DEBUG):
        for line in "".join(traceback.format_exception(error)).splitlines():
            to_stderr(line)
    to_stderr(f"error: {error}")


@contextlib.contextmanager
def answering() -> Iterator[None]:
    """Wraps a command whose result is its output. Ends the process with 141 if the reader has left (`| head`), and with one line and 2
    on a full disk."""
    try:
        try:
            yield
        finally:  # what is left to be written at Python's own end is lost without a word
            # It is None if standard output is closed. sys.stdout may be typer's, which hides errors.
            if sys.__stdout__ is not None:
                sys.__stdout__.flush()
    except (OSError, SystemExit) as error:
        # typer makes an exit with 1 of a reader that has left, and 1 says that a job failed.
        cause = error.__context__ if isinstance(error, SystemExit) else error
        if (
            not isinstance(cause, OSError)
            or cause.filename
            or cause.errno not in (errno.EPIPE, errno.ENOSPC, errno.EDQUOT)
        ):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python would try once more at its end
        if cause.errno != errno.EPIPE:
            to_stderr(f"error: the answer could not be written: {cause.strerror}")
        sys.exit(EXIT_NO_READER if cause.errno == errno.EPIPE else EXIT_USAGE)


def end_process(code: int) -> NoReturn:
    """Ends the process with this exit code, from any thread, whatever the other threads wait for."""
    _flush_or_drop()
    os._exit(code)


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Ends a program with one line and exit code 2 on a `UserError`, which its user can correct."""
    try:
        yield
    except UserError as error:
        print_error(error)
        sys.exit(error.code)


class UserError(Exception):
    """Something that the person who started the run can mend. Ends the process with exit code 2.

    The message is one line: what is wrong, what was expected, what to do.

    Args:
        code: the exit code of the process.
        shared: whether every rank has the same error, so that only rank 0 prints it.
    """

    def __init__(self, message: str, code: int = EXIT_USAGE, shared: bool = False) -> None:
        super().__init__(message)
        self.code, self.shared = code, shared

    def __str__(self) -> str:
        return printable(super().__str__())


def textfile(run_dir: Path, rank: int) -> Path:
    """Returns the path of a rank's metrics in Prometheus' text format: what it served last."""
    return run_dir / METRICS / f"rank-{rank:05d}.prom"

"""python -m lockstep.wire.exec --rank N -- COMMAND …

Runs a command on a rank's node, in the rank's folder and with its environment.

`lockstep exec` starts it on the node. The command takes this process's place, so its exit code and its signals are its own.
The variables that mark a job's processes are removed: neither the command nor a run that it starts belongs to the job.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Mapping

from lockstep.training.cli import Parser
from lockstep.training.contract import (
    ENV_JOB,
    ENV_LAUNCHER,
    ENV_LIVE,
    ENV_NOTE,
    ENV_REPLACEMENT,
    ENV_RESTARTS,
    ENV_RUN_DIR,
    ENV_SESSION,
    UserError,
    rank_of,
    to_stderr,
    user_errors,
)

from .progress import stat_of, variables_of

_OF_THE_RANK = (ENV_JOB, ENV_LAUNCHER, ENV_RESTARTS, ENV_LIVE, ENV_REPLACEMENT, ENV_SESSION, ENV_NOTE)
"""Variables of a rank that the command must not have. The last two would make a Session of the command write into the run of the job,
and report its progress as that of the rank."""
_FROM_SLURM = {"RANK": "SLURM_PROCID", "LOCAL_RANK": "SLURM_LOCALID", "WORLD_SIZE": "SLURM_NTASKS"}


def processes() -> Iterator[tuple[int, dict[str, str]]]:
    """Yields (id, environment) of every process of this user on this node."""
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (env := variables_of(int(entry))):
            yield int(entry), env


def ranks(here: Mapping[str, str]) -> dict[int, tuple[int, dict[str, str]]]:
    """Returns rank → (process, environment) on this node. Children of a rank inherit its environment, so the oldest process is the rank.

    Args:
        here: this process's environment. If it names a job or a launcher, only ranks of that job or launcher count.
    """
    job_marks = {name: here[name] for name in (ENV_JOB, ENV_LAUNCHER) if name in here}
    candidates = [
        (began, pid, env)
        for pid, env in processes()
        if ENV_LAUNCHER in env and job_marks.items() <= env.items() and pid != os.getpid() and (began := _began(pid)) is not None
    ]  # fmt: skip
    youngest_first = sorted(candidates, key=lambda item: item[:2], reverse=True)
    return {int(rank): (pid, env) for _, pid, env in youngest_first if (rank := rank_of(env)).isdecimal()}


def _began(pid: int) -> int | None:
    """Returns the start of a process in clock ticks; None: it has ended."""
    fields = stat_of(pid)
    return None if not fields or fields[0] == "Z" else int(fields[19])


def environment(rank_env: Mapping[str, str], args: argparse.Namespace) -> dict[str, str]:
    """Returns the command's variables: the rank's, without those that mark a process of the job."""
    env = {name: value for name, value in rank_env.items() if name not in _OF_THE_RANK}
    # A recipe reads SLURM's own names.
    env |= {name: env[source] for name, source in _FROM_SLURM.items() if name not in env and source in env}
    if args.run_dir:
        env[ENV_RUN_DIR] = args.run_dir
    if "TERM" in os.environ:  # of the terminal that the command is typed in
        env["TERM"] = os.environ["TERM"]
    return env


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = Parser(prog="python -m lockstep.wire.exec", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--run-dir", default="", help=f"{ENV_RUN_DIR} of the command")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args(argv)
    args.command = args.command[1:] if args.command[:1] == ["--"] else args.command
    return args


def main(argv: list[str]) -> int:
    """Executes the command in this process. Returns an exit code only if that fails. Raises `UserError`."""
    args = _parse(argv)
    if not os.path.isdir("/proc/self"):
        raise UserError("the processes of this machine are not to be seen: /proc is Linux's")
    rank_process = ranks(os.environ).get(args.rank)
    if rank_process is None:
        raise UserError(f"rank {args.rank} does not run: it has ended, or has not begun, or is being started again")
    pid, rank_env = rank_process
    env = environment(rank_env, args)
    with contextlib.suppress(OSError):  # this process may not see the rank's folder
        os.chdir(os.readlink(f"/proc/{pid}/cwd"))
    env["PWD"] = os.getcwd()
    try:
        os.execvpe(args.command[0], args.command, env)  # noqa: S606 - without a shell, as it was given
    except OSError as error:
        to_stderr(f"error: cannot start {args.command[0]!r}: {error.strerror}")
        return 127 if isinstance(error, FileNotFoundError) else 126  # as a shell has it


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # before the command is there, Ctrl-C needs no traceback
    with user_errors():
        sys.exit(main(sys.argv[1:]))

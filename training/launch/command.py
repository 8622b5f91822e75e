"""python -m lockstep.training launch [--ranks N] [--nodes N] … run RECIPE …   |   launch … -- COMMAND …

The launcher is PID 1 of a node: it starts the ranks, and restarts them if one fails. It forwards signals to the ranks and prefixes each
line of output with its rank. Its exit code tells the cluster what to do next.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping
from pathlib import Path

from lockstep.wire import payload
from lockstep.wire.hangs import Hangs
from lockstep.wire.signals import FORWARDED

from .. import extras
from ..cli import PROGRAM, Parser, count, positive
from ..contract import (
    CHECKPOINTS,
    ENV_LAUNCHER,
    ENV_LIVE,
    ENV_NOTE,
    ENV_REPLACEMENT,
    ENV_SECRET,
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_PREEMPTED,
    EXIT_TIMED_OUT,
    MASTER_PORT,
    UserError,
    first_line,
    to_stderr,
)  # fmt: skip
from ..limits import GRACE_SECONDS, LOST_LIVE_SECONDS, LOST_SECONDS
from ..parallel import stores
from ..parallel.cores import cores
from . import exec_rank
from .coordinator import Coordinator
from .ending import Attempts, cluster_code, exit_code
from .node_agent import NodeAgent
from .nodes import CannotMeet, Meeting, opened
from .workers import Interrupted, handle, leave_while_waiting, nothing


def main(argv: list[str]) -> int:
    """Launches and returns the code for the cluster. Raises `UserError` for wrong arguments."""
    extras.require("torch")  # on the only node it is imported when the ranks have been started
    args = _parse(argv, os.environ)
    nodes = _meeting(args, os.environ.get(ENV_SECRET, ""))
    # The ranks need no secret; and what a launcher gave this one is not theirs.
    for name in (ENV_SECRET, ENV_LIVE, ENV_REPLACEMENT):
        os.environ.pop(name, None)
    payload.enter(args)
    if shutil.which(args.command[0]) is None:
        raise UserError(
            f"launch: {args.command[0]} is no executable program on PATH: write ./{args.command[0]}, or put its interpreter before it"
        )
    args.command = exec_rank.wrapped(args.command)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // args.ranks)))
    os.environ.setdefault("PYTHONHASHSEED", "0")  # a set of texts has the same order on all ranks, and in each start
    os.environ[ENV_LAUNCHER] = str(os.getpid())
    # The first node counts for all.
    attempts = Attempts(args.restarts_dir if nodes.serves else None, args.max_restarts)
    if not attempts.begin():
        to_stderr(f"launch: the job was restarted {args.max_restarts} times, as often as --max-restarts allows")
        return EXIT_FAILED
    # Ignored, as a parent may have left it, it hides how ranks have ended.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    args.caught = tuple(number for number in FORWARDED if signal.getsignal(number) is not signal.SIG_IGN)
    with tempfile.TemporaryDirectory(prefix="lockstep-", ignore_cleanup_errors=True) as folder:
        note = Path(folder) / "run"
        os.environ[ENV_NOTE] = str(note)
        code, final, first = _run(args, nodes, attempts, Hangs(Path(folder)))
        if code == EXIT_FAILED and args.exit_codes == "plain":
            _tell_saved(note)
    if args.session is not None and code == EXIT_DONE and (warning := args.session.unused()):
        to_stderr(f"launch: warning: {warning}")
    attempts.end(code, final)
    if not first:
        handle(args.caught, leave_while_waiting)
        with contextlib.suppress(Interrupted):
            time.sleep(args.linger)
        handle(args.caught, nothing)
    return code if final else cluster_code(code, args.exit_codes, attempts.used, args.max_restarts)


def _run(args: argparse.Namespace, nodes: Meeting, attempts: Attempts, hangs: Hangs) -> tuple[int, bool, bool]:
    """Returns (exit code of the ranks, whether no cluster may restart this node, whether this node leaves first)."""
    began, group, final = time.monotonic(), None, False
    handle((*args.caught, signal.SIGALRM), leave_while_waiting)
    signal.setitimer(signal.ITIMER_REAL, args.time_limit)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)  # they were held back until here
        store, number = opened(nodes)
        group = NodeAgent(args, nodes, attempts, hangs) if number else Coordinator(args, nodes, attempts, hangs, store)
        group.catch(began)
        if isinstance(group, NodeAgent):
            assert store is not None
            ending = group.run(store, number)
            return group.settled(ending.code, {}), ending.final, ending.first == group.index
        codes = group.run()
        code = group.settled(exit_code(codes.values()) if codes else EXIT_DONE, codes)
        return code, False, group.part(code, codes)
    except Interrupted as error:
        handle(args.caught, signal.SIG_IGN)
        over = error.number == signal.SIGALRM if group is None else group.timed_out
        what = f"the time limit of {args.time_limit} s is over" if over else error.number.name
        again = " again" if group is not None and group.starts else ""
        code, why = EXIT_TIMED_OUT if over else EXIT_PREEMPTED, f"{what} before the ranks had started{again}"
    except CannotMeet as error:
        code, why, final = error.code, str(error), error.final
    except OSError as error:
        code, why = EXIT_FAILED, f"a rank cannot be started: {error.strerror or error}"
    except stores.lost() as error:
        code, why = EXIT_FAILED, f"the store where ranks or nodes meet is lost: {first_line(error)}"
    to_stderr(f"launch: {why}")
    first = True
    if isinstance(group, Coordinator):
        group.note(code, why)
        with contextlib.suppress(*stores.lost()):
            first = group.part(code, (), final)
    return code, final, first


def _parse(argv: list[str], env: Mapping[str, str]) -> argparse.Namespace:
    """Returns the flags, with the `command` of a rank, the number of `ranks`, and whether the ranks are `ours`. Raises `UserError`."""
    parser = Parser(
        prog=f"{PROGRAM} launch", description="Starts the ranks of this node and waits for their end.",
        epilog="COMMAND is `run RECIPE …` (any `python -m lockstep.training` command), or `-- PROGRAM …` for your own program.",
    )  # fmt: skip
    parser.add_argument("--ranks", default=env.get("PET_NPROC_PER_NODE", "auto"),
                        help="ranks on this node; auto: one per visible GPU, or 2 without a GPU")  # fmt: skip
    parser.add_argument("--nodes", default=env.get("PET_NNODES", "1"), help="number of nodes (default 1)")
    parser.add_argument("--rendezvous", default=_endpoint(env), metavar="HOST:PORT",
                        help="address where the nodes meet; the node of that name serves it")  # fmt: skip
    parser.add_argument("--serve", action=argparse.BooleanOptionalAction, default=_serves(env),
                        help="this node serves the rendezvous (default: the one whose name matches)")  # fmt: skip
    parser.add_argument("--job-id", default=env.get("PET_RDZV_ID", "lockstep"), help="the same on all nodes of a job")
    parser.add_argument("--address", default=node_address(env, socket.gethostname()),
                        help="this node's address as the others see it; default: its host name")  # fmt: skip
    parser.add_argument("--max-restarts", type=count, default=env.get("PET_MAX_RESTARTS", "0"),
                        help="restarts after a failure, of all ranks of all nodes (default 0)")  # fmt: skip
    parser.add_argument("--join-timeout", type=count, default="600", metavar="SECONDS",
                        help="how long to wait for the other nodes (default 600)")  # fmt: skip
    parser.add_argument("--linger", type=count, default="0", metavar="SECONDS",
                        help="seconds to stay after rank 0's node; for clusters that end a job with its first node")  # fmt: skip
    parser.add_argument("--grace", type=positive, metavar="SECONDS",
                        help=f"seconds between a signal and the kill (default {GRACE_SECONDS:g}, or more if the run asks)")  # fmt: skip
    parser.add_argument("--live", action="store_true",
                        help="if a rank or a node is lost, the others continue (sync.name=exact)")  # fmt: skip
    parser.add_argument("--min-ranks", type=positive, metavar="N",
                        help="with --live: fewer ranks do not continue, and all start again (default 1)")  # fmt: skip
    parser.add_argument("--lost-seconds", type=positive, metavar="SECONDS",
                        help="with --live: a silent node is lost after this time (default 10)")  # fmt: skip
    parser.add_argument("--time-limit", type=count, default="0", metavar="SECONDS",
                        help=f"end the ranks after this time, with a checkpoint and exit code {EXIT_TIMED_OUT}; 0: never")  # fmt: skip
    parser.add_argument("--exit-codes", choices=("plain", "kubernetes"), default="plain",
                        help="kubernetes: end with codes from 128 on where the operator shall start the pod again")  # fmt: skip
    parser.add_argument("--restarts-dir", type=Path, metavar="DIR",
                        help="folder on shared storage that keeps the job's restart count, also for a replaced first node")  # fmt: skip
    parser.add_argument("--prefix", action=argparse.BooleanOptionalAction, default=True,
                        help="put the rank at the beginning of every line")  # fmt: skip
    payload.add_arguments(parser)
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND", help="what each rank runs: see below")
    args = parser.parse_args(argv)
    if not args.command:
        parser.error("nothing to launch: add `run RECIPE …`, or `-- PROGRAM …`")
    if not args.live and (args.min_ranks or args.lost_seconds):
        parser.error("--min-ranks and --lost-seconds need --live")
    args.min_ranks = args.min_ranks or 1
    args.lost_seconds = args.lost_seconds or (LOST_LIVE_SECONDS if args.live else LOST_SECONDS)
    args.ours = args.command[0] == "run"
    if args.command[0] == "--":
        args.command = args.command[1:] or parser.error("nothing after --")
    else:
        args.command = [sys.executable, "-u", "-m", "lockstep.training", *args.command]
    args.ranks = rank_count(args.ranks, args.command)
    if args.min_ranks > (ranks := _node_count(args.nodes) * args.ranks):
        raise UserError(f"--min-ranks {args.min_ranks}, but there are {ranks} ranks")
    return args


def _node_count(text: str) -> int:
    """Returns the number of nodes of `--nodes`. The operator of a PyTorchJob writes it twice, as N:N. Raises `UserError`."""
    match = re.fullmatch(r"([1-9]\d{0,4})(:\1)?", text)
    if not match:
        raise UserError(f"--nodes must be a number from 1; got {text!r}")
    return int(match[1])


def _meeting(args: argparse.Namespace, secret: str) -> Meeting:
    """Returns the rendezvous of the nodes, from the launcher's flags. Raises `UserError`."""
    count = _node_count(args.nodes)
    if count == 1:
        return Meeting("", "", uuid.uuid4().hex, "127.0.0.1", 1, args.join_timeout, host=True)
    if not args.rendezvous:
        raise UserError(f"--nodes {args.nodes} needs --rendezvous HOST:PORT, the same on every node")
    return Meeting(
        args.rendezvous, secret.strip(), args.job_id, args.address, count, args.join_timeout, host=args.serve
    )


def _endpoint(env: Mapping[str, str]) -> str:
    if "PET_RDZV_ENDPOINT" in env:
        return env["PET_RDZV_ENDPOINT"]
    return f"{env['PET_MASTER_ADDR']}:{env.get('PET_MASTER_PORT', MASTER_PORT)}" if "PET_MASTER_ADDR" in env else ""


def node_address(env: Mapping[str, str], host: str) -> str:
    """Returns the host name, in the master's domain if it has one: TrainJob's pods know each other only as `host.job`."""
    master, _, domain = env.get("PET_MASTER_ADDR", "").partition(".")
    return f"{host}.{domain}" if domain and not master.isdigit() and "." not in host else host


def _serves(env: Mapping[str, str]) -> bool | None:
    return env["PET_NODE_RANK"] == "0" if "PET_NODE_RANK" in env and "PET_RDZV_ENDPOINT" not in env else None


def rank_count(text: str, command: list[str]) -> int:
    """Returns the number of ranks of `--ranks`: a number, or `auto`, the visible GPUs or else 2. Raises `UserError`."""
    if text == "auto":
        return ("device=cpu" not in command and _gpus()) or 2
    if not re.fullmatch(r"[1-9]\d{0,3}", text):
        raise UserError(f"--ranks must be a number from 1, or auto; got {text!r}")
    return int(text)


def _gpus() -> int:
    """Returns the number of visible GPUs. Without a driver there is none, and no need to import torch, which takes seconds."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        if not Path("/dev/kfd").exists():  # AMD's
            return 0
    import torch

    return torch.cuda.device_count()


def _tell_saved(note: Path) -> None:
    """Prints which step of the run is saved, if rank 0 was on this node and has written the run directory into the file `note`."""
    with contextlib.suppress(OSError):
        from ..checkpoint import store

        run = Path(os.fsdecode(note.read_bytes()))
        for newest in store.candidates(run / CHECKPOINTS)[:1]:
            to_stderr(f"launch: step {store.step_of(newest)} is saved: the same command resumes there")

"""python -m lockstep.training launch [--ranks N] [--nodes N|MIN:MAX] … run RECIPE …   |   launch … -- COMMAND …

PID 1 of a node: torch's own elastic agent starts the ranks as one gang and restarts them together. What it adds:
an exit code 2 or 75 ends the restarts, signals reach the ranks instead of ending the agent, every line of output
carries its rank, and the exit code says what the cluster should do next.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousError, RendezvousTimeoutError

from lockstep.training.cli import PROGRAM, Parser, count
from lockstep.training.contract import (
    CHECKPOINTS,
    ENV_LAUNCHER,
    ENV_NOTE,
    ENV_RESTARTS,
    ENV_SECRET,
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_PREEMPTED,
    EXIT_TIMED_OUT,
    EXIT_USAGE,
    MASTER_PORT,
    UserError,
    to_stderr,
)  # fmt: skip
from lockstep.training.launch import guard, lines, rendezvous
from lockstep.training.launch.ending import (
    FINAL,
    Attempts,
    ExitBarrier,
    cluster_code,
    deaths,
    exit_code,
    failed_ranks,
    forget_ended,
    tell_ranks,
    too_early,
)
from lockstep.training.launch.rendezvous import NotMet, Several
from lockstep.training.parallel.world import cores
from lockstep.wire import payload
from lockstep.wire.signals import FORWARDED, PendingSignals

STOP_SECONDS = 30
"""Time that ranks have to end before they are started again."""


class Agent(LocalElasticAgent):
    """torch's agent, which knows which endings are final and hands signals on.

    Args:
        ours: the ranks are `python -m lockstep.training run`, which saves on a signal; else a program of which nothing is known.
        caught: without signals that the launcher ignores (nohup): the ranks ignore them, too.
        finish_lines: prints what killed ranks began.
        serves: the rendezvous is in this process.
        guarded: takes the ranks' processes, which end with this one however it ends.
    """

    def __init__(
        self, spec: WorkerSpec, logs: DefaultLogsSpecs, prefix: str | None, *, attempts: Attempts, grace: int, ours: bool,
        caught: tuple[signal.Signals, ...], finish_lines: Callable[[], None], serves: bool,
        guarded: Callable[[Iterable[int]], None],
    ) -> None:  # fmt: skip
        super().__init__(spec, logs, log_line_prefix_template=prefix)
        self.attempts, self.grace, self.ours, self.caught = attempts, grace, ours, caught
        self.finish_lines, self.serves, self.guarded = finish_lines, serves, guarded
        self.signalled: int | None = None
        self.timed_out = False
        self.held = PendingSignals()
        """Signals for ranks that are starting."""
        self.starts = attempts.used
        """How often the ranks were started before, by this launcher or one that it replaced."""
        self.barrier: ExitBarrier | None = None
        """Of this round, where there are other nodes."""
        self._ended: RunResult | None = None
        """How the ranks of this node have ended well."""

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self.barrier = self._ended = None
        handler = worker_group.spec.rdzv_handler
        with rendezvous.reporting_missing(handler):
            super()._rendezvous(worker_group)
        store, nodes, node = worker_group.store, worker_group.group_world_size, worker_group.group_rank
        assert store is not None and nodes is not None and node is not None
        if isinstance(handler, Several) and nodes > 1:
            self.barrier = ExitBarrier(handler, store, nodes, node, self.serves)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self.attempts.restarted(worker_group.spec.max_restarts - self._remaining_restarts)
        os.environ[ENV_RESTARTS] = str(self.starts)
        self.finish_lines()
        self.starts += 1  # a change of membership counts here, and not as a restart
        earlier, self.held = self.held, PendingSignals(self.grace)  # from here on it takes what comes
        self.held.inherit(earlier)
        # Ours take signals from the moment they catch them, and inherit that they wait until then.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED if self.ours else ())
        try:
            with _ignored_stays_ignored():
                ids: dict[int, Any] = super()._start_workers(worker_group)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self.catch()  # torch has just installed handlers of its own, which would end the agent
        self.guarded(ids.values())
        if self.signalled is not None:
            self._forward(self.signalled, None)  # it came while the ranks were starting
        return ids

    def _stop_workers(self, worker_group: WorkerGroup) -> None:  # noqa: ARG002 - torch's signature
        self._end(signal.SIGTERM, STOP_SECONDS)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 0) -> None:  # noqa: ARG002 - torch's own limit
        self._end(death_sig, self.grace)

    def _end(self, death_sig: signal.Signals, seconds: int) -> None:
        if self._pcontext is not None:
            self._pcontext.close(death_sig, seconds)
        super()._shutdown(death_sig)

    @property
    def done(self) -> bool:
        """All ranks have ended well, those of the other nodes, too."""
        return self._worker_group.state == WorkerState.SUCCEEDED or (self.barrier is not None and self.barrier.over)

    @property
    def _waits(self) -> bool:
        """No rank of this node runs: they have ended, or the old ones are gone and the new ones wait for other nodes."""
        ended = self.barrier is not None and self.barrier.done
        return ended or self._worker_group.state in (WorkerState.SUCCEEDED, WorkerState.STOPPED)

    def catch(self) -> None:
        _handle(self.caught, self._forward)

    def _forward(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - the handler's signature
        if self.ours or number in (signal.SIGTERM, signal.SIGINT):  # what else a program does with a USR1 is its own
            if self.signalled is None:
                signal.signal(signal.SIGALRM, self._kill)
                signal.setitimer(signal.ITIMER_REAL, self.grace)
            self.signalled = number
        if self._waits and not (self.ours or number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM)):
            return self.held.send((), number)  # for the ranks that start next
        if self._pcontext is None or self._waits:
            raise SignalException(f"signal {number}", signal.Signals(number))
        self.held.send(self._pcontext.pids().values(), number)

    def limit(self, seconds: float) -> None:
        """Ends the ranks after `seconds`, as TERM does."""
        signal.signal(signal.SIGALRM, self._over)
        signal.setitimer(signal.ITIMER_REAL, seconds)

    def _over(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - the handler's signature
        self.timed_out = True
        self._forward(signal.SIGTERM, frame)

    def _kill(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - the handler's signature
        """The grace is over: who still runs is killed. Again and again: a rank may just be starting."""
        signal.setitimer(signal.ITIMER_REAL, 1)
        if self._pcontext is not None and not self._waits:
            self.held.send(self._pcontext.pids().values(), signal.SIGKILL)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self._ended is None:
            result = self._look(worker_group)
            if result.state != WorkerState.SUCCEEDED or self.barrier is None:
                return result
            self._ended = result
        assert self.barrier is not None
        if not self.barrier.reached():
            return RunResult(state=WorkerState.HEALTHY)  # a node that comes anew has the ranks start again
        if self.barrier.lost:
            to_stderr("launch: a node was lost before it ended: the ranks restart without it")
            return RunResult(state=WorkerState.UNHEALTHY if self._remaining_restarts > 0 else WorkerState.FAILED)
        if self.barrier.verdict is None:
            return self._ended
        self._remaining_restarts = 0
        return RunResult(state=WorkerState.FAILED)

    def _exit_barrier(self) -> None:
        """torch's own bounded wait for the other nodes: `ExitBarrier` has none, and knows more."""

    def _look(self, worker_group: WorkerGroup) -> RunResult:
        assert self._pcontext is not None
        self.held.release(self._pcontext.pids().values())
        tell_ranks(worker_group, failed_ranks(worker_group, self._pcontext))
        failed = failed_ranks(worker_group, self._pcontext)  # more may have ended meanwhile
        result: RunResult = super()._monitor_workers(worker_group)
        if not self.held.delivered:
            forget_ended(result, failed)
        ended = {failure.exitcode for failure in result.failures.values()}
        handler = worker_group.spec.rdzv_handler
        if ended == {EXIT_PREEMPTED} and self.signalled is None and handler.num_nodes_waiting() > 0:
            # Another node's agent saw a newcomer first and asked its ranks to leave; ours left with them.
            return RunResult(state=WorkerState.HEALTHY)
        if self.signalled is None and result.is_failed():
            self.signalled = self.held.ending(ended)  # one that no rank has used for itself
        for line in deaths(result, self.signalled, failed, self.ours):
            to_stderr(f"launch: {line}")
        if not self.ours and (name := too_early(result, self.signalled)):
            to_stderr(f"launch: the ranks were ended by {name}, which they did not catch")
        final = not ended.isdisjoint(FINAL)
        if result.is_failed() and (final or self.signalled is not None):
            self._remaining_restarts = 0
        if result.is_failed() and self._remaining_restarts > 0:
            left = self._remaining_restarts - 1
            to_stderr(f"launch: all ranks start again; restarts left after that: {left}")
        return result


def _parse(argv: list[str], env: Mapping[str, str]) -> tuple[argparse.Namespace, list[str]]:
    parser = Parser(
        prog=f"{PROGRAM} launch", description="Starts the ranks of this node and waits for their end.",
        epilog="COMMAND is `run RECIPE …` (any `python -m lockstep.training` command), or `-- PROGRAM …` for your own program.",
    )  # fmt: skip
    parser.add_argument("--ranks", default=env.get("PET_NPROC_PER_NODE", "auto"),
                        help="ranks on this node; auto: one per visible GPU, or 2 without a GPU")  # fmt: skip
    parser.add_argument("--nodes", default=env.get("PET_NNODES", "1"),
                        help="number of nodes, or MIN:MAX for an elastic job")  # fmt: skip
    parser.add_argument("--rendezvous", default=_endpoint(env), metavar="HOST:PORT",
                        help="address where the nodes meet; the node of that name serves it")  # fmt: skip
    parser.add_argument("--serve", action=argparse.BooleanOptionalAction, default=_serves(env),
                        help="this node serves the rendezvous (default: the one whose name matches)")  # fmt: skip
    parser.add_argument("--job-id", default=env.get("PET_RDZV_ID", "lockstep"),
                        help="the same on all nodes of a job")  # fmt: skip
    parser.add_argument("--address", default=node_address(env, socket.gethostname()),
                        help="this node's address as the others see it; default: its host name")  # fmt: skip
    parser.add_argument("--max-restarts", type=count, default=env.get("PET_MAX_RESTARTS", "0"),
                        help="restarts after a failure, of all ranks of the node (default 0)")  # fmt: skip
    parser.add_argument("--join-timeout", type=count, default="600", metavar="SECONDS",
                        help="how long to wait for the other nodes (default 600)")  # fmt: skip
    parser.add_argument("--linger", type=count, default="0", metavar="SECONDS",
                        help="seconds to stay after rank 0's node; for clusters that end a job with its first node")  # fmt: skip
    parser.add_argument(
        "--grace", type=int, default=60, help="seconds that the ranks have after a signal, before they are killed"
    )
    parser.add_argument("--time-limit", type=count, default="0", metavar="SECONDS",
                        help=f"end the ranks after this time, with a checkpoint and exit code {EXIT_TIMED_OUT}; 0: never")  # fmt: skip
    parser.add_argument("--exit-codes", choices=("plain", "kubernetes"), default="plain",
                        help="kubernetes: end with codes from 128 on where the operator shall start the pod again")  # fmt: skip
    parser.add_argument("--restarts-dir", type=Path, metavar="DIR",
                        help="folder on shared storage that keeps this node's restart count, also for its replacement")  # fmt: skip
    parser.add_argument("--prefix", action=argparse.BooleanOptionalAction, default=True,
                        help="put the rank at the beginning of every line")  # fmt: skip
    payload.add_arguments(parser)
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND", help="what each rank runs: see below")
    args = parser.parse_args(argv)
    if not args.command:
        parser.error("nothing to launch: add `run RECIPE …`, or `-- PROGRAM …`")
    if args.command[0] == "--":
        command = args.command[1:] or parser.error("nothing after --")
    else:
        command = [sys.executable, "-u", "-m", "lockstep.training", *args.command]
    return args, command


def _endpoint(env: Mapping[str, str]) -> str:
    if "PET_RDZV_ENDPOINT" in env:
        return env["PET_RDZV_ENDPOINT"]
    return f"{env['PET_MASTER_ADDR']}:{env.get('PET_MASTER_PORT', MASTER_PORT)}" if "PET_MASTER_ADDR" in env else ""


def node_address(env: Mapping[str, str], host: str) -> str:
    """The host name, in the master's domain where that has one: TrainJob's pods know each other as `host.job` only."""
    master, _, domain = env.get("PET_MASTER_ADDR", "").partition(".")
    return f"{host}.{domain}" if domain and not master.isdigit() and "." not in host else host


def _serves(env: Mapping[str, str]) -> bool | None:
    return env["PET_NODE_RANK"] == "0" if "PET_NODE_RANK" in env and "PET_RDZV_ENDPOINT" not in env else None


def rank_count(text: str, command: list[str]) -> int:
    """`--ranks`: a number, or `auto` for the visible GPUs, else 2. Raises `UserError`."""
    gpus = 0 if "device=cpu" in command else torch.cuda.device_count()
    if text == "auto":
        return gpus or 2
    if not re.fullmatch(r"[1-9]\d{0,3}", text):
        raise UserError(f"--ranks must be a number from 1, or auto; got {text!r}")
    if gpus and int(text) > gpus and os.environ.get("CUDA_VISIBLE_DEVICES") != "":
        raise UserError(f"--ranks {text}, but {gpus} GPUs are visible: start at most one rank a GPU")
    return int(text)


def _why_not(program: str) -> str:
    """Why a program cannot be started, and what to do."""
    if not os.path.isfile(program):
        return f"there is no program {program!r}"
    if os.access(program, os.X_OK):
        return f"{program} is in this folder, and not on PATH: write ./{program}"
    interpreter = "python" if program.endswith(".py") else "sh"
    return f"{program} is not executable: put its interpreter before it, as in -- {interpreter} {program}"


def main(argv: list[str], env: Mapping[str, str] | None = None) -> int:
    """Launches and returns the code for the cluster. Raises `UserError` for wrong arguments."""
    env = os.environ if env is None else env
    args, command = _parse(argv, env)
    ranks = rank_count(args.ranks, command)
    parameters = rendezvous.parameters(args, env.get(ENV_SECRET, ""))
    os.environ.pop(ENV_SECRET, None)  # the ranks need it for nothing
    payload.enter(args)
    if shutil.which(command[0]) is None:
        raise UserError(f"launch: {_why_not(command[0])}")
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // ranks)))
    os.environ[ENV_LAUNCHER] = str(os.getpid())
    # A replaced agent cannot join a later round while the agents share one store (training/launch tests).
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the ranks have said why
    attempts = Attempts(args.restarts_dir, args.address, args.max_restarts)
    if not attempts.begin():
        to_stderr(f"launch: this node was restarted {args.max_restarts} times, as often as --max-restarts allows")
        return EXIT_FAILED
    caught = tuple(number for number in FORWARDED if signal.getsignal(number) is not signal.SIG_IGN)
    try:
        with (
            tempfile.TemporaryDirectory(prefix="lockstep-", ignore_cleanup_errors=True) as logs,
            lines.whole_lines() as finish_lines,
            _guard(args.grace) as guarded,
        ):
            os.environ[ENV_NOTE] = str(Path(logs) / "run")
            code, barrier = _run(args, command, ranks, parameters, logs, attempts, finish_lines, caught, guarded)
            if code == EXIT_FAILED and args.exit_codes == "plain":
                _tell_where_it_resumes(Path(os.environ[ENV_NOTE]))
    except NotMet as error:
        to_stderr(f"launch: {error}: giving up")
        attempts.end(EXIT_FAILED, final=True)
        return EXIT_FAILED  # as it is: it was no failure, and no cluster shall start this node again
    payload.leave(args, code)
    final = barrier is not None and barrier.final  # another node has ended the job with this code
    attempts.end(code, final)
    if barrier is not None:
        _handle(caught, _leave_while_waiting)
        with contextlib.suppress(SignalException):
            barrier.leave(args.linger)
        _handle(caught, _nothing)
    return code if final else cluster_code(code, args.exit_codes, attempts.used, args.max_restarts)


def _run(
    args: argparse.Namespace, command: list[str], ranks: int, parameters: RendezvousParameters, logs: str, attempts: Attempts,
    finish_lines: Callable[[], None], caught: tuple[signal.Signals, ...], guarded: Callable[[Iterable[int]], None],
) -> tuple[int, ExitBarrier | None]:  # fmt: skip
    """The exit code of the ranks, and how the nodes part. Raises `NotMet`."""
    agent: Agent | None = None
    began, serves = time.monotonic(), rendezvous.serves(parameters)
    _handle((*caught, signal.SIGALRM), _leave_while_waiting)
    signal.setitimer(signal.ITIMER_REAL, args.time_limit)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)  # they were held back until here
        spec = WorkerSpec(
            role="rank", local_world_size=ranks, entrypoint=command[0],
            args=tuple(word.replace("$", "$$") for word in command[1:]),  # torch replaces ${local_rank} in them
            rdzv_handler=rendezvous.connect(parameters, serves), max_restarts=attempts.left, monitor_interval=0.1,
            local_addr=parameters.local_addr,
        )  # fmt: skip
        agent = Agent(
            spec, DefaultLogsSpecs(log_dir=logs, tee=Std.ALL if args.prefix else Std.NONE),
            "[rank ${rank}] " if args.prefix else None, attempts=attempts, grace=args.grace, ours=args.command[0] == "run",
            caught=caught, finish_lines=finish_lines, serves=serves, guarded=guarded,
        )  # fmt: skip
        agent.catch()
        agent.limit(max(0.001, args.time_limit - (time.monotonic() - began)) if args.time_limit else 0)
        result = agent.run()
        _handle(caught, signal.SIG_IGN)  # it is over: a signal changes nothing any more
        code = exit_code(result)
        if agent.barrier is not None and agent.barrier.verdict is not None:
            code = agent.barrier.verdict
        if agent.ours and code == EXIT_FAILED and (name := too_early(result, agent.signalled)):
            to_stderr(f"launch: {name} before any rank had started")
            code = EXIT_PREEMPTED
        signal.setitimer(signal.ITIMER_REAL, 0)
        if agent.timed_out and code not in (EXIT_DONE, EXIT_USAGE):
            to_stderr(f"launch: the time limit of {args.time_limit} s is over")
            code = EXIT_TIMED_OUT
        if agent.barrier is not None and code != EXIT_DONE:
            agent.barrier.failed(code, final=code == EXIT_FAILED and attempts.used >= args.max_restarts)
        spec.rdzv_handler.shutdown()
    except SignalException as error:
        _handle(caught, signal.SIG_IGN)
        if agent is not None and agent.done:
            return EXIT_DONE, None
        over = error.sigval == signal.SIGALRM if agent is None else agent.timed_out
        if agent is not None and agent.barrier is not None:
            agent.barrier.interrupted()
        what = f"the time limit of {args.time_limit} s is over" if over else error.sigval.name
        when = "all nodes had ended" if agent is not None and agent.barrier is not None else "the ranks had started"
        to_stderr(f"launch: {what} before {when}")
        return EXIT_TIMED_OUT if over else EXIT_PREEMPTED, None
    except RendezvousTimeoutError:
        raise NotMet(f"the nodes did not meet at {parameters.endpoint} within {args.join_timeout:g} s") from None
    except RendezvousError as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        to_stderr(f"launch: the nodes did not meet at {parameters.endpoint}: {reason}")
        return EXIT_FAILED, None
    return code, agent.barrier


def _tell_where_it_resumes(note: Path) -> None:
    """Says what is saved of the run that rank 0 has noted there, if it was on this node and came so far."""
    from lockstep.training.checkpoint import store

    with contextlib.suppress(OSError):
        for newest in store.candidates(Path(os.fsdecode(note.read_bytes()), CHECKPOINTS))[:1]:
            to_stderr(f"launch: step {store.step_of(newest)} is saved: the same command resumes there")


@contextlib.contextmanager
def _guard(grace: int) -> Iterator[Callable[[Iterable[int]], None]]:
    """Inside the block, the ranks that it was given last end when this process is killed (`guard.py`)."""
    command = [sys.executable, "-I", "-S", guard.__file__, str(grace)]
    env = {name: value for name, value in os.environ.items() if name != ENV_LAUNCHER}  # it is no rank
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True, start_new_session=True,
        env=env,
    )  # fmt: skip

    def tell(ranks: Iterable[int]) -> None:
        with contextlib.suppress(OSError):  # somebody has killed it
            print(*ranks, file=process.stdin, flush=True)

    try:
        yield tell
    finally:
        tell(())
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            process.communicate(timeout=1)


@contextlib.contextmanager
def _ignored_stays_ignored() -> Iterator[None]:
    """Inside the block, a signal that nohup has us ignore gets no handler: else the ranks would not ignore it, either.

    torch gives one to each of four signals, right before it starts the ranks. Its TORCHELASTIC_SIGNALS_TO_HANDLE, from 2.10
    on, would be inherited.
    """
    install, ignored = signal.signal, {n for n in signal.valid_signals() if signal.getsignal(n) is signal.SIG_IGN}
    vars(signal)["signal"] = lambda number, handler: None if number in ignored else install(number, handler)
    try:
        yield
    finally:
        vars(signal)["signal"] = install


def _handle(numbers: tuple[signal.Signals, ...], handler: Callable[..., Any] | signal.Handlers) -> None:
    for number in numbers:
        signal.signal(number, handler)


def _nothing(number: int, frame: FrameType | None) -> None:
    """In place of SIG_IGN, which Python complains of where the signal has come already."""


def _leave_while_waiting(number: int, frame: FrameType | None) -> NoReturn:  # noqa: ARG001
    for other in (*FORWARDED, signal.SIGALRM):  # the second of two at once would end what the first has begun
        if signal.getsignal(other) is _leave_while_waiting:
            signal.signal(other, _nothing)
    raise SignalException(f"signal {number}", signal.Signals(number))

"""The ranks of a node under torch's own elastic agent, which starts them as one gang and restarts them together. What it adds:
an exit code 2 or 75 ends the restarts, signals reach the ranks instead of ending the agent, and nodes end together.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousError, RendezvousTimeoutError

from lockstep.wire.hangs import Hangs
from lockstep.wire.signals import FORWARDED

from ..contract import EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED, to_stderr
from . import rendezvous
from .ending import (
    ERROR_SECONDS,
    Attempts,
    ExitBarrier,
    exit_code,
    exit_codes,
    raising,
    tell_ranks,
    without_ended,
)
from .gang import STOP_SECONDS, Gang, handle, interrupted, leave_while_waiting
from .rendezvous import NotMet, Several


class Agent(Gang, LocalElasticAgent):
    """torch's agent, which knows which endings are final and hands signals on.

    Args:
        finish_lines: prints what killed ranks began.
        serves: the rendezvous is in this process.
        of_gang: `Gang`'s arguments.
    """

    def __init__(
        self, spec: WorkerSpec, logs: DefaultLogsSpecs, prefix: str | None, *, finish_lines: Callable[[], None], serves: bool,
        **of_gang: Any,
    ) -> None:  # fmt: skip
        Gang.__init__(self, **of_gang)
        LocalElasticAgent.__init__(self, spec, logs, log_line_prefix_template=prefix)
        self.finish_lines, self.serves = finish_lines, serves
        self.barrier: ExitBarrier | None = None
        """Of this round, where there are other nodes."""
        self._came: list[int] | None = None
        """Signals since the ranks begin to start; None: they run, or wait for other nodes."""
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
        self.finish_lines()
        self._came = came = [] if self.signalled is None else [self.signalled]
        with self._starting(), _handlers_stay(self.caught):
            ids: dict[int, Any] = super()._start_workers(worker_group)
        self._came = None
        for number in came:  # while the ranks were starting, of which some run already
            self._forward(number, None)
        return ids

    def _forward(self, number: int, frame: FrameType | None) -> None:
        if self._came is not None:
            self._came.append(number)
        else:
            super()._forward(number, frame)

    def _kill(self, number: int, frame: FrameType | None) -> None:
        running = exit_codes(self._worker_group, self._pcontext)
        self.overdue.update(rank for rank, code in running.items() if code is None)
        super()._kill(number, frame)

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

    def _pids(self) -> list[int] | None:
        if self._pcontext is None:
            return None
        return [] if self._waits else list(self._pcontext.pids().values())

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
        self.hangs.look([worker.global_rank for worker in worker_group.workers])
        tell_ranks(worker_group, exit_codes(worker_group, self._pcontext))
        ended = exit_codes(worker_group, self._pcontext)  # more may have ended meanwhile
        deadline = time.monotonic() + ERROR_SECONDS
        while raising(ended.values()) and self.signalled is None and time.monotonic() < deadline:
            time.sleep(0.05)
            ended = exit_codes(worker_group, self._pcontext)
        failed = {rank: code for rank, code in ended.items() if code}
        result: RunResult = super()._monitor_workers(worker_group)
        codes = _codes(result)
        if not self.held.delivered:
            codes = without_ended(codes, failed)
            result.failures = {rank: result.failures[rank] for rank in codes}
        handler = worker_group.spec.rdzv_handler
        if set(codes.values()) == {EXIT_PREEMPTED} and self.signalled is None and handler.num_nodes_waiting() > 0:
            # Another node's agent saw a newcomer first and asked its ranks to leave; ours left with them.
            return RunResult(state=WorkerState.HEALTHY)
        if result.is_failed() and not self._start_again(codes, failed, self._remaining_restarts):
            self._remaining_restarts = 0
        return result


def run(
    args: argparse.Namespace, command: list[str], ranks: int, parameters: RendezvousParameters, logs: str, attempts: Attempts,
    finish_lines: Callable[[], None], caught: tuple[signal.Signals, ...], hangs: Hangs,
) -> tuple[int, ExitBarrier | None]:  # fmt: skip
    """The exit code of the ranks, and how the nodes part. Raises `NotMet`."""
    agent: Agent | None = None
    began, serves = time.monotonic(), rendezvous.serves(parameters)
    handle((*caught, signal.SIGALRM), leave_while_waiting)
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
            "[rank ${rank}] " if args.prefix else None, finish_lines=finish_lines, serves=serves, attempts=attempts,
            grace=args.grace, ours=args.command[0] == "run", caught=caught, time_limit=args.time_limit, hangs=hangs,
        )  # fmt: skip
        agent.catch()
        agent.limit(began)
        result = agent.run()
        codes = _codes(result)
        code = exit_code(codes.values()) if result.is_failed() else EXIT_DONE
        if agent.barrier is not None and agent.barrier.verdict is not None:
            code = agent.barrier.verdict
        code = agent.settled(code, codes)
        if agent.barrier is not None and code != EXIT_DONE:
            agent.barrier.failed(code, final=code == EXIT_FAILED and attempts.used >= args.max_restarts)
        spec.rdzv_handler.shutdown()
    except SignalException as error:
        handle(caught, signal.SIG_IGN)
        if agent is not None and agent.done:
            return EXIT_DONE, None
        over = error.sigval == signal.SIGALRM if agent is None else agent.timed_out
        if agent is not None and agent.barrier is not None:
            agent.barrier.interrupted()
        when = "all nodes had ended" if agent is not None and agent.barrier is not None else "the ranks had started"
        return interrupted(error.sigval, args.time_limit, over, when), None
    except RendezvousTimeoutError:
        raise NotMet(f"the nodes did not meet at {parameters.endpoint} within {args.join_timeout:g} s") from None
    except RendezvousError as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        to_stderr(f"launch: the nodes did not meet at {parameters.endpoint}: {reason}")
        return EXIT_FAILED, None
    return code, agent.barrier


def _codes(result: RunResult) -> dict[int, int]:
    """Rank → exit code, of those that failed."""
    return {rank: failure.exitcode for rank, failure in result.failures.items()}


@contextlib.contextmanager
def _handlers_stay(caught: tuple[signal.Signals, ...]) -> Iterator[None]:
    """Inside the block these signals, and those that nohup has us ignore, get no other handler.

    torch gives one to each of four signals, right before it starts the ranks. It would end the agent while some ranks run that the agent
    does not know yet; and ranks would not ignore what they should. Its TORCHELASTIC_SIGNALS_TO_HANDLE, from 2.10 on, would be inherited.
    """
    install, ignored = signal.signal, {n for n in signal.valid_signals() if signal.getsignal(n) is signal.SIG_IGN}
    stay = {*ignored, *caught}
    vars(signal)["signal"] = lambda number, handler: None if number in stay else install(number, handler)
    try:
        yield
    finally:
        vars(signal)["signal"] = install

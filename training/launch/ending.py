"""How ranks and nodes end: the exit code, for people and for clusters; who was killed; how often a node was restarted.

The nodes of a job end together: none that is done leaves before all are, and rank 0's node leaves first, or the one that has failed.
Kubernetes ends a job of workers with the first one that completes or fails, and takes the others' pods away, with what they had still
to say. So a node whose ranks have ended well tells the others, and waits: for a node that is not done yet, for one that is started
again (its ranks then start again, too), and for the exit code of one that fails late.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Container, Mapping
from pathlib import Path

import filelock
from torch.distributed.elastic.agent.server.api import WorkerGroup
from torch.distributed.elastic.multiprocessing import PContext
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError

from .. import files
from ..contract import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_PREEMPTED,
    EXIT_USAGE,
    LOCK_FILE,
    STATUS_FILE,
    UserError,
    named,
)
from ..parallel import stores
from .rendezvous import NotMet, Several, SignedStore

FINAL = (EXIT_USAGE, EXIT_PREEMPTED)
"""Codes of a rank after which the gang is not started again."""
_OURS = (signal.SIGTERM, signal.SIGKILL)
"""With these the launcher ends the other ranks."""
_HINTS: dict[int, str] = {
    signal.SIGKILL: ", by hand or because the memory was used up",
    signal.SIGSTOP: ", stopped for too long",  # it ends no process: so `live.py` names these
}
ERROR_SECONDS = 2.0
"""Between the error of one rank and the end of those that have not said theirs."""
TELL_SECONDS = 2.0
"""Bound on telling the other ranks: rank 0, which serves the store, may be the one that is lost, or stand still."""
COUNT_PREFIX = "lockstep-restarts-"
"""Of the names of the files that count restarts: the folder may hold others, which are left alone."""
DONE, LEFT, ENDED = "done", "left", "ended"
"""What each node writes of itself: its ranks have ended well; it needs the store no longer after that; or it has failed or was ended."""
FAILED = "failed"
"""The key at which one node writes its exit code for all."""
ANSWER_SECONDS = 20.0
SAVING_SECONDS = 20.0
"""How long the node with the store waits for nodes that save. Less than the margin that clusters add to the grace period."""
HEARD_SECONDS = 5.0
"""How long the other nodes have to read the result."""
LOOK_SECONDS = 1.0
LAST_SECONDS = 60.0
"""How long rank 0's node may take from the end of its ranks to the end of its launcher."""


def exit_code(codes: Collection[int]) -> int:
    """Those of ranks that failed as one code: wrong usage beats preempted beats failed."""
    return next((code for code in FINAL if code in codes), EXIT_FAILED)


def cluster_code(code: int, scheme: str, attempt: int, max_restarts: int) -> int:
    """What the cluster must see. Kubernetes' `restartPolicy: ExitCode` retries codes of 128 and above only.

    Args:
        attempt: how often this node was restarted so far, within the pod and by replacing it.
    """
    if scheme == "plain" or code in (EXIT_DONE, EXIT_USAGE):
        return code
    if code == EXIT_PREEMPTED:
        return 128 + signal.SIGTERM
    return 138 if attempt < max_restarts else EXIT_FAILED


def without_ended(codes: Mapping[int, int], failed: Mapping[int, int]) -> dict[int, int]:
    """Drops the 75 of ranks that the launcher has ended because another one had failed: nobody has asked them to save.

    Args:
        codes: rank → exit code, of all that failed.
        failed: the same of those that had failed before.
    """
    asked = not failed or not set(FINAL).isdisjoint(failed.values())
    return {rank: code for rank, code in codes.items() if asked or rank in failed or code != EXIT_PREEMPTED}


def too_early(codes: Mapping[int, int], signalled: int | None) -> str:
    """The signal that was handed on to a rank and ended it: it was importing still, so nothing is lost. Else "".

    A rank that has begun catches all of them.
    """
    return signal.Signals(signalled).name if signalled is not None and -signalled in codes.values() else ""


def deaths(
    codes: Mapping[int, int], signalled: int | None, failed: Container[int] = (), ours: bool = True
) -> list[str]:
    """A sentence for each way in which ranks failed by themselves, signals first: not by the one that was handed on to them, nor by
    the launcher's, which ends the others. Nor for a rank with a `FINAL` code: it has said why.

    Args:
        codes: rank → exit code, of those that failed.
        failed: ranks that had failed when the launcher was about to end the others. Empty where the first one failed after
            that: then SIGTERM is the launcher's, if another rank ended otherwise.
        ours: the ranks are `python -m lockstep.training run`, which say themselves why they end with a code.
    """
    by_itself = any(-code not in _OURS for code in codes.values())
    ends = _OURS if failed else (signal.SIGTERM,) if by_itself else ()
    found: dict[str, list[int]] = {}
    for rank, code in sorted(codes.items()):
        by_launcher = -code in ends and rank not in failed
        if -code != signalled and not by_launcher and (code < 0 or not ours) and code not in FINAL:
            found.setdefault(f"{'was ' if code < 0 else ''}{how(code)}", []).append(rank)
    return [f"rank {named(ranks)} {what}" for what, ranks in sorted(found.items(), reverse=True)]


def how(code: int) -> str:
    """How a process has ended, by its exit code as Python gives it: negative for a signal."""
    if code >= 0:
        return f"ended with exit code {code}"
    hint = _HINTS.get(-code, "")
    return f"ended by {_name(-code)}{hint}"


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def exit_codes(group: WorkerGroup, processes: PContext | None) -> dict[int, int | None]:
    """Rank → exit code, of the ranks of this node; None: it runs. torch's agent ends these when it next checks and one has failed."""
    if not isinstance(processes, SubprocessContext):
        return {}
    codes = {local: handler.proc.poll() for local, handler in processes.subprocess_handlers.items()}
    return {group.workers[local].global_rank: code for local, code in codes.items()}


def raising(codes: Collection[int | None]) -> bool:
    """A rank has ended with an error of its own, and one that runs may be about to say the same, or another."""
    return None in codes and any(code is not None and code > 0 and code not in FINAL for code in codes)


def tell_ranks(group: WorkerGroup, codes: Mapping[int, int | None]) -> None:
    """Tells the ranks that still run which of this node have failed, and how: they need not wait for a timeout.

    It stands in the store where the ranks meet (`resilience.hang` reads it), so other nodes' ranks hear of it, too.
    """
    # A rank that ends for good has said why, and the others end with it.
    failed = {rank: code for rank, code in codes.items() if code and code not in FINAL}
    if not group.master_addr or not group.master_port:
        return
    alone = len(group.workers) == group.group_world_size == 1  # no other rank waits for it
    # Rank 0 serves a new store each time the ranks start. A store of the agent outlives the ranks, and so would this message.
    if not failed or alone or group.spec.rdzv_handler.use_agent_store:
        return
    # torch bounds the connection and not the first answer. Signals are handled during the wait.
    thread = threading.Thread(target=_write_failures, args=(group.master_addr, group.master_port, failed), daemon=True)
    thread.start()
    thread.join(TELL_SECONDS)


def _write_failures(host: str, port: int, failed: dict[int, int]) -> None:
    with contextlib.suppress(OSError, RuntimeError, ValueError):  # torch's DistError among them: then they wait for it
        # Asked in Python first: where rank 0 is gone, this knows it at once, and torch's store only when the time is over.
        socket.create_connection((host, port), TELL_SECONDS).close()
        store = stores.tcp_store(host, port, serves=False, seconds=TELL_SECONDS)
        for rank, code in failed.items():
            store.set(stores.ended(rank), how(code))


def note_end(note: Path, code: int, reason: str) -> None:
    """Completes status.json of the run that rank 0 has noted there, if rank 0 was killed before it could.

    Another launcher may have resumed the run: its rank 0 holds the lock then.
    """
    with contextlib.suppress(OSError, filelock.Timeout):
        run = Path(os.fsdecode(note.read_bytes()))
        with filelock.FileLock(run / LOCK_FILE, timeout=1):
            status = files.read_json(run / STATUS_FILE)
            if isinstance(status, dict) and status.get("code", code) is None:
                files.replace_json(run / STATUS_FILE, {**status, "code": code, "reason": reason})


class Attempts:
    """How often a node was restarted, counted where a replaced node finds it again; without a folder, as long as the process lives.

    Kubernetes replaces a failed pod (`restartPolicy: ExitCode`) without counting, and a killed launcher cannot count
    itself. So each node keeps a file on the run's shared storage; one that says "running" at the start was killed.

    Args:
        node: a name that the replaced node has again (its host name).
        limit: restarts that are allowed.
    """

    def __init__(self, folder: Path | None, node: str, limit: int) -> None:
        self.limit = limit
        self.used = self._begun = 0
        self._file = (
            folder / f"{COUNT_PREFIX}{re.sub(r'[^A-Za-z0-9.-]', '_', node)}.json" if folder is not None else None
        )

    @property
    def left(self) -> int:
        return self.limit - self.used

    def begin(self) -> bool:
        """Counts a predecessor that was killed. False: the limit is passed, do not start. Raises `UserError`."""
        if self._file is None:
            return True
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self.used, killed = self._read(self._file)
        except OSError as error:
            raise UserError(f"cannot count restarts in {self._file.parent}: {error.strerror}") from None
        self.used += killed
        if self.used > self.limit:
            self._forget()
            return False
        self._begun = self.used
        self._write(running=True)
        return True

    def restarted(self, times: int) -> None:
        """The ranks have been restarted `times` times since `begin`."""
        self.used = self._begun + times
        self._write(running=True, only_known=True)

    def end(self, code: int, final: bool = False) -> None:
        """Settles the count: a preemption costs nothing, a failure one, and with a final ending the job forgets.

        Args:
            final: the job is over, whatever restarts this node has left.
        """
        if code == EXIT_PREEMPTED:
            self._write(running=False, only_known=True)
        elif final or code != EXIT_FAILED or self.left <= 0:
            self._forget()
        else:
            self.used += 1
            self._write(running=False, only_known=True)
            self.used -= 1  # what `cluster_code` compares with the limit: restarts so far

    @staticmethod
    def _read(file: Path) -> tuple[int, int]:
        try:
            value = files.parsed(files.read(file, 1 << 16))
            return int(value["used"]), int(value["running"] is True)
        except FileNotFoundError:
            return 0, 0
        except (ValueError, KeyError, TypeError):
            return 0, 1  # cut off while it was written: by a kill

    def _write(self, running: bool, only_known: bool = False) -> None:
        if self._file is None or (only_known and not self._file.exists()):
            return  # another node's final ending has removed the counts of the whole job
        try:
            files.publish(self._file, json.dumps({"used": self.used, "running": running}).encode())
        except OSError as error:
            raise UserError(f"cannot count restarts in {self._file.parent}: {error.strerror}") from None

    def _forget(self) -> None:
        if self._file is not None:
            for file in self._file.parent.glob(f"{COUNT_PREFIX}*.json"):
                file.unlink(missing_ok=True)


class ExitBarrier:
    """One round of one node.

    Args:
        store: of this round.
        nodes: of this round.
        node: this one's place among them; rank 0 is on node 0.
        serves: the store is in this process.
    """

    def __init__(self, handler: Several, store: SignedStore, nodes: int, node: int, serves: bool) -> None:
        self._serves = serves
        self._handler, self._nodes, self._node = handler, nodes, node
        self.done = False
        """The ranks of this node have ended well."""
        self.over = False
        """The ranks of all nodes have ended well."""
        self.verdict: int | None = None
        """The exit code of the job, where another node has failed for good."""
        self.final = False
        """Whether the failure is final: the cluster must not start this node again."""
        # Asked in threads: torch waits for a server that is gone.
        self._answers = store.other_connection()
        self._written: dict[str, str] = {}
        self._states: dict[int, str] = {}
        """What the nodes have written of themselves, as far as it was asked for."""
        self.lost = False
        """A node was lost before its end, and the job may go on without it: the ranks start again."""
        self._reported = False
        """This node's failure is the one by which all end."""
        self._missing_since: float | None = None

    def reached(self) -> bool:
        """To be called again and again when this node is done. True when all nodes are done, or one has failed or was lost.

        Raises:
            RendezvousConnectionError: the node that serves the rendezvous is gone.
            NotMet: a node is gone, and no other has come in its place.
        """
        try:
            if not self.done:
                self.done = True
                self._write(f"node/{self._node}", DONE)
            self.over = len(self._those(DONE, LEFT)) >= self._nodes
            if not self.over and (match := re.fullmatch(r"(\d{1,3}) (final|retry)", self._ask(FAILED)[0] or "")):
                self.verdict, self.final = int(match[1]), match[2] == "final"
        except RuntimeError as error:
            raise RendezvousConnectionError("the node that serves the rendezvous is gone") from error
        if self.over or self.verdict is not None:
            return True
        present = self._handler.present
        if present >= self._nodes or self._handler.num_nodes_waiting() > 0:  # one that starts again has left the round
            self._missing_since = None
            return False
        if present >= self._handler.settings.min_nodes:
            self.lost = True
            return True
        self._missing_since = self._missing_since or time.monotonic()
        timeout = self._handler.settings.timeout.join.total_seconds()
        if time.monotonic() - self._missing_since > timeout:
            raise NotMet(
                f"{self._nodes - present} of {self._nodes} nodes were lost before their end, {timeout:g} s ago"
            )
        return False

    def failed(self, code: int, final: bool) -> None:
        """This node has failed for good: those that wait for it end with its exit code.

        Args:
            final: no cluster shall start a node again.
        """
        with contextlib.suppress(RuntimeError):  # the node that serves the store has ended, and knows why
            if self.verdict is None:  # else another node has reported a failure already
                self._reported = True
                self._write(FAILED, f"{code} {'final' if final else 'retry'}")
                # Launchers whose ranks ended at the same moment report it when they next check.
                _until(lambda: bool(self._those(DONE, LEFT)), LOOK_SECONDS)
                self._stay_for(self._those(DONE, LEFT), HEARD_SECONDS)
            self._end(saves=code == EXIT_PREEMPTED)

    def interrupted(self) -> None:
        """A signal ends this node before the others have ended."""
        with contextlib.suppress(RuntimeError):
            self._end(saves=True)

    def _end(self, saves: bool) -> None:
        """Nodes that need longer to save would be cut off: the store goes with the node that serves it."""
        self._write(f"node/{self._node}", LEFT if self.done else ENDED)
        if saves:
            self._stay_for(set(range(self._nodes)), SAVING_SECONDS)

    def leave(self, linger: float) -> None:
        """Returns when this node may leave: the others `linger` seconds after rank 0's, or after the one that has failed late."""
        if self.over:
            with contextlib.suppress(RuntimeError):  # the node that serves the store was lost
                if self._node != 0:
                    _until(lambda: 0 in self._those(LEFT), LAST_SECONDS)
                self._write(f"node/{self._node}", LEFT)
                self._stay_for(set(range(self._nodes)), HEARD_SECONDS)
        if not self._reported and not (self.verdict is None and self._node == 0):
            time.sleep(linger)

    def _stay_for(self, nodes: set[int], seconds: float) -> None:
        """Returns when these need the store no longer, which ends with the node that serves it."""
        if self._serves:
            _until(lambda: nodes <= self._those(LEFT, ENDED), seconds)

    def _write(self, key: str, text: str) -> None:
        self._written[key] = text
        self._ask()

    def _those(self, *states: str) -> set[int]:
        """The nodes that have written one of these of themselves."""
        others = [node for node in range(self._nodes) if self._states.get(node) not in states]
        answers = self._ask(*(f"node/{node}" for node in others))
        self._states.update((node, text) for node, text in zip(others, answers) if text is not None)
        return {node for node, state in self._states.items() if state in states}

    def _ask(self, *keys: str) -> list[str | None]:
        """What nodes have written at these keys. Raises `RuntimeError` without an answer in time. Signals are handled during the wait.

        Each question writes once more what this node has written: whoever reaches the store may have put something else there.
        """
        answers: list[list[str | None]] = []
        errors: list[RuntimeError] = []

        def ask() -> None:
            try:
                for key, text in list(self._written.items()):
                    self._answers.set(key, text)
                answers.append([self._answers.read(key) for key in keys])
            except RuntimeError as error:
                errors.append(error)

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(ANSWER_SECONDS)
        if errors:
            raise errors[0]
        if not answers:
            raise RuntimeError(f"no answer for {ANSWER_SECONDS:g} s")
        return answers[0]


def _until(reached: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not reached() and time.monotonic() < deadline:
        time.sleep(0.1)

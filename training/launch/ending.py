"""The nodes of a job end together: none that is done leaves before all are, and rank 0's node leaves first.

Kubernetes ends a job of workers with the first one that completes, and takes the others' pods away, with what they had
still to say. So a node whose ranks have ended well tells the others, and waits: for a node that is not done yet, for one
that is started again (its ranks then start again, too), and for the exit code of one that fails late.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable
from typing import Any

from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError

from lockstep.training.contract import EXIT_PREEMPTED
from lockstep.training.launch.nodes import Several
from lockstep.training.launch.rendezvous import NotMet
from lockstep.training.launch.signed import SignedStore

DONE, ENDED, HEARD = "done", "ended", "heard"
"""Said by each node for itself."""
FAILED, LAST = "failed", "last"
"""Said by one node for all."""
ANSWER_SECONDS = 20.0
SAVING_SECONDS = 20.0
"""How long the node with the store waits for nodes that save. Less than the margin that clusters add to the grace period."""
HEARD_SECONDS = 5.0
"""How long the other nodes have to read the result."""
LOOK_SECONDS = 1.0
LAST_SECONDS = 60.0
"""How long rank 0's node may take from the end of its ranks to the end of its launcher."""


class Ending:
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
        self._said: dict[str, str] = {}
        self._heard: dict[str, set[int]] = {DONE: set(), ENDED: set(), HEARD: set()}
        self.lost = False
        """A node was lost before its end, and the job may go on without it: the ranks start again."""
        self._alone = False
        """This node has failed while the ranks of the other nodes ran. Those nodes end by themselves."""
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
                self._say(f"{DONE}/{self._node}")
            self.over = self._count(DONE) >= self._nodes or self._read(LAST) is not None
            if not self.over and (said := re.fullmatch(r"(\d{1,3}) (final|retry)", self._read(FAILED) or "")):
                self.verdict, self.final = int(said[1]), said[2] == "final"
                self._say(f"{HEARD}/{self._node}")
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
                self._tell(code, final)
            self._say(f"{ENDED}/{self._node}")
            if code == EXIT_PREEMPTED:
                self._stay_for_who_saves()

    def _tell(self, code: int, final: bool) -> None:
        self._say(FAILED, f"{code} {'final' if final else 'retry'}")
        # Launchers whose ranks ended at the same moment report it when they next check.
        _until(lambda: self._count(DONE) > 0, LOOK_SECONDS)
        waiting = self._count(DONE)
        self._alone = waiting == 0
        self._stay_for(waiting)

    def interrupted(self) -> None:
        """A signal ends this node before the others have ended."""
        with contextlib.suppress(RuntimeError):
            self._say(f"{ENDED}/{self._node}")
            self._stay_for_who_saves()

    def _stay_for_who_saves(self) -> None:
        """Nodes that need longer to save would be cut off: the store goes with the node that serves it."""
        if self._serves:
            _until(lambda: self._count(ENDED) >= self._nodes, SAVING_SECONDS)

    def leave(self, linger: float) -> None:
        """Returns when this node may leave: the others `linger` seconds after rank 0's, also where they have failed late."""
        if self.over:
            self._part()
        if self._node != 0 and not self._alone:
            time.sleep(linger)

    def _part(self) -> None:
        try:
            if self._node == 0:
                self._say(LAST)
            else:
                _until(lambda: self._read(LAST) is not None, LAST_SECONDS)
            self._say(f"{HEARD}/{self._node}")
            self._stay_for(self._nodes)
        except RuntimeError:
            pass  # the node that serves it was lost

    def _stay_for(self, nodes: int) -> None:
        """Returns when `nodes` nodes have read the result: the store ends with the node that serves it."""
        if self._serves:
            _until(lambda: self._count(HEARD) >= nodes, HEARD_SECONDS)

    def _say(self, key: str, text: str = "1") -> None:
        self._said[key] = text
        self._ask(self._repeat)

    def _repeat(self) -> None:
        """With each question: whoever reaches the store may have written something else there, or have deleted it."""
        for key, text in list(self._said.items()):
            self._answers.set(key, text)

    def _count(self, what: str) -> int:
        """How many nodes have said it."""
        heard = self._heard[what]
        missing = set(range(self._nodes)) - heard

        def ask() -> set[int]:
            self._repeat()
            return {node for node in missing if self._answers.read(f"{what}/{node}") is not None}

        heard |= self._ask(ask)
        return len(heard)

    def _read(self, key: str) -> str | None:
        def ask() -> str | None:
            self._repeat()
            return self._answers.read(key)

        found: str | None = self._ask(ask)
        return found

    def _ask(self, question: Callable[[], Any]) -> Any:
        """The store's answer. Raises `RuntimeError` without an answer in time. Signals are handled during the wait."""
        answers: list[Any] = []
        broken: list[RuntimeError] = []

        def ask() -> None:
            try:
                answers.append(question())
            except RuntimeError as error:
                broken.append(error)

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(ANSWER_SECONDS)
        if broken:
            raise broken[0]
        if not answers:
            raise RuntimeError(f"no answer for {ANSWER_SECONDS:g} s")
        return answers[0]


def _until(reached: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not reached() and time.monotonic() < deadline:
        time.sleep(0.1)

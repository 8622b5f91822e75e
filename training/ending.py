"""The nodes of a job end together: none that is done leaves before all are, and rank 0's node leaves first.

Kubernetes ends a job of workers with the first one that completes, and takes the others' pods away, with what they had
still to say. So a node whose ranks have ended well tells the others, and waits: for a node that is not done yet, for one
that is started again (its ranks then start again, too), and for the exit code of one that fails late.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from torch.distributed import Store
from torch.distributed.elastic.rendezvous import RendezvousHandler
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError

from training import rendezvous
from training.rendezvous import NotMet

DONE, FAILED, LAST, HEARD = "lockstep/done", "lockstep/failed", "lockstep/last", "lockstep/heard"
HEARD_SECONDS = 5.0
"""What the other nodes may take to hear of that."""
LOOK_SECONDS = 1.0
LAST_SECONDS = 60.0
"""What rank 0's node may take from the end of its ranks to the end of its launcher."""


class Ending:
    """One round of one node.

    Args:
        store: of this round.
        nodes: of this round.
        node: this one's place among them; rank 0 is on node 0.
        serves: the store is in this process.
    """

    def __init__(self, handler: RendezvousHandler, store: Store, nodes: int, node: int, serves: bool) -> None:
        self._serves = serves
        self._handler, self._store, self._nodes, self._node = handler, store, nodes, node
        self.done = False
        """The ranks of this node have ended well."""
        self.over = False
        """Those of all nodes have."""
        self.verdict: int | None = None
        """The exit code of the job, where another node has failed for good."""
        self.lost = False
        """A node was lost before its end, and the job may go on without it: the ranks start again."""
        self._alone = False
        """It has failed while the ranks of the other nodes ran: these end by themselves."""
        self._missing_since: float | None = None

    def reached(self) -> bool:
        """This node is done: whether all are, or one has failed or was lost. To be asked again until then.

        Raises:
            RendezvousConnectionError: the node that serves the rendezvous is gone.
            NotMet: a node is gone, and no other has come in its place.
        """
        try:
            if not self.done:
                self.done = True
                self._store.add(DONE, 1)
            self.over = self._store.add(DONE, 0) >= self._nodes
            if not self.over and self._store.check([FAILED]):
                self.verdict = int(self._store.get(FAILED))
                self._store.add(HEARD, 1)
        except RuntimeError as error:
            raise RendezvousConnectionError("the node that serves the rendezvous is gone") from error
        if self.over or self.verdict is not None:
            return True
        here = rendezvous.present(self._handler)
        if here >= self._nodes:
            self._missing_since = None
            return False
        if here >= self._handler.settings.min_nodes:  # type: ignore[attr-defined]
            self.lost = True
            return True
        self._missing_since = self._missing_since or time.monotonic()
        timeout = self._handler.settings.timeout.join.total_seconds()  # type: ignore[attr-defined]
        if time.monotonic() - self._missing_since > timeout:
            raise NotMet(f"{self._nodes - here} of {self._nodes} nodes were lost before their end, {timeout:g} s ago")
        return False

    def failed(self, code: int) -> None:
        """This node has failed for good: those that wait for it end with its exit code."""
        if self.verdict is not None:
            return  # it was told by one of the others
        with contextlib.suppress(RuntimeError):  # the node that serves the store has ended, and knows why
            self._store.set(FAILED, str(code))
            # Ranks that ended at the same moment are told of at their launcher's next look.
            _until(lambda: self._store.add(DONE, 0) > 0, LOOK_SECONDS)
            waiting = self._store.add(DONE, 0)
            self._alone = waiting == 0
            self._stay_for(waiting)

    def leave(self, linger: float) -> None:
        """Returns when this node may leave: the others `linger` seconds after rank 0's, also where they have failed late."""
        if self.over:
            self._part()
        if self._node != 0 and not self._alone:
            time.sleep(linger)

    def _part(self) -> None:
        try:
            if self._node == 0:
                self._store.set(LAST, "1")
            else:
                _until(lambda: self._store.check([LAST]), LAST_SECONDS)
            self._store.add(HEARD, 1)
            self._stay_for(self._nodes)
        except RuntimeError:
            pass  # the node that serves it was lost

    def _stay_for(self, nodes: int) -> None:
        """Returns when so many have heard: the store goes with the node that serves it."""
        if self._serves:
            _until(lambda: self._store.add(HEARD, 0) >= nodes, HEARD_SECONDS)


def _until(reached: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not reached() and time.monotonic() < deadline:
        time.sleep(0.1)

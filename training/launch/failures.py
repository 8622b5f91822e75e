"""Tells the ranks that still run which rank of this node has ended, and how: they need not wait for a timeout.

It is said in the store where the ranks meet (`lockstep.training.resilience.hang` reads it), so other nodes' ranks hear of it, too.
"""

from __future__ import annotations

import contextlib
import socket
import threading

from torch.distributed.elastic.agent.server.api import WorkerGroup
from torch.distributed.elastic.multiprocessing import PContext
from torch.distributed.elastic.multiprocessing.api import SubprocessContext

from lockstep.training.launch.codes import FINAL, how
from lockstep.training.parallel import stores

SECONDS = 2.0
"""Bound on it all: rank 0, which serves the store, may be the one that is lost, or stand still."""


def failed(group: WorkerGroup, processes: PContext | None) -> dict[int, int]:
    """Rank → exit code, of the ranks of this node that have ended with one. torch's agent ends the others when it next checks."""
    if not isinstance(processes, SubprocessContext):
        return {}
    codes = {local: handler.proc.poll() for local, handler in processes.subprocess_handlers.items()}
    return {group.workers[local].global_rank: code for local, code in codes.items() if code}


def tell(group: WorkerGroup, codes: dict[int, int]) -> None:
    """Writes to the store which ranks of this node have failed, so that the others need not wait for them."""
    # A rank that ends for good has said why, and the others end with it.
    failed = {rank: code for rank, code in codes.items() if code not in FINAL}
    if not group.master_addr or not group.master_port:
        return
    alone = len(group.workers) == group.group_world_size == 1  # no other rank waits for it
    # Rank 0 serves a new store each time the ranks start. A store of the agent outlives the ranks, and so would this message.
    if not failed or alone or group.spec.rdzv_handler.use_agent_store:
        return
    # torch bounds the connection and not the first answer. Signals are handled during the wait.
    thread = threading.Thread(target=_tell, args=(group.master_addr, group.master_port, failed), daemon=True)
    thread.start()
    thread.join(SECONDS)


def _tell(host: str, port: int, failed: dict[int, int]) -> None:
    with contextlib.suppress(OSError, RuntimeError, ValueError):  # torch's DistError among them: then they wait for it
        # Asked in Python first: where rank 0 is gone, this knows it at once, and torch's store only when the time is over.
        socket.create_connection((host, port), SECONDS).close()
        store = stores.tcp_store(host, port, serves=False, seconds=SECONDS)
        for rank, code in failed.items():
            store.set(stores.ended(rank), how(code))
